//! The cases of every operation, in files of the operations' names.
//!
//! Each file holds the operation's formula as a plain loop over [`Real`](super::real::Real), from which both the reference
//! (f64) and the low-precision version (f32) come, and the shapes it is run at: odd, one, just past a vector or a block. On a
//! graphics card an operation runs by each kind of kernels that it has there, and the plain version rounds what those round.

mod add;
mod attention;
mod attention_rows;
mod embedding;
mod gated_activation;
mod linear;
mod linear_many;
mod rmsnorm;
mod rope;
mod rope_append;
mod route_experts;
mod routed_experts;
mod rows;
mod training;
mod weights;

use anyhow::{Context as _, Result};
use ironloom_tensor::{Context, Device, Gradients, Tape, Tensor};

use super::case::Case;

/// Every operation's cases on `device`.
pub(super) fn cases(device: &Device) -> Vec<Case> {
    let by_operation = [
        linear::cases,
        linear_many::cases,
        embedding::cases,
        rmsnorm::cases,
        rope::cases,
        rope_append::cases,
        attention::cases,
        attention_rows::cases,
        gated_activation::cases,
        add::cases,
        route_experts::cases,
        routed_experts::cases,
        rows::cases,
        training::cases,
    ];
    by_operation.into_iter().flat_map(|cases| cases(device)).collect()
}

/// Runs `forward` under a tape, then back from `gradient`: what the tape found for `inputs`.
fn differentiate(
    device: &Device,
    gradient: Tensor,
    inputs: &[&Tensor],
    forward: impl FnOnce(&Context) -> Result<Tensor>,
) -> Result<Gradients> {
    let tape = Tape::new();
    inputs.iter().for_each(|input| tape.watch(input));
    let output = forward(&Context::training(device, &tape))?;
    let mut gradients = Gradients::new();
    tape.backward(&output, gradient, &mut gradients)?;
    Ok(gradients)
}

/// The gradient of `tensor`, as values.
fn gradient_of(gradients: &Gradients, tensor: &Tensor) -> Result<Vec<f32>> {
    let gradient = gradients.get(tensor.id()).context("the tape found no gradient for an input")?;
    Ok(gradient.as_f32()?.to_vec())
}
