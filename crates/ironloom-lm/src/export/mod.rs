//! Writes a model in the other format, or in another type: Hugging Face folder to GGUF, GGUF to GGUF, GGUF to folder.
//!
//! In: an opened checkpoint, mapped. Out: a file or folder that appears under its name only when it's complete. A configuration
//! becomes a list of recipes, one for each tensor to write, and the writer asks for them one after the other, so that one
//! tensor is in memory at a time, packed by all threads. The files are llama.cpp's: names, keys, order of rows and types
//! follow its converter. Whatever the target can't say is refused by name, and what only some readers will heed is noted in the
//! [`ExportReport`].
//!
//! Exporting is exact where it can be: to F32 and back, a folder's tensors return bit for bit.

mod hugging_face;
mod metadata;
mod recipe;
mod tokenizer;
mod tokenizer_json;
mod trained;
mod types;
mod weights;

use std::{ops::ControlFlow, path::Path};

use ironloom_core::{DType, Shape, Threads};
use ironloom_weights::{Checkpoint, Format, Metadata, NewTensor, TensorInfo};

pub use hugging_face::to_hugging_face;
pub use trained::{TextFiles, write_trained};
pub use types::Mix;

use crate::{Config, Error, Result, names::Naming};
use recipe::Recipe;
use types::TypePolicy;

/// How a GGUF file is written.
#[derive(Clone)]
pub struct ExportOptions<'a> {
    /// The type of the matrices: F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K or Q6_K. Vectors and routers stay in F32, and
    /// [`ExportReport::kept`] lists the matrices that get a larger type.
    pub dtype: DType,
    /// Whether some matrices get more bits.
    pub mix: Mix,
    /// The threads that pack.
    pub threads: Threads,
    /// Called after each tensor with the bytes written and all bytes to write; where it breaks, the export is given up.
    pub progress: Option<&'a dyn Fn(u64, u64) -> ControlFlow<()>>,
}

impl ExportOptions<'_> {
    /// This type, on all threads, without a report of progress.
    pub fn new(dtype: DType) -> Self {
        Self { dtype, mix: Mix::default(), threads: Threads::all(), progress: None }
    }
}

impl std::fmt::Debug for ExportOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExportOptions")
            .field("dtype", &self.dtype)
            .field("mix", &self.mix)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportReport {
    /// Tensors in the output.
    pub tensors: usize,
    /// Bytes of the input's weight files.
    pub bytes_in: u64,
    /// Bytes of the output's weight file.
    pub bytes_out: u64,
    /// Matrices that got a larger type than asked for, each with its type and why.
    pub kept: Vec<String>,
    /// What a person should know: what other readers will do differently, what was left behind.
    pub notes: Vec<String>,
}

/// Writes `checkpoint` as the GGUF file `out`.
///
/// From a Hugging Face folder the names, keys, rows, tokenizer, end tokens and chat template become GGUF's. From a GGUF file
/// the metadata stay as they are but for the type they name, and each matrix is packed again from what the file holds:
/// packing what was packed before adds the errors of both.
///
/// ```no_run
/// use ironloom_core::DType;
/// use ironloom_lm::export::{ExportOptions, to_gguf};
/// let folder = ironloom_weights::open("SmolLM2-135M-Instruct")?;
/// let report = to_gguf(&folder, "SmolLM2-135M-Instruct.Q4_K.gguf".as_ref(), &ExportOptions::new(DType::Q4_K))?;
/// println!("{} bytes became {}", report.bytes_in, report.bytes_out);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The model, its tokenizer or the type can't be written to GGUF ([`Error::NotExportable`] says what and why); the
/// configuration isn't supported; tensors are missing or have other shapes than it says; a weight isn't a finite number or doesn't
/// fit the type; the progress broke off ([`ironloom_weights::Error::Cancelled`]); the file cannot be written. `out` is then as it was.
pub fn to_gguf(checkpoint: &Checkpoint, out: &Path, options: &ExportOptions<'_>) -> Result<ExportReport> {
    let config = Config::from_checkpoint(checkpoint)?;
    let types = TypePolicy::new(options.dtype, options.mix, config.tied_embeddings, config.layers.len())?;
    let mut plan = match checkpoint.format() {
        Format::Gguf { .. } => Plan {
            metadata: checkpoint.metadata().clone(),
            fixed: Vec::new(),
            recipes: checkpoint.tensors().cloned().map(Recipe::copy).collect(),
            notes: Vec::new(),
        },
        Format::Safetensors => plan_of_folder(&config, checkpoint)?,
    };
    // GGUF's version of its packed types; no other was ever released with these types.
    const QUANTIZATION_VERSION: u32 = 2;
    plan.metadata.insert("general.file_type", types::file_type(options.dtype, options.mix).unwrap_or_default());
    plan.metadata.insert("general.quantization_version", QUANTIZATION_VERSION);
    check_sources(&plan.recipes, checkpoint)?;
    let mut kept = Vec::new();
    for recipe in &mut plan.recipes {
        let choice = types.choose(&recipe.info.name, recipe.info.shape);
        recipe.info.dtype = choice.dtype;
        kept.extend(choice.reason);
    }
    let mut tensors = plan.fixed;
    tensors.extend(plan.recipes.into_iter().map(|recipe| recipe.into_tensor(checkpoint, &options.threads)));
    let count = tensors.len();
    ironloom_weights::gguf::write(out, &plan.metadata, tensors, &mut |progress| match options.progress {
        Some(show) => show(progress.bytes, progress.total_bytes),
        None => ControlFlow::Continue(()),
    })?;
    report(checkpoint, out, count, kept, plan.notes)
}

/// What a GGUF file will hold.
struct Plan {
    metadata: Metadata,
    /// Tensors that no stored one is the source of.
    fixed: Vec<NewTensor<'static>>,
    recipes: Vec<Recipe>,
    notes: Vec<String>,
}

fn plan_of_folder(config: &Config, checkpoint: &Checkpoint) -> Result<Plan> {
    let json: serde_json::Value = match checkpoint.folder_file("config.json")? {
        Some(bytes) => serde_json::from_slice(&bytes)
            .map_err(|source| Error::ConfigJson { path: checkpoint.path().to_owned(), source })?,
        None => return Err(Error::MissingConfig { path: checkpoint.path().to_owned() }),
    };
    let dense_width = json["intermediate_size"].as_u64().and_then(|width| usize::try_from(width).ok());
    let folder = checkpoint.path().file_name().map(|name| name.to_string_lossy().into_owned());
    let name = json["_name_or_path"].as_str().filter(|name| !name.is_empty()).map(str::to_owned).or(folder);
    let description = metadata::describe(config, name.as_deref().unwrap_or("model"), dense_width)?;
    let (mut metadata, mut notes) = (description.metadata, description.notes);
    tokenizer::add_tokenizer(&mut metadata, checkpoint, config.vocab_size, &mut notes)?;
    let fixed = description.rope_factors.map(|factors| {
        let info =
            TensorInfo { name: "rope_freqs.weight".into(), dtype: DType::F32, shape: Shape::from([factors.len()]) };
        NewTensor::new(info, factors.iter().flat_map(|factor| factor.to_le_bytes()).collect())
    });
    let naming = Naming::hugging_face(config.architecture, |name| checkpoint.contains(name));
    let recipes = weights::to_gguf(config, naming);
    Ok(Plan { metadata, fixed: fixed.into_iter().collect(), recipes, notes })
}

/// Refuses missing tensors, all together, and wrong shapes, before anything is written.
fn check_sources(recipes: &[Recipe], checkpoint: &Checkpoint) -> Result<()> {
    let mut missing = Vec::new();
    for recipe in recipes {
        recipe.check(checkpoint, &mut missing)?;
    }
    missing.dedup();
    if missing.is_empty() {
        return Ok(());
    }
    let (path, count, names) = (checkpoint.path().to_owned(), missing.len(), missing.join(", "));
    Err(Error::MissingTensors { path, count, names })
}

fn report(
    checkpoint: &Checkpoint,
    out: &Path,
    tensors: usize,
    kept: Vec<String>,
    mut notes: Vec<String>,
) -> Result<ExportReport> {
    let unused = checkpoint.unused();
    if !unused.is_empty() {
        notes.push(format!("{} tensors of the input are no part of the model: {}", unused.len(), unused.join(", ")));
    }
    // Opened again, it is also known to be readable.
    let bytes_out = ironloom_weights::open(out)?.file_bytes();
    Ok(ExportReport { tensors, bytes_in: checkpoint.file_bytes(), bytes_out, kept, notes })
}

fn refuse(what: impl Into<String>, format: &'static str, reason: impl Into<String>) -> Error {
    Error::NotExportable { what: what.into(), format, reason: reason.into() }
}
