//! Routed experts: each row goes to its `k` most probable experts, and to the shared one.
//!
//! `p = softmax(x R^T)`; `S` = the `k` largest, optionally divided by their sum;
//! `y = shared(x) + sum over e in S of p_e expert_e(x)`, the sum in ascending order of `e`, so that a row's result does not
//! depend on the rows beside it. A gated shared expert is weighted by `sigmoid(x g^T)`.

use ironloom_nn::{FeedForward, Linear, RmsNorm};
use ironloom_tensor::{
    Context, Tensor,
    ops::{self, ExpertWeights, Routing},
};

use crate::Result;

/// The routed feed-forward half of a layer.
#[derive(Clone, Debug)]
pub struct Experts {
    /// The router, `[experts, width]`.
    pub router: Linear,
    /// The experts.
    pub experts: Vec<FeedForward>,
    /// Experts a row goes to.
    pub per_row: usize,
    /// Whether the chosen experts' probabilities are divided by their sum.
    pub normalize: bool,
    /// The expert every row goes to, and its gate `[1, width]` where it has one.
    pub shared: Option<(FeedForward, Option<Linear>)>,
}

impl Experts {
    /// `residual` `[n, width]` plus the block's output for `x [n, width]`, and `next`'s norm of it.
    ///
    /// # Errors
    /// A shape does not fit.
    pub fn forward_add_norm(
        &self,
        cx: &Context,
        residual: Tensor,
        x: &Tensor,
        next: &RmsNorm,
    ) -> Result<(Tensor, Tensor)> {
        let routing = self.route(cx, x)?;
        let sum = match &self.shared {
            None => residual,
            Some((shared, None)) => shared.forward_add(cx, residual, x)?,
            Some((shared, Some(gate))) => {
                ops::add_gated_rows(cx, residual, &shared.forward(cx, x)?, &gate.forward(cx, x)?)?
            }
        };
        let experts: Vec<ExpertWeights<'_>> = self
            .experts
            .iter()
            .map(|expert| ExpertWeights { gate: &expert.gate.weight, up: &expert.up.weight, down: &expert.down.weight })
            .collect();
        let activation = self.experts.first().map_or(ops::Activation::Silu, |expert| expert.activation);
        let (sum, normed) = ops::routed_experts(cx, sum, x, &routing, &experts, activation, Some(next.norm()))?;
        let normed = match normed {
            Some(normed) => normed,
            None => next.forward(cx, &sum)?,
        };
        Ok((sum, normed))
    }

    /// Which experts the rows go to, and with what weights.
    ///
    /// # Errors
    /// A shape does not fit.
    pub fn route(&self, cx: &Context, x: &Tensor) -> Result<Routing> {
        let logits = self.router.forward(cx, x)?;
        Ok(ops::route_experts(cx, &logits, self.per_row, self.normalize)?)
    }
}
