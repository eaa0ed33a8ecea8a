//! Writes a model that was trained as a Hugging Face folder, which [`Model::load`] and transformers read: weights in single
//! precision, `config.json`, and the files of its text.
//!
//! The configuration is read back and held against the model's own before anything is written. `ironloom_dense` is a Llama, and
//! is written as one; InternLM2's fused matrix is three here, so it is written as a Llama too. ERNIE's q and k get the rows of
//! their rotation over neighbours again, and its routers their bias on the choice, which is zero. `ironloom_moe` has no class
//! in transformers.

use std::path::Path;

use ironloom_core::{DType, Shape};
use ironloom_weights::{Checkpoint, Format, Metadata, NewTensor, TensorInfo, unwatched};
use serde_json::{Map, Value, json};

use super::{
    hugging_face::{FORMAT, MAX_SHARD_BYTES, config_json, special_ids, target, write_file, write_json},
    refuse,
    tokenizer_json::tokenizer_files,
};
use crate::{
    Architecture, Config, Error, FeedForwardConfig, Model, Result,
    names::{Part, inverse},
};

/// The files beside a model's weights that say how text becomes ids and back, and which ids begin and end it.
#[derive(Clone, Debug, Default)]
pub struct TextFiles {
    /// Names and contents.
    files: Vec<(String, Vec<u8>)>,
    /// `bos_token_id`, `eos_token_id`, `pad_token_id` as `config.json` has them.
    ids: Map<String, Value>,
}

/// Files of a folder that belong to its text.
const TEXT_FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
];

impl TextFiles {
    /// Those of a checkpoint: a folder's own, or a GGUF file's written as a folder's.
    ///
    /// # Errors
    /// The tokenizer of a GGUF file can't be written, or files can't be read.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        if checkpoint.format() != Format::Safetensors {
            let (text, ids) = (tokenizer_files(checkpoint.metadata())?, special_ids(checkpoint.metadata())?);
            let files = [
                ("tokenizer.json", text.tokenizer),
                ("tokenizer_config.json", text.settings),
                ("generation_config.json", Value::Object(ids.clone())),
            ];
            let files = files.map(|(name, json)| (name.to_owned(), format!("{json:#}\n").into_bytes()));
            return Ok(Self { files: files.into(), ids });
        }
        let mut files = Vec::new();
        for name in TEXT_FILES {
            if let Some(bytes) = checkpoint.folder_file(name)? {
                files.push((name.to_owned(), bytes));
            }
        }
        let config: Value = match checkpoint.folder_file("config.json")? {
            Some(bytes) => serde_json::from_slice(&bytes)
                .map_err(|source| Error::ConfigJson { path: checkpoint.path().to_owned(), source })?,
            None => Value::Null,
        };
        let kept = ["bos_token_id", "eos_token_id", "pad_token_id"].map(|key| (key.to_owned(), config[key].clone()));
        Ok(Self { files, ids: kept.into_iter().filter(|(_, value)| !value.is_null()).collect() })
    }

    /// Those of a tokenizer that was trained here: its `tokenizer.json`, the token that ends a text, and that token's id.
    pub fn of_trained(tokenizer_json: &str, end_token: &str, end_id: u32) -> Self {
        let settings = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end_token,
            "clean_up_tokenization_spaces": false,
        });
        let ids = Map::from_iter([("eos_token_id".to_owned(), Value::from(end_id))]);
        let json = |value: &Value| format!("{value:#}\n").into_bytes();
        let files = [
            ("tokenizer.json", tokenizer_json.as_bytes().to_vec()),
            ("tokenizer_config.json", json(&settings)),
            ("generation_config.json", json(&Value::Object(ids.clone()))),
        ];
        Self { files: files.map(|(name, bytes)| (name.to_owned(), bytes)).into(), ids }
    }
}

/// Writes the folder, which is made where it isn't there. Every matrix must be dense, as [`Model::make_trainable`] makes it,
/// and adapters merged.
///
/// # Errors
/// A matrix is packed, an adapter is attached, the configuration has an option that `config.json` can't say, or files cannot be
/// written.
pub fn write_trained(model: &Model, folder: &Path, text: &TextFiles) -> Result<()> {
    if model.has_adapters() {
        return Err(refuse("a model with adapters", FORMAT, "merge them first, or save them beside their base"));
    }
    if !model.is_dense() {
        return Err(refuse("a model of packed weights", FORMAT, "only what was trained is written: use `quantize`"));
    }
    let mut config = target(&model.config)?;
    if matches!(config.architecture, Architecture::IronloomDense | Architecture::InternLm2) {
        config.architecture = Architecture::Llama;
    }
    let (json, width) = (config_json(&config, DType::F32, text.ids.clone())?, config.width);
    let mut tensors: Vec<_> = model
        .parameters()
        .into_iter()
        .map(|parameter| {
            let info = TensorInfo { name: parameter.name, dtype: DType::F32, shape: *parameter.values.shape() };
            let less_one = config.norms_less_one && info.shape.dims().len() == 1 && info.name.ends_with("norm.weight");
            let layer = info.name.strip_suffix(".weight").unwrap_or(&info.name);
            let order = config.stored_rows(layer).map(|rows| inverse(&rows));
            NewTensor::made(info, move || {
                let less = if less_one { 1.0 } else { 0.0 };
                let values = parameter.values.clone().into_f32()?;
                if let Some(order) = &order {
                    let row = |row: &u32| &values[*row as usize * width..][..width];
                    return Ok(order.iter().flat_map(row).flat_map(|value| value.to_le_bytes()).collect());
                }
                Ok(values.iter().flat_map(|value| (value - less).to_le_bytes()).collect())
            })
        })
        .collect();
    tensors.extend(router_biases(&config));
    let mut metadata = Metadata::new();
    metadata.insert("format", "pt");
    ironloom_weights::safetensors::write_sharded(folder, &metadata, tensors, MAX_SHARD_BYTES, &mut unwatched)?;
    write_json(&folder.join("config.json"), &json)?;
    for (name, bytes) in &text.files {
        write_file(&folder.join(name), bytes)?;
    }
    Ok(())
}

/// What ERNIE's checkpoints add to the probabilities that experts are chosen by.
fn router_biases(config: &Config) -> Vec<NewTensor<'static>> {
    let experts = match &config.experts {
        Some(experts) if config.architecture == Architecture::Ernie45Moe => experts.count,
        _ => return Vec::new(),
    };
    let is_routed = |layer: &usize| config.layers[*layer].feed_forward == FeedForwardConfig::Routed;
    let bias = |layer| {
        let name = config.trained_naming().name(Part::RouterBias, layer);
        let info = TensorInfo { name, dtype: DType::F32, shape: Shape::from([1, experts]) };
        NewTensor::new(info, vec![0; experts * size_of::<f32>()])
    };
    (0..config.layers.len()).filter(is_routed).map(bias).collect()
}
