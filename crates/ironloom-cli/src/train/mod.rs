//! `ironloom train CONFIG.toml`: trains a model, from a configuration to a folder that `ironloom run` runs.
//!
//! The run is `ironloom_train::Run`; here are its configuration, what is said meanwhile, and how it ends: the first Ctrl-C ends it after
//! the step it is in, with a checkpoint, and a second one at once.

mod config;
pub(crate) mod finetune;
mod prepare;
mod progress;
mod resumption;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ironloom_core::grouped;
use ironloom_lm::{LoadOptions, Model};
use ironloom_quant::WeightFormat;
use ironloom_tensor::Device;
use ironloom_train::{
    Run, Trainer, resume,
    run::{self, EndReason, Ended, RunOptions, load_range},
};
use ironloom_weights::Checkpoint;
use serde::Serialize;

use self::{
    config::TrainConfig,
    prepare::Prepared,
    progress::Follower,
    resumption::{Beginning, Resumed, notes, now},
};
use crate::{
    console::{Console, Unit},
    failure::Outcome,
    interrupt::{self, Work},
    machine::MachineOptions,
};

const EXAMPLES: &str = "\
Examples:
  ironloom train examples/quick-start.toml --dry-run    what it would do, and the memory it would take
  ironloom train examples/quick-start.toml
  ironloom train examples/quick-start.toml --device cuda    on a graphics card, in mixed precision
  ironloom train examples/quick-start.toml --resume --steps 800
  ironloom run target/quick-start/model \"Training\"

The output folder gets log.jsonl, loss.svg, checkpoints/ and, at the end, model/. Ctrl-C saves a checkpoint and ends. A run that
goes on with --resume gives the same bits as one that was never ended. Paths in the file are relative to its folder.";

const ADVICE: &str = "use fewer batch.rows (with batch.accumulate), training.checkpointing = true, or a smaller model";

/// Train a model as a TOML file says
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The configuration
    config: PathBuf,
    /// Go on from the last checkpoint in the output folder
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// Remove the run that is in the output folder
    #[arg(long)]
    overwrite: bool,
    /// Steps of the whole run, instead of training.steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// The output folder, instead of output
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Print what the run would do and take, and end
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    machine: MachineOptions,
}

/// What `--json` prints at the end.
#[derive(Serialize)]
struct Report<'a> {
    reason: &'static str,
    steps: u64,
    loss: Option<f64>,
    held_out_loss: Option<f64>,
    largest_expert_load: Option<f32>,
    smallest_expert_load: Option<f32>,
    /// Of this process, not of those before a resumption.
    tokens: u64,
    step_seconds: f64,
    tokens_per_second: Option<f64>,
    /// MFU.
    utilization: Option<f64>,
    peak_memory_bytes: Option<u64>,
    device_memory_bytes: Option<u64>,
    checkpoint: &'a Path,
    model: Option<&'a Path>,
}

/// Trains.
pub(crate) fn run(arguments: &Arguments, console: &Console) -> Result<Outcome> {
    interrupt::install()?;
    let mut config = TrainConfig::read(&arguments.config)?;
    config.training.steps = arguments.steps.unwrap_or(config.training.steps);
    config.output = arguments.output.clone().unwrap_or(config.output);
    refuse_own_folders(&config.output, config.model.from.as_deref())?;
    let mut options = run_options(&config, title(&arguments.config));
    let beginning = Beginning::asked(arguments.resume, arguments.overwrite || arguments.dry_run);
    let resumed = Resumed::find(beginning, &config.output, &options, console)?;
    let (begun, settings) = (resumed.as_ref().and_then(Resumed::begun).unwrap_or_else(now), config.notes());
    if let Some(resumed) = &resumed {
        resumed.compare(&config.training, &[], &settings, console)?;
    }
    options.notes = notes(begun, &settings);
    let resumed = resumed.map(|resumed| resumed.path);
    let device = arguments.machine.open()?;
    let prepared = Prepared::new(&config, resumed.as_deref(), begun, &device, console)?;
    let available = arguments.machine.device.available(&device)?;
    let shown = if arguments.dry_run { Shown::Result { json: arguments.json } } else { Shown::Note };
    show_plan(&prepared, shown, available, ADVICE, console)?;
    if arguments.dry_run {
        return Ok(Outcome::Done);
    }
    let run = open(arguments, &config, options, resumed.as_deref(), prepared, &device, console)?;
    let (ended, follower) = go(run, config.training.steps, console)?;
    report(arguments, &ended, &follower, console)?;
    Ok(outcome(ended.reason))
}

fn run_options(config: &TrainConfig, title: String) -> RunOptions {
    RunOptions {
        batches_per_step: config.batch.accumulate,
        evaluate_every: config.held_out.as_ref().map_or(0, |table| table.every),
        checkpoint_every: config.checkpoints.every,
        keep: config.checkpoints.keep,
        title,
        ..RunOptions::default()
    }
}

/// Refuses a model to begin with that lies where the run writes: it would be removed.
fn refuse_own_folders(output: &Path, model: Option<&Path>) -> Result<()> {
    let Some(Ok(from)) = model.map(Path::canonicalize) else { return Ok(()) };
    match run::folders(output).iter().find(|own| own.canonicalize().is_ok_and(|own| from.starts_with(own))) {
        Some(own) => bail!(
            "the model lies in {}, which the run would write and remove: choose another output folder",
            own.display()
        ),
        None => Ok(()),
    }
}

/// How a plan is told.
#[derive(Clone, Copy)]
enum Shown {
    /// As what the command was asked for.
    Result { json: bool },
    /// Before the work.
    Note,
}

/// Tells the plan, and refuses it where it doesn't fit.
fn show_plan(
    prepared: &Prepared,
    shown: Shown,
    available: Option<u64>,
    advice: &'static str,
    console: &Console,
) -> Result<()> {
    match shown {
        Shown::Result { json: true } => console.print_json(&prepared.plan)?,
        Shown::Result { json: false } => console.print(&prepared.plan)?,
        Shown::Note => console.note(&prepared.plan),
    }
    if let Some(available) = available {
        prepared.memory.check(available, advice)?;
    }
    Ok(())
}

/// Takes the run's steps, told as they go, until they are done or Ctrl-C comes.
fn go(run: Run, steps: u64, console: &Console) -> Result<(Ended, Follower<'_>)> {
    let work = Work::begin(1);
    let mut follower = Follower::new(console, run.meter(), run.trainer().steps_done(), steps);
    let ended = run.go(&mut |event| {
        follower.see(event);
        work.flow()
    })?;
    Ok((ended, follower))
}

fn outcome(reason: EndReason) -> Outcome {
    match reason {
        EndReason::Done => Outcome::Done,
        EndReason::Stopped => Outcome::Interrupted,
    }
}

/// The run with its model's weights, which are read or made on the processor and then go to the device.
fn open(
    arguments: &Arguments,
    config: &TrainConfig,
    options: RunOptions,
    resumed: Option<&Path>,
    prepared: Prepared,
    device: &Device,
    console: &Console,
) -> Result<Run> {
    let Prepared { config: described, checkpoint, text, loader, held_out, .. } = prepared;
    let training = config.training.clone();
    let run = if let Some(last) = resumed {
        Run::resume(&config.output, resume(last, device, training)?, loader, text, options)?
    } else {
        let model = match checkpoint {
            Some(checkpoint) => {
                let mut model = load(&checkpoint, &device.processor(), WeightFormat::F32, console)?;
                model.make_trainable()?;
                model
            }
            None => Model::untrained(&described, &device.processor(), training.seed)?,
        };
        let trainer = Trainer::new(model, training)?.to_device(device)?;
        if arguments.overwrite {
            run::remove(&config.output)?;
        }
        Run::begin(&config.output, trainer, loader, text, options)?
    };
    Ok(run.with_held_out(held_out))
}

/// The model of a checkpoint, held as `format`.
fn load(checkpoint: &Checkpoint, device: &Device, format: WeightFormat, console: &Console) -> Result<Model> {
    let progress = console.progress("loading", Unit::Bytes);
    let show = |done, total| progress.set(done, total);
    let options = LoadOptions { format, progress: Some(&show) };
    Model::load(checkpoint, device, &options).with_context(|| format!("cannot train {}", checkpoint.path().display()))
}

/// Says how the run ended, and what to do with what it made.
fn report(arguments: &Arguments, ended: &Ended, follower: &Follower<'_>, console: &Console) -> Result<()> {
    let last = follower.last.as_ref();
    let (steps, loss) = (ended.trainer.steps_done(), last.map(|report| report.loss));
    let loads = last.and_then(|report| load_range(&report.expert_loads));
    if arguments.json {
        return console.print_json(&Report {
            reason: reason(ended.reason),
            steps,
            loss,
            held_out_loss: follower.held_out_loss,
            largest_expert_load: loads.map(|(largest, _)| largest),
            smallest_expert_load: loads.map(|(_, smallest)| smallest),
            tokens: follower.tokens,
            step_seconds: follower.step_time.as_secs_f64(),
            tokens_per_second: follower.tokens_per_second(),
            utilization: follower.utilization(),
            peak_memory_bytes: progress::peak_bytes(),
            device_memory_bytes: follower.device_bytes(),
            checkpoint: &ended.checkpoint,
            model: ended.model.as_deref(),
        });
    }
    let shown = ended.model.as_ref().unwrap_or(&ended.checkpoint).display();
    console.print(format_args!("{shown}: {}", summary(steps, follower)))?;
    console.note(format_args!("run it:     ironloom run {shown} \"Once upon a time\""));
    if ended.reason == EndReason::Stopped {
        let config = arguments.config.display();
        console.note(format_args!("go on with: ironloom train {config} --resume"));
    }
    Ok(())
}

fn reason(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Done => "done",
        EndReason::Stopped => "stopped",
    }
}

/// `200 steps, loss 1.2345, held-out loss 1.3456, 1,234 tok/s, MFU 31.6%`.
fn summary(steps: u64, follower: &Follower<'_>) -> String {
    let mut line = format!("{} steps", grouped(steps));
    let losses =
        [("loss", follower.last.as_ref().map(|report| report.loss)), ("held-out loss", follower.held_out_loss)];
    for (name, loss) in losses.iter().filter_map(|(name, loss)| Some((name, (*loss)?))) {
        line.push_str(&format!(", {name} {loss:.4}"));
    }
    if let Some(rate) = follower.tokens_per_second() {
        line.push_str(&format!(", {} tok/s", grouped(rate as u64)));
    }
    if let Some(share) = follower.utilization() {
        line.push_str(&format!(", MFU {:.1}%", 100.0 * share));
    }
    line
}

/// The configuration's name, as the plot's title.
fn title(config: &Path) -> String {
    config.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}
