//! The gated feed-forward block: `down(act(gate(x)) * up(x))`.

use ironloom_tensor::{
    Context, Tensor,
    ops::{self, ExpertWeights},
};

use crate::{Activation, Linear, Result};

/// `down(act(gate(x)) * up(x))` (SwiGLU or GeGLU, by `activation`).
#[derive(Clone, Debug)]
pub struct FeedForward {
    /// `[inner width, width]`.
    pub gate: Linear,
    /// `[inner width, width]`.
    pub up: Linear,
    /// `[width, inner width]`.
    pub down: Linear,
    /// The gate's activation.
    pub activation: Activation,
}

impl FeedForward {
    /// `[n, width]` to `[n, width]`.
    ///
    /// # Errors
    /// `x` is not as wide as the weights.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        self.down.forward(cx, &self.inner(cx, x)?)
    }

    /// `residual` `[n, width]` plus the block's output.
    ///
    /// # Errors
    /// `x` is not as wide as the weights, or the residual has another shape.
    pub fn forward_add(&self, cx: &Context, residual: Tensor, x: &Tensor) -> Result<Tensor> {
        self.down.forward_add(cx, residual, &self.inner(&cx.inside(), x)?)
    }

    /// What operations on routed experts take of an expert.
    pub fn expert_weights(&self) -> ExpertWeights<'_> {
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(Linear::projection);
        ExpertWeights { gate, up, down }
    }

    /// `act(gate(x)) * up(x)`, `[n, inner width]`.
    fn inner(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        let halves = [self.gate.projection(), self.up.projection()];
        Ok(ops::gated_linear(cx, x, halves, self.activation)?)
    }
}
