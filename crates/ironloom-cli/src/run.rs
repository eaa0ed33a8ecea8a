//! `ironloom run MODEL PROMPT`: one answer, streamed to stdout.
//!
//! Prompt → ids (chat template) → model → session, fed in one go → answer as it becomes certain → speed on stderr. The prompt
//! is held against the context before the weights are read.

use std::{ops::ControlFlow, path::PathBuf};

use anyhow::{Context, Result};
use ironloom_decode::{Error, FinishReason, GenerateOptions, Generation, Sampler, SamplerOptions, Session, generate};
use ironloom_lm::text::{Specials, Tokenizer};
use serde::Serialize;

use crate::{
    console::{Console, Unit},
    failure::Outcome,
    interrupt::{self, Work},
    loading::{self, Loaded, ModelOptions, Opened},
    machine::MachineOptions,
    prompt,
    sampling::SamplingOptions,
};

const EXAMPLES: &str = "\
Examples:
  ironloom run model.gguf \"Why is the sky blue?\"
  ironloom run model.gguf --raw \"Once upon a time\" --max-tokens 100 --temperature 0
  git diff | ironloom run model.gguf - --system \"Describe this change in one line.\"
  ironloom run model.gguf \"List three colours.\" --stop \"4.\" --seed 7 --json";

/// Answer one prompt
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// A GGUF file or a Hugging Face folder
    model: PathBuf,
    /// What to ask; `-` reads it from stdin
    #[arg(allow_hyphen_values = true)]
    prompt: String,
    /// Continue the prompt as it stands, special tokens in it included, without the chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// What the model is told before the prompt
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Print one JSON object at the end instead of the text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    options: ModelOptions,
    #[command(flatten)]
    machine: MachineOptions,
}

/// When an answer ends.
#[derive(clap::Args)]
#[command(next_help_heading = "Answer")]
pub(crate) struct AnswerOptions {
    /// The most tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 512)]
    max_tokens: usize,
    /// Text that ends the answer before it starts; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on past the model's end tokens
    #[arg(long)]
    ignore_eos: bool,
}

/// Answers the prompt.
pub(crate) fn run(arguments: &Arguments, console: &Console) -> Result<Outcome> {
    interrupt::install()?;
    let sampling = arguments.sampling.sampler_options()?;
    let opened = Opened::new(&arguments.model)?;
    let tokenizer = opened.tokenizer()?;
    let ids = prompt_ids(arguments, &opened, &tokenizer, console)?;
    let device = arguments.machine.open()?;
    let available = arguments.machine.device.available(&device)?;
    let context = opened.choose_context(&device, available, &arguments.options, console)?;
    if ids.len() > context {
        return Err(Error::PromptTooLong { prompt: ids.len(), held: 0, context }.into());
    }
    let loaded = opened.load(device, context, arguments.options.weights, console)?;
    let mut session = loaded.session()?;

    let work = Work::begin(1);
    if let Err(error) = feed(&mut session, &ids, &work, console) {
        return if work.is_interrupted() { Ok(Outcome::Interrupted) } else { Err(error) };
    }
    let mut sampler = Sampler::new(sampling.clone())?;
    let mut closed = None;
    let mut show = |text: &str| {
        if !arguments.json
            && let Err(error) = console.print_part(text)
        {
            closed = Some(error);
            return ControlFlow::Break(());
        }
        work.flow()
    };
    let generation = arguments.answer.generate(&mut session, &tokenizer, &mut sampler, &mut show)?;
    if let Some(error) = closed {
        return Err(error).context("cannot print the answer");
    }
    if arguments.json {
        console.print_json(&Report::new(arguments, &opened, &loaded, &sampling, &generation))?;
    } else {
        console.print("")?;
        if generation.finish == FinishReason::ContextFull {
            console.note(format_args!("note: the answer ends where the context of {context} tokens is full"));
        }
        console.note(speed(&generation));
    }
    Ok(if work.is_interrupted() { Outcome::Interrupted } else { Outcome::Done })
}

impl AnswerOptions {
    /// Samples an answer to what the session was fed.
    ///
    /// # Errors
    /// A stop string is empty, or the model failed.
    pub(crate) fn generate(
        &self,
        session: &mut Session,
        tokenizer: &Tokenizer,
        sampler: &mut Sampler,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation> {
        let mut options = GenerateOptions { max_tokens: self.max_tokens, stop: self.stop.clone() };
        let mut answer = generate(session, tokenizer, sampler, &options, on_text)?;
        while self.ignore_eos && answer.finish == FinishReason::EndToken && answer.generated < self.max_tokens {
            options.max_tokens = self.max_tokens - answer.generated;
            let more = generate(session, tokenizer, sampler, &options, on_text)?;
            answer.ids.extend(more.ids);
            answer.text.push_str(&more.text);
            answer.finish = more.finish;
            answer.generated += more.generated;
            answer.decode_seconds += more.decode_seconds;
        }
        Ok(answer)
    }
}

/// Puts ids through the model, under a progress bar and until interrupted.
///
/// # Errors
/// They do not fit, the model failed, or it was interrupted.
pub(crate) fn feed(session: &mut Session, ids: &[u32], work: &Work, console: &Console) -> Result<()> {
    let progress = console.progress("reading", Unit::Tokens);
    session.feed_with(ids, &mut |fed| {
        progress.set(fed.done as u64, fed.total as u64);
        work.flow()
    })?;
    Ok(())
}

/// `prompt 32 tokens 800.0 tok/s, generated 64 tokens 180.0 tok/s`.
pub(crate) fn speed(generation: &Generation) -> String {
    let rate = |rate: Option<f64>| rate.map(|rate| format!(" {rate:.1} tok/s")).unwrap_or_default();
    format!(
        "prompt {} tokens{}, generated {} tokens{}",
        generation.prompt_tokens,
        rate(prompt_rate(generation)),
        generation.generated,
        rate(generation.tokens_per_second())
    )
}

fn prompt_rate(generation: &Generation) -> Option<f64> {
    let rate = generation.prompt_tokens as f64 / generation.prefill_seconds;
    Some(rate).filter(|rate| rate.is_finite() && *rate > 0.0)
}

fn prompt_ids(arguments: &Arguments, opened: &Opened, tokenizer: &Tokenizer, console: &Console) -> Result<Vec<u32>> {
    let text = prompt::text_or_stdin(&arguments.prompt)?;
    if arguments.raw {
        return prompt::raw_ids(tokenizer, &text, Specials::Parse);
    }
    let system = arguments.system.as_deref();
    match loading::template(&opened.checkpoint)? {
        Some(template) => prompt::chat_ids(tokenizer, &template, &prompt::messages(system, &text)),
        None => {
            if system.is_some() {
                console.warn("the model has no chat template, so --system has no effect");
            }
            prompt::raw_ids(tokenizer, &text, Specials::Literal)
        }
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    text: &'a str,
    ids: &'a [u32],
    finish_reason: FinishReason,
    prompt_tokens: usize,
    generated_tokens: usize,
    timings: Timings,
    sampling: &'a SamplerOptions,
    model: ModelReport<'a>,
}

#[derive(Serialize)]
struct Timings {
    load_seconds: f64,
    prompt_seconds: f64,
    generation_seconds: f64,
    prompt_tokens_per_second: Option<f64>,
    generated_tokens_per_second: Option<f64>,
}

#[derive(Serialize)]
struct ModelReport<'a> {
    path: &'a std::path::Path,
    architecture: &'static str,
    parameters: u64,
    weights: &'static str,
    weight_bytes: u64,
    context: usize,
    device: String,
    unused_tensors: &'a [String],
}

impl<'a> Report<'a> {
    fn new(
        arguments: &'a Arguments,
        opened: &Opened,
        loaded: &'a Loaded,
        sampling: &'a SamplerOptions,
        generation: &'a Generation,
    ) -> Self {
        Self {
            text: &generation.text,
            ids: &generation.ids,
            finish_reason: generation.finish,
            prompt_tokens: generation.prompt_tokens,
            generated_tokens: generation.generated,
            timings: Timings {
                load_seconds: loaded.time.as_secs_f64(),
                prompt_seconds: generation.prefill_seconds,
                generation_seconds: generation.decode_seconds,
                prompt_tokens_per_second: prompt_rate(generation),
                generated_tokens_per_second: generation.tokens_per_second(),
            },
            sampling,
            model: ModelReport {
                path: &arguments.model,
                architecture: opened.config.architecture.name(),
                parameters: opened.config.parameters(),
                weights: loaded.model.weight_format(),
                weight_bytes: loaded.model.weight_bytes(),
                context: loaded.context,
                device: loaded.device.describe(),
                unused_tensors: loaded.model.unused_tensors(),
            },
        }
    }
}
