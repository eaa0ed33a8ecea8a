//! What is known about a model file, as data: `--json` prints it as it is.

use std::collections::BTreeMap;

use anyhow::Result;
use ironloom_core::{DType, MemoryPlan};
use ironloom_lm::{Config, FeedForwardConfig, RunMemory, text::Tokenizer};
use ironloom_tensor::Device;
use ironloom_weights::{Array, Checkpoint, Format, Value};
use serde::Serialize;
use serde_json::json;

use super::Arguments;
use crate::{
    failure::{self, Usage},
    figures::cut,
    loading,
};

/// Characters of a metadata value that are shown.
const VALUE_WIDTH: usize = 80;

/// What is known about a file.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) path: String,
    pub(super) format: String,
    pub(super) file_bytes: u64,
    pub(super) model: Part<ModelReport>,
    pub(super) tensor_count: usize,
    pub(super) types: Vec<TypeReport>,
    pub(super) tokenizer: Part<TokenizerReport>,
    /// Whether there is a chat template that works.
    pub(super) chat_template: Part<bool>,
    pub(super) memory: Option<MemoryReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tensors: Option<Vec<TensorReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) metadata: Option<serde_json::Map<String, serde_json::Value>>,
}

/// A part of a file that is understood, or why it is not.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Part<T> {
    Known(T),
    Unusable { error: String },
}

/// A model's configuration.
#[derive(Serialize)]
pub(super) struct ModelReport {
    pub(super) architecture: &'static str,
    pub(super) parameters: u64,
    pub(super) active_parameters: u64,
    pub(super) vocab_size: usize,
    pub(super) context_length: usize,
    pub(super) layers: usize,
    pub(super) width: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_width: usize,
    /// Inner widths of dense blocks, with the number of layers of each.
    pub(super) dense_widths: Vec<(usize, usize)>,
    pub(super) experts: Option<ExpertsReport>,
    /// Windows of attention, with the number of layers of each; the other layers see all positions.
    pub(super) windows: Vec<(usize, usize)>,
    pub(super) ropes: Vec<RopeReport>,
    pub(super) activation: String,
    pub(super) tied_embeddings: bool,
    /// Options of the block that are on.
    pub(super) options: Vec<&'static str>,
}

#[derive(Serialize)]
pub(super) struct ExpertsReport {
    pub(super) layers: usize,
    pub(super) count: usize,
    pub(super) per_token: usize,
    pub(super) width: usize,
    pub(super) shared_width: Option<usize>,
}

#[derive(Serialize)]
pub(super) struct RopeReport {
    pub(super) base: f64,
    pub(super) width: usize,
    pub(super) scaling: String,
}

/// The tensors of one type.
#[derive(Serialize)]
pub(super) struct TypeReport {
    #[serde(rename = "type")]
    pub(super) dtype: &'static str,
    pub(super) tensors: usize,
    pub(super) elements: u64,
    pub(super) bytes: u64,
}

#[derive(Serialize)]
pub(super) struct TokenizerReport {
    pub(super) kind: String,
    pub(super) tokens: usize,
    pub(super) start: Option<String>,
    pub(super) adds_start: bool,
    pub(super) ends: Vec<String>,
}

#[derive(Serialize)]
pub(super) struct MemoryReport {
    pub(super) context: usize,
    pub(super) parts: Vec<(String, u64)>,
    pub(super) total_bytes: u64,
    pub(super) available_bytes: Option<u64>,
    pub(super) fits: Option<bool>,
}

#[derive(Serialize)]
pub(super) struct TensorReport {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    #[serde(rename = "type")]
    pub(super) dtype: &'static str,
    pub(super) bytes: u64,
}

impl Report {
    /// Gathers what the arguments ask for.
    ///
    /// # Errors
    /// The context asked for is longer than the model's.
    pub(super) fn new(arguments: &Arguments, checkpoint: &Checkpoint) -> Result<Self> {
        let config = Config::from_checkpoint(checkpoint);
        let memory = match &config {
            Ok(config) => Some(memory_report(arguments, checkpoint, config)?),
            Err(_) => None,
        };
        let tokenizer = Tokenizer::from_checkpoint(checkpoint);
        let tokenizer = tokenizer.map(|tokenizer| TokenizerReport::new(checkpoint, &tokenizer));
        let template = loading::template(checkpoint).map(|template| template.is_some());
        let tensors = || checkpoint.tensors().map(TensorReport::new).collect();
        Ok(Self {
            path: checkpoint.path().display().to_string(),
            format: match checkpoint.format() {
                Format::Gguf { version } => format!("GGUF v{version}"),
                Format::Safetensors => "safetensors".to_owned(),
            },
            file_bytes: checkpoint.file_bytes(),
            model: Part::new(config.map(|config| ModelReport::new(&config)).map_err(Into::into)),
            tensor_count: checkpoint.tensors().len(),
            types: types(checkpoint),
            tokenizer: Part::new(tokenizer.map_err(Into::into)),
            chat_template: Part::new(template),
            memory,
            tensors: arguments.tensors.then(tensors),
            metadata: arguments.metadata.then(|| metadata(checkpoint)),
        })
    }
}

impl<T> Part<T> {
    fn new(result: Result<T>) -> Self {
        match result {
            Ok(known) => Self::Known(known),
            Err(error) => Self::Unusable { error: failure::line(&error) },
        }
    }
}

impl ModelReport {
    fn new(config: &Config) -> Self {
        let mut dense = BTreeMap::new();
        let mut windows = BTreeMap::new();
        let mut routed = 0;
        for layer in &config.layers {
            match layer.feed_forward {
                FeedForwardConfig::Dense { width } => *dense.entry(width).or_insert(0) += 1,
                FeedForwardConfig::Routed => routed += 1,
            }
            if let Some(window) = layer.window {
                *windows.entry(window).or_insert(0) += 1;
            }
        }
        let options = [
            (config.qkv_bias, "biases on q, k and v"),
            (config.output_bias, "a bias after attention"),
            (config.feed_forward_bias, "biases in the feed-forward block"),
            (config.qk_norm, "norms on q and k"),
            (config.post_norms, "norms after each half"),
        ];
        let ropes = config.ropes.iter().map(|rope| RopeReport {
            base: rope.base,
            width: rope.width,
            scaling: cut(&format!("{:?}", rope.scaling), VALUE_WIDTH),
        });
        Self {
            architecture: config.architecture.name(),
            parameters: config.parameters(),
            active_parameters: config.active_parameters(),
            vocab_size: config.vocab_size,
            context_length: config.context_length,
            layers: config.layers.len(),
            width: config.width,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_width: config.head_width,
            dense_widths: dense.into_iter().collect(),
            experts: config.experts.as_ref().map(|experts| ExpertsReport {
                layers: routed,
                count: experts.count,
                per_token: experts.per_row,
                width: experts.width,
                shared_width: experts.shared.map(|shared| shared.width),
            }),
            windows: windows.into_iter().collect(),
            ropes: ropes.collect(),
            activation: format!("{:?}", config.activation),
            tied_embeddings: config.tied_embeddings,
            options: options.into_iter().filter(|(on, _)| *on).map(|(_, name)| name).collect(),
        }
    }
}

impl TokenizerReport {
    fn new(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Self {
        let text = |id| tokenizer.token_text(id).unwrap_or_default();
        Self {
            kind: tokenizer_kind(checkpoint).unwrap_or_else(|| "unknown".to_owned()),
            tokens: tokenizer.vocab_size(),
            start: tokenizer.bos_id().map(text),
            adds_start: tokenizer.adds_bos(),
            ends: tokenizer.end_ids().iter().map(|&id| text(id)).collect(),
        }
    }
}

impl TensorReport {
    fn new(info: &ironloom_weights::TensorInfo) -> Self {
        Self {
            name: info.name.clone(),
            shape: info.shape.dims().to_vec(),
            dtype: info.dtype.name(),
            bytes: info.bytes().unwrap_or(0) as u64,
        }
    }
}

/// What kind of tokenizer it is, as its file says.
fn tokenizer_kind(checkpoint: &Checkpoint) -> Option<String> {
    let metadata = checkpoint.metadata();
    if matches!(checkpoint.format(), Format::Gguf { .. }) {
        let pre = metadata.string("tokenizer.ggml.pre").ok().flatten();
        return Some(match metadata.string("tokenizer.ggml.model").ok().flatten()? {
            "gpt2" => format!("byte-level BPE, split as {}", pre.unwrap_or("nothing says")),
            "llama" => "SentencePiece BPE".to_owned(),
            other => other.to_owned(),
        });
    }
    let file = checkpoint.folder_file("tokenizer.json").ok().flatten()?;
    let json: serde_json::Value = serde_json::from_slice(&file).ok()?;
    Some(format!("{} of tokenizer.json", json["model"]["type"].as_str().unwrap_or("BPE")))
}

fn types(checkpoint: &Checkpoint) -> Vec<TypeReport> {
    let mut types = BTreeMap::<DType, TypeReport>::new();
    for info in checkpoint.tensors() {
        let dtype = info.dtype.name();
        let entry = types.entry(info.dtype).or_insert_with(|| TypeReport { dtype, tensors: 0, elements: 0, bytes: 0 });
        entry.tensors += 1;
        entry.elements += info.shape.elements().unwrap_or(0) as u64;
        entry.bytes += info.bytes().unwrap_or(0) as u64;
    }
    let mut types: Vec<_> = types.into_values().collect();
    types.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    types
}

fn memory_report(arguments: &Arguments, checkpoint: &Checkpoint, config: &Config) -> Result<MemoryReport> {
    let options = &arguments.options;
    let context = options.context.unwrap_or(config.context_length);
    if context > config.context_length {
        let limit = config.context_length;
        return Err(Usage(ironloom_decode::Error::ContextOption { asked: context, limit }.to_string()).into());
    }
    let device = Device::cpu(1);
    let plan = RunMemory::new(config, checkpoint, &device, options.weights.into())?.plan(context, 1);
    let available = MemoryPlan::available_host_memory();
    Ok(MemoryReport {
        context,
        total_bytes: plan.total(),
        fits: available.map(|available| plan.total() <= available),
        available_bytes: available,
        parts: plan.parts().to_vec(),
    })
}

fn metadata(checkpoint: &Checkpoint) -> serde_json::Map<String, serde_json::Value> {
    checkpoint.metadata().iter().map(|(key, value)| (key.to_owned(), shown(value))).collect()
}

/// A metadata value as JSON: numbers as they are, long texts and lists by their beginning.
fn shown(value: &Value) -> serde_json::Value {
    match value {
        Value::F32(value) => number(&value.to_string()),
        Value::F64(value) => number(&value.to_string()),
        Value::Bool(value) => json!(value),
        Value::String(text) => json!(cut(text, VALUE_WIDTH)),
        Value::Array(array) => json!(cut(&list(array), VALUE_WIDTH)),
        other => match other.as_integer() {
            Some(integer) => i64::try_from(integer).map_or_else(|_| json!(integer.to_string()), |value| json!(value)),
            None => json!(other.kind()),
        },
    }
}

/// A fraction in as few digits as it takes; JSON has no NaN and no infinity, so those are texts.
fn number(text: &str) -> serde_json::Value {
    let number = text.parse().ok().and_then(serde_json::Number::from_f64);
    number.map_or_else(|| json!(text), serde_json::Value::Number)
}

/// The beginning of an array, after its length.
fn list(array: &Array) -> String {
    const SHOWN: usize = 8;
    let elements: Vec<String> = match array {
        Array::Strings(strings) => strings.iter().take(SHOWN).map(|text| format!("{text:?}")).collect(),
        Array::F32(values) => values.iter().take(SHOWN).map(ToString::to_string).collect(),
        Array::F64(values) => values.iter().take(SHOWN).map(ToString::to_string).collect(),
        Array::Bool(values) => values.iter().take(SHOWN).map(ToString::to_string).collect(),
        other => match other.integers() {
            Some(integers) => integers.take(SHOWN).map(|integer| integer.to_string()).collect(),
            None => Vec::new(),
        },
    };
    let more = if array.len() > elements.len() { ", …" } else { "" };
    format!("{} x {}: {}{more}", array.len(), array.kind().trim_start_matches("array of "), elements.join(", "))
}
