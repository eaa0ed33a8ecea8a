//! `ironloom quantize INPUT OUTPUT --type T`: a model in another type, as a GGUF file.
//!
//! The library writes beside the output and renames when all is there, so an interrupted or failed run leaves nothing.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use ironloom_core::{DType, Threads, format_bytes};
use ironloom_lm::export::{ExportOptions, ExportReport, Mix, to_gguf};
use ironloom_weights::Checkpoint;
use serde::Serialize;

use crate::{
    console::{Console, Unit},
    failure::Outcome,
    figures::counted,
    interrupt::{self, Work},
    loading,
    machine::MachineOptions,
};

const EXAMPLES: &str = "\
Examples:
  ironloom quantize Qwen2.5-0.5B-Instruct/ qwen-q4_k_m.gguf --type q4_k_m
  ironloom quantize model-f16.gguf model-q8_0.gguf --type q8_0 --threads 4
  ironloom quantize SmolLM2-135M/ smollm2-bf16.gguf --type bf16 --json

Vectors and routers stay in F32, and matrices that a type does not suit get a larger one; --json lists each.";

/// The types of an output, by their names on the command line.
const TYPES: &[&str] = &["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k_m", "q4_k", "q6_k", "f16", "bf16", "f32"];

/// The type of a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GgufType {
    pub(crate) dtype: DType,
    pub(crate) mix: Mix,
}

impl GgufType {
    /// All matrices the same.
    pub(crate) fn plain(dtype: DType) -> Self {
        Self { dtype, mix: Mix::Plain }
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mix = if self.mix == Mix::Medium { "_M" } else { "" };
        write!(f, "{}{mix}", self.dtype)
    }
}

/// Write a model as a GGUF file in another type
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// A GGUF file or a Hugging Face folder
    input: PathBuf,
    /// The GGUF file to write
    output: PathBuf,
    /// Type of the matrices: q8_0, q4_0, q4_1, q5_0, q5_1, q4_k_m, q4_k, q6_k, f16, bf16 or f32
    #[arg(long = "type", value_name = "TYPE", value_parser = parse_type)]
    gguf_type: GgufType,
    /// Replace the output if it exists
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    machine: MachineOptions,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    output: &'a Path,
    #[serde(rename = "type")]
    gguf_type: String,
    tensors: usize,
    bytes_in: u64,
    bytes_out: u64,
    kept: &'a [String],
    notes: &'a [String],
    unused_tensors: &'a [String],
}

/// A GGUF file to write.
pub(crate) struct GgufOutput<'a> {
    /// What errors call the input.
    pub(crate) input: &'a Path,
    pub(crate) output: &'a Path,
    /// The type of the matrices.
    pub(crate) gguf_type: GgufType,
    pub(crate) threads: Threads,
    /// Whether one JSON object is printed instead of a line.
    pub(crate) json: bool,
}

/// Writes the file.
pub(crate) fn run(arguments: &Arguments, console: &Console) -> Result<Outcome> {
    interrupt::install()?;
    let Arguments { input, output, gguf_type, json, .. } = arguments;
    if output.is_dir() {
        bail!("{} is a folder: name the GGUF file to write", output.display());
    }
    check_output(input, output, arguments.force)?;
    let threads = arguments.machine.threads();
    let target = GgufOutput { input, output, gguf_type: *gguf_type, threads, json: *json };
    write(&loading::open(input)?, &target, console)
}

/// Writes `checkpoint` and says what was written.
///
/// # Errors
/// The model can't be written as GGUF, or the disk can't be written.
pub(crate) fn write(checkpoint: &Checkpoint, target: &GgufOutput<'_>, console: &Console) -> Result<Outcome> {
    let GgufOutput { output, gguf_type, json, .. } = target;
    let Some(report) = export(checkpoint, target, console)? else {
        console.note(format_args!("stopped; {} is not written", output.display()));
        return Ok(Outcome::Interrupted);
    };
    let unused = checkpoint.unused();
    let ExportReport { tensors, bytes_in, bytes_out, kept, notes } = &report;
    if *json {
        console.print_json(&Report {
            output,
            gguf_type: gguf_type.to_string(),
            tensors: *tensors,
            bytes_in: *bytes_in,
            bytes_out: *bytes_out,
            kept,
            notes,
            unused_tensors: &unused,
        })?;
        return Ok(Outcome::Done);
    }
    if !unused.is_empty() {
        let left = counted(unused.len(), "tensor");
        console.warn(format_args!(
            "{left} of the input left out, since the model does not use them: {}",
            unused.join(", ")
        ));
    }
    grouped_by_reason(kept).iter().chain(notes).for_each(|line| console.note(format_args!("note: {line}")));
    let (tensors, before, after) = (counted(*tensors, "tensor"), format_bytes(*bytes_in), format_bytes(*bytes_out));
    console.print(format_args!("{}: {tensors}, {gguf_type}, {before} became {after}", output.display()))?;
    Ok(Outcome::Done)
}

/// Writes the file; `None` when Ctrl-C came.
fn export(checkpoint: &Checkpoint, target: &GgufOutput<'_>, console: &Console) -> Result<Option<ExportReport>> {
    let work = Work::begin(1);
    let bar = console.progress("packing", Unit::Bytes);
    let progress = |done, total| {
        bar.set(done, total);
        work.flow()
    };
    let (GgufType { dtype, mix }, threads) = (target.gguf_type, target.threads.clone());
    let options = ExportOptions { dtype, mix, threads, progress: Some(&progress) };
    match to_gguf(checkpoint, target.output, &options) {
        Err(ironloom_lm::Error::Weights(ironloom_weights::Error::Cancelled { .. })) => Ok(None),
        exported => {
            let cannot = || format!("cannot write {} as {}", target.input.display(), target.output.display());
            exported.map(Some).with_context(cannot)
        }
    }
}

/// Lines of `name: reason`, one for each reason with its first names: a model has the same few shapes in every layer.
fn grouped_by_reason(lines: &[String]) -> Vec<String> {
    const SHOWN: usize = 3;
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in lines {
        let (name, reason) = line.split_once(": ").unwrap_or(("", line));
        match groups.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, names)) => names.push(name),
            None => groups.push((reason, vec![name])),
        }
    }
    let sentence = |(reason, names): (&str, Vec<&str>)| {
        let shown = names[..names.len().min(SHOWN)].join(", ");
        let more = names.len().saturating_sub(SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{shown}{more}: {reason}")
    };
    groups.into_iter().map(sentence).collect()
}

/// Refuses an output that would be lost.
///
/// # Errors
/// The output is the input, or is there already and `force` is not.
pub(crate) fn check_output(input: &Path, output: &Path, force: bool) -> Result<()> {
    let shown = output.display();
    if output.exists() {
        if same_file(input, output) {
            bail!("{shown} is the input itself: choose another output");
        }
        if !force {
            bail!("{shown} exists: choose another output, or replace it with --force");
        }
    }
    Ok(())
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// A type by its name on the command line.
pub(crate) fn parse_type(name: &str) -> Result<GgufType, String> {
    let name = name.to_ascii_lowercase();
    if name == "q4_k_m" {
        return Ok(GgufType { dtype: DType::Q4_K, mix: Mix::Medium });
    }
    let known = TYPES.contains(&name.as_str()).then(|| DType::from_name(&name)).flatten();
    known.map(GgufType::plain).ok_or_else(|| format!("the types are {}", TYPES.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_reason_is_said_once() {
        let lines: Vec<String> = (0..5).map(|layer| format!("blk.{layer}.up: Q8_0, because of its rows")).collect();
        let lines = [&lines[..], &["output: Q6_K, because it makes the logits".to_owned()]].concat();
        let grouped = [
            "blk.0.up, blk.1.up, blk.2.up and 2 more: Q8_0, because of its rows",
            "output: Q6_K, because it makes the logits",
        ];
        assert_eq!(grouped_by_reason(&lines), grouped);
    }

    #[test]
    fn types_are_known_by_name() {
        assert!(TYPES.iter().all(|name| parse_type(name).is_ok()));
        assert_eq!(parse_type("Q4_K"), Ok(GgufType::plain(DType::Q4_K)));
        assert_eq!(parse_type("q4_k_m").unwrap().to_string(), "Q4_K_M");
        assert!(parse_type("q2_k").unwrap_err().contains("q8_0, q4_0"));
    }
}
