//! `add`, `add_bias` and `scale`: `x + y`, `x + b` for each row, `f x`.

use ironloom_tensor::{Device, Tensor, ops};

use super::{differentiate, gradient_of};
use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::{Place, is_cpu},
    real::Real,
};

const SHAPES: [[usize; 2]; 4] = [[1, 3], [3, 17], [2, 65], [33, 576]];
const FACTOR: f32 = 0.3;

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for [rows, width] in SHAPES {
        let shape = format!("[{rows}, {width}]");
        let inputs = |name: &str| {
            let mut inputs = Inputs::of(name, &shape);
            (inputs.normal(rows * width), inputs.normal(rows * width))
        };
        let ((x, y), place) = (inputs("add"), Place::single(device));
        cases.push(Case::new("add", &shape, Bound::TwicePlain, move |kernel| {
            let [x_in, y_in] = [&x, &y].map(|values| place.tensor(kernel.inputs(values), [rows, width]));
            let ours = ops::add(&place.context(), x_in?, &y_in?)?;
            Ok(Results::new(add::<f64>(&x, &y), add::<f32>(&x, &y), ours.into_f32()?))
        }));

        let ((x, mut bias), place) = (inputs("add_bias"), Place::single(device));
        bias.truncate(width);
        cases.push(Case::new("add_bias", &shape, Bound::TwicePlain, move |kernel| {
            let given = place.tensor(kernel.inputs(&x), [rows, width])?;
            let ours = ops::add_bias(&place.context(), given, &place.vector(kernel.inputs(&bias))?)?;
            let rows = bias.repeat(rows);
            Ok(Results::new(add::<f64>(&x, &rows), add::<f32>(&x, &rows), ours.into_f32()?))
        }));

        let ((x, gradient), place) = (inputs("scale"), Place::single(device));
        let forward = x.clone();
        cases.push(Case::new("scale", &shape, Bound::TwicePlain, move |kernel| {
            let input = place.tensor(kernel.inputs(&forward), [rows, width])?;
            let ours = ops::scale(&place.context(), input, FACTOR)?;
            Ok(Results::new(scale::<f64>(&forward), scale::<f32>(&forward), ours.into_f32()?))
        }));
        if is_cpu(device) {
            let device = device.clone();
            cases.push(Case::new("scale gradient", &shape, Bound::ThricePlain, move |kernel| {
                let input = Tensor::from_f32(x.clone(), [rows, width])?;
                let above = Tensor::from_f32(kernel.inputs(&gradient), [rows, width])?;
                let found = differentiate(&device, above, &[&input], |cx| Ok(ops::scale(cx, input.clone(), FACTOR)?))?;
                let ours = gradient_of(&found, &input)?;
                Ok(Results::new(scale::<f64>(&gradient), scale::<f32>(&gradient), ours))
            }));
        }
    }
    cases
}

fn add<R: Real>(x: &[f32], y: &[f32]) -> Vec<R> {
    R::all(x).into_iter().zip(R::all(y)).map(|(x, y)| x + y).collect()
}

fn scale<R: Real>(x: &[f32]) -> Vec<R> {
    R::all(x).into_iter().map(|x| x * R::of(f64::from(FACTOR))).collect()
}
