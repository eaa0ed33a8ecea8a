//! Routed experts: each row goes to its `k` most probable experts, and to the shared one.
//!
//! `p = softmax(x R^T)`; `S` = the `k` largest, optionally divided by their sum;
//! `y = shared(x) + sum over e in S of p_e expert_e(x)`, the sum in ascending order of `e`, so that a row's result does not
//! depend on the rows beside it. A gated shared expert is weighted by `sigmoid(x g^T)`.

use ironloom_nn::{FeedForward, Linear};
use ironloom_tensor::{
    Context, Tensor,
    ops::{self, ExpertWeights, RoutedTraining, RouterLosses, Routing},
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
    /// `residual` `[n, width]` plus the block's output for `x [n, width]`.
    ///
    /// # Errors
    /// A shape does not fit.
    pub fn forward_add(&self, cx: &Context, residual: Tensor, x: &Tensor) -> Result<Tensor> {
        self.add_experts(cx, residual, x, &self.route(cx, x)?)
    }

    /// `residual` plus the block's output, and the router's own losses, weighted and scaled, on the tape.
    ///
    /// # Errors
    /// A shape does not fit, or experts on a graphics card have adapters that others lack.
    pub fn forward_training(
        &self,
        cx: &Context,
        residual: Tensor,
        x: &Tensor,
        (losses, scale): (RouterLosses, f32),
    ) -> Result<Tensor> {
        // The routed experts are what is last.
        let (last, cx) = (cx, &cx.inside());
        let logits = self.router.forward(cx, x)?;
        let sum = self.add_shared(cx, residual, x)?;
        let experts = self.expert_weights();
        let layer = RoutedTraining {
            logits: &logits,
            per_row: self.per_row,
            normalize: self.normalize,
            losses,
            scale,
            experts: &experts,
            activation: self.activation(),
        };
        Ok(ops::routed_training(last, sum, x, &layer)?)
    }

    /// `residual` plus the shared expert's output.
    fn add_shared(&self, cx: &Context, residual: Tensor, x: &Tensor) -> Result<Tensor> {
        Ok(match &self.shared {
            None => residual,
            Some((shared, None)) => shared.forward_add(cx, residual, x)?,
            Some((shared, Some(gate))) => {
                ops::add_gated_rows(cx, residual, &shared.forward(cx, x)?, &gate.forward(cx, x)?)?
            }
        })
    }

    fn expert_weights(&self) -> Vec<ExpertWeights<'_>> {
        self.experts.iter().map(FeedForward::expert_weights).collect()
    }

    fn activation(&self) -> ops::Activation {
        self.experts.first().map_or(ops::Activation::Silu, |expert| expert.activation)
    }

    /// `residual` plus the shared expert's and the routed experts' outputs.
    fn add_experts(&self, cx: &Context, residual: Tensor, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        let sum = self.add_shared(cx, residual, x)?;
        Ok(ops::routed_experts(cx, sum, x, routing, &self.expert_weights(), self.activation())?)
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
