//! Writes a GGUF model as a Hugging Face folder: weights as safetensors, `config.json`, `generation_config.json`, and the
//! tokenizer's files.
//!
//! Weights keep their values: F32, F16 and BF16 tensors their type, packed ones become F32. The configuration is read back and held
//! against the file's own description before anything is written, since a wrong `config.json` makes a model that answers
//! fluently and wrong.

use std::path::Path;

use ironloom_core::{DType, Threads, replace_file};
use ironloom_nn::RopeScaling;
use ironloom_weights::{Checkpoint, Format, Metadata, unwatched};
use serde_json::{Map, Value, json};

use super::{
    ExportReport, check_sources, metadata::llama3_of_divisors, refuse, report, tokenizer_json::tokenizer_files, weights,
};
use crate::{Architecture, Config, FeedForwardConfig, LayerConfig, Result};

/// What errors call the format.
pub(super) const FORMAT: &str = "a Hugging Face folder";
/// The size of the hub's own shards.
pub(super) const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// Writes the GGUF `checkpoint` as the Hugging Face folder `folder`, which is made where it's not there.
///
/// # Errors
/// The checkpoint isn't GGUF, or the model has an option that a `config.json` can't say ([`crate::Error::NotExportable`]);
/// the configuration isn't supported; tensors are missing or have other shapes than it says; files cannot be written.
pub fn to_hugging_face(checkpoint: &Checkpoint, folder: &Path) -> Result<ExportReport> {
    if checkpoint.format() == Format::Safetensors {
        return Err(refuse(checkpoint.path().display().to_string(), FORMAT, "it is one already"));
    }
    let config = Config::from_checkpoint(checkpoint)?;
    let target = target(&config)?;
    let mut recipes = weights::to_hugging_face(&config, target.architecture);
    check_sources(&recipes, checkpoint)?;
    for recipe in &mut recipes {
        let stored = recipe.sources.first().and_then(|(name, _)| checkpoint.info(name)).map(|info| info.dtype);
        recipe.info.dtype = stored.filter(|dtype| !dtype.is_packed()).unwrap_or(DType::F32);
    }
    if checkpoint.contains("rope_freqs.weight") {
        // Its divisors are in the configuration now.
        checkpoint.tensor("rope_freqs.weight")?;
    }
    let ids = special_ids(checkpoint.metadata())?;
    let stored = checkpoint.info("token_embd.weight").map_or(DType::F32, |info| info.dtype);
    let json = config_json(&target, stored, ids.clone())?;
    let mut notes = Vec::new();
    let tokenizer = match tokenizer_files(checkpoint.metadata()) {
        Ok(files) => Some(files),
        Err(error) => {
            notes.push(format!("the tokenizer stays in the GGUF file ({error}): take it from the original model"));
            None
        }
    };
    let (count, threads) = (recipes.len(), Threads::all());
    let tensors = recipes.into_iter().map(|recipe| recipe.into_tensor(checkpoint, &threads)).collect();
    // Readers of the hub's files look for this entry.
    let mut metadata = Metadata::new();
    metadata.insert("format", "pt");
    ironloom_weights::safetensors::write_sharded(folder, &metadata, tensors, MAX_SHARD_BYTES, &mut unwatched)?;
    write_json(&folder.join("config.json"), &json)?;
    write_json(&folder.join("generation_config.json"), &Value::Object(ids))?;
    if let Some(files) = tokenizer {
        write_json(&folder.join("tokenizer.json"), &files.tokenizer)?;
        write_json(&folder.join("tokenizer_config.json"), &files.settings)?;
    }
    report(checkpoint, folder, count, Vec::new(), notes)
}

/// The configuration as the folder's own.
pub(super) fn target(config: &Config) -> Result<Config> {
    let mut target = config.clone();
    target.norms_less_one = config.architecture == Architecture::Gemma3;
    if config.architecture == Architecture::Llama && config.layers.iter().any(|layer| layer.window.is_some()) {
        target.architecture = Architecture::Mistral;
    }
    for rope in &mut target.ropes {
        if let RopeScaling::Factors(factors) = &rope.scaling {
            let reason = "they are none of Llama 3's scaling, which is the only one config.json can name";
            let found = llama3_of_divisors(rope.base, rope.width, factors);
            rope.scaling = found.ok_or_else(|| refuse("the factors of rope_freqs.weight", FORMAT, reason))?;
        }
    }
    Ok(target)
}

/// Which part of a configuration came back different.
fn difference(wanted: &Config, found: &Config) -> Option<&'static str> {
    let same = [
        ("family", wanted.architecture == found.architecture),
        ("vocabulary size", wanted.vocab_size == found.vocab_size),
        ("context length", wanted.context_length == found.context_length),
        ("attention scale", wanted.attention_scale == found.attention_scale),
        ("biases", {
            let biases = |config: &Config| (config.qkv_bias, config.output_bias, config.feed_forward_bias);
            biases(wanted) == biases(found)
        }),
        ("windows or feed-forward widths", wanted.layers == found.layers),
        ("experts", wanted.experts == found.experts),
        ("rotary embedding", wanted.ropes == found.ropes),
    ];
    let part = same.iter().find(|(_, same)| !same).map(|(part, _)| *part);
    part.or_else(|| (wanted != found).then_some("configuration"))
}

/// The `config.json` of a model whose weights are `stored`, with the ids of its special tokens; read back and held against `config`.
pub(super) fn config_json(config: &Config, stored: DType, ids: Map<String, Value>) -> Result<Value> {
    let mut json = config_entries(config)?;
    json.insert("torch_dtype".into(), torch_name(stored).into());
    json.extend(ids);
    let json = Value::Object(json);
    match difference(config, &Config::from_json(&json)?) {
        None => Ok(json),
        Some(difference) => {
            let reason = "config.json has no entry that means it for this family";
            Err(refuse(format!("the model's {difference}"), FORMAT, reason))
        }
    }
}

/// The entries of `config.json`, but for the special tokens and the stored type.
fn config_entries(config: &Config) -> Result<Map<String, Value>> {
    use Architecture::{Ernie45Moe, Gemma3, InternLm2, Llama, Mixtral, Qwen2Moe};
    let architecture = config.architecture;
    let mut json = Map::new();
    let mut set = |key: &str, value: Value| _ = json.insert(key.to_owned(), value);
    set("architectures", json!([class_name(architecture)]));
    set("model_type", architecture.name().into());
    set("vocab_size", config.vocab_size.into());
    set("hidden_size", config.width.into());
    set("num_hidden_layers", config.layers.len().into());
    set("num_attention_heads", config.heads.into());
    set("num_key_value_heads", config.kv_heads.into());
    set("head_dim", config.head_width.into());
    set("rms_norm_eps", shortest(config.rms_epsilon));
    set("tie_word_embeddings", config.tied_embeddings.into());
    match architecture {
        Gemma3 => {
            set("hidden_activation", "gelu_pytorch_tanh".into());
            // The attention scale is 1 / sqrt of this, which transformers takes as a whole number only.
            let scalar = (1.0 / f64::from(config.attention_scale).powi(2)).round() as u64;
            set("query_pre_attn_scalar", scalar.into());
        }
        _ => set("hidden_act", "silu".into()),
    }
    match architecture {
        InternLm2 => set("bias", config.qkv_bias.into()),
        Llama => {
            set("attention_bias", config.qkv_bias.into());
            set("mlp_bias", config.feed_forward_bias.into());
        }
        Architecture::Qwen2 | Mixtral | Architecture::Mistral => {}
        Qwen2Moe => set("qkv_bias", config.qkv_bias.into()),
        Ernie45Moe => {
            set("use_bias", false.into());
            // The class's defaults are tokens of its own vocabulary; of a padding token no gradient would come.
            for token in ["bos_token_id", "eos_token_id", "pad_token_id"] {
                set(token, Value::Null);
            }
        }
        _ => set("attention_bias", config.qkv_bias.into()),
    }
    let dense = config.layers.iter().find_map(|layer| match layer.feed_forward {
        FeedForwardConfig::Dense { width } => Some(width),
        FeedForwardConfig::Routed => None,
    });
    if let (Ernie45Moe, Some(experts)) = (architecture, &config.experts) {
        let is_routed = |layer: &LayerConfig| layer.feed_forward == FeedForwardConfig::Routed;
        let layers = config.layers.len();
        set("moe_k", experts.per_row.into());
        set("moe_num_experts", experts.count.into());
        set("moe_intermediate_size", experts.width.into());
        set("moe_num_shared_experts", experts.shared.map_or(0, |shared| shared.width / experts.width.max(1)).into());
        set("moe_layer_interval", 1.into());
        set("moe_layer_start_index", config.layers.iter().position(is_routed).unwrap_or(layers).into());
        set("moe_layer_end_index", config.layers.iter().rposition(is_routed).unwrap_or(layers).into());
        set("intermediate_size", dense.unwrap_or(experts.width * experts.per_row).into());
    } else if let Some(experts) = &config.experts {
        set("num_experts_per_tok", experts.per_row.into());
        if architecture == Mixtral {
            set("num_local_experts", experts.count.into());
            set("intermediate_size", experts.width.into());
        } else {
            set("num_experts", experts.count.into());
            set("moe_intermediate_size", experts.width.into());
            set("norm_topk_prob", experts.normalize.into());
            set("decoder_sparse_step", 1.into());
            let is_dense = |layer: &usize| config.layers[*layer].feed_forward != FeedForwardConfig::Routed;
            set("mlp_only_layers", (0..config.layers.len()).filter(is_dense).collect());
            set("intermediate_size", dense.unwrap_or(experts.width * experts.per_row).into());
        }
        if let Some(shared) = experts.shared {
            set("shared_expert_intermediate_size", shared.width.into());
        }
    } else if let Some(width) = dense {
        set("intermediate_size", width.into());
    }
    windows_json(config, &mut set);
    ropes_json(config, &mut set)?;
    Ok(json)
}

fn windows_json(config: &Config, set: &mut dyn FnMut(&str, Value)) {
    let window = config.layers.iter().find_map(|layer| layer.window);
    match config.architecture {
        Architecture::Gemma3 => {
            set("sliding_window", window.unwrap_or(config.context_length).into());
            let kind = |windowed| if windowed { "sliding_attention" } else { "full_attention" };
            set("layer_types", config.layers.iter().map(|layer| kind(layer.window.is_some())).collect());
        }
        Architecture::Mistral | Architecture::Mixtral => set("sliding_window", window.into()),
        Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen2Moe | Architecture::Qwen3Moe => {
            set("use_sliding_window", window.is_some().into());
            set("sliding_window", window.into());
            set("max_window_layers", 0.into());
        }
        _ => {}
    }
}

fn ropes_json(config: &Config, set: &mut dyn FnMut(&str, Value)) -> Result<()> {
    let Some(rope) = config.ropes.first() else { return Ok(()) };
    let mut context = config.context_length;
    set("rope_theta", rope.base.into());
    if let Some(local) = config.ropes.get(1) {
        set("rope_local_base_freq", local.base.into());
    }
    let scaling = match &rope.scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => {
            // Files of scaled models have the length before scaling, but for Gemma's.
            if config.architecture != Architecture::Gemma3 {
                context = (context as f64 / factor).round() as usize;
            }
            json!({"rope_type": "linear", "factor": factor})
        }
        RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_frequency_factor,
            "high_freq_factor": high_frequency_factor,
            "original_max_position_embeddings": *original_context as u64,
        }),
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, attention_factor } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": *original_context as u64,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "truncate": truncate,
            "attention_factor": attention_factor,
        }),
        RopeScaling::Factors(_) => {
            return Err(refuse("a list of rotary factors", FORMAT, "config.json names scaling by its parameters"));
        }
    };
    set("rope_scaling", scaling);
    set("max_position_embeddings", context.into());
    Ok(())
}

/// The class that transformers runs the family with.
fn class_name(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Mistral => "MistralForCausalLM",
        Architecture::Qwen2 => "Qwen2ForCausalLM",
        Architecture::Qwen3 => "Qwen3ForCausalLM",
        Architecture::Gemma3 => "Gemma3ForCausalLM",
        Architecture::InternLm2 => "InternLM2ForCausalLM",
        Architecture::Mixtral => "MixtralForCausalLM",
        Architecture::Qwen2Moe => "Qwen2MoeForCausalLM",
        Architecture::Qwen3Moe => "Qwen3MoeForCausalLM",
        Architecture::Ernie45Moe => "Ernie4_5_MoeForCausalLM",
        Architecture::Llama | Architecture::IronloomDense => "LlamaForCausalLM",
        // transformers has no such class, and says so by this name.
        Architecture::IronloomMoe => "IronloomMoeForCausalLM",
    }
}

/// The start and end tokens as configuration entries; one end token is a number, several a list.
pub(super) fn special_ids(metadata: &Metadata) -> Result<Map<String, Value>> {
    let id = |key: &str| metadata.u32(&format!("tokenizer.ggml.{key}_token_id"));
    let mut ids = Map::new();
    if let Some(bos) = id("bos")? {
        ids.insert("bos_token_id".into(), bos.into());
    }
    let mut ends: Vec<u32> = Vec::new();
    for key in ["eos", "eot", "eom"] {
        ends.extend(id(key)?.filter(|id| !ends.contains(id)));
    }
    match ends[..] {
        [] => {}
        [end] => _ = ids.insert("eos_token_id".into(), end.into()),
        _ => _ = ids.insert("eos_token_id".into(), ends.into()),
    }
    if let Some(pad) = id("padding")? {
        ids.insert("pad_token_id".into(), pad.into());
    }
    Ok(ids)
}

fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}

/// The number with the fewest digits that is this one in single precision: 1e-5, not 9.99999974e-6.
fn shortest(value: f32) -> Value {
    value.to_string().parse::<f64>().unwrap_or(f64::from(value)).into()
}

pub(super) fn write_json(path: &Path, json: &Value) -> Result<()> {
    write_file(path, format!("{json:#}\n").as_bytes())
}

/// Writes a file whole or not at all.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let error = |source| ironloom_weights::Error::Write { path: path.to_owned(), source };
    Ok(replace_file(path, bytes).map_err(error)?)
}
