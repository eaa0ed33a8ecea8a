//! What training takes of a graphics card.
//!
//! Of a layer, with rows `n` of `w` elements, `q` and `kv` columns of queries and of keys, and a feed-forward block of inner
//! width `i`, stay until the way back:
//!
//! | | elements | bytes each |
//! |---|---|---|
//! | the rows before both norms, rounded | 2 n w | 2 |
//! | q, k and v | n (q + 2 kv) | 2 |
//! | what the attention gives, and its log-sum-exps | n q, n heads | 2, 4 |
//! | gate and up | 2 n i | 2 |
//!
//! The rows after norms, and products of gate and up, are made again on the way back. With checkpointing the rows before the
//! first norm stay, as they are, and all of this is there for one layer at a time. What a layer takes by the way and the loss's
//! logits use the same memory; between buffers of different sizes some of it lies free.

pub(super) mod adapters;

use std::collections::BTreeSet;

use ironloom_core::MemoryPlan;
use ironloom_kernels as kernels;
use ironloom_lm::{Config, FeedForwardConfig};
use ironloom_tensor::ops::logits_rows;

use super::{FLOAT, RunSize, moments};
use crate::{TrainerOptions, card::ROWS, optimizer::OptimizerOptions};

/// A number in bfloat16.
const HALF: usize = 2;
const WORD: usize = 4;
/// The most that cuBLASLt asks for.
const PRODUCTS: u64 = 32 << 20;

pub(super) fn memory(config: &Config, options: &TrainerOptions, size: RunSize) -> MemoryPlan {
    let parameters = config.parameters();
    let tables = if config.tied_embeddings { 1 } else { 2 } * (config.vocab_size * config.width) as u64;
    let mut plan = MemoryPlan::new()
        .with("weights", FLOAT * parameters)
        .with("weights in bfloat16", HALF as u64 * parameters)
        .with("gradients", FLOAT * parameters)
        .with("moments", moments(parameters, tables, options));
    if options.average_decay.is_some() {
        // Weights and average are exchanged through a third piece of memory.
        plan = plan.with("averaged weights", 2 * FLOAT * parameters);
    }
    let rows = size.tokens.next_multiple_of(ROWS);
    let pass = Pass { config, rows };
    let activations = pass.activations(options.checkpointing, size.batches, 0);
    plan = plan.with(format!("activations of {} tokens", size.tokens), activations);
    let matrices = config.linear_layers().into_iter().map(|(_, sides)| sides);
    plan.with("workspaces", PRODUCTS + pass.workspace() + optimizer_workspace(matrices, &options.optimizer))
}

/// A pass of so many rows.
struct Pass<'a> {
    config: &'a Config,
    rows: usize,
}

/// The sizes of a part of a pass, in bytes.
#[derive(Default)]
struct Part {
    /// What stays until the way back.
    kept: u64,
    /// What is needed by the way, there and back.
    passing: u64,
    /// What the way back needs beyond that.
    back: u64,
}

impl Pass<'_> {
    /// All of a pass and of its loss, with `more` by the way.
    fn activations(&self, checkpointing: bool, batches: usize, more: u64) -> u64 {
        let config = self.config;
        let layers: Vec<Part> = config.layers.iter().map(|layer| self.layer(layer.feed_forward)).collect();
        let largest = |of: fn(&Part) -> u64| layers.iter().map(of).max().unwrap_or(0);
        let kept = match checkpointing {
            // A block that runs again has rows of its own beside their gradient.
            true => (layers.len() as u64 + 1) * self.buffer(WORD, config.width) + largest(|layer| layer.kept),
            false => layers.iter().map(|layer| layer.kept).sum(),
        };
        // The rows before the last norm, rounded; of each batch its ids, targets, positions, and who sees whom.
        let ends = self.buffer(HALF, config.width);
        let mut masks: Vec<_> = config.layers.iter().map(|layer| layer.window).collect();
        masks.sort_unstable();
        masks.dedup();
        let batch = (WORD * self.rows * (3 + 4 * masks.len())) as u64;
        let phases = config.ropes.len() as u64 * self.buffer(WORD, config.head_width);
        let by_the_way = largest(|layer| layer.passing) + largest(|layer| layer.back) + more;
        let in_use = kept + by_the_way.max(self.logits()) + ends + phases;
        // 1 to 6% of what models were seen to take lay free between what was in use. What a batch brings lies outside of that.
        in_use + in_use / 10 + batches as u64 * batch
    }

    /// Those of some rows of a pass, and of the fewer that are left at its end.
    fn logits(&self) -> u64 {
        let row = HALF * self.config.vocab_size.next_multiple_of(8);
        let piece = logits_rows(self.rows, self.config.vocab_size);
        let last = self.rows % piece;
        bytes(piece, row) + bytes(last, row)
    }

    /// For the embedding's gradient, places and partial sums; for those of norms' weights, partial sums.
    fn workspace(&self) -> u64 {
        let (rows, width) = (self.rows, self.config.width);
        let workspaces =
            [kernels::embedding_backward_workspace(rows, width), kernels::rmsnorm_backward_workspace(rows, 1, width)];
        workspaces
            .into_iter()
            .map(|workspace| workspace.map_or(u64::MAX, |size| bytes(1, size)))
            .fold(0, u64::saturating_add)
    }

    fn layer(&self, feed_forward: FeedForwardConfig) -> Part {
        let (attention, block) = (self.attention(), self.feed_forward(feed_forward));
        let Config { width, post_norms, .. } = *self.config;
        // The residual stream before a sum and after it, and the rows after a norm: on the way back its gradient and these rows
        // again, and besides the rounded gradient, that before it or that of the rows after the norm.
        let passing = 2 * self.buffer(WORD, width) + self.buffer(HALF, width);
        let mut back = 2 * self.buffer(HALF, width);
        let mut kept = 2 * self.buffer(HALF, width);
        if post_norms {
            kept += 2 * self.buffer(WORD, width);
            back += self.buffer(WORD, width);
        }
        Part {
            kept: kept + attention.kept + block.kept,
            passing: passing + block.passing,
            back: back + attention.back + block.back,
        }
    }

    fn attention(&self) -> Part {
        let Config { heads, kv_heads, head_width, qk_norm, .. } = *self.config;
        let (q, kv) = (heads * head_width, kv_heads * head_width);
        let mut both = self.buffer(HALF, q + 2 * kv) + self.buffer(HALF, q) + self.buffer(WORD, heads);
        if qk_norm {
            both += self.buffer(HALF, q) + self.buffer(HALF, kv);
        }
        Part { kept: both, passing: 0, back: both }
    }

    fn feed_forward(&self, feed_forward: FeedForwardConfig) -> Part {
        let halves = |inner: usize| self.buffer(HALF, 2 * inner);
        let product = |inner: usize| self.buffer(HALF, inner);
        let (experts, width) = match (feed_forward, &self.config.experts) {
            (FeedForwardConfig::Dense { width }, _) => {
                // The product again, and its gradient; those of gate and up take the place of both.
                return Part { kept: halves(width), passing: product(width), back: product(width) };
            }
            (FeedForwardConfig::Routed, None) => return Part::default(),
            (FeedForwardConfig::Routed, Some(experts)) => (experts, self.config.width),
        };
        let (inner, places) = (experts.width, self.rows * experts.per_row);
        let by_place = |width: usize| bytes(places, HALF * width);
        let [shared_halves, shared_product] =
            experts.shared.map_or([0, 0], |shared| [halves(shared.width), product(shared.width)]);
        let gated = experts.shared.is_some_and(|shared| shared.gated);
        // Experts, weights, places and rows of each place; the router's logits; gate and up.
        let kept = 4 * bytes(places, WORD) + self.buffer(WORD, experts.count) + by_place(2 * inner);
        // Their product, what experts give, and the rows with what the shared expert gave.
        let passing = by_place(inner) + by_place(width) + self.buffer(WORD, width) + shared_product;
        // Gradients of what experts give, of their product, which takes its place, as those of gate and up do theirs; their
        // inputs picked anew; the gradients of weights and of the router's logits.
        let routed = 2 * by_place(width) + by_place(inner) + bytes(places, WORD);
        let logits = self.buffer(HALF, experts.count.next_multiple_of(8));
        Part {
            kept: kept + shared_halves + if gated { self.buffer(WORD, width) } else { 0 },
            passing,
            back: routed + logits + shared_product,
        }
    }

    /// A buffer of `width` numbers a row.
    fn buffer(&self, number: usize, width: usize) -> u64 {
        bytes(self.rows, number * width)
    }
}

/// What `rows` rows of so many bytes take.
fn bytes(rows: usize, row: usize) -> u64 {
    match rows.saturating_mul(row) {
        0 => 0,
        bytes => kernels::pass_bytes(bytes).map_or(u64::MAX, |bytes| bytes as u64),
    }
}

/// Muon works on one matrix at a time; matrices of one size share their memory.
fn optimizer_workspace(matrices: impl Iterator<Item = [usize; 2]>, optimizer: &OptimizerOptions) -> u64 {
    if !matches!(optimizer, OptimizerOptions::Muon(_)) {
        return 0;
    }
    let workspace =
        |[rows, cols]: [usize; 2]| kernels::muon_workspace(rows, cols).map_or(u64::MAX, |size| bytes(1, size));
    let sizes: BTreeSet<u64> = matrices.map(workspace).collect();
    sizes.into_iter().fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(config: &Config, options: &TrainerOptions, tokens: usize) -> MemoryPlan {
        memory(config, options, RunSize { tokens, batches: 1 })
    }

    fn part(plan: &MemoryPlan, name: &str) -> u64 {
        plan.parts().iter().find(|(part, _)| part.starts_with(name)).map_or(0, |(_, bytes)| *bytes)
    }

    #[test]
    fn a_layer_keeps_what_its_operations_keep() {
        let config = Config { vocab_size: 32_768, ..Config::dense_102m() };
        // Sizes that the pool does not round.
        let pass = Pass { config: &config, rows: 4096 };
        let layer = pass.layer(FeedForwardConfig::Dense { width: 1408 });
        let elements = |bytes: u64| bytes / 4096;
        // 2 rows of 768 in 2 bytes; 768 + 2 * 256 columns and 768 of attention in 2, 12 heads in 4; 2 * 1408 in 2.
        assert_eq!(elements(layer.kept), 2 * 768 * 2 + 2 * (1280 + 768) + 4 * 12 + 2 * 2 * 1408);
        // The residual stream twice in 4 bytes, a norm's rows and a product in 2; beyond that, gradients.
        assert_eq!(elements(layer.passing), 2 * 768 * 4 + 2 * 768 + 2 * 1408);
        assert_eq!(elements(layer.back), 2 * 2 * 768 + 2 * (1280 + 768) + 4 * 12 + 2 * 1408);
        assert_eq!(pass.logits(), 2048 * 2 * 32_768);
    }

    #[test]
    fn the_parts_are_those_of_the_options() {
        let config = Config::moe_55m();
        let options = TrainerOptions::default();
        let whole = plan(&config, &options, 4096);
        assert_eq!(part(&whole, "weights"), 4 * 55_181_824);
        assert_eq!(part(&whole, "weights in bfloat16"), 2 * 55_181_824);
        assert_eq!(part(&whole, "moments"), 8 * 55_181_824);
        let muon = TrainerOptions { optimizer: OptimizerOptions::Muon(Default::default()), ..options.clone() };
        let muon = plan(&config, &muon, 4096);
        assert!(part(&muon, "moments") < part(&whole, "moments"));
        assert!(part(&muon, "workspaces") > part(&whole, "workspaces"));
        let small = TrainerOptions { checkpointing: true, average_decay: Some(0.99), ..options.clone() };
        let small = plan(&config, &small, 4096);
        assert!(part(&small, "activations") * 4 < part(&whole, "activations") * 3);
        // The loss's logits lie where a layer's gradients come after them: of 4,096 tokens they are the larger.
        let activations = |rows, more| Pass { config: &config, rows }.activations(true, 1, more);
        assert_eq!(activations(4096, 1 << 20), activations(4096, 0));
        assert!(activations(8192, 1 << 20) > activations(8192, 0));
        assert_eq!(part(&small, "averaged"), 8 * 55_181_824);
        // A step of two batches needs room for the second one's ids, and no more.
        let two = memory(&config, &options, RunSize { tokens: 4096, batches: 2 });
        assert_eq!(part(&two, "activations") - part(&whole, "activations"), 4096 * 4 * 7);
    }

    #[test]
    fn logits_are_made_in_pieces() {
        let config = Config { vocab_size: 262_144, ..Config::dense_102m() };
        let logits = |rows| Pass { config: &config, rows }.logits() / (2 * 262_144);
        assert_eq!(logits(128), 128);
        assert_eq!(logits(4096), 2048);
        assert_eq!(logits(4096 + 128), 2048 + 128);
        // 2 GiB at most.
        assert_eq!(logits(32_768), 4096);
    }
}
