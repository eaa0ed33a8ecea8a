//! `gather_rows`, `concat_rows`, `scatter_add_rows`, `scale_rows_by_sigmoid` and `add_gated_rows`: how rows are picked, go to
//! experts and come back.

use ironloom_tensor::{Device, ops};

use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::{Place, is_cpu},
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
        let gate = inputs.normal(whole);

        let (place, from, which) = (Place::single(device), x.clone(), rows.clone());
        cases.push(Case::new("gather_rows", &shape, Bound::Exact, move |kernel| {
            let given = place.tensor(kernel.inputs(&from), [whole, width])?;
            let ours = ops::gather_rows(&place.context(), &given, &which)?;
            let gathered = which.iter().flat_map(|&row| &from[row as usize * width..][..width]);
            let reference = gathered.map(|&value| f64::from(value)).collect();
            Ok(Results::new(reference, Vec::new(), ours.into_f32()?))
        }));

        let (place, parts) = (Place::single(device), [x.clone(), added.clone()]);
        cases.push(Case::new("concat_rows", &shape, Bound::Exact, move |kernel| {
            let [first, second] = [(&parts[0], whole), (&parts[1], moved)]
                .map(|(values, rows)| place.tensor(kernel.inputs(values), [rows, width]));
            let ours = ops::concat_rows(&place.context(), vec![first?, second?])?;
            let reference = parts.iter().flatten().map(|&value| f64::from(value)).collect();
            Ok(Results::new(reference, Vec::new(), ours.into_f32()?))
        }));

        let (place, onto, term, gates) = (Place::single(device), inputs.normal(whole * width), x.clone(), gate.clone());
        cases.push(Case::new("add_gated_rows", &shape, Bound::TwicePlain, move |kernel| {
            let [out, given] =
                [&onto, &kernel.inputs(&term)].map(|values| place.tensor(values.clone(), [whole, width]));
            let gates_in = place.tensor(gates.clone(), [whole, 1])?;
            let ours = ops::add_gated_rows(&place.context(), out?, &given?, &gates_in)?;
            Ok(Results::new(
                add_gated::<f64>(&onto, &term, &gates, width),
                add_gated::<f32>(&onto, &term, &gates, width),
                ours.into_f32()?,
            ))
        }));

        if !is_cpu(device) {
            // A card adds experts' rows back in `routed_experts`, and gates a shared expert's as it adds them.
            continue;
        }
        let (place, onto) = (Place::single(device), x.clone());
        cases.push(Case::new("scatter_add_rows", &shape, Bound::TwicePlain, move |kernel| {
            let out = place.tensor(onto.clone(), [whole, width])?;
            let given = place.tensor(kernel.inputs(&added), [moved, width])?;
            let factors = place.tensor(weights.clone(), [1, moved])?;
            let places: Vec<u32> = (0..moved as u32).collect();
            let each = ops::RowWeights { weights: &factors, places: &places };
            let ours = ops::scatter_add_rows(&place.context(), out, &rows, &given, each)?;
            Ok(Results::new(
                scatter::<f64>(&onto, &rows, &added, &weights, width),
                scatter::<f32>(&onto, &rows, &added, &weights, width),
                ours.into_f32()?,
            ))
        }));

        let place = Place::single(device);
        cases.push(Case::new("scale_rows_by_sigmoid", &shape, Bound::TwicePlain, move |kernel| {
            let given = place.tensor(kernel.inputs(&x), [whole, width])?;
            let gates = place.tensor(gate.clone(), [whole, 1])?;
            let ours = ops::scale_rows_by_sigmoid(&place.context(), given, &gates)?;
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

fn add_gated<R: Real>(onto: &[f32], x: &[f32], gate: &[f32], width: usize) -> Vec<R> {
    R::all(onto).into_iter().zip(open::<R>(x, gate, width)).map(|(onto, term)| onto + term).collect()
}
