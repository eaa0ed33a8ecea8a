//! The attention block: projections, optional q/k norms, rotary embedding, kept keys and values, output projection.

use ironloom_tensor::{
    Context, Tensor,
    ops::{
        self, AttentionOptions, AttentionSpan, DocumentAttentionOptions, Documents, KvSpan, KvTable, Mask, RopeAppend,
        RotatedAttention,
    },
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

/// Which sequences the rows of a pass belong to.
#[derive(Debug)]
pub enum PassRows<'a, 'b> {
    /// Consecutive rows of these, one after the other.
    Spans(&'a mut [Span<'b>]),
    /// Consecutive rows of one sequence, of which the block gives the last `rows` only: all others' keys and values are kept,
    /// and that is all that is asked of them.
    Last {
        /// The sequence.
        span: &'a mut Span<'b>,
        /// How many rows come out.
        rows: usize,
    },
    /// Those of a table on a graphics card, whose caches have the room.
    Table(&'a KvTable),
}

/// What an attention block reads besides its weights.
#[derive(Debug)]
pub struct AttentionInput<'a, 'b> {
    /// Sines and cosines of the rows' positions, from [`ops::rope_phases`].
    pub phases: &'a Tensor,
    /// The rows' sequences.
    pub rows: PassRows<'a, 'b>,
    /// Which of the caches' layers is this block's.
    pub layer: usize,
}

/// The documents that the rows of a training pass belong to, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDocuments<'a> {
    /// Sines and cosines of the rows' positions, which begin at 0 in each document.
    pub phases: &'a Tensor,
    /// The documents.
    pub documents: Documents<'a>,
}

impl Attention {
    /// The attention of `x [n, width]` before its output projection, `[n, heads * head width]`, or of the rows that come out;
    /// appends the rows' keys and values to their caches.
    fn attend(&self, cx: &Context, x: &Tensor, input: AttentionInput<'_, '_>) -> Result<Tensor> {
        let AttentionInput { phases, rows, layer } = input;
        let projected = linear_many(cx, x, [&self.q, &self.k, &self.v])?;
        let norms = self.qk_norm.as_ref().map(|[q, k]| ([&q.weight, &k.weight], q.epsilon));
        let options = RopeAppend { head_width: self.head_width, norms, phases };
        Ok(match rows {
            PassRows::Table(table) => ops::attention_rows(cx, projected, &options, table, layer, &self.options)?,
            PassRows::Spans(spans) => {
                let mut buffers: Vec<KvSpan<'_>> = spans
                    .iter_mut()
                    .map(|span| KvSpan { buffer: span.cache.layer_mut(layer), rows: span.rows })
                    .collect();
                let q = ops::rope_append(cx, projected, &options, &mut buffers)?;
                let spans: Vec<AttentionSpan<'_>> =
                    buffers.iter().map(|span| AttentionSpan { history: span.buffer, rows: span.rows }).collect();
                ops::attention(cx, &q, &spans, &self.options)?
            }
            PassRows::Last { span, rows } => {
                let buffer = span.cache.layer_mut(layer);
                let appended = &mut [KvSpan { buffer: &mut *buffer, rows: span.rows }];
                let q = ops::rope_append(cx, projected, &options, appended)?;
                let q = q.rows_view(q.rows().saturating_sub(rows)..q.rows())?;
                ops::attention(cx, &q, &[AttentionSpan { history: buffer, rows: q.rows() }], &self.options)?
            }
        })
    }

    /// `[n, width]` to `[n, heads * head width]`, each document within itself and without a cache: the form that has gradients.
    fn attend_documents(&self, cx: &Context, x: &Tensor, documents: AttentionDocuments<'_>) -> Result<Tensor> {
        let projected = linear_many(cx, x, [&self.q, &self.k, &self.v])?;
        let options = DocumentAttentionOptions {
            heads: self.options.heads,
            kv_heads: projected[1].width() / self.head_width.max(1),
            scale: self.options.scale,
            mask: self.document_mask(),
        };
        let rotation = RotatedAttention {
            head_width: self.head_width,
            norms: self.qk_norm.as_ref().map(|[q, k]| ([&q.weight, &k.weight], q.epsilon)),
            phases: documents.phases,
            documents: documents.documents,
            options: &options,
        };
        Ok(ops::rotated_attention(cx, projected, &rotation)?)
    }

    /// Which rows of its document a row sees.
    pub fn document_mask(&self) -> Mask {
        self.options.window.map_or(Mask::Causal, Mask::Window)
    }

    /// `[n, width]` to `[n, width]`, each document within itself and without a cache.
    ///
    /// # Errors
    /// A shape does not fit.
    pub fn forward_documents(&self, cx: &Context, x: &Tensor, documents: AttentionDocuments<'_>) -> Result<Tensor> {
        self.out.forward(cx, &self.attend_documents(cx, x, documents)?)
    }

    /// `residual` `[n, width]` plus what [`Attention::forward_documents`] gives.
    ///
    /// # Errors
    /// A shape does not fit.
    pub fn forward_documents_add(
        &self,
        cx: &Context,
        residual: Tensor,
        x: &Tensor,
        documents: AttentionDocuments<'_>,
    ) -> Result<Tensor> {
        self.out.forward_add(cx, residual, &self.attend_documents(cx, x, documents)?)
    }

    /// `[n, width]` to `[n, width]`, or to the rows that come out; appends the rows' keys and values to their caches.
    ///
    /// # Errors
    /// A shape does not fit.
    pub fn forward(&self, cx: &Context, x: &Tensor, input: AttentionInput<'_, '_>) -> Result<Tensor> {
        self.out.forward(cx, &self.attend(cx, x, input)?)
    }

    /// `residual` plus the block's output; `residual` has the rows that come out.
    ///
    /// # Errors
    /// A shape does not fit.
    pub fn forward_add(
        &self,
        cx: &Context,
        residual: Tensor,
        x: &Tensor,
        input: AttentionInput<'_, '_>,
    ) -> Result<Tensor> {
        self.out.forward_add(cx, residual, &self.attend(cx, x, input)?)
    }
}
