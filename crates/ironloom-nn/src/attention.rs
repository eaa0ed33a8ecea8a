//! The attention block: projections, optional q/k norms, rotary embedding, kept keys and values, output projection.

use ironloom_tensor::{
    Context, Tensor,
    ops::{self, AttentionOptions, AttentionSpan},
};

use crate::{Linear, Result, RmsNorm, Span, linear_many};

/// Attention with grouped queries over a cache.
#[derive(Clone, Debug)]
pub struct Attention {
    /// `[heads * head width, width]`.
    pub q: Linear,
    /// `[kv heads * head width, width]`.
    pub k: Linear,
    /// `[kv heads * head width, width]`.
    pub v: Linear,
    /// `[width, heads * head width]`.
    pub out: Linear,
    /// The norm of every query head and of every key head, where the family has them.
    pub qk_norm: Option<[RmsNorm; 2]>,
    /// Elements of a head.
    pub head_width: usize,
    /// Heads, scale and window.
    pub options: AttentionOptions,
}

/// What an attention block reads besides its weights.
#[derive(Debug)]
pub struct AttentionInput<'a, 'b> {
    /// Sines and cosines of the rows' positions, from [`ops::rope_phases`].
    pub phases: &'a Tensor,
    /// The sequences, in the rows' order.
    pub spans: &'a mut [Span<'b>],
    /// Which of the caches' layers is this block's.
    pub layer: usize,
}

impl Attention {
    /// `[n, width]` to `[n, width]`; appends the rows' keys and values to the spans' caches.
    ///
    /// # Errors
    /// A shape does not fit.
    pub fn forward(&self, cx: &Context, x: &Tensor, input: AttentionInput<'_, '_>) -> Result<Tensor> {
        let AttentionInput { phases, spans, layer } = input;
        let [mut q, mut k, v] = linear_many(cx, x, [&self.q, &self.k, &self.v])?;
        if let Some([q_norm, k_norm]) = &self.qk_norm {
            q = q_norm.forward(cx, &q)?;
            k = k_norm.forward(cx, &k)?;
        }
        q = ops::rope(cx, q, self.head_width, phases)?;
        k = ops::rope(cx, k, self.head_width, phases)?;
        let mut first = 0;
        for span in spans.iter_mut() {
            let rows = first..first + span.rows;
            span.cache.layer_mut(layer).append(cx, &k.rows_view(rows.clone())?, &v.rows_view(rows)?)?;
            first += span.rows;
        }
        let spans: Vec<AttentionSpan<'_>> =
            spans.iter().map(|span| AttentionSpan { history: span.cache.layer(layer), rows: span.rows }).collect();
        self.out.forward(cx, &ops::attention(cx, &q, &spans, &self.options)?)
    }
}
