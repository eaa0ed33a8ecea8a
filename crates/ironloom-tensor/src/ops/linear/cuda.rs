//! Products on a graphics card that have no gradient: packed weights straight into the tensor cores for few rows, cuBLASLt with
//! weights unpacked to bfloat16 for many, weights that lie together as one matrix.

use ironloom_kernels::{self as kernels, Buffer, Form, Gpu, Output, Slice, Then, WeightLayout};

use super::{Activation, NAME, Projection, array};
use crate::{Context, CudaDevice, Path, Result, Tensor, weight::CudaMatrix};

/// All projections into one piece of memory, a row of it holding one row of each: in single precision for few rows, in
/// bfloat16 for many.
pub(super) fn on_cuda<const N: usize>(
    cx: &Context,
    cuda: &CudaDevice,
    x: &Tensor,
    projections: [Projection<'_>; N],
) -> Result<[Tensor; N]> {
    let (gpu, n) = (cuda.gpu(), x.rows());
    let total = projections.iter().map(|projection| projection.weight.rows()).sum();
    let form = if cx.path == Path::Few { Form::F32 } else { Form::Bf16 };
    let whole = Tensor::allocate(gpu, form, [n, total], NAME)?;
    let out = whole.cuda(NAME, form)?;
    match cx.path {
        Path::Few => few(gpu, x, &projections, Place { out, stride: total, add: false })?,
        Path::Many => {
            let (mut start, mut rest) = (0, &projections[..]);
            while !rest.is_empty() {
                let (group, after) = rest.split_at(together(rest)?);
                rest = after;
                many(cuda, x, group, out.part(start, out.bytes() - start)?, total, Output::Bf16)?;
                start += Form::Bf16.bytes(1, group.iter().map(|projection| projection.weight.rows()).sum())?;
            }
        }
    }
    let mut tensors = Vec::with_capacity(N);
    let mut column = 0;
    for projection in &projections {
        let end = column + projection.weight.rows();
        tensors.push(whole.columns(column..end)?);
        column = end;
    }
    array(tensors)
}

/// One product in single precision, stored or added.
pub(super) fn store(
    cx: &Context,
    cuda: &CudaDevice,
    x: &Tensor,
    projection: Projection<'_>,
    out: Slice<'_>,
    add: bool,
) -> Result<()> {
    let rows = projection.weight.rows();
    match cx.path {
        Path::Few => few(cuda.gpu(), x, &[projection], Place { out, stride: rows, add }),
        Path::Many => {
            let output = if add { Output::AddF32 } else { Output::F32 };
            many(cuda, x, &[projection], out, rows, output)
        }
    }
}

/// `act(gate(x)) * up(x)` of few rows in one kernel; none where it does not read gate and up, which are of two formats or have no
/// tiles.
pub(super) fn gated(
    gpu: &Gpu,
    x: &Tensor,
    [gate, up]: [Projection<'_>; 2],
    activation: Activation,
) -> Result<Option<Tensor>> {
    let (gate_matrix, up_matrix) = (gate.weight.as_cuda(NAME)?, up.weight.as_cuda(NAME)?);
    let WeightLayout::Tiles(format) = gate_matrix.layout else { return Ok(None) };
    if gate_matrix.layout != up_matrix.layout {
        return Ok(None);
    }
    let out = Tensor::allocate(gpu, Form::Split, [x.rows(), gate_matrix.rows], NAME)?;
    let call = kernels::Linear {
        x: x.cuda(NAME, Form::Split)?,
        n: x.rows(),
        cols: x.width(),
        format,
        matrices: &[matrix_of(&gate, 0)?, matrix_of(&up, 0)?],
        then: Then::Gated(activation),
        out: out.cuda(NAME, Form::Split)?,
        width: gate_matrix.rows,
    };
    kernels::linear(gpu, &call)?;
    Ok(Some(out))
}

/// Where products of few rows go.
#[derive(Clone, Copy)]
struct Place<'a> {
    out: Slice<'a>,
    /// Elements from one row to the next.
    stride: usize,
    /// Whether they are added to what is there.
    add: bool,
}

/// Neighbours of one format go in one launch.
fn few(gpu: &Gpu, x: &Tensor, projections: &[Projection<'_>], place: Place<'_>) -> Result<()> {
    let (operand, n, cols) = (x.cuda(NAME, Form::Split)?, x.rows(), x.width());
    let mut column = 0;
    let mut rest = projections;
    while let Some(first) = rest.first() {
        let layout = first.weight.as_cuda(NAME)?.layout;
        let alike =
            rest.iter().take_while(|next| next.weight.as_cuda(NAME).is_ok_and(|next| next.layout == layout)).count();
        let (group, after) = rest.split_at(alike);
        rest = after;
        match layout {
            WeightLayout::Tiles(format) => {
                let mut matrices = Vec::with_capacity(group.len());
                for projection in group {
                    matrices.push(matrix_of(projection, column)?);
                    column += projection.weight.rows();
                }
                let Place { out, stride, add } = place;
                let then = if add { Then::Add } else { Then::Store };
                let call =
                    kernels::Linear { x: operand, n, cols, format, matrices: &matrices, then, out, width: stride };
                kernels::linear(gpu, &call)?;
            }
            WeightLayout::Plain(dtype) => {
                for projection in group {
                    let matrix = projection.weight.as_cuda(NAME)?;
                    let start = column * 4;
                    let call = kernels::LinearPlain {
                        x: operand,
                        n,
                        matrix: matrix.slice()?,
                        dtype,
                        rows: matrix.rows,
                        cols,
                        bias: bias_of(projection)?,
                        add: place.add,
                        out: place.out.part(start, place.out.bytes() - start)?,
                        out_stride: place.stride,
                    };
                    kernels::linear_plain(gpu, &call)?;
                    column += matrix.rows;
                }
            }
        }
    }
    Ok(())
}

/// How many of the first projections a product of many rows takes as one: matrices that lie as rows of bfloat16 one after the
/// other, or packed ones, which are unpacked so. Their biases lie one after the other too, or there are none.
fn together(projections: &[Projection<'_>]) -> Result<usize> {
    let mut count = 1;
    for pair in projections.windows(2) {
        let (first, second) = (pair[0].weight.as_cuda(NAME)?, pair[1].weight.as_cuda(NAME)?);
        let weights = match (first.is_bf16(), second.is_bf16()) {
            (true, true) => first.is_followed_by(second),
            (first, second) => first == second,
        };
        let biases = match (pair[0].bias, pair[1].bias) {
            (Some(first), Some(second)) => first.is_followed_by(second),
            (first, second) => first.is_none() && second.is_none(),
        };
        if !(weights && biases) {
            break;
        }
        count += 1;
    }
    Ok(count)
}

/// One product of many rows for projections that go [`together`], by cuBLASLt, or by our own kernel where it is not
/// installed. A bias is rounded as the output is.
fn many(
    cuda: &CudaDevice,
    x: &Tensor,
    group: &[Projection<'_>],
    out: Slice<'_>,
    out_stride: usize,
    output: Output,
) -> Result<()> {
    let gpu = cuda.gpu();
    let matrices = group.iter().map(|projection| projection.weight.as_cuda(NAME)).collect::<Result<Vec<_>>>()?;
    let Some(first) = matrices.first() else { return Ok(()) };
    let held;
    let weight = if first.is_bf16() {
        first.buffer.part(first.offset, matrices.iter().map(|matrix| matrix.bytes).sum())?
    } else {
        held = unpacked(gpu, &matrices)?;
        held.slice()
    };
    let rounded;
    let bias = match group[0].bias {
        Some(bias) if output == Output::Bf16 => {
            rounded = bias.operand(gpu, NAME)?;
            Some(rounded.cuda(NAME, Form::Bf16)?)
        }
        _ => bias_of(&group[0])?,
    };
    let call = kernels::Product {
        x: x.cuda(NAME, Form::Bf16)?,
        x_stride: x.width(),
        weight,
        weight_stride: WeightLayout::padded_cols(first.cols),
        bias,
        out,
        out_stride,
        output,
        rows: x.rows(),
        outputs: matrices.iter().map(|matrix| matrix.rows).sum(),
        inputs: first.cols,
    };
    cuda.product(&call)
}

/// The matrix as rows of bfloat16; none where it lies so already.
pub(in crate::ops) fn bf16_rows(gpu: &Gpu, matrix: &CudaMatrix) -> Result<Option<Buffer>> {
    if matrix.is_bf16() { Ok(None) } else { unpacked(gpu, &[matrix]).map(Some) }
}

/// Matrices of one width as rows of bfloat16, one after the other.
fn unpacked(gpu: &Gpu, matrices: &[&CudaMatrix]) -> Result<Buffer> {
    let padded_cols = matrices.first().map_or(0, |first| WeightLayout::padded_cols(first.cols));
    let rows = matrices.iter().map(|matrix| matrix.rows).sum();
    let buffer = gpu.allocate(Form::Bf16.bytes(rows, padded_cols)?, "unpacked weights")?;
    let mut start = 0;
    for matrix in matrices {
        let bytes = Form::Bf16.bytes(matrix.rows, padded_cols)?;
        let call = kernels::Dequantize {
            matrix: matrix.slice()?,
            layout: matrix.layout,
            rows: matrix.rows,
            cols: matrix.cols,
            first_row: 0,
            count: matrix.rows,
            out: buffer.part(start, bytes)?,
        };
        kernels::dequantize(gpu, &call)?;
        start += bytes;
    }
    Ok(buffer)
}

/// A matrix of a product of few rows whose outputs go to the columns from `column` on.
fn matrix_of<'a>(projection: &Projection<'a>, column: usize) -> Result<kernels::Matrix<'a>> {
    let matrix = projection.weight.as_cuda(NAME)?;
    Ok(kernels::Matrix { weights: matrix.slice()?, rows: matrix.rows, bias: bias_of(projection)?, column })
}

fn bias_of<'a>(projection: &Projection<'a>) -> Result<Option<Slice<'a>>> {
    projection.bias.map(|bias| bias.cuda(NAME, Form::F32)).transpose()
}
