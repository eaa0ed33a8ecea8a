//! `rmsnorm`: `x / sqrt(mean x^2 + e) * w` for each run of `w`'s length, and its gradients; `rmsnorm_add`: the same added to
//! the residual stream.

use anyhow::Result;
use ironloom_tensor::{Device, Tensor, ops};

use super::{differentiate, gradient_of};
use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::{Place, is_cpu},
    real::Real,
};

/// Added to the mean square.
pub(super) const EPSILON: f32 = 1e-5;
/// Rows, runs in a row, length of a run.
const SHAPES: [[usize; 3]; 6] = [[1, 1, 4], [1, 1, 16], [3, 1, 17], [2, 9, 64], [5, 1, 576], [2, 1, 4099]];
/// More on a card: numbers of rows that passes have, and widths past what a block holds in registers.
const CARD_SHAPES: [[usize; 3]; 6] =
    [[1, 1, 2048], [7, 1, 64], [16, 1, 5120], [33, 1, 576], [64, 1, 2048], [1, 1, 8192]];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    let more: &[[usize; 3]] = if is_cpu(device) { &[] } else { &CARD_SHAPES };
    for &[rows, runs, width] in SHAPES.iter().chain(more) {
        let shape = format!("[{rows}, {runs} x {width}]");
        let mut inputs = Inputs::of("rmsnorm", &shape);
        let (x, weight) = (inputs.normal(rows * runs * width), inputs.normal(width));
        let above = inputs.normal(rows * runs * width);

        for place in Place::each(device) {
            let (x, weight) = (x.clone(), weight.clone());
            cases.push(Case::new("rmsnorm", place.shape(&shape), Bound::TwicePlain, move |kernel| {
                let given = place.tensor(x.clone(), [rows, runs * width])?;
                let ours = ops::rmsnorm(&place.context(), &given, &place.vector(kernel.inputs(&weight))?, EPSILON)?;
                let plain = place.operands().round(&forward::<f32>(&x, &weight));
                Ok(Results::new(forward(&x, &weight), plain, ours.into_f32()?).in_precision(place.operands()))
            }));
        }

        if runs == 1 {
            let (x, weight, above) = (x.clone(), weight.clone(), above.clone());
            let place = Place::single(device);
            cases.push(Case::new("rmsnorm_add", &shape, Bound::TwicePlain, move |kernel| {
                let (residual, given) =
                    (place.tensor(above.clone(), [rows, width])?, place.tensor(x.clone(), [rows, width])?);
                let weight_in = place.vector(kernel.inputs(&weight))?;
                let ours = ops::rmsnorm_add(&place.context(), residual, &given, &weight_in, EPSILON)?;
                Ok(Results::new(sum::<f64>(&above, &x, &weight), sum::<f32>(&above, &x, &weight), ours.into_f32()?))
            }));
        }

        if is_cpu(device) {
            let place = device.clone();
            cases.push(Case::new("rmsnorm gradient", &shape, Bound::ThricePlain, move |kernel| {
                let tensor =
                    |values: Vec<f32>| -> Result<Tensor> { Ok(Tensor::from_f32(values, [rows, runs * width])?) };
                let (x_in, weight_in) = (tensor(x.clone())?, Tensor::from_f32(weight.clone(), [width])?);
                let found = differentiate(&place, tensor(kernel.inputs(&above))?, &[&x_in, &weight_in], |cx| {
                    Ok(ops::rmsnorm(cx, &x_in, &weight_in, EPSILON)?)
                })?;
                let ours = [gradient_of(&found, &x_in)?, gradient_of(&found, &weight_in)?].concat();
                Ok(Results::new(backward::<f64>(&above, &x, &weight), backward::<f32>(&above, &x, &weight), ours))
            }));
        }
    }
    cases
}

/// `1 / sqrt(mean x^2 + e)`.
fn factor<R: Real>(x: &[R]) -> R {
    let mean = x.iter().map(|&x| x * x).sum::<R>() / R::of(x.len() as f64);
    R::of(1.0) / (mean + R::of(f64::from(EPSILON))).sqrt()
}

fn forward<R: Real>(x: &[f32], weight: &[f32]) -> Vec<R> {
    norms(&R::all(x), &R::all(weight))
}

/// The norm of each run of `weight`'s length.
pub(super) fn norms<R: Real>(x: &[R], weight: &[R]) -> Vec<R> {
    let mut out = Vec::new();
    for x in x.chunks_exact(weight.len()) {
        let r = factor(x);
        out.extend(x.iter().zip(weight).map(|(&x, &w)| x * r * w));
    }
    out
}

fn sum<R: Real>(residual: &[f32], x: &[f32], weight: &[f32]) -> Vec<R> {
    R::all(residual).into_iter().zip(forward::<R>(x, weight)).map(|(residual, norm)| residual + norm).collect()
}

/// With `h = x r`: `dx = r (g w - h mean(g w h))`, then `dw = sum over runs of g h`.
fn backward<R: Real>(above: &[f32], x: &[f32], weight: &[f32]) -> Vec<R> {
    let (above, x, weight) = (R::all(above), R::all(x), R::all(weight));
    let width = weight.len();
    let (mut to_x, mut to_weight) = (Vec::new(), vec![R::of(0.0); width]);
    for (g, x) in above.chunks_exact(width).zip(x.chunks_exact(width)) {
        let r = factor(x);
        let mean = (0..width).map(|j| g[j] * weight[j] * x[j] * r).sum::<R>() / R::of(width as f64);
        for j in 0..width {
            to_x.push(r * (g[j] * weight[j] - x[j] * r * mean));
            to_weight[j] = to_weight[j] + g[j] * x[j] * r;
        }
    }
    [to_x, to_weight].concat()
}
