//! Reads a Hugging Face `config.json`, in the hub's classical layout and in the newer one with `rope_parameters`.
//!
//! Defaults are those of the families' configuration classes, for files often leave out what equals them. An entry that
//! would change the arithmetic and that Ironloom does not have is refused.

use ironloom_nn::{Activation, RopeOptions, RopeScaling};
use serde_json::{Value, json};

use super::{
    Architecture, Config, ExpertsConfig, FeedForwardConfig, LayerConfig, SharedExpertConfig,
    json::{Fields, short},
};
use crate::{Error, Result};

/// The description in `json`.
pub(super) fn read(json: &Value) -> Result<Config> {
    let root = Fields::new(json, "", "a model")?;
    let model_type = root.required("model_type", root.text("model_type"))?;
    let architecture = architecture(model_type)?;
    // Multimodal checkpoints keep the language model's entries in text_config; the tie flag may be in either.
    let nested = root.get("text_config");
    let fields =
        Fields::new(nested.unwrap_or(json), if nested.is_some() { "text_config" } else { "" }, architecture.name())?;
    let tied = match (fields.flag("tie_word_embeddings")?, root.flag("tie_word_embeddings")?) {
        (Some(tied), _) | (None, Some(tied)) => tied,
        (None, None) => matches!(architecture, Architecture::Gemma3 | Architecture::Ernie45Moe) || is_own(architecture),
    };
    refuse_unsupported(&fields)?;

    let (width, heads) = (fields.required_count("hidden_size")?, fields.required_count("num_attention_heads")?);
    let head_width = match fields.count("head_dim")? {
        Some(head_width) => head_width,
        None => match architecture {
            Architecture::Gemma3 => 256,
            Architecture::Qwen3 => 128,
            _ if heads > 0 && width.is_multiple_of(heads) => width / heads,
            _ => return Err(Error::MissingKey { key: "head_dim".into(), architecture: architecture.name().into() }),
        },
    };
    let context_length = fields.required_count("max_position_embeddings")?;
    let layer_count = fields.required_count("num_hidden_layers")?;
    if layer_count > 4096 {
        let found = layer_count.to_string();
        return Err(Error::InvalidValue { key: "num_hidden_layers".into(), expected: "at most 4096".into(), found });
    }
    let is_gemma = architecture == Architecture::Gemma3;
    let scale_base = match fields.number("query_pre_attn_scalar")? {
        Some(scalar) if is_gemma => scalar,
        None if is_gemma => 256.0,
        _ => head_width as f64,
    };
    let experts = experts(&fields, architecture)?;
    let windows = windows(&fields, architecture, layer_count)?;
    let (ropes, windowed_rope) = ropes(&fields, architecture, head_width, context_length)?;
    let context_length = scaled_context(context_length, &ropes[0].scaling, is_gemma);
    let layers = (0..layer_count)
        .map(|i| {
            let feed_forward = feed_forward(&fields, architecture, i)?;
            let rope = if windows[i].is_some() { windowed_rope } else { 0 };
            Ok(LayerConfig { window: windows[i], rope, feed_forward })
        })
        .collect::<Result<Vec<_>>>()?;
    let default_epsilon = if architecture == Architecture::Ernie45Moe { 1e-5 } else { 1e-6 };
    let flag = |key| fields.flag(key).map(|flag| flag.unwrap_or(false));
    let bias = match architecture {
        Architecture::Qwen2 => true,
        Architecture::Qwen2Moe => fields.flag("qkv_bias")?.unwrap_or(true),
        Architecture::InternLm2 => flag("bias")?,
        Architecture::Ernie45Moe => {
            let reason = "biases of this family are not implemented; its published models have none";
            fields.refuse_unless("use_bias", &[json!(false)], reason)?;
            false
        }
        _ => flag("attention_bias")?,
    };
    Ok(Config {
        architecture,
        vocab_size: fields.required_count("vocab_size")?,
        width,
        context_length,
        heads,
        kv_heads: fields.count("num_key_value_heads")?.unwrap_or(heads),
        head_width,
        attention_scale: (1.0 / scale_base.sqrt()) as f32,
        rms_epsilon: fields.number("rms_norm_eps")?.unwrap_or(default_epsilon) as f32,
        tied_embeddings: tied,
        embedding_scale: if is_gemma { (width as f64).sqrt() as f32 } else { 1.0 },
        activation: activation(&fields)?,
        qkv_bias: bias,
        output_bias: bias && !matches!(architecture, Architecture::Qwen2 | Architecture::Qwen2Moe),
        feed_forward_bias: flag("mlp_bias")?,
        qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Gemma3),
        post_norms: is_gemma,
        norms_less_one: is_gemma,
        ropes,
        layers,
        experts,
    })
}

fn architecture(model_type: &str) -> Result<Architecture> {
    match model_type {
        "gemma3" => Ok(Architecture::Gemma3),
        _ => Architecture::ALL.iter().copied().find(|known| known.name() == model_type).ok_or_else(|| {
            Error::UnknownArchitecture { name: model_type.to_owned(), supported: Architecture::supported() }
        }),
    }
}

fn is_own(architecture: Architecture) -> bool {
    matches!(architecture, Architecture::IronloomDense | Architecture::IronloomMoe)
}

/// Entries that would change the arithmetic in ways Ironloom does not have.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<()> {
    let capped = "capped logits are not implemented";
    fields.refuse_unless("attn_logit_softcapping", &[], capped)?;
    fields.refuse_unless("final_logit_softcapping", &[], capped)?;
    fields.refuse_unless(
        "partial_rotary_factor",
        &[json!(1), json!(1.0)],
        "partial rotation is not implemented for it",
    )?;
    fields.refuse_unless(
        "quantization_config",
        &[],
        "weights quantized inside safetensors are not read: use the original checkpoint or a GGUF file",
    )?;
    fields.refuse_unless("use_bidirectional_attention", &[json!(false)], "decoding needs causal attention")
}

fn activation(fields: &Fields<'_>) -> Result<Activation> {
    let key = if fields.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    match fields.text(key)? {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some(other) => Err(Error::UnsupportedOption {
            key: key.into(),
            value: other.into(),
            reason: "silu and gelu_pytorch_tanh are implemented",
        }),
    }
}

fn experts(fields: &Fields<'_>, architecture: Architecture) -> Result<Option<ExpertsConfig>> {
    let (count_key, width_key, normalize) = match architecture {
        Architecture::Mixtral => ("num_local_experts", "intermediate_size", Some(true)),
        Architecture::Qwen2Moe | Architecture::Qwen3Moe => {
            ("num_experts", "moe_intermediate_size", Some(fields.flag("norm_topk_prob")?.unwrap_or(false)))
        }
        Architecture::IronloomMoe => ("num_experts", "moe_intermediate_size", fields.flag("norm_topk_prob")?),
        Architecture::Ernie45Moe => return ernie_experts(fields).map(Some),
        _ => return Ok(None),
    };
    let shared_width = match architecture {
        Architecture::Qwen2Moe | Architecture::IronloomMoe => {
            Some(fields.required_count("shared_expert_intermediate_size")?)
        }
        _ => None,
    };
    Ok(Some(ExpertsConfig {
        count: fields.required_count(count_key)?,
        per_row: fields.required_count("num_experts_per_tok")?,
        width: fields.required_count(width_key)?,
        normalize: fields.required("norm_topk_prob", Ok(normalize))?,
        shared: shared_width
            .filter(|width| *width > 0)
            .map(|width| SharedExpertConfig { width, gated: architecture == Architecture::Qwen2Moe }),
    }))
}

/// Several shared experts are one of their widths together, which is how checkpoints hold them too.
fn ernie_experts(fields: &Fields<'_>) -> Result<ExpertsConfig> {
    let count = |key, default| fields.count(key).map(|count| count.unwrap_or(default));
    let (experts, per_row, width) =
        (count("moe_num_experts", 64)?, count("moe_k", 6)?, count("moe_intermediate_size", 1536)?);
    // The sum of a row's largest probabilities is never below their share of all.
    if fields.number("moe_norm_min")?.unwrap_or(1e-12) * experts as f64 >= per_row as f64 {
        return Err(Error::UnsupportedOption {
            key: "moe_norm_min".into(),
            value: short(fields.get("moe_norm_min").unwrap_or_default()),
            reason: "probabilities are divided by their sum, with no least divisor above moe_k / moe_num_experts",
        });
    }
    let shared = width.saturating_mul(count("moe_num_shared_experts", 2)?);
    Ok(ExpertsConfig {
        count: experts,
        per_row,
        width,
        normalize: true,
        shared: (shared > 0).then_some(SharedExpertConfig { width: shared, gated: false }),
    })
}

fn feed_forward(fields: &Fields<'_>, architecture: Architecture, layer: usize) -> Result<FeedForwardConfig> {
    let routed = match architecture {
        Architecture::Mixtral => true,
        Architecture::Qwen2Moe | Architecture::Qwen3Moe | Architecture::IronloomMoe => {
            let step = fields.count("decoder_sparse_step")?.unwrap_or(1);
            let dense = fields.counts("mlp_only_layers")?.unwrap_or_default();
            step > 0 && (layer + 1).is_multiple_of(step) && !dense.contains(&layer)
        }
        Architecture::Ernie45Moe => {
            let interval = fields.count("moe_layer_interval")?.unwrap_or(1);
            let start = fields.count("moe_layer_start_index")?.unwrap_or(1);
            // -1 is the last layer.
            let end = fields.number("moe_layer_end_index")?.filter(|end| *end != -1.0).unwrap_or(f64::INFINITY);
            interval > 0 && (layer + 1).is_multiple_of(interval) && layer >= start && layer as f64 <= end
        }
        _ => false,
    };
    if routed {
        return Ok(FeedForwardConfig::Routed);
    }
    Ok(FeedForwardConfig::Dense { width: fields.required_count("intermediate_size")? })
}

/// The window of each layer. A window applies where the family has one for the layer; `layer_types`, where given, decides.
fn windows(fields: &Fields<'_>, architecture: Architecture, layers: usize) -> Result<Vec<Option<usize>>> {
    let window = fields.count("sliding_window")?;
    let is_qwen = matches!(
        architecture,
        Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen2Moe | Architecture::Qwen3Moe
    );
    let window = match architecture {
        _ if is_qwen => window.filter(|_| matches!(fields.flag("use_sliding_window"), Ok(Some(true)))),
        Architecture::Mistral | Architecture::Mixtral => window,
        Architecture::Gemma3 => Some(window.unwrap_or(4096)),
        // The others' configuration classes have no window; an entry there means nothing to the reference either.
        _ => None,
    };
    if let Some(types) = fields.texts("layer_types")? {
        if types.len() != layers {
            let found = types.len().to_string();
            return Err(Error::InvalidValue {
                key: "layer_types".into(),
                expected: format!("{layers} entries"),
                found,
            });
        }
        return types
            .iter()
            .map(|kind| match *kind {
                "full_attention" => Ok(None),
                "sliding_attention" => fields.required("sliding_window", Ok(window.map(Some))),
                other => Err(Error::UnsupportedOption {
                    key: "layer_types".into(),
                    value: other.into(),
                    reason: "full_attention and sliding_attention are implemented",
                }),
            })
            .collect();
    }
    let first_windowed = if is_qwen { fields.count("max_window_layers")?.unwrap_or(28) } else { 0 };
    let pattern = match architecture {
        Architecture::Gemma3 => fields.count("sliding_window_pattern")?.unwrap_or(6),
        _ => 0,
    };
    let is_global = |layer: usize| layer < first_windowed || (pattern > 0 && (layer + 1).is_multiple_of(pattern));
    Ok((0..layers).map(|layer| if is_global(layer) { None } else { window }).collect())
}

/// The rotary embeddings, and which of them windowed layers use; global layers use the first.
fn ropes(
    fields: &Fields<'_>,
    architecture: Architecture,
    width: usize,
    context: usize,
) -> Result<(Vec<RopeOptions>, usize)> {
    let is_gemma = architecture == Architecture::Gemma3;
    let default_base = match architecture {
        Architecture::Mixtral | Architecture::Gemma3 => 1e6,
        Architecture::Ernie45Moe => 5e5,
        _ => 1e4,
    };
    let parameters = fields.object("rope_parameters")?;
    // The newer layout may hold one object for each kind of layer.
    let by_kind = match parameters {
        Some(parameters) => (parameters.object("full_attention")?, parameters.object("sliding_attention")?),
        None => (None, None),
    };
    let base_of = |place: Option<Fields<'_>>| place.map_or(Ok(None), |place| place.number("rope_theta"));
    let global = by_kind.0.or(parameters);
    let base = base_of(global)?.or(fields.number("rope_theta")?).unwrap_or(default_base);
    let scaling = match global.map_or_else(|| fields.object("rope_scaling"), |parameters| Ok(Some(parameters)))? {
        Some(scaling) => scaling_of(&scaling, context)?,
        None => RopeScaling::None,
    };
    let mut ropes = vec![RopeOptions { base, width, scaling }];
    if is_gemma {
        let base = base_of(by_kind.1)?.or(fields.number("rope_local_base_freq")?).unwrap_or(1e4);
        let scaling = match by_kind.1 {
            Some(scaling) => scaling_of(&scaling, context)?,
            None => RopeScaling::None,
        };
        ropes.push(RopeOptions { base, width, scaling });
    }
    Ok((ropes, usize::from(is_gemma)))
}

/// The context that scaling makes of `max_position_embeddings`, which files leave at the unscaled length: YaRN's original
/// context times its factor, or the length times linear scaling's. Gemma's and Llama 3's files have the scaled one.
fn scaled_context(context: usize, scaling: &RopeScaling, is_gemma: bool) -> usize {
    let scaled = match scaling {
        RopeScaling::Linear { factor } if !is_gemma => context as f64 * factor,
        RopeScaling::Yarn { factor, original_context, .. } => original_context * factor,
        _ => 0.0,
    };
    context.max(scaled.min(f64::from(u32::MAX)) as usize)
}

fn scaling_of(scaling: &Fields<'_>, context: usize) -> Result<RopeScaling> {
    let kind = match scaling.text("rope_type")? {
        Some(kind) => kind,
        None => scaling.text("type")?.unwrap_or("default"),
    };
    let original = scaling.number("original_max_position_embeddings")?;
    let factor = || -> Result<f64> {
        match (scaling.number("factor")?, original) {
            (Some(factor), _) => Ok(factor),
            (None, Some(original)) if original > 0.0 && kind == "yarn" => Ok(context as f64 / original),
            _ => scaling.required("factor", Ok(None)),
        }
    };
    match kind {
        // Dynamic scaling begins past max_position_embeddings, where a session's context ends.
        "default" | "dynamic" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: factor()? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: factor()?,
            low_frequency_factor: scaling.required("low_freq_factor", scaling.number("low_freq_factor"))?,
            high_frequency_factor: scaling.required("high_freq_factor", scaling.number("high_freq_factor"))?,
            original_context: scaling.required("original_max_position_embeddings", Ok(original))?,
        }),
        "yarn" => {
            let factor = factor()?;
            Ok(RopeScaling::Yarn {
                factor,
                original_context: original.unwrap_or(context as f64),
                beta_fast: scaling.number("beta_fast")?.unwrap_or(32.0),
                beta_slow: scaling.number("beta_slow")?.unwrap_or(1.0),
                truncate: scaling.flag("truncate")?.unwrap_or(true),
                attention_factor: RopeScaling::yarn_attention_factor(
                    factor,
                    scaling.number("attention_factor")?,
                    scaling.number("mscale")?,
                    scaling.number("mscale_all_dim")?,
                ),
            })
        }
        other => Err(Error::UnsupportedOption {
            key: "rope_scaling".into(),
            value: short(&json!(other)),
            reason: "default, linear, dynamic, llama3 and yarn are implemented",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama() -> Value {
        json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "intermediate_size": 96, "max_position_embeddings": 512, "vocab_size": 100})
    }

    fn with(key: &str, value: Value) -> Result<Config> {
        let mut config = llama();
        config[key] = value;
        read(&config)
    }

    #[test]
    fn head_width_is_read_where_given() {
        assert_eq!(read(&llama()).unwrap().head_width, 16);
        assert_eq!(with("head_dim", json!(40)).unwrap().head_width, 40);
    }

    #[test]
    fn unknown_things_are_named() {
        for (key, value, part) in [
            ("model_type", json!("mamba"), "mamba"),
            ("hidden_act", json!("relu2"), "relu2"),
            ("rope_scaling", json!({"type": "longrope", "factor": 2}), "longrope"),
            ("num_hidden_layers", json!(-1), "num_hidden_layers"),
            ("num_hidden_layers", json!(1e9 as u64), "num_hidden_layers"),
            ("hidden_size", json!("many"), "many"),
            ("final_logit_softcapping", json!(30.0), "final_logit_softcapping"),
            ("quantization_config", json!({"quant_method": "gptq"}), "GGUF"),
        ] {
            let error = with(key, value).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(read(&json!([])).is_err());
        assert!(read(&json!({"model_type": "llama"})).unwrap_err().to_string().contains("hidden_size"));
    }

    #[test]
    fn ernies_experts_are_those_of_its_layers() {
        let read = |changes: &[(&str, Value)]| {
            let mut config = llama();
            config["model_type"] = json!("ernie4_5_moe");
            config["num_hidden_layers"] = json!(6);
            changes.iter().for_each(|(key, value)| config[*key] = value.clone());
            read(&config)
        };
        let routed = |changes: &[(&str, Value)]| -> Vec<usize> {
            let layers = read(changes).unwrap().layers;
            (0..6).filter(|layer| layers[*layer].feed_forward == FeedForwardConfig::Routed).collect()
        };
        assert_eq!(routed(&[]), [1, 2, 3, 4, 5]);
        assert_eq!(routed(&[("moe_layer_end_index", json!(-1)), ("moe_layer_start_index", json!(2))]), [2, 3, 4, 5]);
        assert_eq!(routed(&[("moe_layer_end_index", json!(3)), ("moe_layer_interval", json!(2))]), [1, 3]);
        // What the family's configuration class takes where a file says nothing.
        let config = read(&[]).unwrap();
        let experts = config.experts.unwrap();
        assert_eq!((experts.count, experts.per_row, experts.width, experts.normalize), (64, 6, 1536, true));
        assert_eq!(experts.shared, Some(SharedExpertConfig { width: 3072, gated: false }));
        assert!(config.tied_embeddings && config.ropes[0].base == 5e5 && config.rms_epsilon == 1e-5);
        assert_eq!(read(&[("moe_num_shared_experts", json!(0))]).unwrap().experts.unwrap().shared, None);
        for (key, value) in [("use_bias", json!(true)), ("moe_norm_min", json!(0.1))] {
            assert!(read(&[(key, value)]).unwrap_err().to_string().contains(key));
        }
    }

    #[test]
    fn scaling_types_are_read_under_both_keys() {
        for key in ["type", "rope_type"] {
            let config = with("rope_scaling", json!({key: "linear", "factor": 4.0})).unwrap();
            assert_eq!(config.ropes[0].scaling, RopeScaling::Linear { factor: 4.0 });
        }
    }
}
