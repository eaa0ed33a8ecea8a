//! `ironloom`: runs, chats with, inspects, quantizes, measures and trains language models.
//!
//! Arguments come in, a command's module does the work, and an exit code goes out: 0 done, 1 failed, 2 wrong usage, 130
//! interrupted. What a command makes goes to stdout (text, or one JSON object with `--json`); everything about the work
//! (progress, warnings, speed, errors) goes to stderr. Nothing here is of use to another program: what is lives in the
//! libraries.

mod bench;
mod chat;
mod console;
mod conversation;
mod export;
mod failure;
mod figures;
mod inspect;
mod interrupt;
mod loading;
mod machine;
mod memory;
mod merging;
mod prompt;
mod quantize;
mod run;
mod sampling;
mod tokenize;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{console::Console, failure::Outcome};

const EXAMPLES: &str = "\
Examples:
  ironloom run model.gguf \"Why is the sky blue?\"
  ironloom chat Qwen2.5-0.5B-Instruct/
  ironloom inspect model.gguf --tensors
  ironloom quantize Qwen2.5-0.5B-Instruct/ qwen-q4_k.gguf --type q4_k
  ironloom bench model.gguf -p 512 -n 128
  ironloom train examples/quick-start.toml
  ironloom finetune SmolLM2-135M-Instruct/ --data facts.jsonl --merge
  ironloom export SmolLM2-135M-Instruct-finetuned/model facts.gguf --type q8_0

A model is a GGUF file, or a Hugging Face folder with config.json, tokenizer.json and safetensors.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.";

/// Runs, chats with, inspects, quantizes, measures and trains language models, without Python
#[derive(Parser)]
#[command(name = "ironloom", version, after_help = EXAMPLES)]
struct Program {
    #[command(subcommand)]
    command: Command,
    /// Print nothing but results and errors
    #[arg(long, global = true)]
    quiet: bool,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Arguments),
    Chat(chat::Arguments),
    Inspect(inspect::Arguments),
    Quantize(quantize::Arguments),
    Tokenize(tokenize::Arguments),
    Bench(bench::Arguments),
    Train(train::Arguments),
    Finetune(train::finetune::Arguments),
    Export(export::Arguments),
}

fn main() -> ExitCode {
    let program = Program::parse();
    let console = Console::new(program.quiet);
    let ended = match &program.command {
        Command::Run(arguments) => run::run(arguments, &console),
        Command::Chat(arguments) => chat::run(arguments, &console),
        Command::Inspect(arguments) => inspect::run(arguments, &console),
        Command::Quantize(arguments) => quantize::run(arguments, &console),
        Command::Tokenize(arguments) => tokenize::run(arguments, &console),
        Command::Bench(arguments) => bench::run(arguments, &console),
        Command::Train(arguments) => train::run(arguments, &console),
        Command::Finetune(arguments) => train::finetune::run(arguments, &console),
        Command::Export(arguments) => export::run(arguments, &console),
    };
    match ended {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Interrupted) => ExitCode::from(interrupt::EXIT_CODE),
        Err(error) => failure::report(&error),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn arguments_are_consistent() {
        Program::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples() {
        for command in Program::command().get_subcommands() {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(text.contains("ironloom "), "{} has no examples", command.get_name());
        }
    }
}
