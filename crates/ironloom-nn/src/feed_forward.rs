//! The gated feed-forward block: `down(act(gate(x)) * up(x))`.

use ironloom_tensor::{Context, Tensor, ops};

use crate::{Activation, Linear, Result, linear_many};

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
        let [gate, up] = linear_many(cx, x, [&self.gate, &self.up])?;
        self.down.forward(cx, &ops::gated_activation(cx, gate, &up, self.activation)?)
    }
}
