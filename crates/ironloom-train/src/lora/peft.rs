//! Adapters in the layout of the Python library `peft`: a folder with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! ```text
//! base_model.model.<layer>.lora_A.weight    [rank, inputs]
//! base_model.model.<layer>.lora_B.weight    [outputs, rank]
//! ```
//!
//! Which layers are adapted is read from the tensors. The configuration gives the scale and the dropout, and is read to
//! its last field: what has no meaning here must have the value that switches it off, or the adapter is refused by that field's name.
//! Fields that only say how an adapter was first set or which layers were chosen are let be.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use ironloom_core::{DType, replace_file};
use ironloom_weights::{Metadata, NewTensor, TensorData, TensorInfo, safetensors, unwatched};
use serde_json::{Map, Value, json};

use super::{ALL_LINEAR, LoraAdapter, LoraError, LoraMatrices, LoraOptions, targets};
use crate::Error;

/// The name of the configuration.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// The name of the matrices' file.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

const PREFIX: &str = "base_model.model.";
const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";

/// Writes a folder that `PeftModel.from_pretrained` reads. Each file is replaced only by a whole one.
///
/// Targets with `*` are written as the layers that they named, for PEFT would read them as regular expressions.
///
/// # Errors
/// The options don't make sense, a matrix has another size than its layer says, two have one name, or a file can't be written.
pub fn save(folder: impl AsRef<Path>, adapter: &LoraAdapter) -> crate::Result<()> {
    let (folder, options) = (folder.as_ref(), &adapter.options);
    options.check()?;
    std::fs::create_dir_all(folder).map_err(|source| Error::Write { path: folder.to_owned(), source })?;
    let mut tensors = Vec::with_capacity(2 * adapter.layers.len());
    for LoraMatrices { layer, inputs, outputs, a, b } in &adapter.layers {
        for (matrix, name, values, shape) in
            [("A", A, a, [options.rank, *inputs]), ("B", B, b, [*outputs, options.rank])]
        {
            let expected = shape[0].saturating_mul(shape[1]);
            if values.len() != expected {
                return Err(LoraError::Length { layer: layer.clone(), matrix, expected, found: values.len() }.into());
            }
            let info = TensorInfo { name: format!("{PREFIX}{layer}{name}"), dtype: DType::F32, shape: shape.into() };
            tensors.push(NewTensor::made(info, || Ok(bytemuck::cast_slice(values).to_vec())));
        }
    }
    let mut metadata = Metadata::new();
    metadata.insert("format", "pt");
    safetensors::write(folder.join(WEIGHTS_FILE), &metadata, tensors, &mut unwatched)?;

    let path = folder.join(CONFIG_FILE);
    let written = serde_json::to_vec_pretty(&config(adapter))
        .map_err(std::io::Error::from)
        .and_then(|text| replace_file(&path, &text));
    written.map_err(|source| Error::Write { path, source })
}

/// Reads a folder that [`save`] or PEFT's `save_pretrained` wrote. Matrices come in single precision, in the order of their layers'
/// names.
///
/// # Errors
/// A file is missing or damaged; the configuration asks for what isn't supported; a tensor is no part of an adapter of
/// linear layers, has another shape than the rank says, or is without its partner.
pub fn load(folder: impl AsRef<Path>) -> crate::Result<LoraAdapter> {
    let folder = folder.as_ref();
    for missing in [CONFIG_FILE, WEIGHTS_FILE] {
        if !folder.join(missing).is_file() {
            let pickled = missing == WEIGHTS_FILE && folder.join("adapter_model.bin").is_file();
            return Err(LoraError::NotAnAdapter { folder: folder.to_owned(), missing, pickled }.into());
        }
    }
    let path = folder.join(CONFIG_FILE);
    let text = std::fs::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
    let config: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|source| LoraError::Config { path: path.clone(), source })?;
    let config = Config { path, fields: config };
    let (options, base_model) = config.read()?;
    let layers = matrices(folder.join(WEIGHTS_FILE), options.rank)?;
    Ok(LoraAdapter { options, base_model, layers })
}

/// The configuration as PEFT has written it since its first versions; later fields default to off.
fn config(adapter: &LoraAdapter) -> Value {
    let options = &adapter.options;
    let targets: Vec<&str> = if options.targets.iter().any(|target| targets::is_pattern(target)) {
        adapter.layers.iter().map(|layer| layer.layer.as_str()).collect()
    } else {
        options.targets.iter().map(String::as_str).collect()
    };
    let whole = options.alpha.fract() == 0.0 && options.alpha < 1e15;
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "revision": null,
        "inference_mode": true,
        "r": options.rank,
        "lora_alpha": if whole { json!(options.alpha as u64) } else { json!(options.alpha) },
        "lora_dropout": options.dropout,
        "use_rslora": options.rank_stabilized,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "modules_to_save": null,
        "layers_to_transform": null,
        "layers_pattern": null,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": false,
    })
}

/// The fields of a configuration, and the file they are from.
struct Config {
    path: PathBuf,
    fields: Map<String, Value>,
}

/// Fields that are read, or that don't change what an adapter computes.
const KNOWN: [&str; 27] = [
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "base_model_name_or_path",
    "peft_type",
    "task_type",
    "bias",
    "init_lora_weights",
    // Who wrote it, from what, and whether it was in training.
    "peft_version",
    "auto_mapping",
    "revision",
    "inference_mode",
    "runtime_config",
    // Which layers were chosen: the tensors say it.
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    // How the matrices began; `init_lora_weights` says whether the base was changed with it.
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    // Of switches that are off, or of other layers than linear ones.
    "qalora_group_size",
    "megatron_config",
    "megatron_core",
    "ensure_weight_tying",
    "ephemeral_gpu_offload",
];

impl Config {
    /// Options and the name of the base model.
    fn read(&self) -> Result<(LoraOptions, Option<String>), LoraError> {
        self.refuse_unsupported()?;
        let rank = self.number("r", 8.0)?;
        if rank.fract() != 0.0 || !(1.0..=1e6).contains(&rank) {
            return Err(self.wrong("r", "a whole number from 1 to 1,000,000"));
        }
        let options = LoraOptions {
            rank: rank as usize,
            alpha: self.number("lora_alpha", 8.0)?,
            dropout: self.number("lora_dropout", 0.0)?,
            rank_stabilized: match self.fields.get("use_rslora") {
                None | Some(Value::Null) => false,
                Some(Value::Bool(value)) => *value,
                Some(_) => return Err(self.wrong("use_rslora", "true or false")),
            },
            targets: self.targets()?,
        };
        options.check()?;
        let base_model = match self.fields.get("base_model_name_or_path") {
            None | Some(Value::Null) => None,
            Some(Value::String(name)) => Some(name.clone()),
            Some(_) => return Err(self.wrong("base_model_name_or_path", "a string or null")),
        };
        Ok((options, base_model))
    }

    /// Names of targets. PEFT takes a lone string as a regular expression, which is not kept: the tensors say which layers it named.
    fn targets(&self) -> Result<Vec<String>, LoraError> {
        let wanted = "a list of names, a string or null";
        match self.fields.get("target_modules") {
            Some(Value::Array(names)) if !names.is_empty() => {
                let name = |name: &Value| name.as_str().map(str::to_owned);
                names.iter().map(name).collect::<Option<_>>().ok_or_else(|| self.wrong("target_modules", wanted))
            }
            None | Some(Value::Null | Value::String(_) | Value::Array(_)) => Ok(vec![ALL_LINEAR.to_owned()]),
            Some(_) => Err(self.wrong("target_modules", wanted)),
        }
    }

    fn number(&self, field: &'static str, default: f64) -> Result<f64, LoraError> {
        match self.fields.get(field) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.wrong(field, "a number")),
        }
    }

    fn wrong(&self, field: &'static str, wanted: &'static str) -> LoraError {
        let found = self.fields.get(field).map_or_else(|| "missing".to_owned(), shortened);
        LoraError::Field { path: self.path.clone(), field, wanted, found }
    }

    fn refuse_unsupported(&self) -> Result<(), LoraError> {
        if self.fields.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return Err(self.wrong("peft_type", "\"LORA\""));
        }
        for (field, value) in &self.fields {
            let way_out = match (field.as_str(), value) {
                ("task_type", Value::Null) => continue,
                ("task_type", value) if value == "CAUSAL_LM" => continue,
                ("task_type", _) => "only adapters of language models (CAUSAL_LM) are read",
                ("bias", value) if value == "none" => continue,
                ("bias", _) => "train it with bias=\"none\"",
                // These leave the base as it is; others, such as "pissa", take a part out of it.
                ("init_lora_weights", Value::Bool(_) | Value::Null) => continue,
                ("init_lora_weights", Value::String(way))
                    if ["gaussian", "orthogonal", "eva"].contains(&way.as_str()) =>
                {
                    continue;
                }
                ("init_lora_weights", _) => {
                    "it changes the base model; save the adapter as plain LoRA (path_initial_model_for_weight_conversion)"
                }
                (known, _) if KNOWN.contains(&known) => continue,
                (_, value) if is_off(value) => continue,
                ("use_dora", _) => "train it without DoRA, or merge it into its model with peft",
                ("modules_to_save", _) => "train it without whole modules, or merge it into its model with peft",
                ("rank_pattern" | "alpha_pattern", _) => "one rank and one alpha for all layers are read",
                _ => "merge the adapter into its model with peft",
            };
            let (path, value) = (self.path.clone(), shortened(value));
            return Err(LoraError::Unsupported { path, field: field.clone(), value, way_out });
        }
        Ok(())
    }
}

/// Whether a value switches its field off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => false,
    }
}

/// A value for a message.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The matrices of a file, by layer.
fn matrices(path: PathBuf, rank: usize) -> crate::Result<Vec<LoraMatrices>> {
    let checkpoint = ironloom_weights::open(&path)?;
    let mut pairs: BTreeMap<String, [Option<TensorData>; 2]> = BTreeMap::new();
    let names: Vec<String> = checkpoint.tensors().map(|info| info.name.clone()).collect();
    for name in names {
        let layer = name.strip_prefix(PREFIX).and_then(|rest| {
            let matrix = [A, B].iter().position(|end| rest.ends_with(end))?;
            Some((&rest[..rest.len() - A.len()], matrix)).filter(|(layer, _)| !layer.is_empty())
        });
        let Some((layer, matrix)) = layer else {
            return Err(LoraError::UnknownTensor { path, tensor: name }.into());
        };
        pairs.entry(layer.to_owned()).or_default()[matrix] = Some(checkpoint.tensor(&name)?);
    }
    if pairs.is_empty() {
        return Err(LoraError::Empty { path }.into());
    }
    let layer = |(layer, pair): (String, [Option<TensorData>; 2])| match pair {
        [Some(a), Some(b)] => {
            let (&[a_rank, inputs], &[outputs, b_rank]) = (a.shape.dims(), b.shape.dims()) else {
                let bad = if a.shape.dims().len() == 2 { b } else { a };
                return Err(shape_error(&path, bad, rank));
            };
            if a_rank != rank {
                return Err(shape_error(&path, a, rank));
            }
            if b_rank != rank {
                return Err(shape_error(&path, b, rank));
            }
            Ok(LoraMatrices { layer, inputs, outputs, a: values(&path, a)?, b: values(&path, b)? })
        }
        [first, _] => {
            let missing = if first.is_some() { "lora_B" } else { "lora_A" };
            Err(LoraError::Unpaired { path: path.clone(), layer, missing }.into())
        }
    };
    pairs.into_iter().map(layer).collect()
}

fn shape_error(path: &Path, tensor: TensorData, rank: usize) -> Error {
    let wanted = if tensor.name.ends_with(A) { "[rank, inputs]" } else { "[outputs, rank]" };
    let (path, shape) = (path.to_owned(), Box::new(tensor.shape));
    LoraError::Shape { path, tensor: tensor.name, shape, rank, wanted }.into()
}

fn values(path: &Path, tensor: TensorData) -> crate::Result<Vec<f32>> {
    if !matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(LoraError::Type { path: path.to_owned(), tensor: tensor.name, dtype: tensor.dtype }.into());
    }
    let mut values = vec![0.0; tensor.shape.elements().map_err(ironloom_weights::Error::from)?];
    ironloom_quant::unpack(tensor.dtype, &tensor.bytes, &mut values)?;
    Ok(values)
}

#[cfg(test)]
mod tests;
