//! `ironloom export MODEL OUTPUT`: a model as a GGUF file or as a Hugging Face folder, with adapters merged where some are named.
//!
//! What makes text of ids goes with the weights: the tokenizer, the chat template and every end token. A GGUF file is written
//! as `quantize` writes it. Adapters are added to the weights in 32 bits first; the sum is written beside the output and removed when the
//! GGUF file is there.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use ironloom_core::{DType, format_bytes};
use ironloom_lm::{
    LoadOptions, Model,
    export::TextFiles,
    text::{AddBos, Specials},
};
use ironloom_quant::WeightFormat;
use ironloom_train::lora::peft;
use ironloom_weights::Checkpoint;
use serde::Serialize;

use crate::{
    console::{Console, Unit},
    failure::{Outcome, Usage},
    figures::counted,
    interrupt::{self, Work},
    loading,
    machine::MachineOptions,
    merging::{self, Merged},
    quantize::{self, GgufOutput, GgufType},
};

const EXAMPLES: &str = "\
Examples:
  ironloom export SmolLM2-135M-Instruct-finetuned/model facts.gguf --type q8_0
  ironloom export SmolLM2-135M-Instruct/ facts.gguf --type q4_k_m --adapter SmolLM2-135M-Instruct-finetuned/adapter
  ironloom export SmolLM2-135M-Instruct/ merged/ --adapter SmolLM2-135M-Instruct-finetuned/adapter
  ironloom export model.gguf model/

An output that ends with .gguf is a GGUF file; any other is a folder with safetensors in F32, which transformers reads too.";

/// Write a model, with an adapter merged if you have one, as a GGUF file or as a folder of safetensors
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// A GGUF file or a Hugging Face folder
    model: PathBuf,
    /// The GGUF file (NAME.gguf) or the folder to write
    output: PathBuf,
    /// Type of a GGUF file's matrices: q8_0, q4_0, q4_1, q5_0, q5_1, q4_k_m, q4_k, q6_k, f16, bf16 or f32 [default: f16]
    #[arg(long = "type", value_name = "TYPE", value_parser = quantize::parse_type)]
    gguf_type: Option<GgufType>,
    /// Add this adapter to the weights: a folder in PEFT's layout
    #[arg(long, value_name = "FOLDER")]
    adapter: Option<PathBuf>,
    /// Replace the output if it exists
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    machine: MachineOptions,
}

/// What `--json` prints of a folder.
#[derive(Serialize)]
struct Report<'a> {
    output: &'a Path,
    bytes_in: u64,
    bytes_out: u64,
    merging: Option<Merged>,
}

/// Writes the output.
pub(crate) fn run(arguments: &Arguments, console: &Console) -> Result<Outcome> {
    let Arguments { model, output, adapter, .. } = arguments;
    let is_gguf = output.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
    if !is_gguf && arguments.gguf_type.is_some_and(|asked| asked.dtype != DType::F32) {
        let message = "a folder is written in F32: name an output that ends with .gguf for other types".to_owned();
        return Err(Usage(message).into());
    }
    interrupt::install()?;
    check_output(arguments, is_gguf)?;
    let stored = loading::open(model)?;
    let gguf_type = arguments.gguf_type.unwrap_or_else(|| GgufType::plain(DType::F16));
    let (threads, json) = (arguments.machine.threads(), arguments.json);
    let options = GgufOutput { input: model, output, gguf_type, threads, json };
    match (adapter, is_gguf) {
        (None, true) => quantize::write(&stored, &options, console),
        (Some(adapter), true) => {
            let beside = Beside(PathBuf::from(format!("{}.{}.partial", output.display(), std::process::id())));
            // The folder's name becomes the name in the file.
            let folder = beside.0.join(loading::name(model));
            // Ctrl-C waits until the folder can be removed.
            let work = Work::begin(1);
            let merged = write_merged(arguments, &stored, Some(adapter), &folder, console)?;
            if work.is_interrupted() {
                console.note(format_args!("stopped; {} is not written", output.display()));
                return Ok(Outcome::Interrupted);
            }
            drop(work);
            if let Some(merged) = merged {
                console.note(format_args!("merged: {merged}"));
            }
            quantize::write(&loading::open(&folder)?, &options, console)
        }
        (adapter, false) => {
            let merged = write_merged(arguments, &stored, adapter.as_deref(), output, console)?;
            told(arguments, &stored, merged, console)
        }
    }
}

/// Refuses an output that would be lost. A folder is replaced only where it is one of a model and nothing else.
fn check_output(arguments: &Arguments, is_gguf: bool) -> Result<()> {
    let Arguments { model, output, force, .. } = arguments;
    let shown = output.display();
    quantize::check_output(model, output, *force)?;
    if is_gguf && output.is_dir() {
        bail!("{shown} is a folder: name the GGUF file to write");
    }
    if !is_gguf && output.exists() {
        let entries = fs::read_dir(output).with_context(|| format!("{shown} is not a folder"))?;
        let holds_folders = entries.flatten().any(|entry| entry.path().is_dir());
        if holds_folders || !output.join("config.json").exists() {
            bail!("{shown} is no folder of a model, so it is not replaced: choose another output");
        }
    }
    Ok(())
}

/// Says what a folder holds.
fn told(arguments: &Arguments, stored: &Checkpoint, merging: Option<Merged>, console: &Console) -> Result<Outcome> {
    let output = arguments.output.as_path();
    // Opened again, it is also known to be readable.
    let (bytes_in, bytes_out) = (stored.file_bytes(), loading::open(output)?.file_bytes());
    if arguments.json {
        console.print_json(&Report { output, bytes_in, bytes_out, merging })?;
        return Ok(Outcome::Done);
    }
    if let Some(merged) = merging {
        console.note(format_args!("merged: {merged}"));
    }
    let (before, after) = (format_bytes(bytes_in), format_bytes(bytes_out));
    console.print(format_args!("{}: {before} became {after}", output.display()))?;
    Ok(Outcome::Done)
}

/// Writes the model, with the adapter if there is one, as a folder.
fn write_merged(
    arguments: &Arguments,
    stored: &Checkpoint,
    adapter: Option<&Path>,
    folder: &Path,
    console: &Console,
) -> Result<Option<Merged>> {
    let adapter = match adapter {
        Some(path) => Some(peft::load(path).with_context(|| format!("cannot use {}", path.display()))?),
        None => None,
    };
    let device = arguments.machine.open()?;
    let (text, tokenizer) = (TextFiles::from_checkpoint(stored)?, loading::tokenizer(stored)?);
    let progress = console.progress("loading", Unit::Bytes);
    let show = |done, total| progress.set(done, total);
    let options = LoadOptions { format: WeightFormat::F32, progress: Some(&show) };
    let mut model = Model::load(stored, &device, &options)
        .with_context(|| format!("cannot export {}", arguments.model.display()))?;
    drop(progress);
    let merged = match adapter {
        Some(adapter) => {
            adapter.attach(&mut model)?;
            let probe = tokenizer.encode(PROBE, Specials::Literal, AddBos::Yes)?;
            console.note(format_args!("adding adapters to {}", counted(adapter.layers.len(), "layer")));
            Some(merging::merge(&mut model, &probe[..probe.len().min(merging::PROBE)])?)
        }
        None => {
            model.make_trainable()?;
            None
        }
    };
    merging::write_folder(&model, folder, &text)?;
    Ok(merged)
}

/// A text that a merged model is held against its adapters on.
const PROBE: &str = "The quick brown fox jumps over the lazy dog. In 1815, 27 of them were seen near the river.";

/// A folder that goes when its work is done, or fails.
struct Beside(PathBuf);

impl Drop for Beside {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
