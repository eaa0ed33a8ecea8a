//! What passes take of a graphics card beside weights and cache.
//!
//! A chunk of a prompt takes its rows' activations, weights unpacked to bfloat16 for its products, and the workspace of
//! cuBLASLt. A captured pass, of which there is one for each power of two of rows up to [`FEW_ROWS`], and a captured step have
//! memory of their own. Sizes are counted as if memory served the next buffer of its own size only, which is more than what is
//! there at once.

use std::collections::BTreeMap;

use ironloom_kernels::{self as kernels, FewShape, WeightLayout, pass_bytes};
use ironloom_quant::{DeviceFormat, TileFormat};
use ironloom_tensor::ops::attention_takes_many_rows;

use super::weights::Held;
use crate::{Config, FeedForwardConfig, names::Part, passes::FEW_ROWS};

/// A number in bfloat16.
const HALF: usize = 2;
const WORD: usize = 4;
/// The most that cuBLASLt asks for.
const PRODUCTS: u64 = 32 << 20;

/// What passes of up to `rows` rows of a prompt take that are not captured, with the logits that come out of any; or what
/// loading takes, where that is more.
pub(super) fn workspace(config: &Config, held: &[Held], rows: usize) -> u64 {
    let mut parts = vec![bytes(1, WORD * config.vocab_size)];
    if rows > FEW_ROWS && attention_takes_many_rows(config.head_width) {
        parts.extend([unpacked(held), activations(config, rows, HALF), PRODUCTS]);
    }
    parts.into_iter().fold(0, u64::saturating_add).max(moved(held))
}

/// What captured passes of a sequence take whose prompts come in chunks of up to `rows` rows, and a captured step.
pub(super) fn graphs(config: &Config, rows: usize) -> u64 {
    let most = rows.clamp(1, FEW_ROWS).next_power_of_two();
    let passes = (0..=most.ilog2()).map(|power| captured(config, 1 << power));
    let choice = [kernels::argmax_workspace(1, config.vocab_size), kernels::sample_workspace(1, config.vocab_size)];
    let choice = choice.map(|size| size.map_or(u64::MAX, |size| bytes(1, size)));
    passes.chain([captured(config, 1)]).chain(choice).fold(0, u64::saturating_add)
}

/// A pass of `rows` rows from their table to their logits.
fn captured(config: &Config, rows: usize) -> u64 {
    let mut windows: Vec<_> = config.layers.iter().map(|layer| layer.window).collect();
    windows.sort_unstable();
    windows.dedup();
    let attention = windows.into_iter().map(|window| {
        let Config { context_length: max_positions, heads, kv_heads, head_width, .. } = *config;
        let shape = FewShape { rows, max_positions, heads, kv_heads, head_width, window };
        shape.workspace().map_or(u64::MAX, |workspace| bytes(1, workspace.partials) + bytes(1, workspace.tickets))
    });
    // Ids, positions, and the addresses of keys and values.
    let table = bytes(rows, 2 * WORD + 16 * config.layers.len());
    let rest = [table, activations(config, rows, WORD), bytes(rows, WORD * config.vocab_size)];
    attention.chain(rest).fold(0, u64::saturating_add)
}

/// The buffers of a pass from the embedding to the last norm, for `rows` rows, those between products of numbers of so many bytes.
fn activations(config: &Config, rows: usize, number: usize) -> u64 {
    let (width, q, kv) = (config.width, config.heads * config.head_width, config.kv_heads * config.head_width);
    let buffer = |number: usize, width: usize| bytes(rows, number * width);
    // The sum that goes through the layers and what is added to it; norms of it; projections; turned queries and what the
    // attention gives; sines and cosines.
    let mut total = 2 * buffer(WORD, width) + 3 * buffer(number, width);
    total += buffer(number, q + 2 * kv) + 2 * buffer(number, q);
    total += config.ropes.len() as u64 * buffer(WORD, config.head_width);
    let gated = |inner: usize| buffer(number, 2 * inner) + buffer(number, inner);
    let layers = config.layers.iter().map(|layer| match (layer.feed_forward, &config.experts) {
        (FeedForwardConfig::Dense { width: inner }, _) => gated(inner),
        (FeedForwardConfig::Routed, None) => 0,
        (FeedForwardConfig::Routed, Some(experts)) => {
            let places = rows.saturating_mul(experts.per_row);
            // The router's logits; experts, weights, places and rows of each place; between the products and after them.
            let routing = buffer(WORD, experts.count) + 4 * bytes(places, WORD) + bytes(experts.count + 1, WORD);
            let products = bytes(places, number * experts.width) + bytes(places, WORD * width);
            // The shared expert's, what it gives, and its weight.
            let shared = experts.shared.map_or(0, |shared| gated(shared.width) + buffer(WORD, width) + buffer(WORD, 1));
            routing + products + shared
        }
    });
    total + layers.max().unwrap_or(0)
}

/// The largest matrices that are there twice while a loader brings them together: stacks of experts, and rows of bfloat16 that
/// read one input.
fn moved(held: &[Held]) -> u64 {
    let joined = held.chunk_by(|a, b| a.layer == b.layer && is_bf16(a) && is_bf16(b) && read_one_input(a.part, b.part));
    let joined = joined.filter(|joined| joined.len() > 1 || joined[0].count > 1);
    joined.map(|joined| joined.iter().map(|held| held.bytes as u64).sum()).max().unwrap_or(0)
}

fn is_bf16(held: &Held) -> bool {
    held.format == DeviceFormat::Tiles(TileFormat::Bf16)
}

/// Weights as bfloat16, those of each product.
fn unpacked(held: &[Held]) -> u64 {
    let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
    // Neighbours of one form that read one input are unpacked as one matrix.
    for product in held.chunk_by(|a, b| a.layer == b.layer && a.format == b.format && read_one_input(a.part, b.part)) {
        let at_once = match product[0].part {
            Part::Embedding | Part::Head => continue,
            // Gate and up of all experts.
            Part::ExpertGate(_) | Part::ExpertUp(_) => 2,
            _ => 1,
        };
        if !is_bf16(&product[0]) {
            let rows = product.iter().map(|held| held.count * held.shape[0]).sum();
            let size = bytes(rows, HALF * WeightLayout::padded_cols(product[0].shape[1]));
            let most = sizes.entry(size).or_default();
            *most = at_once.max(*most);
        }
    }
    sizes.into_iter().map(|(size, count)| size.saturating_mul(count)).fold(0, u64::saturating_add)
}

fn read_one_input(first: Part, second: Part) -> bool {
    matches!(
        (first, second),
        (Part::Q, Part::K) | (Part::K, Part::V) | (Part::Gate, Part::Up) | (Part::SharedGate, Part::SharedUp)
    )
}

/// What `rows` rows of so many bytes take.
fn bytes(rows: usize, row: usize) -> u64 {
    match rows.saturating_mul(row) {
        0 => 0,
        bytes => pass_bytes(bytes).map_or(u64::MAX, |bytes| bytes as u64),
    }
}

#[cfg(test)]
mod tests {
    use ironloom_core::DType;
    use ironloom_quant::WeightFormat;

    use super::*;
    use crate::{
        memory::weights::{on_card, taken},
        names::Naming,
    };

    const MIB: u64 = 1 << 20;

    fn held(config: &Config, format: WeightFormat) -> Vec<Held> {
        on_card(config, Naming::Gguf, |_| Some(DType::BF16), format).unwrap()
    }

    /// Records of one sequence on an H200 in MiB, less what its context took: 527 before and 263 after it left out stacks.
    #[test]
    fn plans_are_not_below_what_models_were_measured_to_take() {
        let measured = [
            (Config::qwen2_5_14b(), WeightFormat::Nf4, (512, 1024), 9241 - 527),
            (Config::qwen2_5_3b(), WeightFormat::Nf4, (512, 1024), 2765 - 527),
            (Config::qwen2_5_3b(), WeightFormat::Int8, (512, 1024), 3929 - 527),
            (Config::qwen2_5_3b(), WeightFormat::Bf16, (512, 1024), 6309 - 263),
            (Config::qwen2_5_3b(), WeightFormat::Bf16, (4096, 4096), 6863 - 263),
        ];
        for (config, format, (rows, positions), measured) in measured {
            let held = held(&config, format);
            let cache = 4 * (positions * config.layers.len() * config.kv_heads * config.head_width) as u64;
            // Prompts of whole chunks: no pass was captured but a step's.
            let parts = [taken(&config, &held), cache, workspace(&config, &held, rows), graphs(&config, 1)];
            let (parts, total) = (parts.map(|bytes| bytes / MIB), parts.iter().sum::<u64>() / MIB);
            assert!((measured..measured * 106 / 100).contains(&total), "{parts:?} are {total} MiB of {measured}");
        }
    }

    #[test]
    fn what_is_packed_is_unpacked_for_a_chunk_of_a_prompt() {
        let config = Config::qwen2_5_14b();
        // Gate and up, down, q with k and v, out, each rounded as the pool does.
        assert_eq!(unpacked(&held(&config, WeightFormat::Nf4)), (288 + 144 + 72 + 52) * MIB);
        assert_eq!(unpacked(&held(&config, WeightFormat::Bf16)), 0);
        // What is bfloat16 is brought together: gate and up.
        assert_eq!(moved(&held(&config, WeightFormat::Bf16)), 2 * 136 * MIB);
        assert_eq!(moved(&held(&config, WeightFormat::Nf4)), 0);
        // Values of another type than queries and keys.
        let mixed = |name: &str| Some(if name.contains("attn_v") { DType::Q6_K } else { DType::Q4_K });
        let mixed = on_card(&config, Naming::Gguf, mixed, WeightFormat::Keep).unwrap();
        assert_eq!(unpacked(&mixed), (288 + 144 + 60 + 10 + 52) * MIB);
        // All experts of a layer: gate and up, and down.
        let config = Config::moe_55m();
        let experts = config.experts.clone().unwrap();
        let stack = (experts.count * experts.width * config.width * 2) as u64;
        let whole = unpacked(&held(&config, WeightFormat::Int8));
        assert!(whole >= 2 * stack, "{whole} of {stack}");
        assert!(moved(&held(&config, WeightFormat::Bf16)) >= stack);
    }

    #[test]
    fn few_rows_take_a_graph_and_no_workspace() {
        let config = Config::dense_102m();
        let held = held(&config, WeightFormat::Int8);
        let logits = (4 * config.vocab_size) as u64;
        assert!(workspace(&config, &held, FEW_ROWS) < 2 * logits);
        assert!(workspace(&config, &held, FEW_ROWS + 1) > 32 * MIB);
        // A pass of one row and a step; all passes up to 64 rows.
        assert!(graphs(&config, 1) >= 2 * logits);
        assert!(graphs(&config, 512) >= 128 * logits);
        assert_eq!(graphs(&config, 64), graphs(&config, 4096));
        let odd = Config { head_width: 40, ..config.clone() };
        assert!(workspace(&odd, &held, 512) < 2 * logits);
    }
}
