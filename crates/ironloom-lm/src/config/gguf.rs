//! Reads GGUF metadata (`llama.block_count`, `qwen2.attention.head_count`, …) as a model's description.
//!
//! Conventions are those of llama.cpp's converter: queries and keys of the Llama and InternLM2 families are stored with
//! interleaved rotation (undone on load), Gemma's norm weights have the one added, and a file without `output.weight` has
//! tied embeddings.

use ironloom_nn::{Activation, RopeOptions, RopeScaling};
use ironloom_weights::{Checkpoint, Metadata};

use super::{Architecture, Config, ExpertsConfig, FeedForwardConfig, LayerConfig, SharedExpertConfig};
use crate::{Error, Result};

struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn count(&self, name: &str) -> Result<Option<usize>> {
        Ok(self.metadata.u64(&self.key(name))?.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    fn number(&self, name: &str) -> Result<Option<f64>> {
        Ok(self.metadata.f32(&self.key(name))?.map(f64::from))
    }

    fn required<T>(&self, name: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| Error::MissingKey { key: self.key(name), architecture: self.architecture.to_owned() })
    }

    fn required_count(&self, name: &str) -> Result<usize> {
        self.required(name, self.count(name)?)
    }

    /// A count that may be one number, or a list with one number for each layer, all equal.
    fn uniform_count(&self, name: &str) -> Result<usize> {
        let key = self.key(name);
        let Some(list) = self.metadata.get(&key).and_then(|_| self.metadata.u32s(&key).ok().flatten()) else {
            return self.required_count(name);
        };
        match list.first() {
            Some(first) if list.iter().all(|n| n == first) => Ok(*first as usize),
            _ => Err(Error::UnsupportedOption {
                key,
                value: format!("{list:?}"),
                reason: "layers of different sizes are not implemented",
            }),
        }
    }
}

/// The description in the file's metadata.
pub(super) fn read(checkpoint: &Checkpoint) -> Result<Config> {
    let metadata = checkpoint.metadata();
    let name = metadata.string("general.architecture")?;
    let name =
        name.ok_or_else(|| Error::MissingKey { key: "general.architecture".into(), architecture: "a model".into() })?;
    let keys = Keys { metadata, architecture: name };
    let expert_count = keys.count("expert_count")?.unwrap_or(0);
    let architecture = match name {
        "llama" if expert_count > 0 => Architecture::Mixtral,
        "llama" => Architecture::Llama,
        "qwen2" => Architecture::Qwen2,
        "qwen3" => Architecture::Qwen3,
        "gemma3" => Architecture::Gemma3,
        "internlm2" => Architecture::InternLm2,
        "qwen2moe" => Architecture::Qwen2Moe,
        "qwen3moe" => Architecture::Qwen3Moe,
        other => {
            let supported = "llama, qwen2, qwen3, gemma3, internlm2, qwen2moe, qwen3moe".to_owned();
            return Err(Error::UnknownArchitecture { name: other.to_owned(), supported });
        }
    };
    let is_gemma = architecture == Architecture::Gemma3;
    let (width, heads) = (keys.required_count("embedding_length")?, keys.uniform_count("attention.head_count")?);
    let layer_count = keys.required_count("block_count")?;
    if layer_count > 4096 {
        let (key, found) = (keys.key("block_count"), layer_count.to_string());
        return Err(Error::InvalidValue { key, expected: "at most 4096".into(), found });
    }
    let head_width = match keys.count("attention.key_length")? {
        Some(head_width) => head_width,
        None if heads > 0 && width.is_multiple_of(heads) => width / heads,
        None => return keys.required("attention.key_length", None),
    };
    if let Some(value_width) = keys.count("attention.value_length")?.filter(|value_width| *value_width != head_width) {
        return Err(Error::UnsupportedOption {
            key: keys.key("attention.value_length"),
            value: value_width.to_string(),
            reason: "keys and values of different widths are not implemented",
        });
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = keys.number(key)?.filter(|cap| *cap != 0.0) {
            let reason = "capped logits are not implemented";
            return Err(Error::UnsupportedOption { key: keys.key(key), value: cap.to_string(), reason });
        }
    }
    let scale_width = if is_gemma && layer_count == 62 {
        // Gemma 3 27B alone scales by the width a head would have, not by the one it has; GGUF has no key for that.
        width as f64 / heads as f64
    } else {
        head_width as f64
    };
    let kv_heads = match metadata.contains(&keys.key("attention.head_count_kv")) {
        true => keys.uniform_count("attention.head_count_kv")?,
        false => heads,
    };
    let context_length = keys.required_count("context_length")?;
    let experts = experts(&keys, architecture, expert_count)?;
    let global = rope(checkpoint, &keys, head_width, context_length)?;
    let mut ropes = vec![global];
    if is_gemma {
        let base = keys.number("rope.freq_base_swa")?.unwrap_or(1e4);
        ropes.push(RopeOptions { base, width: ropes[0].width, scaling: RopeScaling::None });
    }
    let window = keys.count("attention.sliding_window")?.filter(|window| *window > 0);
    let pattern = keys.count("attention.sliding_window_pattern").ok().flatten().unwrap_or(6);
    let layers = (0..layer_count)
        .map(|layer| {
            let routed = experts.is_some() && checkpoint.contains(&format!("blk.{layer}.ffn_gate_inp.weight"));
            let feed_forward = match routed {
                true => FeedForwardConfig::Routed,
                false => FeedForwardConfig::Dense { width: keys.uniform_count("feed_forward_length")? },
            };
            let is_global = is_gemma && pattern > 0 && (layer + 1).is_multiple_of(pattern);
            let window = if is_global { None } else { window };
            Ok(LayerConfig { window, rope: usize::from(is_gemma && window.is_some()), feed_forward })
        })
        .collect::<Result<Vec<_>>>()?;
    let embedding = checkpoint.info("token_embd.weight").map(|info| info.shape.dims()[0]);
    let vocab_size = match embedding {
        Some(rows) => rows,
        None => keys.required_count("vocab_size")?,
    };
    let has = |name: &str| checkpoint.contains(name);
    Ok(Config {
        architecture,
        vocab_size,
        width,
        context_length,
        heads,
        kv_heads,
        head_width,
        attention_scale: (1.0 / scale_width.sqrt()) as f32,
        rms_epsilon: keys
            .required("attention.layer_norm_rms_epsilon", keys.number("attention.layer_norm_rms_epsilon")?)?
            as f32,
        tied_embeddings: !has("output.weight"),
        embedding_scale: if is_gemma { (width as f64).sqrt() as f32 } else { 1.0 },
        activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
        qkv_bias: matches!(architecture, Architecture::Qwen2 | Architecture::Qwen2Moe) || has("blk.0.attn_q.bias"),
        output_bias: has("blk.0.attn_output.bias"),
        feed_forward_bias: has("blk.0.ffn_gate.bias"),
        qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Gemma3),
        post_norms: is_gemma,
        norms_less_one: false,
        ropes,
        layers,
        experts,
    })
}

fn experts(keys: &Keys<'_>, architecture: Architecture, count: usize) -> Result<Option<ExpertsConfig>> {
    let routed = [Architecture::Mixtral, Architecture::Qwen2Moe, Architecture::Qwen3Moe];
    if !routed.contains(&architecture) {
        return Ok(None);
    }
    let width = match keys.count("expert_feed_forward_length")? {
        Some(width) => width,
        None => keys.uniform_count("feed_forward_length")?,
    };
    let normalize = keys.metadata.bool(&keys.key("expert_weights_norm"))?;
    let shared = match architecture {
        Architecture::Qwen2Moe => {
            let width = keys.count("expert_shared_feed_forward_length")?;
            let width = keys.required("expert_shared_feed_forward_length", width)?;
            Some(SharedExpertConfig { width, gated: true })
        }
        _ => None,
    };
    Ok(Some(ExpertsConfig {
        count,
        per_row: keys.required_count("expert_used_count")?,
        width,
        // Without the key the family decides, as the format's reference reader does.
        normalize: normalize.unwrap_or(architecture != Architecture::Qwen2Moe),
        shared,
    }))
}

fn rope(checkpoint: &Checkpoint, keys: &Keys<'_>, head_width: usize, context: usize) -> Result<RopeOptions> {
    let width = keys.count("rope.dimension_count")?.unwrap_or(head_width);
    if width != head_width {
        return Err(Error::UnsupportedOption {
            key: keys.key("rope.dimension_count"),
            value: width.to_string(),
            reason: "partial rotation is not implemented for it",
        });
    }
    let base = keys.number("rope.freq_base")?.unwrap_or(1e4);
    let scaling_type = keys.metadata.string(&keys.key("rope.scaling.type"))?.unwrap_or("none");
    let factor = keys.number("rope.scaling.factor")?.or(keys.number("rope.scale_linear")?);
    let scaling = if checkpoint.contains("rope_freqs.weight") {
        let tensor = checkpoint.tensor("rope_freqs.weight")?;
        let mut factors = vec![0.0; tensor.shape.elements()?];
        ironloom_quant::unpack(tensor.dtype, &tensor.bytes, &mut factors)
            .map_err(|source| Error::Pack { tensor: tensor.name.clone(), source })?;
        RopeScaling::Factors(factors)
    } else {
        match (scaling_type, factor) {
            ("none", None) => RopeScaling::None,
            ("none" | "linear", Some(factor)) => RopeScaling::Linear { factor },
            ("yarn", Some(factor)) => {
                let original = keys.number("rope.scaling.original_context_length").ok().flatten();
                let original = match original {
                    Some(original) => original,
                    None => keys.count("rope.scaling.original_context_length")?.unwrap_or(context) as f64,
                };
                let magnitude =
                    keys.number("rope.scaling.attn_factor")?.or(keys.number("rope.scaling.yarn_attn_factor")?);
                RopeScaling::Yarn {
                    factor,
                    original_context: original,
                    beta_fast: keys.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: keys.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    truncate: true,
                    // The key multiplies the usual factor.
                    attention_factor: magnitude.unwrap_or(1.0)
                        * RopeScaling::yarn_attention_factor(factor, None, None, None),
                }
            }
            (other, _) => {
                return Err(Error::UnsupportedOption {
                    key: keys.key("rope.scaling.type"),
                    value: other.to_owned(),
                    reason: "none, linear and yarn with a factor are implemented",
                });
            }
        }
    };
    Ok(RopeOptions { base, width, scaling })
}
