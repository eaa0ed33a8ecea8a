//! The arguments of `ironloom finetune` as the configuration of a training run.

use std::path::PathBuf;

use anyhow::{Result, bail};
use ironloom_lm::Config;
use ironloom_train::{
    Schedule, SpikeGuardOptions, TrainerOptions,
    data::{Answers, EndToken, Order, Overlong, Packing, Source, SourceFormat},
    lora::{ALL_LINEAR, LoraOptions},
    optimizer::{AdamWOptions, OptimizerOptions},
};
use serde::Serialize;

use super::{
    super::{
        config::{BatchTable, CheckpointsTable, DataTable, HeldOutTable, ModelTable, TrainConfig},
        prepare::Prepared,
    },
    Arguments,
};
use crate::loading::{self, Weights};

/// What is learned from.
#[derive(clap::Args)]
#[command(next_help_heading = "Data")]
pub(super) struct DataOptions {
    /// Files of one kind, or a folder of text; told by names and first lines
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// Which of a conversation's answers are learned: all, each (with the messages before it) or last [default: all]
    #[arg(long, value_name = "WHICH", value_parser = answers)]
    answers: Option<Answers>,
    /// This part of the documents is not learned from: the loss on it is measured
    #[arg(long, value_name = "PART", value_parser = part)]
    held_out: Option<f64>,
    /// The most tokens of a row [default: 512, or the model's positions]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    sequence_length: Option<u32>,
}

/// How adapters are set.
#[derive(clap::Args, Serialize)]
#[command(next_help_heading = "Adapters")]
pub(super) struct AdapterOptions {
    /// Rows of an adapter's inner matrix
    #[arg(long, value_name = "N", default_value_t = 16, conflicts_with = "full")]
    rank: usize,
    /// The adapters' scale, times the rank
    #[arg(long, value_name = "ALPHA", default_value_t = 32.0, conflicts_with = "full")]
    alpha: f64,
    /// The part of an adapter's input that is left out at random
    #[arg(long, value_name = "PART", default_value_t = 0.0, conflicts_with = "full")]
    dropout: f64,
    /// Layers with adapters: ends of names, patterns with *, or all-linear
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = ALL_LINEAR, conflicts_with = "full")]
    targets: Vec<String>,
    /// How the frozen model is held; keep holds what the file has
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t, conflicts_with = "full")]
    #[serde(skip)]
    pub(super) base: Weights,
}

/// How long and how fast.
#[derive(clap::Args)]
#[command(next_help_heading = "Steps")]
pub(super) struct StepOptions {
    /// How often the data are gone through
    #[arg(long, value_name = "N", default_value_t = 3.0, value_parser = above_zero, conflicts_with = "steps")]
    epochs: f64,
    /// Steps of the whole run, instead of --epochs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// The peak learning rate [default: 2e-4, or 2e-5 with --full]
    #[arg(long, value_name = "RATE", value_parser = above_zero)]
    learning_rate: Option<f64>,
    /// Rows of a batch
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    batch_rows: u32,
    /// Batches whose gradients a step sums
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    accumulate: u32,
    /// Compute blocks again on the way back instead of keeping what they made: less memory, a third more time
    #[arg(long)]
    checkpointing: bool,
    /// Steps between checkpoints, and between measurements on what is held out
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// Decides the adapters' first values, the order of the data and what dropout leaves out
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl AdapterOptions {
    /// The library's options.
    ///
    /// # Errors
    /// One is out of its range, or asks for an adapter of the embedding or the head.
    pub(super) fn lora(&self) -> Result<LoraOptions> {
        let Self { rank, alpha, dropout, targets, .. } = self;
        if let Some(name) = targets.iter().find(|name| name.contains("lm_head") || name.contains("embed_tokens")) {
            bail!(
                "{name} has no adapter: a head may be the embedding itself, and adapters are of the blocks' linear layers. \
                 --full trains embedding and head"
            );
        }
        let lora = LoraOptions {
            rank: *rank,
            alpha: *alpha,
            dropout: *dropout,
            targets: targets.clone(),
            ..LoraOptions::default()
        };
        lora.check()?;
        Ok(lora)
    }
}

/// A configuration, how long its run is, which the data decide, and the model's description.
pub(super) struct Chosen {
    pub(super) config: TrainConfig,
    pub(super) length: Length,
    pub(super) model: Config,
}

#[derive(Clone, Copy)]
pub(super) enum Length {
    Epochs(f64),
    Steps(u64),
}

/// The configuration that the arguments make.
///
/// # Errors
/// The model or the data can't be read, or the data are of different kinds.
pub(super) fn choose(arguments: &Arguments) -> Result<Chosen> {
    let Arguments { model, output, full, data, steps, .. } = arguments;
    let format = format(&data.data)?;
    let described = Config::from_checkpoint(&loading::open(model)?)?;
    let sequence_length = data.sequence_length.map_or(described.context_length.min(512), |length| length as usize);
    // An answer's rest without its question teaches to answer nothing; of a text any part is one.
    let overlong = match format {
        SourceFormat::Chat { .. } | SourceFormat::Completion => Overlong::Cut,
        _ => Overlong::Split,
    };
    let weight_decay = if *full { 0.01 } else { 0.0 };
    let training = TrainerOptions {
        learning_rate: steps.learning_rate.unwrap_or(if *full { 2e-5 } else { 2e-4 }),
        optimizer: OptimizerOptions::AdamW(AdamWOptions { weight_decay, ..AdamWOptions::default() }),
        // Routers were balanced when the model was trained.
        balance_loss: 0.0,
        router_z_loss: 0.0,
        checkpointing: steps.checkpointing,
        // Losses of few answers differ by much, and the hard ones are to be learned too.
        spike_guard: SpikeGuardOptions { ratio: 20.0, ..SpikeGuardOptions::default() },
        seed: steps.seed,
        ..TrainerOptions::default()
    };
    let output = output.clone().unwrap_or_else(|| PathBuf::from(format!("{}-finetuned", loading::name(model))));
    let config = TrainConfig {
        output,
        model: ModelTable::of_model(model.clone()),
        tokenizer: None,
        data: vec![DataTable::of_files(data.data.clone(), data.answers)],
        held_out: data.held_out.map(|part| HeldOutTable::of_format(&format, part, steps.every)),
        batch: BatchTable {
            sequence_length,
            rows: steps.batch_rows as usize,
            accumulate: steps.accumulate as usize,
            packing: Packing::Documents,
            overlong: Some(overlong),
            order: Order::Shuffled,
            seed: steps.seed,
            end: EndToken::Auto,
        },
        training,
        checkpoints: CheckpointsTable { every: steps.every, keep: 2 },
    };
    let length = steps.steps.map_or(Length::Epochs(steps.epochs), Length::Steps);
    Ok(Chosen { config, length, model: described })
}

/// The format that all files have.
fn format(files: &[PathBuf]) -> Result<SourceFormat> {
    let mut found: Option<(&PathBuf, SourceFormat)> = None;
    for file in files {
        let format = Source::guess(file)?.format;
        match &found {
            Some((first, known)) if *known != format => {
                bail!(
                    "{} and {} are of different kinds of data: fine-tune on one after the other, or make them one kind",
                    first.display(),
                    file.display()
                )
            }
            Some(_) => {}
            None => found = Some((file, format)),
        }
    }
    let Some((_, format)) = found else { bail!("--data names no file") };
    Ok(format)
}

impl Length {
    /// Sets the run's steps, and the schedule that they have room for.
    pub(super) fn set(self, config: &mut TrainConfig, prepared: &mut Prepared) {
        let rows: usize = prepared.loader.rows_in_epoch().iter().sum();
        let rows_per_step = (config.batch.rows * config.batch.accumulate) as f64;
        let steps = match self {
            Self::Steps(steps) => steps,
            Self::Epochs(epochs) => ((epochs * rows as f64 / rows_per_step).ceil() as u64).max(1),
        };
        config.training.steps = steps;
        config.training.schedule = Schedule::WarmupCosine { warmup_steps: (steps / 20).min(100), final_ratio: 0.1 };
        prepared.plan.steps = steps;
        prepared.plan.epochs = steps as f64 * rows_per_step / rows.max(1) as f64;
    }
}

fn answers(text: &str) -> Result<Answers, String> {
    match text {
        "all" => Ok(Answers::All),
        "each" => Ok(Answers::Each),
        "last" => Ok(Answers::Last),
        _ => Err("there are all, each and last".to_owned()),
    }
}

fn part(text: &str) -> Result<f64, String> {
    let part = text.parse().ok().filter(|part| (0.0..1.0).contains(part) && *part > 0.0);
    part.ok_or_else(|| "a number above 0 and below 1 is needed, such as 0.05".to_owned())
}

fn above_zero(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "a number above 0 is needed".to_owned())
}
