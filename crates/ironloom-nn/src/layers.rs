//! Layers of one weight: linear, embedding, norm.

use ironloom_tensor::{
    Context, Indices, Tensor, Weight,
    ops::{self, Norm, Projection},
};

use crate::Result;

/// `y = x W^T (+ b)` with `W [out features, in features]` in any packed form.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The weight, `[out features, in features]`.
    pub weight: Weight,
    /// The bias, `[out features]`.
    pub bias: Option<Tensor>,
}

impl Linear {
    /// `[n, in features]` to `[n, out features]`.
    ///
    /// # Errors
    /// `x` is not as wide as the weight.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        Ok(ops::linear(cx, x, self.projection())?)
    }

    /// `residual` `[n, out features]` plus the layer's output.
    ///
    /// # Errors
    /// `x` is not as wide as the weight, or the residual has another shape than the output.
    pub fn forward_add(&self, cx: &Context, residual: Tensor, x: &Tensor) -> Result<Tensor> {
        Ok(ops::linear_add(cx, residual, x, self.projection())?)
    }

    /// `residual` plus the layer's output, and `next`'s norm of it.
    ///
    /// # Errors
    /// As [`Linear::forward_add`], or the norm is not as wide as a row.
    pub fn forward_add_norm(
        &self,
        cx: &Context,
        residual: Tensor,
        x: &Tensor,
        next: &RmsNorm,
    ) -> Result<(Tensor, Tensor)> {
        Ok(ops::linear_add_norm(cx, residual, x, self.projection(), next.norm())?)
    }

    /// What operations take of it.
    pub(crate) fn projection(&self) -> Projection<'_> {
        Projection { weight: &self.weight, bias: self.bias.as_ref() }
    }
}

/// Several layers on one input, which is read once for all.
///
/// # Errors
/// `x` is not as wide as a weight.
pub fn linear_many<const N: usize>(cx: &Context, x: &Tensor, layers: [&Linear; N]) -> Result<[Tensor; N]> {
    Ok(ops::linear_many(cx, x, layers.map(Linear::projection))?)
}

/// Rows of a table, times a constant.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// The table, `[vocabulary, width]`; packed tables are unpacked row by row on look-up.
    pub weight: Weight,
    /// The factor on every row (Gemma's square root of the width; 1 elsewhere).
    pub scale: f32,
}

impl Embedding {
    /// The rows of `ids`, `[n, width]`.
    ///
    /// # Errors
    /// An id is outside the table.
    pub fn forward(&self, cx: &Context, ids: &Indices) -> Result<Tensor> {
        Ok(ops::embedding(cx, &self.weight, ids, self.scale)?)
    }
}

/// Root-mean-square norm over runs of the weight's length.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// The weight, `[width]`; families that store it less one have it added on load.
    pub weight: Tensor,
    /// Added to the mean square.
    pub epsilon: f32,
}

impl RmsNorm {
    /// The norm of `x`, in its shape.
    ///
    /// # Errors
    /// A row is not whole runs of the weight's length.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        Ok(ops::rmsnorm(cx, x, &self.weight, self.epsilon)?)
    }

    /// What operations take of it.
    pub fn norm(&self) -> Norm<'_> {
        Norm { weight: &self.weight, epsilon: self.epsilon }
    }

    /// `residual` plus the norm of `x`, of one shape, and `next`'s norm of that.
    ///
    /// # Errors
    /// The shapes differ, or a row is not as long as a weight.
    pub fn forward_add_norm(
        &self,
        cx: &Context,
        residual: Tensor,
        x: &Tensor,
        next: &RmsNorm,
    ) -> Result<(Tensor, Tensor)> {
        let sum = self.forward_add(cx, residual, x)?;
        let normed = next.forward(cx, &sum)?;
        Ok((sum, normed))
    }

    /// `residual` plus the norm of `x`, of one shape.
    ///
    /// # Errors
    /// The shapes differ, or a row is not as long as the weight.
    pub fn forward_add(&self, cx: &Context, residual: Tensor, x: &Tensor) -> Result<Tensor> {
        Ok(ops::rmsnorm_add(cx, residual, x, &self.weight, self.epsilon)?)
    }
}
