//! Layers of one weight: linear, embedding, norm.

use ironloom_tensor::{
    Context, Device, Indices, Tensor, Weight,
    ops::{self, LowRank, Projection},
};

use crate::Result;

/// `y = x W^T (+ b)` with `W [out features, in features]` in any packed form, and a low-rank adapter beside it where one is attached.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The weight, `[out features, in features]`.
    pub weight: Weight,
    /// The bias, `[out features]`.
    pub bias: Option<Tensor>,
    /// What is learnt beside a frozen weight.
    pub adapter: Option<Box<Adapter>>,
}

/// A low-rank adapter: `y += scale * dropout(x) A^T B^T` (Hu et al., arXiv 2106.09685).
#[derive(Clone, Debug)]
pub struct Adapter {
    /// `[rank, in features]`, dense.
    pub a: Weight,
    /// `[out features, rank]`, dense.
    pub b: Weight,
    /// The factor, usually `alpha / rank`.
    pub scale: f32,
    /// The probability with which an element of `x` is left out in training.
    pub dropout: f32,
    /// Tells its dropout's random numbers from other adapters'.
    pub stream: u64,
}

impl Adapter {
    /// Adds the adapter to a dense weight `[out features, in features]`: `W += scale B A`.
    ///
    /// # Errors
    /// The shapes don't fit, or a matrix is not on the processor.
    pub fn merge_into(&self, weight: &mut Tensor) -> Result<()> {
        let (rows, cols, rank) = (self.b.rows(), self.a.cols(), self.a.rows());
        if weight.shape().dims() != [rows, cols] || self.b.cols() != rank {
            let (expected, found) = (Box::new([rows, cols].into()), Box::new(*weight.shape()));
            let (operation, operand) = ("merging an adapter", "the weight");
            return Err(ironloom_tensor::Error::Shape { operation, operand, expected, found }.into());
        }
        let (a, b) = (self.a.unpacked()?, self.b.unpacked()?);
        let values = weight.as_f32_mut()?;
        for (row, b) in values.chunks_exact_mut(cols.max(1)).zip(b.chunks_exact(rank.max(1))) {
            for (b, a) in b.iter().zip(a.chunks_exact(cols.max(1))) {
                row.iter_mut().zip(a).for_each(|(value, a)| *value += self.scale * b * a);
            }
        }
        Ok(())
    }

    /// What operations take of it.
    fn low_rank(&self) -> LowRank<'_> {
        LowRank {
            a: &self.a,
            b: &self.b,
            scale: self.scale,
            dropout: self.dropout,
            stream: self.stream,
            rows_before: 0,
        }
    }
}

impl Linear {
    /// `[n, in features]` to `[n, out features]`.
    ///
    /// # Errors
    /// `x` is not as wide as the weight.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> Result<Tensor> {
        Ok(ops::linear(cx, x, self.projection())?)
    }

    /// A layer without an adapter.
    pub fn new(weight: Weight, bias: Option<Tensor>) -> Self {
        Self { weight, bias, adapter: None }
    }

    /// `residual` `[n, out features]` plus the layer's output.
    ///
    /// # Errors
    /// `x` is not as wide as the weight, or the residual has another shape than the output.
    pub fn forward_add(&self, cx: &Context, residual: Tensor, x: &Tensor) -> Result<Tensor> {
        Ok(ops::linear_add(cx, residual, x, self.projection())?)
    }

    /// What operations take of it.
    pub(crate) fn projection(&self) -> Projection<'_> {
        Projection {
            weight: &self.weight,
            bias: self.bias.as_ref(),
            adapter: self.adapter.as_ref().map(|adapter| adapter.low_rank()),
        }
    }
}

/// Several layers on one input, which is read once for all.
///
/// # Errors
/// `x` is not as wide as a weight.
pub fn linear_many<const N: usize>(cx: &Context, x: &Tensor, layers: [&Linear; N]) -> Result<[Tensor; N]> {
    Ok(ops::linear_many(cx, x, layers.map(Linear::projection))?)
}

/// Layers on one input, moved to where products of many rows on a graphics card take them as one: see [`Weight::join`].
///
/// # Errors
/// The device has no room.
pub fn join<const N: usize>(device: &Device, mut layers: [Linear; N]) -> Result<[Linear; N]> {
    let weights = Weight::join(device, layers.iter().map(|layer| layer.weight.clone()).collect())?;
    layers.iter_mut().zip(weights).for_each(|(layer, weight)| layer.weight = weight);
    if let Some(biases) = layers.iter().map(|layer| layer.bias.clone()).collect() {
        let biases = Tensor::join(device, biases)?;
        layers.iter_mut().zip(biases).for_each(|(layer, bias)| layer.bias = Some(bias));
    }
    Ok(layers)
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

    /// `residual` plus the norm of `x`, of one shape.
    ///
    /// # Errors
    /// The shapes differ, or a row is not as long as the weight.
    pub fn forward_add(&self, cx: &Context, residual: Tensor, x: &Tensor) -> Result<Tensor> {
        Ok(ops::rmsnorm_add(cx, residual, x, &self.weight, self.epsilon)?)
    }
}
