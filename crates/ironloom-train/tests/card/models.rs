//! Small models of every kind of block, and batches for them.

use ironloom_core::Philox;
use ironloom_lm::{
    Architecture, Config, DenseShape, ExpertsConfig, FeedForwardConfig, LayerConfig, Model, SharedExpertConfig,
};
use ironloom_nn::{Activation, RopeOptions, RopeScaling};
use ironloom_train::data::{Batch, IGNORED};

use super::processor;

/// Entries of every model's embedding but one's.
const VOCABULARY: usize = 1000;

/// A model that tests train.
pub(crate) struct Subject {
    /// What is particular to it.
    pub(crate) name: &'static str,
    pub(crate) config: Config,
}

impl Subject {
    /// The model with its first weights, on the processor: the same each time.
    pub(crate) fn model(&self) -> Model {
        let mut model = Model::untrained(&self.config, &processor(), 7).unwrap();
        let mut draws = Philox::new(11, 0);
        let is_after = |name: &str| {
            let ends = ["post_attention_layernorm.weight", "post_feedforward_layernorm.weight"];
            self.config.post_norms && ends.iter().any(|end| name.ends_with(end))
        };
        model
            .update(|name, values| {
                let values = values.as_f32_mut()?;
                if name.ends_with("norm.weight") {
                    values.iter_mut().for_each(|value| *value += 0.05 * draws.next_normal().clamp(-2.0, 2.0));
                    if is_after(name) {
                        // As a trained model has them: what a layer adds is a part of what was there.
                        values.iter_mut().for_each(|value| *value *= 0.06);
                    }
                } else if name.ends_with(".bias") {
                    values.iter_mut().for_each(|value| *value = 0.1 * draws.next_normal());
                } else if name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight") {
                    // So that attention is not the mean of all it sees.
                    values.iter_mut().for_each(|value| *value *= 3.0);
                }
                Ok(())
            })
            .unwrap();
        if let Some(experts) = &self.config.experts {
            make_routers_sure(&mut model, experts.count);
        }
        model
    }
}

/// Lets the first columns of the rows, one for each expert, say by a wide margin which experts a row goes to: an embedding sets
/// them, no layer writes to them at first, and the router reads little else. Else a rounding would move a row to other experts, and
/// gradients of two devices could not be held against each other.
fn make_routers_sure(model: &mut Model, experts: usize) {
    let width = model.config().width;
    model
        .update(|name, values| {
            let values = values.as_f32_mut()?;
            if name.ends_with("embed_tokens.weight") {
                for (id, row) in values.chunks_mut(width).enumerate() {
                    for (expert, value) in row.iter_mut().take(experts).enumerate() {
                        let level = ((3 * expert + id) % experts) as f32;
                        *value = 0.01 * (level - (experts - 1) as f32 / 2.0);
                    }
                }
            } else if name.ends_with("mlp.gate.weight") {
                for (expert, row) in values.chunks_mut(width).enumerate() {
                    row.iter_mut().for_each(|value| *value *= 0.1);
                    row[expert] = 4.0;
                }
            } else if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
                let inputs = values.len() / width;
                values[..experts * inputs].fill(0.0);
            }
            Ok(())
        })
        .unwrap();
}

fn shape(width: usize, heads: usize, kv_heads: usize, head_width: usize) -> DenseShape {
    DenseShape { vocab_size: VOCABULARY, width, layers: 2, heads, kv_heads, head_width, inner_width: 384 }
}

fn rope(base: f64, width: usize) -> RopeOptions {
    RopeOptions { base, width, scaling: RopeScaling::None }
}

/// The second layer of a plain decoder goes to 8 experts, 2 a row.
fn routed(architecture: Architecture, normalize: bool, shared: Option<SharedExpertConfig>) -> Config {
    let mut config = Config::dense(shape(256, 4, 2, 64));
    config.architecture = architecture;
    config.layers[1].feed_forward = FeedForwardConfig::Routed;
    config.experts = Some(ExpertsConfig { count: 8, per_row: 2, width: 96, normalize, shared });
    config
}

pub(crate) fn dense() -> Subject {
    Subject { name: "grouped queries, tied head", config: Config::dense(shape(256, 4, 2, 64)) }
}

pub(crate) fn untied() -> Subject {
    let config = Config::dense(DenseShape { vocab_size: 1003, ..shape(256, 4, 4, 64) });
    Subject { name: "untied head of an odd vocabulary", config: Config { tied_embeddings: false, ..config } }
}

pub(crate) fn qwen3() -> Subject {
    let config = Config::dense(shape(128, 4, 2, 64));
    let config = Config { architecture: Architecture::Qwen3, qk_norm: true, rms_epsilon: 1e-6, ..config };
    Subject { name: "qwen3", config }
}

fn qwen2() -> Subject {
    let config = Config::dense(shape(256, 4, 1, 64));
    let config = Config { architecture: Architecture::Qwen2, qkv_bias: true, ropes: vec![rope(1e6, 64)], ..config };
    Subject { name: "qwen2", config }
}

fn biases() -> Subject {
    let config = Config::dense(shape(128, 2, 2, 64));
    let architecture = Architecture::Llama;
    let config = Config { architecture, qkv_bias: true, output_bias: true, feed_forward_bias: true, ..config };
    Subject { name: "biases everywhere", config }
}

/// A windowed layer and a global one.
pub(crate) fn gemma3() -> Subject {
    let config = Config::dense(shape(256, 4, 2, 64));
    let layer = |window, rope| LayerConfig { window, rope, ..config.layers[0].clone() };
    let layers = vec![layer(Some(24), 1), layer(None, 0)];
    let config = Config {
        architecture: Architecture::Gemma3,
        embedding_scale: 16.0,
        activation: Activation::GeluTanh,
        qk_norm: true,
        post_norms: true,
        norms_less_one: true,
        ropes: vec![rope(1e6, 64), rope(1e4, 64)],
        layers,
        ..config
    };
    Subject { name: "gemma3", config }
}

fn heads(name: &'static str, width: usize, heads: usize, kv_heads: usize, head_width: usize) -> Subject {
    Subject { name, config: Config::dense(shape(width, heads, kv_heads, head_width)) }
}

fn partly_turned() -> Subject {
    let config = Config::dense(shape(128, 2, 1, 64));
    Subject { name: "half of each head turned", config: Config { ropes: vec![rope(1e4, 32)], ..config } }
}

pub(crate) fn our_experts() -> Subject {
    let shared = Some(SharedExpertConfig { width: 96, gated: false });
    Subject { name: "ironloom moe", config: routed(Architecture::IronloomMoe, true, shared) }
}

/// Gates are not normalized.
pub(crate) fn qwen3_experts() -> Subject {
    let config = routed(Architecture::Qwen3Moe, false, None);
    let config = Config { qk_norm: true, rms_epsilon: 1e-6, tied_embeddings: false, ..config };
    Subject { name: "qwen3 moe, gates as they are", config }
}

/// A shared expert behind a gate of its own.
pub(crate) fn qwen2_experts() -> Subject {
    let shared = Some(SharedExpertConfig { width: 128, gated: true });
    let config = routed(Architecture::Qwen2Moe, false, shared);
    Subject { name: "qwen2 moe", config: Config { qkv_bias: true, ..config } }
}

/// Every kind of block.
pub(crate) fn all() -> Vec<Subject> {
    vec![
        dense(),
        untied(),
        qwen3(),
        qwen2(),
        biases(),
        gemma3(),
        heads("heads of 32", 128, 4, 2, 32),
        heads("heads of 96", 192, 2, 1, 96),
        heads("heads of 128", 256, 2, 1, 128),
        heads("heads of 256", 256, 2, 1, 256),
        partly_turned(),
        our_experts(),
        qwen3_experts(),
        qwen2_experts(),
    ]
}

/// The kinds that differ in what a whole step does.
pub(crate) fn few() -> Vec<Subject> {
    vec![dense(), untied(), qwen3(), gemma3(), our_experts(), qwen3_experts()]
}

/// Documents of these lengths in which each id tells the next one, but for some that don't count; another `seed`, other ids.
pub(crate) fn batch(documents: &[usize], seed: usize) -> Batch {
    let mut batch = Batch { documents: documents.to_vec(), ..Batch::default() };
    for (number, &length) in documents.iter().enumerate() {
        // 61 ids all over the vocabulary.
        let mut word = (7 * number + 13 * seed) % 61;
        for place in 0..length {
            batch.ids.push((16 * word + word % 13) as u32);
            word = (3 * word + 5 + place % 3) % 61;
            let is_counted = place + 1 < length && place % 7 != 3;
            batch.targets.push(if is_counted { (16 * word + word % 13) as i64 } else { IGNORED });
        }
    }
    batch
}

/// 100 rows, which are filled up on a card: one document longer than a tile, one of a single row.
pub(crate) fn ragged() -> Batch {
    batch(&[37, 1, 62], 1)
}

/// The batches of step `number`: two micro-batches, of four kinds.
pub(crate) fn step_batches(number: usize) -> Vec<Batch> {
    let seed = number % 4;
    vec![batch(&[37, 1, 62], seed), batch(&[50, 30 + seed], 4 + seed)]
}
