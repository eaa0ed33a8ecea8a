//! A language model: weights in packed form, and the pass from ids to logits.
//!
//! ```text
//! x = embedding[ids] * scale
//! for each layer:  x += post(attention(norm(x)));  x += post(feed_forward(norm(x)))
//! logits = head(norm(x))
//! ```
//!
//! One pass takes rows of any number of sequences, each a run of consecutive ids with its own cache: a prompt, one step of
//! decoding, a batch, a verify pass of a speculation are all the same call. A row's logits are the same bits in each.

use ironloom_nn::{Attention, AttentionInput, Embedding, FeedForward, KvCache, Linear, PassRows, RmsNorm, Span};
use ironloom_tensor::{Context, Device, Indices, Path, Tensor, Weight, ops};

use crate::{Config, Error, Experts, Result, passes::Passes};

/// A language model, ready to run on the device it was loaded for.
#[derive(Debug)]
pub struct Model {
    pub(crate) config: Config,
    pub(crate) embedding: Embedding,
    pub(crate) blocks: Vec<Block>,
    pub(crate) output_norm: RmsNorm,
    /// The head; tied models share the embedding's weight.
    pub(crate) head: Linear,
    /// Inverse frequencies `[half]` and the factor on sines and cosines, for each of the configuration's ropes.
    pub(crate) ropes: Vec<(Tensor, f32)>,
    pub(crate) unused: Vec<String>,
    pub(crate) widened_experts: Vec<&'static str>,
    /// Where the weights are.
    pub(crate) device: Device,
    /// Captured passes of few rows.
    pub(crate) passes: Passes,
}

/// One layer.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) attention_norm: RmsNorm,
    pub(crate) attention: Attention,
    pub(crate) attention_post_norm: Option<RmsNorm>,
    pub(crate) feed_forward_norm: RmsNorm,
    pub(crate) feed_forward: BlockFeedForward,
    /// Which of the model's ropes it turns by.
    pub(crate) rope: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum BlockFeedForward {
    /// The block and the norm of its output, where the family has one.
    Dense(Box<FeedForward>, Option<RmsNorm>),
    Routed(Box<Experts>),
}

/// Rows of a prompt that its last layer computes where only the last one's logits are wanted. A row's bits are those it has
/// among all; few enough rows that a card took other kernels would change them.
const LAST_ROWS: usize = 64;

/// Which rows of a pass get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// The last row of each span: what decoding needs.
    Last,
    /// Every row.
    All,
}

impl Model {
    /// The model's shape and options.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Tensors of the checkpoint that the model did not use.
    pub fn unused_tensors(&self) -> &[String] {
        &self.unused
    }

    /// Bytes of the weights as they are held.
    pub fn weight_bytes(&self) -> u64 {
        let mut total = self.embedding.weight.bytes();
        if !self.config.tied_embeddings {
            total += self.head.weight.bytes();
        }
        let linear = |layer: &Linear| layer.weight.bytes();
        let gated = |block: &FeedForward| linear(&block.gate) + linear(&block.up) + linear(&block.down);
        for block in &self.blocks {
            let attention = &block.attention;
            total += linear(&attention.q) + linear(&attention.k) + linear(&attention.v) + linear(&attention.out);
            total += match &block.feed_forward {
                BlockFeedForward::Dense(block, _) => gated(block),
                BlockFeedForward::Routed(experts) => {
                    let shared = experts.shared.as_ref().map_or(0, |(shared, _)| gated(shared));
                    linear(&experts.router) + experts.experts.iter().map(gated).sum::<usize>() + shared
                }
            };
        }
        total as u64
    }

    /// The types of weights that products of few rows read through a slow kernel on the model's device.
    pub fn slow_formats(&self) -> Vec<&'static str> {
        let mut formats: Vec<&str> = Vec::new();
        let mut see = |weight: &Weight| {
            if weight.is_slow() && !formats.contains(&weight.format()) {
                formats.push(weight.format());
            }
        };
        see(&self.head.weight);
        for block in &self.blocks {
            let attention = &block.attention;
            [&attention.q, &attention.k, &attention.v, &attention.out].iter().for_each(|layer| see(&layer.weight));
            if let BlockFeedForward::Dense(block, _) = &block.feed_forward {
                [&block.gate, &block.up, &block.down].iter().for_each(|layer| see(&layer.weight));
            }
        }
        formats
    }

    /// The types of routed experts that are held as bfloat16 although the model was loaded otherwise: on a graphics card their
    /// kernels read tiles, of one type for gate and up and for all experts of a layer.
    pub fn experts_held_as_bf16(&self) -> &[&'static str] {
        &self.widened_experts
    }

    /// The packed form of the layers' weights, such as `Q4_1`; `mixed` where they differ.
    pub fn weight_format(&self) -> &'static str {
        let formats = |block: &Block| {
            let attention = &block.attention;
            [
                attention.q.weight.format(),
                attention.k.weight.format(),
                attention.v.weight.format(),
                attention.out.weight.format(),
            ]
        };
        let mut all = self.blocks.iter().flat_map(formats);
        let first = all.next().unwrap_or("none");
        if all.all(|format| format == first) { first } else { "mixed" }
    }

    /// Where the model's weights are, and its passes run.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// An empty cache for one sequence.
    pub fn new_cache(&self) -> KvCache {
        self.config.new_cache(&self.device)
    }

    /// Runs `ids`, whose rows belong to `spans` one after the other, and appends them to the spans' caches. The logits are
    /// `[spans, vocabulary]` or `[ids, vocabulary]`, by `rows`.
    ///
    /// # Errors
    /// The context is of another device than the model's, the spans' rows are not the ids, a span is empty, a sequence would
    /// outgrow the model's context, an id is outside the vocabulary, a cache is another model's. Then the caches are as they
    /// were.
    pub fn forward(&self, cx: &Context, ids: &[u32], spans: &mut [Span<'_>], rows: LogitRows) -> Result<Tensor> {
        if !self.device.is(cx.device) {
            return Err(Error::OtherDevice { model: self.device.describe(), found: cx.device.describe() });
        }
        let count = |what, expected, found| {
            if expected == found { Ok(()) } else { Err(Error::Count { what, expected, found }) }
        };
        count("the number of the spans' rows", ids.len(), spans.iter().map(|span| span.rows).sum())?;
        let mut positions = Vec::with_capacity(ids.len());
        let mut last_rows = Vec::with_capacity(spans.len());
        let mut lengths = Vec::with_capacity(spans.len());
        for span in spans.iter() {
            let start = span.cache.len();
            if span.rows == 0 {
                return Err(Error::Count { what: "a span's number of rows", expected: 1, found: 0 });
            }
            count("the number of the cache's layers", self.blocks.len(), span.cache.layers().len())?;
            if start + span.rows > self.config.context_length {
                return Err(Error::ContextFull { limit: self.config.context_length, found: start + span.rows });
            }
            positions.extend((start..start + span.rows).map(|position| position as u32));
            last_rows.push(positions.len() as u32 - 1);
            lengths.push(start);
        }
        let logits = match cx.device {
            Device::Cpu(_) => self.whole_pass(cx, ids, &positions, spans, &last_rows, rows),
            _ => self.pass_in_parts(cx, ids, spans, rows),
        };
        if logits.is_err() {
            // Layers before the failure have appended rows: take them back.
            spans.iter_mut().zip(lengths).for_each(|(span, length)| span.cache.truncate(length));
        }
        logits
    }

    /// All rows of a pass through every layer together; the logits of `last_rows` or of all.
    pub(crate) fn whole_pass(
        &self,
        cx: &Context,
        ids: &[u32],
        positions: &[u32],
        spans: &mut [Span<'_>],
        last_rows: &[u32],
        rows: LogitRows,
    ) -> Result<Tensor> {
        let (ids, positions) = (Indices::new(cx.device, ids)?, Indices::new(cx.device, positions)?);
        let mut pass = match spans {
            [span] if rows == LogitRows::Last && span.rows > LAST_ROWS => PassRows::Last { span, rows: LAST_ROWS },
            spans => PassRows::Spans(spans),
        };
        let (hidden, normed) = self.hidden(cx, &ids, &positions, &mut pass)?;
        if rows == LogitRows::All || last_rows.len() == ids.len() {
            return Ok(self.head.forward(cx, &normed)?);
        }
        // A row's logits must not depend on how many rows its prompt had.
        let cx = cx.with_path(Path::Few);
        let left_out = (ids.len() - hidden.rows()) as u32;
        let last_rows: Vec<u32> = last_rows.iter().map(|row| row - left_out).collect();
        let last = ops::gather_rows(&cx, &hidden, &last_rows)?;
        Ok(self.head.forward(&cx, &self.output_norm.forward(&cx, &last)?)?)
    }

    /// Cosines and sines of these positions, for each of the configuration's ropes.
    pub(crate) fn rope_phases(&self, cx: &Context, positions: &Indices) -> Result<Vec<Tensor>> {
        let phases = |(frequencies, factor): &(Tensor, f32)| ops::rope_phases(cx, frequencies, *factor, positions);
        Ok(self.ropes.iter().map(phases).collect::<ironloom_tensor::Result<_>>()?)
    }

    /// The rows after the last layer, and the output norm of them: of [`PassRows::Last`] those that come out, which only the
    /// last layer distinguishes.
    pub(crate) fn hidden(
        &self,
        cx: &Context,
        ids: &Indices,
        positions: &Indices,
        rows: &mut PassRows<'_, '_>,
    ) -> Result<(Tensor, Tensor)> {
        let phases = self.rope_phases(cx, positions)?;
        let mut x = self.embedding.forward(cx, ids)?;
        let norm_before =
            |layer: usize| self.blocks.get(layer).map_or(&self.output_norm, |block: &Block| &block.attention_norm);
        let mut normed = norm_before(0).forward(cx, &x)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            let rows = match rows {
                PassRows::Last { span, rows } if layer + 1 == self.blocks.len() => {
                    x = x.rows_view(x.rows().saturating_sub(*rows)..x.rows())?;
                    PassRows::Last { span, rows: *rows }
                }
                PassRows::Last { span, .. } => PassRows::Spans(std::slice::from_mut(span)),
                PassRows::Spans(spans) => PassRows::Spans(spans),
                PassRows::Table(table) => PassRows::Table(table),
            };
            let input = AttentionInput { phases: &phases[block.rope], rows, layer };
            (x, normed) = block.forward(cx, x, &normed, input, norm_before(layer + 1))?;
        }
        Ok((x, normed))
    }
}

impl Block {
    /// The rows after the block, and `next`'s norm of them, from the rows before it (those that come out) and the norm of all.
    fn forward(
        &self,
        cx: &Context,
        x: Tensor,
        normed: &Tensor,
        input: AttentionInput<'_, '_>,
        next: &RmsNorm,
    ) -> Result<(Tensor, Tensor)> {
        let x = match &self.attention_post_norm {
            None => self.attention.forward_add(cx, x, normed, input)?,
            Some(norm) => norm.forward_add(cx, x, &self.attention.forward(cx, normed, input)?)?,
        };
        let normed = self.feed_forward_norm.forward(cx, &x)?;
        let x = match &self.feed_forward {
            BlockFeedForward::Dense(block, None) => block.forward_add(cx, x, &normed)?,
            BlockFeedForward::Dense(block, Some(norm)) => norm.forward_add(cx, x, &block.forward(cx, &normed)?)?,
            BlockFeedForward::Routed(experts) => experts.forward_add(cx, x, &normed)?,
        };
        let normed = next.forward(cx, &x)?;
        Ok((x, normed))
    }
}

#[cfg(test)]
mod tests {
    use ironloom_quant::WeightFormat;

    use super::*;
    use crate::DenseShape;

    const SHAPE: DenseShape =
        DenseShape { vocab_size: 300, width: 128, layers: 3, heads: 2, kv_heads: 1, head_width: 64, inner_width: 200 };

    #[test]
    fn a_context_of_another_device_is_refused_and_other_threads_are_none() {
        let model = Model::random(&Config::dense(SHAPE), &Device::cpu(1), WeightFormat::Bf16, 7).unwrap();
        let logits = |device: &Device| {
            let mut cache = model.new_cache();
            let mut spans = [Span { cache: &mut cache, rows: 2 }];
            model
                .forward(&Context::inference(device), &[3, 4], &mut spans, LogitRows::Last)?
                .into_f32()
                .map_err(Error::from)
        };
        assert_eq!(logits(&Device::cpu(1)).unwrap(), logits(&Device::cpu(2)).unwrap());
        let Ok(card) = Device::cuda(0, 2).inspect_err(|error| println!("skipped: {error}")) else { return };
        assert!(matches!(logits(&card), Err(Error::OtherDevice { .. })));
    }

    #[test]
    fn the_last_rows_of_a_prompt_are_those_of_all() {
        let card = Device::cuda(0, 2).inspect_err(|error| println!("no card: {error}"));
        for device in [Ok(Device::cpu(2)), card].into_iter().flatten() {
            let model = Model::random(&Config::dense(SHAPE), &device, WeightFormat::Bf16, 7).unwrap();
            let (cx, limit) = (Context::inference(&device), 200u32);
            let ids: Vec<u32> = (0..limit).map(|row| row * 7919 % 300).collect();
            let ids = Indices::new(&device, &ids).unwrap();
            let positions = Indices::new(&device, &(0..limit).collect::<Vec<_>>()).unwrap();
            let mut caches = [model.new_cache(), model.new_cache()];
            let [all, mut last] = caches.each_mut().map(|cache| Span { cache, rows: limit as usize });
            let all = model.hidden(&cx, &ids, &positions, &mut PassRows::Spans(&mut [all])).unwrap();
            let last = model.hidden(&cx, &ids, &positions, &mut PassRows::Last { span: &mut last, rows: 64 }).unwrap();
            for (all, last) in [(all.0, last.0), (all.1, last.1)] {
                assert_eq!(last.rows(), 64);
                let all = all.rows_view(200 - 64..200).unwrap().into_f32().unwrap();
                assert!(all.iter().any(|value| *value != 0.0));
                assert_eq!(last.into_f32().unwrap(), all, "{}", device.describe());
            }
        }
    }
}
