//! What training adapters beside frozen weights takes of a graphics card.
//!
//! Adapters take what weights that are learnt take: values, rounded ones, gradients, moments. A pass keeps what one over all of
//! the model keeps, and the `n rank` elements between an adapter's two matrices. Frozen weights of any form but bfloat16 are
//! unpacked to it for the time of a product: of those that are there at once memory is taken for the largest of each size.

use std::collections::BTreeMap;

use ironloom_core::MemoryPlan;
use ironloom_kernels::WeightLayout;
use ironloom_lm::{Config, FeedForwardConfig};
use ironloom_tensor::ARENA_ALIGNMENT;

use super::{HALF, PRODUCTS, Pass, ROWS, WORD, bytes, optimizer_workspace};
use crate::{
    TrainerOptions,
    lora::LoraOptions,
    plan::{Adapted, FLOAT, FrozenWeights, RunSize, moments},
};

/// The memory of adapters on the layers `adapted`.
pub(in crate::plan) fn memory(
    config: &Config,
    frozen: FrozenWeights,
    lora: &LoraOptions,
    adapted: &[Adapted],
    options: &TrainerOptions,
    size: RunSize,
) -> MemoryPlan {
    let matrices = adapted.iter().flat_map(|(_, [outputs, inputs])| [[lora.rank, *inputs], [*outputs, lora.rank]]);
    let elements = |[rows, cols]: [usize; 2]| rows.saturating_mul(cols).next_multiple_of(ARENA_ALIGNMENT) as u64;
    let parameters = matrices.clone().map(elements).fold(0, u64::saturating_add);
    let mut plan = MemoryPlan::new()
        .with("frozen weights", frozen.bytes)
        .with("adapters", FLOAT * parameters)
        .with("adapters in bfloat16", HALF as u64 * parameters)
        .with("gradients", FLOAT * parameters)
        .with("moments", moments(parameters, 0, options));
    if options.average_decay.is_some() {
        plan = plan.with("averaged weights", 2 * FLOAT * parameters);
    }
    let pass = Pass { config, rows: size.tokens.next_multiple_of(ROWS) };
    let adapters = pass.of_adapters(lora, adapted, options.checkpointing);
    let activations = pass.activations(options.checkpointing, size.batches, adapters);
    plan = plan.with(format!("activations of {} tokens", size.tokens), activations);
    if frozen.unpacked {
        plan = plan.with("weights unpacked for products", unpacked(config));
    }
    plan.with("workspaces", PRODUCTS + optimizer_workspace(matrices, &options.optimizer))
}

impl Pass<'_> {
    /// What adapters add to a pass.
    fn of_adapters(&self, lora: &LoraOptions, adapted: &[Adapted], checkpointing: bool) -> u64 {
        let (routed, plain): (Vec<&Adapted>, Vec<&Adapted>) =
            adapted.iter().partition(|(layer, _)| layer.contains(".experts."));
        // Routed experts see a row once for each of them that it goes to.
        let (count, times) = match &self.config.experts {
            Some(experts) if !routed.is_empty() => (experts.count, experts.per_row),
            _ => (1, 1),
        };
        let passes = plain.len() + routed.len().div_ceil(count) * times;
        let at_once = if checkpointing { passes.div_ceil(self.config.layers.len().max(1)) } else { passes };
        let between =
            (at_once + times) as u64 * self.buffer(HALF, lora.rank) + times as u64 * self.buffer(WORD, lora.rank);
        let mut widths: Vec<usize> = plain.iter().map(|(_, [_, inputs])| *inputs).collect();
        widths.sort_unstable();
        widths.dedup();
        let drops = lora.dropout > 0.0;
        // The gradients of up to three layers on one input, their sum, and that rounded.
        let back = |&width: &usize| (if drops { 6 } else { 4 }) * self.buffer(HALF, width) + self.buffer(WORD, width);
        // The experts' rows; of those that elements are left out of also the rows without, their gradients with and without, and
        // the sum.
        let widest = routed.iter().map(|(_, [_, inputs])| *inputs).max().unwrap_or(0);
        let by_place = match drops {
            true => 4 * self.buffer(HALF, widest) + self.buffer(WORD, widest),
            false => self.buffer(HALF, widest),
        };
        between + widths.iter().map(back).sum::<u64>() + times as u64 * by_place
    }
}

/// Weights as bfloat16, those of each product.
fn unpacked(config: &Config) -> u64 {
    let (width, q, kv) = (config.width, config.heads * config.head_width, config.kv_heads * config.head_width);
    let matrix = |rows: usize, cols: usize| bytes(rows, HALF * WeightLayout::padded_cols(cols));
    let mut products = vec![
        vec![matrix(config.vocab_size, width)],
        vec![matrix(q, width), matrix(kv, width), matrix(kv, width)],
        vec![matrix(width, q)],
    ];
    let mut gated = |inner: usize| products.extend([vec![matrix(inner, width); 2], vec![matrix(width, inner)]]);
    for layer in &config.layers {
        match (layer.feed_forward, &config.experts) {
            (FeedForwardConfig::Dense { width }, _) => gated(width),
            (FeedForwardConfig::Routed, None) => {}
            (FeedForwardConfig::Routed, Some(experts)) => {
                if let Some(shared) = experts.shared {
                    gated(shared.width);
                }
            }
        }
    }
    if let Some(experts) = &config.experts {
        let all = |rows: usize, cols: usize| vec![matrix(experts.count.saturating_mul(rows), cols)];
        products.extend([all(experts.width, width), all(width, experts.width), all(1, width)]);
    }
    let mut held: BTreeMap<u64, u64> = BTreeMap::new();
    for product in products {
        for &size in &product {
            let count = product.iter().filter(|&&other| other == size).count() as u64;
            let most = held.entry(size).or_default();
            *most = count.max(*most);
        }
    }
    held.into_iter().map(|(size, count)| size * count).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::adapted_layers;

    #[test]
    fn frozen_weights_take_no_gradients_and_what_is_packed_is_unpacked() {
        let config = Config::dense_102m();
        let lora = LoraOptions { targets: vec!["q_proj".into(), "v_proj".into()], ..LoraOptions::default() };
        let adapted = adapted_layers(&config, &lora).unwrap();
        assert_eq!(adapted.len(), 2 * config.layers.len());
        let plan = |unpacked: bool, dropout: f64, options: &TrainerOptions| {
            let lora = LoraOptions { dropout, ..lora.clone() };
            let size = RunSize { tokens: 8192, batches: 1 };
            memory(&config, FrozenWeights { bytes: 1000, unpacked }, &lora, &adapted, options, size)
        };
        let options = TrainerOptions::default();
        let whole = plan(true, 0.0, &options);
        let part = |plan: &MemoryPlan, name: &str| {
            plan.parts().iter().find(|(part, _)| part.starts_with(name)).map_or(0, |(_, bytes)| *bytes)
        };
        let elements: u64 = adapted.iter().map(|(_, [outputs, inputs])| 16 * (outputs + inputs) as u64).sum();
        assert_eq!(part(&whole, "frozen"), 1000);
        assert_eq!((part(&whole, "gradients"), part(&whole, "moments")), (4 * elements, 8 * elements));
        assert_eq!(part(&whole, "adapters in"), 2 * elements);
        // The head, and of a block's products the largest of each size: out is as large as q, down as gate, and gate and up are two.
        let (w, i) = (config.width as u64, 1408);
        assert!(part(&whole, "weights unpacked") > 2 * w * (config.vocab_size as u64 + w + 2 * i));
        assert_eq!(part(&plan(false, 0.0, &options), "weights unpacked"), 0);
        let more = plan(true, 0.1, &options);
        assert!(part(&more, "activations") > part(&whole, "activations"));
        let less = plan(true, 0.0, &TrainerOptions { checkpointing: true, ..options.clone() });
        assert!(part(&less, "activations") * 2 < part(&whole, "activations"));
    }
}
