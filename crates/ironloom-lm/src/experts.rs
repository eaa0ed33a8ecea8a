//! Routed experts: each row goes to its `k` most probable experts, and to the shared one.
//!
//! `p = softmax(x R^T)`; `S` = the `k` largest, optionally divided by their sum;
//! `y = shared(x) + sum over e in S of p_e expert_e(x)`, the sum in ascending order of `e`, so that a row's result does not
//! depend on the rows beside it. A gated shared expert is weighted by `sigmoid(x g^T)`.

use ironloom_nn::{FeedForward, Linear};
use ironloom_tensor::{
    Context, Tensor,
    ops::{self, Routing},
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
    /// `[n, width]` to `[n, width]`.
    ///
    /// # Errors
    /// A shape does not fit.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        let routing = self.route(cx, x)?;
        let mut out = match &self.shared {
            None => Tensor::zeros(*x.shape())?,
            Some((shared, None)) => shared.forward(cx, x)?,
            Some((shared, Some(gate))) => {
                let gate = gate.forward(cx, x)?;
                ops::scale_rows_by_sigmoid(cx, shared.forward(cx, x)?, &gate)?
            }
        };
        for (number, expert) in self.experts.iter().enumerate() {
            let slots = routing.experts.iter().enumerate().filter(|(_, chosen)| **chosen as usize == number);
            let (rows, weights): (Vec<u32>, Vec<f32>) =
                slots.map(|(slot, _)| ((slot / self.per_row) as u32, routing.weights[slot])).unzip();
            if rows.is_empty() {
                continue;
            }
            let y = match rows.len() == x.rows() {
                true => expert.forward(cx, x)?,
                false => expert.forward(cx, &ops::gather_rows(cx, x, &rows)?)?,
            };
            out = ops::scatter_add_rows(cx, out, &rows, &y, &weights)?;
        }
        Ok(out)
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
