//! A run: steps with their log, their plot and their checkpoints, and what follows when it is ended or goes wrong.
//!
//! ```text
//! FOLDER/
//!   log.jsonl      a line a step, and one a measurement on held-out data
//!   loss.svg       the same as a picture, refreshed as the run goes on
//!   checkpoints/   see Checkpoints; one of the beginning too, so that there always is one
//!   model/         when the last step is done: the model, or adapter/, averaged where that was asked for
//! ```
//!
//! A step's line is in the log before its checkpoint is written, and a run that goes on drops the lines of the steps that it does
//! again. So however a process ended, the resumed run leaves the files of one that was never ended.
//!
//! When the guard asks for the last checkpoint, the weights and the moments go back to it, and the data don't: the steps are done
//! again with what comes next. A run that was ended after that and resumed from the same checkpoint meets the same data, goes
//! back at the same step, and so gives the same bits. The guard passes over the checkpoint of a run that was told to stop.

use std::{
    cell::Cell,
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use ironloom_core::PartialFolder;
use ironloom_lm::export::{TextFiles, write_trained};
use serde::Serialize;

use crate::{
    Checkpoints, Error, Meter, Occasion, Result, StepReport, Trainer,
    data::{Batch, Cursor, Loader},
    log::TrainingLog,
    lora::peft,
    plot::LossPlot,
    roll_back,
};

/// How a run goes, beside [`TrainerOptions`](crate::TrainerOptions), which say how many steps it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Batches whose gradients a step sums: 1 or more.
    pub batches_per_step: usize,
    /// The held-out loss is measured each time so many steps are done, and after the last; 0: only then.
    pub evaluate_every: u64,
    /// A checkpoint is written each time so many steps are done, and after the last; 0: only then.
    pub checkpoint_every: u64,
    /// How many checkpoints stay; the oldest go.
    pub keep: usize,
    /// The title of the plot.
    pub title: String,
    /// What the caller wants to find again in each checkpoint's [`RunState`](crate::RunState).
    pub notes: serde_json::Value,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            batches_per_step: 1,
            evaluate_every: 100,
            checkpoint_every: 500,
            keep: 2,
            title: "Loss".to_owned(),
            notes: serde_json::Value::Null,
        }
    }
}

/// What a run tells as it goes.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// A step was taken, or refused by the guard.
    Step {
        /// What it did.
        report: &'a StepReport,
        /// How long it took, with the reading of its data.
        time: Duration,
    },
    /// The loss on held-out data was measured.
    Evaluated {
        /// Steps done.
        step: u64,
        /// The mean of `-log p`.
        loss: f64,
    },
    /// A checkpoint was written.
    Checkpoint {
        /// Steps done.
        step: u64,
        /// Its folder.
        path: &'a Path,
    },
    /// The weights went back to a checkpoint.
    RolledBack {
        /// The step whose loss was refused.
        from: u64,
        /// Steps that the checkpoint has.
        to: u64,
    },
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// All steps are done.
    Done,
    /// It was told to.
    Stopped,
}

/// What is left of a run that ended well.
#[derive(Debug)]
pub struct Ended {
    /// Why.
    pub reason: EndReason,
    /// The trainer as it stands.
    pub trainer: Trainer,
    /// The checkpoint of where it stands.
    pub checkpoint: PathBuf,
    /// The folder of the finished model or adapters, when all steps are done.
    pub model: Option<PathBuf>,
}

/// A run that is about to go.
#[derive(Debug)]
pub struct Run {
    trainer: Trainer,
    loader: Loader,
    held_out: Vec<Batch>,
    records: Records,
}

/// What is written into the folder of a run that is done.
const FINISHED: [&str; 2] = ["model", "adapter"];

/// How often in a row, without a checkpoint between, the guard may ask for the last checkpoint.
const MOST_ROLLBACKS: u32 = 3;

impl Run {
    /// A run that begins in `folder`, which is made where it isn't there, and writes its first checkpoint.
    ///
    /// # Errors
    /// The folder has checkpoints, a model or adapters already, an option means nothing, or something can't be written.
    pub fn begin(
        folder: impl Into<PathBuf>,
        trainer: Trainer,
        loader: Loader,
        text: TextFiles,
        options: RunOptions,
    ) -> Result<Self> {
        let folder = folder.into();
        let finished = FINISHED.map(|name| folder.join(name)).into_iter().find(|path| path.exists());
        if let Some(path) = checkpoints(&folder, &options).latest()?.or(finished) {
            return Err(Error::FolderInUse { path });
        }
        fs::create_dir_all(&folder).map_err(|source| Error::Write { path: folder.clone(), source })?;
        let mut records = Records::open(folder, text, options, trainer.steps_done())?;
        records.checkpoint(&trainer, &loader, Occasion::Planned)?;
        Ok(Self { trainer, loader, held_out: Vec::new(), records })
    }

    /// A run that goes on in `folder` from its last checkpoint, of which [`resume`](crate::resume) or
    /// [`resume_adapters`](crate::resume_adapters) made the trainer and the cursor. `loader` must be of the same data and options as the
    /// first one's.
    ///
    /// # Errors
    /// The folder's last checkpoint is another, the data are others than the run began with, or something can't be written.
    pub fn resume(
        folder: impl Into<PathBuf>,
        (trainer, cursor): (Trainer, Cursor),
        mut loader: Loader,
        text: TextFiles,
        options: RunOptions,
    ) -> Result<Self> {
        let folder = folder.into();
        let latest = checkpoints(&folder, &options).list()?.pop();
        if latest.as_ref().is_none_or(|(step, _)| *step != trainer.steps_done()) {
            return Err(Error::NoCheckpoint { folder, step: trainer.steps_done() });
        }
        loader.restore(&cursor)?;
        let mut records = Records::open(folder, text, options, trainer.steps_done())?;
        records.planned = records.checkpoints.latest_planned()?;
        records.latest = latest;
        Ok(Self { trainer, loader, held_out: Vec::new(), records })
    }

    /// The run with batches to measure the loss on.
    #[must_use]
    pub fn with_held_out(mut self, batches: Vec<Batch>) -> Self {
        self.held_out = batches;
        self
    }

    /// The trainer.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// What tells what the run makes of the card that it is on.
    pub fn meter(&self) -> Meter {
        Meter::new(self.trainer.model(), self.loader.sequence_length())
    }

    /// Takes all steps that are left, or those until `on_event` says to stop: then a checkpoint is written and the run ends.
    ///
    /// # Errors
    /// The guard refused loss after loss, also from the last checkpoint on ([`Error::NoProgress`]); a step failed; or something
    /// can't be written. The checkpoints written before are whole.
    pub fn go(self, on_event: &mut dyn FnMut(&Event<'_>) -> ControlFlow<()>) -> Result<Ended> {
        let meter = self.meter();
        let Self { mut trainer, mut loader, held_out, mut records } = self;
        let stops = Cell::new(false);
        let mut tell = |event: Event<'_>| stops.set(on_event(&event).is_break() || stops.get());
        let mut rollbacks = 0;
        let mut reason = EndReason::Done;
        while trainer.steps_done() < trainer.options().steps {
            let start = Instant::now();
            let batches = loader.next_step(records.options.batches_per_step)?;
            let report = trainer.step(&batches)?;
            let time = start.elapsed();
            records.step(&report, time, &meter)?;
            tell(Event::Step { report: &report, time });
            if report.rolls_back {
                rollbacks += 1;
                if rollbacks > MOST_ROLLBACKS {
                    return Err(Error::NoProgress { step: report.step, rollbacks: MOST_ROLLBACKS });
                }
                trainer = records.roll_back(trainer)?;
                tell(Event::RolledBack { from: report.step, to: trainer.steps_done() });
            }
            let (step, last) = (trainer.steps_done(), trainer.steps_done() >= trainer.options().steps);
            let every = records.options.evaluate_every;
            if !held_out.is_empty() && !report.rolls_back && (last || (every > 0 && step.is_multiple_of(every))) {
                let loss = trainer.evaluate(&held_out)?;
                records.evaluation(step, loss)?;
                tell(Event::Evaluated { step, loss });
            }
            if report.moved && records.checkpoint_is_due(step) {
                let path = records.checkpoint(&trainer, &loader, Occasion::Planned)?;
                rollbacks = 0;
                tell(Event::Checkpoint { step, path: &path });
            }
            if stops.get() && !last {
                reason = EndReason::Stopped;
                break;
            }
        }
        let checkpoint = match records.latest.take() {
            Some((step, path)) if step == trainer.steps_done() => path,
            _ => {
                let occasion = if reason == EndReason::Done { Occasion::Planned } else { Occasion::Stop };
                let path = records.checkpoint(&trainer, &loader, occasion)?;
                tell(Event::Checkpoint { step: trainer.steps_done(), path: &path });
                path
            }
        };
        records.draw()?;
        let model = match reason {
            EndReason::Done => Some(records.write_model(&mut trainer)?),
            EndReason::Stopped => None,
        };
        Ok(Ended { reason, trainer, checkpoint, model })
    }
}

/// Where the checkpoints of a run in `folder` are.
pub fn checkpoints(folder: &Path, options: &RunOptions) -> Checkpoints {
    Checkpoints::new(folder.join("checkpoints"), options.keep).with_notes(options.notes.clone())
}

/// The folders that a run in `folder` writes, and removes with what is in them.
pub fn folders(folder: &Path) -> Vec<PathBuf> {
    let beside = ["", PartialFolder::ENDING, PartialFolder::REPLACED];
    let finished = FINISHED.iter().flat_map(|name| beside.map(|ending| folder.join(format!("{name}{ending}"))));
    finished.chain([folder.join("checkpoints")]).collect()
}

/// Removes what a run left in `folder`, and nothing else that is there.
///
/// # Errors
/// Something can't be removed.
pub fn remove(folder: &Path) -> Result<()> {
    let error = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Write { path, source }
    };
    // The log goes last: while checkpoints are left, so is what they tell of.
    for name in folders(folder) {
        if name.exists() {
            fs::remove_dir_all(&name).map_err(error(&name))?;
        }
    }
    for name in ["loss.svg", "log.jsonl"].map(|name| folder.join(name)) {
        if name.exists() {
            fs::remove_file(&name).map_err(error(&name))?;
        }
    }
    Ok(())
}

/// The largest and the smallest share of an expert over all layers, in even shares; none without routed layers.
pub fn load_range(expert_loads: &[Vec<f32>]) -> Option<(f32, f32)> {
    let shares = expert_loads.iter().flat_map(|layer| layer.iter().map(|share| share * layer.len() as f32));
    shares.fold(None, |range, share| {
        let (largest, smallest) = range.unwrap_or((share, share));
        Some((share.max(largest), share.min(smallest)))
    })
}

/// What a run writes.
#[derive(Debug)]
struct Records {
    folder: PathBuf,
    text: TextFiles,
    options: RunOptions,
    checkpoints: Checkpoints,
    /// The steps and the folder of the newest checkpoint.
    latest: Option<(u64, PathBuf)>,
    /// Of the newest that the guard may go back to.
    planned: Option<(u64, PathBuf)>,
    log: TrainingLog,
    plot: LossPlot,
    drawn: Instant,
}

/// A step's line in the log.
#[derive(Serialize)]
struct StepLine {
    loss: f64,
    side_loss: f64,
    gradient_norm: f64,
    learning_rate: f64,
    moved: bool,
    tokens: usize,
    seconds: f64,
    /// MFU, where the card's rate is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    utilization: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    largest_expert_load: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    smallest_expert_load: Option<f32>,
}

impl Records {
    /// The plot is drawn no more often than this, for it is written to disk.
    const PLOT_PAUSE: Duration = Duration::from_secs(5);

    fn open(folder: PathBuf, text: TextFiles, options: RunOptions, step: u64) -> Result<Self> {
        if options.batches_per_step == 0 {
            let (option, value) = ("the number of batches a step", 0.0);
            return Err(Error::InvalidOption { option, value, limits: "1 or more" });
        }
        let log = TrainingLog::resume(folder.join("log.jsonl"), step)?;
        let plot = LossPlot::from_log(log.path(), options.title.clone())?;
        let checkpoints = checkpoints(&folder, &options);
        Ok(Self { folder, text, options, checkpoints, latest: None, planned: None, log, plot, drawn: Instant::now() })
    }

    fn step(&mut self, report: &StepReport, time: Duration, meter: &Meter) -> Result<()> {
        let loads = load_range(&report.expert_loads);
        let line = StepLine {
            loss: report.loss,
            side_loss: report.side_loss,
            gradient_norm: report.gradient_norm,
            learning_rate: report.learning_rate,
            moved: report.moved,
            tokens: report.tokens,
            seconds: time.as_secs_f64(),
            utilization: meter.utilization(report.tokens as f64 / time.as_secs_f64()),
            device_memory_bytes: meter.memory_bytes(),
            largest_expert_load: loads.map(|(largest, _)| largest),
            smallest_expert_load: loads.map(|(_, smallest)| smallest),
        };
        self.log.append(report.step, &line)?;
        if report.loss.is_finite() {
            self.plot.training.push((report.step, report.loss));
        }
        if self.drawn.elapsed() >= Self::PLOT_PAUSE {
            self.draw()?;
        }
        Ok(())
    }

    fn evaluation(&mut self, step: u64, loss: f64) -> Result<()> {
        #[derive(Serialize)]
        struct Line {
            held_out_loss: f64,
        }
        self.log.append(step, &Line { held_out_loss: loss })?;
        if loss.is_finite() {
            self.plot.held_out.push((step, loss));
        }
        Ok(())
    }

    fn draw(&mut self) -> Result<()> {
        self.plot.write(self.folder.join("loss.svg"))?;
        self.drawn = Instant::now();
        Ok(())
    }

    /// Whether the multiple of `checkpoint_every` that follows the last planned checkpoint is reached.
    fn checkpoint_is_due(&self, step: u64) -> bool {
        let every = self.options.checkpoint_every;
        let last = self.planned.as_ref().map_or(0, |(step, _)| *step);
        every > 0 && step >= (last / every + 1) * every
    }

    fn checkpoint(&mut self, trainer: &Trainer, loader: &Loader, occasion: Occasion) -> Result<PathBuf> {
        let path = self.checkpoints.write(trainer, &loader.cursor(), &self.text, occasion)?;
        self.latest = Some((trainer.steps_done(), path.clone()));
        if occasion == Occasion::Planned {
            self.planned.clone_from(&self.latest);
        }
        Ok(path)
    }

    /// The trainer of the last planned checkpoint; the log and the plot forget the steps since.
    fn roll_back(&mut self, trainer: Trainer) -> Result<Trainer> {
        let Some((step, checkpoint)) = &self.planned else {
            return Err(Error::NoCheckpoint { folder: self.folder.clone(), step: 0 });
        };
        let trainer = roll_back(trainer, checkpoint)?;
        self.checkpoints.remove_after(*step)?;
        self.latest.clone_from(&self.planned);
        self.log = TrainingLog::resume(self.folder.join("log.jsonl"), *step)?;
        self.plot = LossPlot::from_log(self.log.path(), self.options.title.clone())?;
        Ok(trainer)
    }

    /// Writes the finished model or, where adapters were trained, those, by another name first.
    fn write_model(&self, trainer: &mut Trainer) -> Result<PathBuf> {
        let name = if trainer.adapter()?.is_some() { "adapter" } else { "model" };
        let target = self.folder.join(name);
        let error = |source| Error::Write { path: target.clone(), source };
        let unfinished = PartialFolder::create(&target).map_err(error)?;
        trainer.swap_average()?;
        let written = match trainer.adapter() {
            Ok(Some(adapter)) => peft::save(unfinished.path(), &adapter),
            Ok(None) => write_trained(trainer.model(), unfinished.path(), &self.text).map_err(Error::from),
            Err(error) => Err(error),
        };
        trainer.swap_average()?;
        written?;
        unfinished.finish().map_err(error)?;
        Ok(target)
    }
}
