//! The models that exactness is shown on.

use anyhow::{Result, bail};
use ironloom_lm::{Config, LoadOptions, Model, RandomWeights};
use ironloom_quant::WeightFormat;
use ironloom_tensor::Device;
use serde_json::{Value, json};

use crate::workspace;

/// A model in a format.
#[derive(Clone, Copy)]
pub(super) struct Subject {
    source: Source,
    weights: RandomWeights,
}

#[derive(Clone, Copy)]
enum Source {
    /// A folder or file of `tests/golden/models`.
    Golden(&'static str),
    /// Random weights of this shape.
    Random(&'static str, fn() -> Value),
}

/// All of them.
pub(super) fn all() -> Vec<Subject> {
    use WeightFormat::{Bf16, Int4, Int8, Keep, Nf4};
    let golden = [
        ("llama", Bf16),
        ("llama", Int8),
        ("llama", Nf4),
        ("llama", Int4),
        ("llama/model-q8_0.gguf", Keep),
        ("llama/model.gguf", Keep),
        ("qwen2", Bf16),
        ("qwen3", Nf4),
        ("gemma3", Bf16),
        ("gemma3/model.gguf", Keep),
        ("mistral", Int8),
        ("mixtral", Bf16),
        ("qwen2_moe", Bf16),
        ("qwen3_moe", Int8),
        ("qwen3_moe", Nf4),
    ];
    let random = [
        ("random dense", dense as fn() -> Value, Bf16.into()),
        ("random dense", dense, Int8.into()),
        ("random dense", dense, Nf4.into()),
        ("random blocks", whole_blocks, RandomWeights::Q4_K_M),
        ("random experts", experts, Bf16.into()),
        ("random experts", experts, Int4.into()),
    ];
    let golden = golden.map(|(path, format)| Subject { source: Source::Golden(path), weights: format.into() });
    let random = random.map(|(name, config, weights)| Subject { source: Source::Random(name, config), weights });
    golden.into_iter().chain(random).collect()
}

impl Subject {
    /// Its name for a reader.
    pub(super) fn name(&self) -> String {
        let name = match self.source {
            Source::Golden(name) | Source::Random(name, _) => name,
        };
        match self.weights {
            RandomWeights::As(WeightFormat::Keep) => name.to_owned(),
            RandomWeights::As(format) => format!("{name} as {format:?}"),
            mixed => format!("{name} as {mixed:?}"),
        }
    }

    /// Whether the kernels of many rows take its heads.
    pub(super) fn has_wide_heads(&self) -> bool {
        matches!(self.source, Source::Random(..))
    }

    /// The model on `device`.
    pub(super) fn load(&self, device: &Device) -> Result<Model> {
        match (self.source, self.weights) {
            (Source::Golden(path), RandomWeights::As(format)) => {
                let checkpoint = ironloom_weights::open(workspace::root().join("tests/golden/models").join(path))?;
                Ok(Model::load(&checkpoint, device, &LoadOptions { format, progress: None })?)
            }
            (Source::Golden(_), weights) => bail!("{weights:?} is of random models only"),
            (Source::Random(_, config), weights) => {
                Ok(Model::random(&Config::from_json(&config())?, device, weights, 1)?)
            }
        }
    }
}

fn dense() -> Value {
    json!({
        "model_type": "llama",
        "hidden_size": 320,
        "intermediate_size": 608,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "num_hidden_layers": 3,
        "vocab_size": 520,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false,
    })
}

fn experts() -> Value {
    json!({
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 72,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": true,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false,
    })
}

/// Widths of whole blocks of the K-types.
fn whole_blocks() -> Value {
    json!({
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false,
    })
}
