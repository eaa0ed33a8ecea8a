//! `gather_rows`, `scatter_add_rows` and `scale_rows_by_sigmoid`: how rows go to experts and come back.

use ironloom_tensor::{Context, Device, Tensor, ops};

use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    real::Real,
};

/// Rows of the whole, rows moved, width.
const SHAPES: [[usize; 3]; 4] = [[1, 1, 4], [5, 3, 17], [4, 9, 65], [64, 128, 576]];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for [whole, moved, width] in SHAPES {
        let shape = format!("{moved} of [{whole}, {width}]");
        let mut inputs = Inputs::of("rows", &shape);
        let (x, added) = (inputs.normal(whole * width), inputs.normal(moved * width));
        let (rows, weights) = (inputs.below(whole as u32, moved), inputs.normal(moved));

        let (place, from, which) = (device.clone(), x.clone(), rows.clone());
        cases.push(Case::new("gather_rows", &shape, Bound::Exact, move |kernel| {
            let given = Tensor::from_f32(kernel.inputs(&from), [whole, width])?;
            let ours = ops::gather_rows(&Context::inference(&place), &given, &which)?;
            let gathered = which.iter().flat_map(|&row| &from[row as usize * width..][..width]);
            let reference = gathered.map(|&value| f64::from(value)).collect();
            Ok(Results::new(reference, Vec::new(), ours.into_f32()?))
        }));

        let (place, onto) = (device.clone(), x.clone());
        cases.push(Case::new("scatter_add_rows", &shape, Bound::TwicePlain, move |kernel| {
            let out = Tensor::from_f32(onto.clone(), [whole, width])?;
            let given = Tensor::from_f32(kernel.inputs(&added), [moved, width])?;
            let ours = ops::scatter_add_rows(&Context::inference(&place), out, &rows, &given, &weights)?;
            Ok(Results::new(
                scatter::<f64>(&onto, &rows, &added, &weights, width),
                scatter::<f32>(&onto, &rows, &added, &weights, width),
                ours.into_f32()?,
            ))
        }));

        let (place, gate) = (device.clone(), inputs.normal(whole));
        cases.push(Case::new("scale_rows_by_sigmoid", &shape, Bound::TwicePlain, move |kernel| {
            let given = Tensor::from_f32(kernel.inputs(&x), [whole, width])?;
            let gates = Tensor::from_f32(gate.clone(), [whole, 1])?;
            let ours = ops::scale_rows_by_sigmoid(&Context::inference(&place), given, &gates)?;
            Ok(Results::new(open::<f64>(&x, &gate, width), open::<f32>(&x, &gate, width), ours.into_f32()?))
        }));
    }
    cases
}

fn scatter<R: Real>(onto: &[f32], rows: &[u32], added: &[f32], weights: &[f32], width: usize) -> Vec<R> {
    let (mut out, added, weights) = (R::all(onto), R::all(added), R::all(weights));
    for (i, &row) in rows.iter().enumerate() {
        for j in 0..width {
            let to = &mut out[row as usize * width + j];
            *to = *to + weights[i] * added[i * width + j];
        }
    }
    out
}

fn open<R: Real>(x: &[f32], gate: &[f32], width: usize) -> Vec<R> {
    let rows = R::all(x);
    let rows = rows.chunks_exact(width).zip(R::all(gate));
    rows.flat_map(|(row, gate)| row.iter().map(move |&x| x / (R::of(1.0) + (-gate).exp()))).collect()
}
