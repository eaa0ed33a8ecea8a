//! Products of training by our own tensor-core kernels, where cuBLASLt is absent: the products of routed experts
//! (`cuda/routed_training.cu`) with a single expert that has every row.

use crate::{
    Error, Form, Gpu, Multiply, Product, Result,
    gemm::{gemm, operand},
    routed_training::{PlacesProduct, WeightGradient, formed_result, input_gradient_kernels, product_kernels},
};

/// A product by the built-in kernels: `a b` (the gradient of inputs), `a b^T` (the product forward) or `a^T b` (the gradient
/// of weights). Sizes that are not summed over are multiples of 8, but for an `a b^T` without `start`; a size that is summed
/// over is one but for `a^T b`.
///
/// The order of sums depends on the sizes and, in `a^T b`, on the number of the card's multiprocessors.
///
/// # Errors
/// A slice is too short, a size, a stride or an address is not aligned, a size does not fit, both operands are transposed,
/// an `a^T b` is to be stored as bfloat16, there is no memory for the pieces of a long sum, or the driver fails.
pub fn gemm_transposed(gpu: &Gpu, call: &Multiply<'_>) -> Result<()> {
    const NAME: &str = "product of training";
    let unsupported = |what: &str| Error::Unsupported { operation: NAME, what: what.to_owned() };
    let Multiply { a, b, out_stride, output, size: [m, n, k], .. } = *call;
    let ([_, _, out], start) = call.addresses()?;
    if call.size.contains(&0) {
        return Ok(());
    }
    let form = output.form();
    let checked = |slice| formed_result(NAME, slice, form, [m, out_stride, n]);
    let places = PlacesProduct {
        x: 0,
        x_stride: a.stride,
        sources: 0,
        offsets: 0,
        weight: 0,
        weight_stride: b.stride,
        expert_stride: 0,
        out,
        out_stride,
        places: m,
        experts: 1,
        columns: n,
        depth: k,
        before: start.unwrap_or(0),
    };
    match (a.transposed, b.transposed) {
        (false, true) if call.start.is_none() => gemm(
            gpu,
            &Product {
                x: a.slice,
                x_stride: a.stride,
                weight: b.slice,
                weight_stride: b.stride,
                bias: None,
                out: call.out,
                out_stride,
                output,
                rows: m,
                outputs: n,
                inputs: k,
            },
        ),
        (false, true) => {
            checked(call.out)?;
            let x = operand(NAME, "a's size in bytes", a.slice, [m, a.stride, k])?;
            let weight = operand(NAME, "b's size in bytes", b.slice, [n, b.stride, k])?;
            PlacesProduct { x, weight, ..places }.launch(gpu, NAME, product_kernels(form))
        }
        (false, false) => {
            checked(call.out)?;
            let x = operand(NAME, "a's size in bytes", a.slice, [m, a.stride, k])?;
            let weight = operand(NAME, "b's size in bytes", b.slice, [k, b.stride, n])?;
            PlacesProduct { x, weight, ..places }.launch(gpu, NAME, input_gradient_kernels(form))
        }
        (true, false) if form == Form::Bf16 => Err(unsupported("the product of a transposed matrix in bfloat16")),
        (true, false) => {
            checked(call.out)?;
            let sums = WeightGradient {
                dy: operand(NAME, "a's size in bytes", a.slice, [k, a.stride, m])?,
                dy_stride: a.stride,
                x: operand(NAME, "b's size in bytes", b.slice, [k, b.stride, n])?,
                x_stride: b.stride,
                offsets: 0,
                out,
                out_stride,
                expert_stride: 0,
                workspace: None,
                places: k,
                experts: 1,
                rows: m,
                columns: n,
                before: start.unwrap_or(0),
            };
            sums.launch(gpu, NAME)
        }
        (true, true) => Err(unsupported("the product of two transposed matrices")),
    }
}
