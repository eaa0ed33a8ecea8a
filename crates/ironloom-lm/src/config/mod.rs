//! One description of a language model for every family: a stack of blocks with options.
//!
//! A block is `x += post(attention(norm(x)))`, `x += post(feed_forward(norm(x)))`. What families differ in is an option here,
//! never a copy of the block: biases, norms on queries and keys, norms after the halves, windows and rotary embeddings by
//! layer, a dense or a routed feed-forward. [`Config::from_checkpoint`] reads it from a `config.json` or from GGUF metadata,
//! and refuses what it does not know rather than leaving it out.

mod gguf;
mod hugging_face;
mod json;
mod presets;

use ironloom_nn::{Activation, KvCache, RopeOptions};
use ironloom_tensor::Device;
use ironloom_weights::{Checkpoint, Format};

pub use presets::DenseShape;

use crate::{Error, Result};

/// A model family, by the description its checkpoints follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 2 and 3.x, and what follows them.
    Llama,
    /// Llama's block with a sliding window.
    Mistral,
    /// Qwen2 and 2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: norms on queries and keys.
    Qwen3,
    /// Gemma 3 (text): windowed and global layers, norms before and after.
    Gemma3,
    /// InternLM2 and 2.5: one fused projection for q, k and v.
    InternLm2,
    /// Mixtral: routed experts.
    Mixtral,
    /// Qwen1.5-MoE and Qwen2-MoE: routed experts and a gated shared one.
    Qwen2Moe,
    /// Qwen3-MoE: Qwen3's attention, routed experts.
    Qwen3Moe,
    /// ERNIE 4.5's routed models: rotation over neighbours, shared experts without a gate.
    Ernie45Moe,
    /// Ironloom's own dense model.
    IronloomDense,
    /// Ironloom's own routed model: as ERNIE's, with any width of the shared expert and any layers dense.
    IronloomMoe,
}

impl Architecture {
    /// Every family.
    pub const ALL: &'static [Self] = &[
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Gemma3,
        Self::InternLm2,
        Self::Mixtral,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::Ernie45Moe,
        Self::IronloomDense,
        Self::IronloomMoe,
    ];

    /// The `model_type` of its `config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3_text",
            Self::InternLm2 => "internlm2",
            Self::Mixtral => "mixtral",
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Ernie45Moe => "ernie4_5_moe",
            Self::IronloomDense => "ironloom_dense",
            Self::IronloomMoe => "ironloom_moe",
        }
    }

    fn supported() -> String {
        Self::ALL.iter().map(|architecture| architecture.name()).collect::<Vec<_>>().join(", ")
    }
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The shape and the options of a language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The family.
    pub architecture: Architecture,
    /// Entries of the embedding.
    pub vocab_size: usize,
    /// Elements of a hidden row.
    pub width: usize,
    /// Positions the model was made for.
    pub context_length: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head; read, not derived, where the checkpoint gives it.
    pub head_width: usize,
    /// The factor on attention scores.
    pub attention_scale: f32,
    /// Added to the mean square in norms.
    pub rms_epsilon: f32,
    /// Whether the embedding is also the head.
    pub tied_embeddings: bool,
    /// The factor on embedding rows.
    pub embedding_scale: f32,
    /// The activation of feed-forward gates.
    pub activation: Activation,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// A bias on the attention's output projection.
    pub output_bias: bool,
    /// Biases in the feed-forward block.
    pub feed_forward_bias: bool,
    /// Norms on every query and key head.
    pub qk_norm: bool,
    /// Norms after attention and after the feed-forward block.
    pub post_norms: bool,
    /// Whether the checkpoint stores norm weights less one.
    pub norms_less_one: bool,
    /// The rotary embeddings that layers choose from.
    pub ropes: Vec<RopeOptions>,
    /// The layers, first to last.
    pub layers: Vec<LayerConfig>,
    /// The routed layers' experts.
    pub experts: Option<ExpertsConfig>,
}

/// What may differ from layer to layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Positions a query sees, its own among them.
    pub window: Option<usize>,
    /// Which of [`Config::ropes`] it turns by.
    pub rope: usize,
    /// Its feed-forward half.
    pub feed_forward: FeedForwardConfig,
}

/// The feed-forward half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForwardConfig {
    /// One gated block.
    Dense {
        /// Its inner width.
        width: usize,
    },
    /// Routed experts, as [`Config::experts`] says.
    Routed,
}

/// Routed experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// How many there are.
    pub count: usize,
    /// How many a row goes to.
    pub per_row: usize,
    /// An expert's inner width.
    pub width: usize,
    /// Whether the chosen experts' probabilities are divided by their sum.
    pub normalize: bool,
    /// The shared expert that every row goes to.
    pub shared: Option<SharedExpertConfig>,
}

/// A shared expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpertConfig {
    /// Its inner width.
    pub width: usize,
    /// Whether a sigmoid of the row weights it.
    pub gated: bool,
}

impl Config {
    /// The description that a checkpoint carries: GGUF metadata, or the `config.json` beside safetensors.
    ///
    /// # Errors
    /// An architecture or an option that Ironloom does not have, a missing or senseless entry.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let config = match checkpoint.format() {
            Format::Gguf { .. } => gguf::read(checkpoint)?,
            _ => {
                let path = checkpoint.path();
                let bytes = checkpoint.folder_file("config.json")?;
                let bytes = bytes.ok_or_else(|| Error::MissingConfig { path: path.to_owned() })?;
                let json = serde_json::from_slice(&bytes);
                let json = json.map_err(|source| Error::ConfigJson { path: path.to_owned(), source })?;
                hugging_face::read(&json)?
            }
        };
        config.validate()?;
        Ok(config)
    }

    /// The description in a `config.json`'s value.
    ///
    /// # Errors
    /// As [`Config::from_checkpoint`].
    pub fn from_json(json: &serde_json::Value) -> Result<Self> {
        let config = hugging_face::read(json)?;
        config.validate()?;
        Ok(config)
    }

    /// Refuses shapes that contradict themselves. A configuration that was read has been through this; one that was put together
    /// has not.
    ///
    /// # Errors
    /// The first number that can't be, with what it may be.
    pub fn validate(&self) -> Result<()> {
        let invalid = |key: &str, expected: &str, found: usize| {
            Err(Error::InvalidValue { key: key.into(), expected: expected.into(), found: found.to_string() })
        };
        let positive = [
            ("vocabulary size", self.vocab_size),
            ("hidden width", self.width),
            ("context length", self.context_length),
            ("number of heads", self.heads),
            ("number of kv heads", self.kv_heads),
            ("head width", self.head_width),
            ("number of layers", self.layers.len()),
        ];
        for (key, value) in positive {
            if value == 0 || value > 1 << 24 {
                return invalid(key, "a number from 1 to 16,777,216", value);
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return invalid("number of kv heads", "a divisor of the number of heads", self.kv_heads);
        }
        if let Some(layer) = self.layers.iter().find(|layer| layer.window == Some(0)) {
            return invalid("sliding window", "at least 1", layer.window.unwrap_or(0));
        }
        for rope in &self.ropes {
            if rope.width > self.head_width {
                return invalid("rotary width", "at most the head width", rope.width);
            }
            rope.inverse_frequencies()?;
        }
        if let Some(experts) = &self.experts
            && !(1..=experts.count).contains(&experts.per_row)
        {
            return invalid("number of experts a token", "from 1 to the number of experts", experts.per_row);
        }
        Ok(())
    }

    /// Weights in the model.
    pub fn parameters(&self) -> u64 {
        self.count_parameters(|experts| experts.count)
    }

    /// Weights that one token's pass uses: all but the experts it does not go to.
    pub fn active_parameters(&self) -> u64 {
        self.count_parameters(|experts| experts.per_row)
    }

    fn count_parameters(&self, experts_counted: impl Fn(&ExpertsConfig) -> usize) -> u64 {
        let width = self.width as u64;
        let (q, kv) = ((self.heads * self.head_width) as u64, (self.kv_heads * self.head_width) as u64);
        let flag = |on: bool, count: u64| if on { count } else { 0 };
        let gated = |inner: usize| 3 * width * inner as u64;
        let mut total = width * self.vocab_size as u64 * if self.tied_embeddings { 1 } else { 2 } + width;
        for layer in &self.layers {
            total += width * (2 * q + 2 * kv) + flag(self.qkv_bias, q + 2 * kv) + flag(self.output_bias, width);
            total += flag(self.qk_norm, 2 * self.head_width as u64) + if self.post_norms { 4 } else { 2 } * width;
            total += match (layer.feed_forward, &self.experts) {
                (FeedForwardConfig::Dense { width: inner }, _) => {
                    gated(inner) + flag(self.feed_forward_bias, 2 * inner as u64 + width)
                }
                (FeedForwardConfig::Routed, Some(experts)) => {
                    let shared = experts.shared.map_or(0, |shared| gated(shared.width) + flag(shared.gated, width));
                    experts_counted(experts) as u64 * gated(experts.width) + width * experts.count as u64 + shared
                }
                (FeedForwardConfig::Routed, None) => 0,
            };
        }
        total
    }

    /// An empty cache for one sequence on `device`.
    pub fn new_cache(&self, device: &Device) -> KvCache {
        KvCache::new(device, self.layers.len(), self.kv_heads, self.head_width).with_limit(self.context_length)
    }

    /// Bytes that a sequence's cache of `positions` positions takes of `device`.
    pub fn cache_bytes(&self, device: &Device, positions: usize) -> u64 {
        self.new_cache(device).bytes_for(positions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_models_have_their_exact_parameter_counts() {
        let moe = Config::moe_55m();
        assert_eq!((moe.parameters(), moe.active_parameters()), (55_181_824, 35_717_632));
        assert_eq!(Config::dense_102m().parameters(), 101_671_680);
        assert!(moe.validate().is_ok() && Config::dense_102m().validate().is_ok());
    }

    #[test]
    fn contradictions_are_refused() {
        let refused = |change: fn(&mut Config)| {
            let mut config = Config::moe_55m();
            change(&mut config);
            config.validate().is_err()
        };
        assert!(refused(|config| config.kv_heads = 3));
        assert!(refused(|config| config.heads = 0));
        assert!(refused(|config| config.layers.clear()));
        assert!(refused(|config| config.layers[0].window = Some(0)));
        assert!(refused(|config| config.ropes[0].width = 66));
        assert!(refused(|config| config.experts.as_mut().unwrap().per_row = 9));
    }
}
