//! Products with packed weights: `out[i, r] = sum_k x[i, k] w[r, k] (+ bias[r])`.
//!
//! On the processor the arithmetic is in `ironloom-quant`, straight from the packed bytes; several weights that read the same
//! `x` (q, k, v; gate, up) go in one call and share one parallel region. On a graphics card few rows read packed weights
//! through the tensor cores, and many go to cuBLASLt, with weights unpacked to bfloat16 first: several weights as one matrix
//! where they lie together ([`Weight::join`]). Sums run over `k` in one order whatever the number of rows.
//!
//! Gradients: `dx = dy W`, `dW = dy^T x`, `db = sum over rows of dy`. A dense weight has one; a packed one is frozen and hands on
//! `dx` only, its rows unpacked some at a time.

mod cuda;

use std::sync::OnceLock;

use ironloom_kernels::Form;
use ironloom_quant::{Product, matmul};

use super::{Activation, DropoutKey, add, add::owned, add_bias, dropout, for_rows, gated_activation, scale};
use crate::{
    Context, CpuDevice, Device, Error, Path, Result, Tensor, Weight,
    error::expect_shape,
    gemm::{Matrix, Write, gemm},
};

pub(super) use self::cuda::bf16_rows;
use self::cuda::{gated, on_cuda, store};

/// A weight matrix with the bias of its outputs.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// `[rows, cols]`.
    pub weight: &'a Weight,
    /// `[rows]`.
    pub bias: Option<&'a Tensor>,
    /// What is learnt beside a frozen weight.
    pub adapter: Option<LowRank<'a>>,
}

/// A low-rank adapter of a product: `y += scale * dropout(x) A^T B^T` (Hu et al., arXiv 2106.09685).
#[derive(Clone, Copy, Debug)]
pub struct LowRank<'a> {
    /// `[rank, cols]`.
    pub a: &'a Weight,
    /// `[rows, rank]`.
    pub b: &'a Weight,
    /// The factor.
    pub scale: f32,
    /// The probability with which an element of `x` is left out under a tape.
    pub dropout: f32,
    /// The stream of its random numbers, beside the tape's seed.
    pub stream: u64,
    /// Rows that draw from the stream before those of `x`: others of routed experts, one expert's after another's.
    pub rows_before: usize,
}

impl<'a> From<&'a Weight> for Projection<'a> {
    fn from(weight: &'a Weight) -> Self {
        Self { weight, bias: None, adapter: None }
    }
}

const NAME: &str = "linear";

/// `x [n, cols]` through each of `projections`: one `[n, rows]` for each.
///
/// # Errors
/// `x` is not as wide as a weight, or a bias is not as long as its outputs.
pub fn linear_many<const N: usize>(cx: &Context, x: &Tensor, projections: [Projection<'_>; N]) -> Result<[Tensor; N]> {
    projections.iter().try_for_each(|projection| check(x, projection))?;
    if let Device::Cuda(cuda) = cx.device {
        if in_training(cx, &projections) {
            return array(super::cuda::linear::many(cx, cuda, x, &projections)?);
        }
        return on_cuda(cx, cuda, x, projections);
    }
    let (cpu, n) = (cx.cpu(NAME)?, x.rows());
    let mut outs = projections.map(|projection| vec![0.0; n * projection.weight.rows()]);
    let mut products = Vec::with_capacity(N);
    for (projection, out) in projections.iter().zip(&mut outs) {
        match projection.weight.as_dense() {
            Some(weight) => dense(cpu, x, weight, out)?,
            None => products.push(Product { matrix: projection.weight.as_cpu(NAME)?, out: out.as_mut_slice() }),
        }
    }
    if !products.is_empty() {
        matmul(&cpu.threads, x.as_f32()?, n, &mut products)?;
    }
    let mut tensors = Vec::with_capacity(N);
    for (projection, out) in projections.iter().zip(outs) {
        let out = Tensor::from_f32(out, [n, projection.weight.rows()])?;
        record(cx, cpu, x, projection.weight, &out);
        let out = match projection.bias {
            Some(bias) => add_bias(cx, out, bias)?,
            None => out,
        };
        tensors.push(match projection.adapter {
            Some(adapter) => add_low_rank(cx, out, x, &adapter)?,
            None => out,
        });
    }
    array(tensors)
}

/// `x [n, cols]` through `projection`: `[n, rows]` in single precision.
///
/// # Errors
/// As [`linear_many`].
pub fn linear<'a>(cx: &Context, x: &Tensor, projection: impl Into<Projection<'a>>) -> Result<Tensor> {
    let projection = projection.into();
    if let Device::Cuda(cuda) = cx.device {
        check(x, &projection)?;
        if in_training(cx, &[projection]) {
            return super::cuda::linear::single(cx, cuda, None, x, projection);
        }
        let out = Tensor::allocate(cuda.gpu(), Form::F32, [x.rows(), projection.weight.rows()], NAME)?;
        store(cx, cuda, x, projection, out.cuda(NAME, Form::F32)?, false)?;
        return Ok(out);
    }
    let [out] = linear_many(cx, x, [projection])?;
    Ok(out)
}

/// `residual + ` the product of [`linear`]; writes into `residual` when nothing else shares it.
///
/// # Errors
/// As [`linear`], or `residual` is not `[n, rows]`.
pub fn linear_add<'a>(
    cx: &Context,
    residual: Tensor,
    x: &Tensor,
    projection: impl Into<Projection<'a>>,
) -> Result<Tensor> {
    let projection = projection.into();
    expect_shape(NAME, "the residual", [x.rows(), projection.weight.rows()], residual.shape())?;
    let Device::Cuda(cuda) = cx.device else { return add(cx, residual, &linear(cx, x, projection)?) };
    check(x, &projection)?;
    if in_training(cx, &[projection]) {
        return super::cuda::linear::single(cx, cuda, Some(&residual), x, projection);
    }
    let out = owned(cuda.gpu(), residual, NAME)?;
    store(cx, cuda, x, projection, out.cuda(NAME, Form::F32)?, true)?;
    Ok(out)
}

/// `act(gate(x)) * up(x)`, `[n, rows]`: the first half of a gated feed-forward block.
///
/// # Errors
/// As [`linear_many`], or gate and up differ in shape.
pub fn gated_linear(
    cx: &Context,
    x: &Tensor,
    [gate, up]: [Projection<'_>; 2],
    activation: Activation,
) -> Result<Tensor> {
    let plain = !in_training(cx, &[gate, up]);
    if let (Device::Cuda(cuda), Path::Few, true) = (cx.device, cx.path, plain) {
        check(x, &gate)?;
        check(x, &up)?;
        if let Some(out) = gated(cuda.gpu(), x, [gate, up], activation)? {
            return Ok(out);
        }
    }
    let [gate, up] = linear_many(cx, x, [gate, up])?;
    gated_activation(cx, gate, &up, activation)
}

/// Whether products on a graphics card are those of a training pass: what is recorded, has dense weights or an adapter.
fn in_training(cx: &Context, projections: &[Projection<'_>]) -> bool {
    let learns = |projection: &Projection<'_>| projection.weight.as_dense().is_some() || projection.adapter.is_some();
    cx.tape.is_some() || projections.iter().any(learns)
}

/// `y` plus what the adapter makes of `x`.
fn add_low_rank(cx: &Context, y: Tensor, x: &Tensor, adapter: &LowRank<'_>) -> Result<Tensor> {
    let x = match cx.tape {
        // Without a tape nothing is learnt, and nothing is left out.
        Some(tape) => {
            let first = adapter.rows_before as u64 * x.width().div_ceil(4) as u64;
            let key = DropoutKey { seed: tape.seed(), stream: adapter.stream, first };
            dropout(cx, x.clone(), adapter.dropout, key)?
        }
        None => x.clone(),
    };
    let inner = scale(cx, linear(cx, &x, adapter.a)?, adapter.scale)?;
    linear_add(cx, y, &inner, adapter.b)
}

/// `out = x W^T`.
fn dense(cpu: &CpuDevice, x: &Tensor, weight: &Tensor, out: &mut [f32]) -> Result<()> {
    let (shape, stride) = ([x.rows(), x.width()], weight.rows());
    let rows = Matrix::new(x.as_f32()?, shape, x.width());
    gemm(cpu, out, stride, rows, dense_matrix(weight)?.transposed(), Write::Set);
    Ok(())
}

fn dense_matrix(weight: &Tensor) -> Result<Matrix<'_>> {
    Ok(Matrix::new(weight.as_f32()?, [weight.rows(), weight.width()], weight.width()))
}

/// Elements of a packed weight that are unpacked at a time on the way back.
const UNPACKED: usize = 1 << 20;

/// Records the product before its bias.
fn record(cx: &Context, cpu: &CpuDevice, x: &Tensor, weight: &Weight, out: &Tensor) {
    let Some(tape) = cx.tape else { return };
    let (to_x, to_weight) = (tape.slot(x), weight.as_dense().and_then(|weight| tape.slot(weight)));
    if to_x.is_none() && to_weight.is_none() {
        return;
    }
    // Only the gradient of the weight needs the input.
    let (cpu, x, weight) = (cpu.clone(), to_weight.map(|slot| (slot, x.clone())), weight.clone());
    let (n, cols) = (out.rows(), weight.cols());
    tape.record(out, move |gradient, gradients| {
        let rows = weight.rows();
        let g = gradient.as_f32()?;
        if let Some((slot, x)) = &x {
            let x = Matrix::new(x.as_f32()?, [n, cols], cols);
            let turned = Matrix::new(g, [n, rows], rows).transposed();
            gradients.write(slot, |out, first| {
                gemm(&cpu, out, cols, turned, x, Write::first(first));
                Ok(())
            })?;
        }
        let Some(slot) = &to_x else { return Ok(()) };
        gradients.write(slot, |out, first| product_back(&cpu, g, &weight, out, Write::first(first)))
    });
}

/// `out [n, cols] (+)= gradient [n, rows] W`.
pub(super) fn product_back(
    cpu: &CpuDevice,
    gradient: &[f32],
    weight: &Weight,
    out: &mut [f32],
    write: Write,
) -> Result<()> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let n = gradient.len().checked_div(rows).unwrap_or(0);
    if let Some(dense) = weight.as_dense() {
        gemm(cpu, out, cols, Matrix::new(gradient, [n, rows], rows), dense_matrix(dense)?, write);
        return Ok(());
    }
    let step = (UNPACKED / cols.max(1)).clamp(1, rows.max(1));
    let mut unpacked = vec![0.0; step * cols];
    for start in (0..rows).step_by(step) {
        let count = step.min(rows - start);
        let unpacked = &mut unpacked[..count * cols];
        let failure = OnceLock::new();
        for_rows(cpu, unpacked, cols, |range, out| {
            for (row, out) in range.zip(out.chunks_exact_mut(cols)) {
                if let Err(error) = weight.row(start + row, out) {
                    let _ = failure.set(error);
                }
            }
        });
        if let Some(error) = failure.into_inner() {
            return Err(error);
        }
        let part = Matrix::new(&gradient[start.min(gradient.len())..], [n, count], rows);
        let write = if start == 0 { write } else { Write::Add };
        gemm(cpu, out, cols, part, Matrix::new(unpacked, [count, cols], cols), write);
    }
    Ok(())
}

fn check(x: &Tensor, projection: &Projection<'_>) -> Result<()> {
    let (rows, cols) = (projection.weight.rows(), projection.weight.cols());
    if cols != x.width() {
        expect_shape(NAME, "the input", [x.rows(), cols], x.shape())?;
    }
    match projection.bias {
        Some(bias) => expect_shape(NAME, "the bias", [rows], bias.shape()),
        None => Ok(()),
    }
}

fn array<const N: usize>(tensors: Vec<Tensor>) -> Result<[Tensor; N]> {
    tensors.try_into().map_err(|wrong: Vec<Tensor>| Error::Count {
        operation: NAME,
        what: "the number of outputs",
        expected: N,
        found: wrong.len(),
    })
}
