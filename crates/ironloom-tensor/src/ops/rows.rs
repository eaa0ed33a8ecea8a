//! Moving rows: picking some, adding some back with weights, weighting each by a sigmoid.

use ironloom_kernels::{self as kernels, Form};

use super::{add, add::owned, for_rows};
use crate::{
    Context, Error, Indices, Result, Tensor,
    error::{expect_count, expect_shape},
    lanes::{dot, exp},
};

/// `out[i] = x[rows[i]]`, as `[rows, width]`. Gradient: added to the rows.
///
/// # Errors
/// A row is outside `x`, or a tape records on a graphics card.
pub fn gather_rows(cx: &Context, x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    check_rows("gather rows", rows, x.rows())?;
    if let Some(gpu) = cx.gpu() {
        const NAME: &str = "gather rows";
        cx.without_gradient(NAME)?;
        let out = Tensor::allocate(gpu, Form::F32, [rows.len(), x.width()], NAME)?;
        let picked = Indices::new(cx.device, rows)?;
        let call = kernels::GatherRows {
            x: x.cuda(NAME, Form::F32)?,
            x_rows: x.rows(),
            rows: picked.cuda(NAME)?,
            out: out.cuda(NAME, Form::F32)?,
            count: rows.len(),
            width: x.width(),
        };
        kernels::gather_rows(gpu, &call)?;
        return Ok(out);
    }
    let (width, input) = (x.width(), x.as_f32()?);
    let mut out = vec![0.0; rows.len() * width];
    for_rows(cx.cpu("gather rows")?, &mut out, width, |range, out| {
        for (&row, out) in rows[range].iter().zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&input[row as usize * width..][..width]);
        }
    });
    let out = Tensor::from_f32(out, [rows.len(), width])?;
    if let Some((tape, [Some(slot)])) = cx.slots([x]) {
        let rows = rows.to_vec();
        tape.record(&out, move |gradient, gradients| {
            let g = gradient.as_f32()?;
            gradients.write(&slot, |out, first| {
                add_rows(out, first, &rows, g, width, 1.0);
                Ok(())
            })
        });
    }
    Ok(out)
}

/// `out[rows[i]] += factor * x[i]`, one `i` after the other; `first` starts from zeros.
pub(super) fn add_rows(out: &mut [f32], first: bool, rows: &[u32], x: &[f32], width: usize, factor: f32) {
    if first {
        out.fill(0.0);
    }
    for (&row, x) in rows.iter().zip(x.chunks_exact(width.max(1))) {
        let sums = &mut out[row as usize * width..][..width];
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += factor * x);
    }
}

/// The factors of rows: row `i`'s is element `places[i]` of `weights`.
#[derive(Clone, Copy, Debug)]
pub struct RowWeights<'a> {
    /// Of any shape.
    pub weights: &'a Tensor,
    /// One for each row.
    pub places: &'a [u32],
}

/// `out[rows[i]] + w_i * x[i]`, one `i` after the other; writes into `out` when nothing else shares it. Gradients: `g` for `out`,
/// `w_i g[rows[i]]` for `x[i]`, `g[rows[i]] . x[i]` for `w_i`.
///
/// # Errors
/// The widths or counts differ, or a row is outside `out` or a place outside the weights.
pub fn scatter_add_rows(
    cx: &Context,
    out: Tensor,
    rows: &[u32],
    x: &Tensor,
    weights: RowWeights<'_>,
) -> Result<Tensor> {
    const NAME: &str = "scatter-add rows";
    check_rows(NAME, rows, out.rows())?;
    let (shape, width, RowWeights { weights, places }) = (*out.shape(), out.width(), weights);
    expect_shape(NAME, "the rows to add", [rows.len(), width], x.shape())?;
    expect_count(NAME, "the number of weights", rows.len(), places.len())?;
    check_rows(NAME, places, weights.shape().elements()?)?;
    cx.cpu(NAME)?;
    let slots = cx.slots([&out, x, weights]);
    let factors: Vec<f32> = {
        let all = weights.as_f32()?;
        places.iter().map(|&place| all[place as usize]).collect()
    };
    let mut sums = out.into_f32()?;
    for ((&row, &factor), x) in rows.iter().zip(&factors).zip(x.as_f32()?.chunks_exact(width)) {
        for (sum, x) in sums[row as usize * width..][..width].iter_mut().zip(x) {
            *sum += factor * x;
        }
    }
    let out = Tensor::from_f32(sums, shape)?;
    if let Some((tape, [to_out, to_x, to_weights])) = slots {
        let (rows, places, x) = (rows.to_vec(), places.to_vec(), x.clone());
        tape.record(&out, move |gradient, gradients| {
            let g = |row: u32| gradient.as_f32().map(|g| &g[row as usize * width..][..width]);
            if let Some(slot) = &to_weights {
                let x = x.as_f32()?;
                gradients.write(slot, |out, first| {
                    if first {
                        out.fill(0.0);
                    }
                    for ((&row, &place), x) in rows.iter().zip(&places).zip(x.chunks_exact(width)) {
                        out[place as usize] += dot(g(row)?, x);
                    }
                    Ok(())
                })?;
            }
            if let Some(slot) = &to_x {
                let mut found = Vec::with_capacity(rows.len() * width);
                for (&row, factor) in rows.iter().zip(&factors) {
                    found.extend(g(row)?.iter().map(|g| factor * g));
                }
                gradients.add(slot, Tensor::from_f32(found, slot.shape())?)?;
            }
            match &to_out {
                Some(slot) => gradients.add(slot, gradient.clone()),
                None => Ok(()),
            }
        });
    }
    Ok(out)
}

/// `x[i, j] / (1 + e^-gate[i])` for `gate [n, 1]`. Has a gradient for both.
///
/// # Errors
/// There is not one gate for each row.
pub fn scale_rows_by_sigmoid(cx: &Context, x: Tensor, gate: &Tensor) -> Result<Tensor> {
    const NAME: &str = "scale rows by sigmoid";
    let (shape, width) = (*x.shape(), x.width());
    expect_shape(NAME, "the gate", [x.rows(), 1], gate.shape())?;
    cx.cpu(NAME)?;
    let factors: Vec<f32> = gate.as_f32()?.iter().map(|gate| 1.0 / (1.0 + exp(-gate))).collect();
    let recorded = cx.slots([&x, gate]).map(|slots| (slots, x.clone()));
    let mut out = x.into_f32()?;
    for (row, factor) in out.chunks_exact_mut(width).zip(&factors) {
        row.iter_mut().for_each(|value| *value *= factor);
    }
    let out = Tensor::from_f32(out, shape)?;
    if let Some(((tape, [to_x, to_gate]), x)) = recorded {
        tape.record(&out, move |gradient, gradients| {
            let (g, x) = (gradient.as_f32()?, x.as_f32()?);
            if let Some(slot) = &to_gate {
                let rows = g.chunks_exact(width).zip(x.chunks_exact(width)).zip(&factors);
                let found = rows.map(|((g, x), factor)| dot(g, x) * factor * (1.0 - factor)).collect();
                gradients.add(slot, Tensor::from_f32(found, slot.shape())?)?;
            }
            let Some(slot) = &to_x else { return Ok(()) };
            let rows = g.chunks_exact(width).zip(&factors);
            let found = rows.flat_map(|(g, factor)| g.iter().map(move |g| g * factor)).collect();
            gradients.add(slot, Tensor::from_f32(found, slot.shape())?)
        });
    }
    Ok(out)
}

/// `residual[i, j] + y[i, j] / (1 + e^-gate[i])`; writes into `residual` when nothing else shares it. Has a gradient for all
/// three.
///
/// # Errors
/// The shapes differ, or there is not one gate for each row.
pub fn add_gated_rows(cx: &Context, residual: Tensor, y: &Tensor, gate: &Tensor) -> Result<Tensor> {
    const NAME: &str = "add gated rows";
    let Some(gpu) = cx.gpu() else { return add(cx, residual, &scale_rows_by_sigmoid(cx, y.clone(), gate)?) };
    expect_shape(NAME, "the rows to add", *residual.shape(), y.shape())?;
    expect_shape(NAME, "the gate", [y.rows(), 1], gate.shape())?;
    // What is recorded has to stay what it is known by.
    let before = cx.tape.map(|_| residual.clone());
    let out = owned(gpu, residual, NAME)?;
    let call = kernels::AddGatedRows {
        residual: out.cuda(NAME, Form::F32)?,
        y: y.cuda(NAME, Form::F32)?,
        form: Form::F32,
        gate: gate.cuda(NAME, Form::F32)?,
        rows: y.rows(),
        width: y.width(),
    };
    kernels::add_gated_rows(gpu, &call)?;
    if let Some(before) = before {
        super::cuda::rows::record_gated_rows(cx, gpu, [&before, y, gate], &out);
    }
    Ok(out)
}

/// The rows of all of `parts`, which are of one width, one after the other.
///
/// # Errors
/// The widths differ, or a tape records.
pub fn concat_rows(cx: &Context, mut parts: Vec<Tensor>) -> Result<Tensor> {
    const NAME: &str = "concatenate rows";
    cx.without_gradient(NAME)?;
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    let width = parts.first().map_or(0, Tensor::width);
    let rows = parts.iter().map(Tensor::rows).sum();
    for part in &parts {
        expect_shape(NAME, "a part", [part.rows(), width], part.shape())?;
    }
    let Some(gpu) = cx.gpu() else {
        let mut out = Vec::with_capacity(rows * width);
        for part in parts {
            out.extend_from_slice(part.as_f32()?);
        }
        return Tensor::from_f32(out, [rows, width]);
    };
    let out = Tensor::allocate(gpu, Form::F32, [rows, width], NAME)?;
    let mut start = 0;
    for part in parts {
        let bytes = Form::F32.bytes(part.rows(), width)?;
        gpu.copy(out.cuda(NAME, Form::F32)?.part(start, bytes)?, part.cuda(NAME, Form::F32)?.part(0, bytes)?)?;
        start += bytes;
    }
    Ok(out)
}

fn check_rows(operation: &'static str, rows: &[u32], limit: usize) -> Result<()> {
    match rows.iter().enumerate().find(|(_, row)| **row as usize >= limit) {
        Some((row, &id)) => Err(Error::IdOutOfRange { operation, id, row, limit }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn rows_move_and_add() {
        let device = Device::cpu(2);
        let cx = Context::inference(&device);
        let x = Tensor::from_f32(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3, 2]).unwrap();
        let picked = gather_rows(&cx, &x, &[2, 0]).unwrap();
        assert_eq!(picked.as_f32().unwrap(), &[5.0, 6.0, 1.0, 2.0]);
        let weights = Tensor::from_f32(vec![0.5, 9.0, 1.0], [3]).unwrap();
        let weights = |places| RowWeights { weights: &weights, places };
        let sum = scatter_add_rows(&cx, x.clone(), &[1, 1], &picked, weights(&[2, 0])).unwrap();
        assert_eq!(sum.as_f32().unwrap(), &[1.0, 2.0, 8.5, 11.0, 5.0, 6.0]);
        let gate = Tensor::from_f32(vec![0.0, f32::INFINITY, f32::NEG_INFINITY], [3, 1]).unwrap();
        let gated = scale_rows_by_sigmoid(&cx, x.clone(), &gate).unwrap();
        assert_eq!(gated.as_f32().unwrap(), &[0.5, 1.0, 3.0, 4.0, 0.0, 0.0]);
        assert!(gather_rows(&cx, &x, &[3]).is_err());
        assert!(scatter_add_rows(&cx, x.clone(), &[0], &picked, weights(&[0])).is_err());
        assert!(scatter_add_rows(&cx, x, &[0, 1], &picked, weights(&[0, 3])).is_err());
    }
}
