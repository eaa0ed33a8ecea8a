//! Products with packed weights: `out[i, r] = sum_k x[i, k] w[r, k]`.
//!
//! The arithmetic is in `ironloom-quant`, straight from the packed bytes; several weights that read the same `x` (q, k, v;
//! gate, up) go in one call and share one parallel region. Sums run over `k` in one order whatever the number of rows.

use ironloom_quant::{Product, matmul};

use crate::{Context, Error, Result, Tensor, Weight, error::expect_shape};

/// `x [n, cols]` times each of `weights [rows, cols]`, transposed: one `[n, rows]` for each.
///
/// # Errors
/// `x` is not as wide as a weight, or a tape records.
pub fn linear_many<const N: usize>(cx: &Context, x: &Tensor, weights: [&Weight; N]) -> Result<[Tensor; N]> {
    cx.without_gradient("linear")?;
    let n = x.rows();
    for weight in weights {
        if weight.cols() != x.width() {
            expect_shape("linear", "the input", [n, weight.cols()], x.shape())?;
        }
    }
    let mut outs = weights.map(|weight| vec![0.0; n * weight.rows()]);
    let mut products: Vec<Product<'_>> = weights
        .iter()
        .zip(&mut outs)
        .map(|(weight, out)| Product { matrix: weight.as_cpu(), out: out.as_mut_slice() })
        .collect();
    matmul(&cx.cpu().threads, x.as_f32()?, n, &mut products)?;
    let mut tensors = Vec::with_capacity(N);
    for (weight, out) in weights.iter().zip(outs) {
        tensors.push(Tensor::from_f32(out, [n, weight.rows()])?);
    }
    tensors.try_into().map_err(|wrong: Vec<Tensor>| Error::Count {
        operation: "linear",
        what: "the number of outputs",
        expected: N,
        found: wrong.len(),
    })
}

/// `x [n, cols]` times `weight [rows, cols]`, transposed: `[n, rows]`.
///
/// # Errors
/// `x` is not as wide as the weight, or a tape records.
pub fn linear(cx: &Context, x: &Tensor, weight: &Weight) -> Result<Tensor> {
    let [out] = linear_many(cx, x, [weight])?;
    Ok(out)
}
