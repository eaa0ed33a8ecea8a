//! Layers of one weight: linear, embedding, norm.

use ironloom_tensor::{Context, Tensor, Weight, ops};

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
        let [out] = linear_many(cx, x, [self])?;
        Ok(out)
    }
}

/// Several layers on one input, which is read once for all.
///
/// # Errors
/// `x` is not as wide as a weight.
pub fn linear_many<const N: usize>(cx: &Context, x: &Tensor, layers: [&Linear; N]) -> Result<[Tensor; N]> {
    let mut outs = ops::linear_many(cx, x, layers.map(|layer| &layer.weight))?;
    for (out, layer) in outs.iter_mut().zip(layers) {
        if let Some(bias) = &layer.bias {
            let whole = std::mem::replace(out, bias.clone());
            *out = ops::add_bias(cx, whole, bias)?;
        }
    }
    Ok(outs)
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
    pub fn forward(&self, cx: &Context, ids: &[u32]) -> Result<Tensor> {
        let rows = ops::embedding(cx, &self.weight, ids)?;
        Ok(if self.scale == 1.0 { rows } else { ops::scale(cx, rows, self.scale)? })
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
}
