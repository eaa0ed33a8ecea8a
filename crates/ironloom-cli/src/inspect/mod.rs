//! `ironloom inspect FILE`: what a model file holds, and what running it would take.
//!
//! Nothing but headers is read. A file whose model cannot run is shown all the same, with the reason: that is when people
//! look into files.

mod report;
mod table;

use std::path::PathBuf;

use anyhow::Result;

use crate::{
    console::Console,
    failure::Outcome,
    loading::{self, ModelOptions},
};

const EXAMPLES: &str = "\
Examples:
  ironloom inspect model.gguf
  ironloom inspect model.gguf --tensors --metadata
  ironloom inspect Qwen2.5-0.5B/ --context 32768 --weights int8
  ironloom inspect model.gguf --json | jq .memory.total_bytes";

/// Show what a model file holds and what it takes to run
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// A GGUF or safetensors file, an index of shards, or a Hugging Face folder
    file: PathBuf,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// List the file's metadata, values cut short
    #[arg(long)]
    metadata: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: ModelOptions,
}

/// Shows the file.
pub(crate) fn run(arguments: &Arguments, console: &Console) -> Result<Outcome> {
    let checkpoint = loading::open(&arguments.file)?;
    let report = report::Report::new(arguments, &checkpoint)?;
    if arguments.json {
        console.print_json(&report)?;
    } else {
        console.print(table::text(&report).trim_end())?;
    }
    Ok(Outcome::Done)
}
