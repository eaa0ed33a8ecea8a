//! Every golden model: the logits another implementation computed from the same weights, at every position of two prompts.
//!
//! On a graphics card weights are held in bfloat16 and the bound is twice the error that the other implementation makes in
//! bfloat16 itself, as `bf16_errors.json` has it.

use std::{collections::HashMap, fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use ironloom_lm::{LoadOptions, LogitRows, Model};
use ironloom_nn::Span;
use ironloom_quant::{WeightFormat, pack, unpack};
use ironloom_tensor::{Context, Device};
use ironloom_weights::{Checkpoint, DType, NewTensor, TensorInfo, safetensors, unwatched};

use serde::Deserialize;

use super::{
    case::{Bound, Case, Kernel, Results},
    place::is_cpu,
};
use crate::workspace;

/// The relative error of logits. The reference itself, in single precision, is within 3e-6 of its double-precision pass;
/// one wrong option is 5e-4 away or more.
const BOUND: Bound = Bound::Fixed(1e-5);
const SEQUENCES: [&str; 2] = ["short", "long"];

/// A case for each prompt of each folder of `tests/golden/models`.
pub(super) fn cases(device: &Device) -> Result<Vec<Case>> {
    let folder = workspace::root().join("tests/golden/models");
    let mut cases = Vec::new();
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut models: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    models.retain(|model| model.join("model.safetensors").exists() && model.join("expected.safetensors").exists());
    models.sort();
    let errors = if is_cpu(device) { None } else { Some(Bf16Errors::read(&folder.join("bf16_errors.json"))?) };
    for model in models {
        let name = model.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for sequence in SEQUENCES {
            let bound = match &errors {
                Some(errors) => errors.bound(&name, sequence)?,
                None => BOUND,
            };
            let (model, device) = (model.clone(), device.clone());
            cases.push(Case::new(format!("model {name}"), sequence, bound, move |kernel| {
                results(&model, sequence, &device, kernel)
            }));
        }
    }
    Ok(cases)
}

/// How far the other implementation's own logits in bfloat16 are from those in single precision.
#[derive(Deserialize)]
struct Bf16Errors {
    errors: HashMap<String, HashMap<String, f64>>,
}

impl Bf16Errors {
    fn read(path: &Path) -> Result<Self> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} has another form", path.display()))
    }

    fn bound(&self, model: &str, sequence: &str) -> Result<Bound> {
        let of = |name: &str| self.errors.get(model).and_then(|errors| errors.get(name)).copied();
        let error =
            of(sequence).with_context(|| format!("no error in bfloat16 is recorded for {model}, {sequence}"))?;
        // Where rows of a model lie so near a tie that bfloat16 sends them to other experts, which rows flip is chance: the
        // larger of its sequences' errors is what one such row costs.
        let flips = of("other_experts").is_some_and(|rows| rows > 0.0);
        let error = if flips { SEQUENCES.iter().filter_map(|name| of(name)).fold(error, f64::max) } else { error };
        Ok(Bound::Fixed(2.0 * error))
    }
}

fn results(folder: &Path, sequence: &str, device: &Device, kernel: Kernel) -> Result<Results> {
    let expected = ironloom_weights::open(folder.join("expected.safetensors"))?;
    let ids = integers(&expected, &format!("{sequence}.input_ids"))?;
    let reference = floats(&expected, &format!("{sequence}.logits"))?;
    let model = match kernel {
        Kernel::Ours => load(folder, device)?,
        Kernel::OneInFourDropped => {
            let place = workspace::target().join("parity-dropped").join(folder.file_name().unwrap_or_default());
            drop_weights(folder, &place, kernel)?;
            load(&place, device)?
        }
    };
    let mut cache = model.new_cache();
    let mut spans = [Span { cache: &mut cache, rows: ids.len() }];
    let logits = model.forward(&Context::inference(device), &ids, &mut spans, LogitRows::All)?;
    let reference = reference.into_iter().map(f64::from).collect();
    Ok(Results::new(reference, Vec::new(), logits.into_f32()?))
}

fn load(folder: &Path, device: &Device) -> Result<Model> {
    let format = if is_cpu(device) { WeightFormat::Keep } else { WeightFormat::Bf16 };
    Ok(Model::load(&ironloom_weights::open(folder)?, device, &LoadOptions { format, progress: None })?)
}

/// Writes the model of `from` to `to` with what `kernel` drops of each tensor.
fn drop_weights(from: &Path, to: &Path, kernel: Kernel) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make the folder {}", to.display()))?;
    fs::copy(from.join("config.json"), to.join("config.json"))?;
    let checkpoint = ironloom_weights::open(from)?;
    let mut tensors = Vec::new();
    for info in checkpoint.tensors() {
        let values = floats(&checkpoint, &info.name)?;
        let info = TensorInfo { name: info.name.clone(), dtype: info.dtype, shape: info.shape };
        let bytes = pack(info.dtype, &kernel.inputs(&values))?;
        tensors.push(NewTensor::new(info, bytes));
    }
    safetensors::write(to.join("model.safetensors"), checkpoint.metadata(), tensors, &mut unwatched)?;
    Ok(())
}

fn floats(checkpoint: &Checkpoint, name: &str) -> Result<Vec<f32>> {
    let tensor = checkpoint.tensor(name)?;
    let mut values = vec![0.0; tensor.shape.elements()?];
    unpack(tensor.dtype, &tensor.bytes, &mut values)?;
    Ok(values)
}

fn integers(checkpoint: &Checkpoint, name: &str) -> Result<Vec<u32>> {
    let tensor = checkpoint.tensor(name)?;
    ensure!(tensor.dtype == DType::I32, "{name} is {}, and I32 is right", tensor.dtype);
    let words = tensor.bytes.as_chunks::<4>().0;
    Ok(words.iter().map(|&word| u32::from_le_bytes(word)).collect())
}
