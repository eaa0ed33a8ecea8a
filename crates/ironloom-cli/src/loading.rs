//! From a path to a model in memory: opened, described, planned, loaded.
//!
//! [`Opened`] knows everything but the weights, so that a prompt, a context or a configuration that cannot work is refused
//! before anything large is read. [`Opened::load`] reads them, under a progress bar, and says which tensors nobody used.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::ValueEnum;
use ironloom_core::{MemoryPlan, format_bytes};
use ironloom_decode::{Session, SessionOptions};
use ironloom_lm::{
    Config, LoadOptions, Model, RunMemory,
    text::{ChatTemplate, TextError, Tokenizer},
};
use ironloom_quant::WeightFormat;
use ironloom_tensor::Device;
use ironloom_weights::Checkpoint;
use serde::Serialize;

use crate::{
    console::{Console, Unit},
    figures::counted,
    memory,
};

/// How a model is held.
#[derive(clap::Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelOptions {
    /// How weights are held for computing; `keep` computes on what the file has
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t)]
    pub(crate) weights: Weights,
    /// The most tokens of prompt and answer together [default: the model's own, or what fits in memory]
    #[arg(short, long, value_name = "N", value_parser = context)]
    pub(crate) context: Option<usize>,
}

/// How weights are held for computing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Weights {
    /// As they are stored.
    #[default]
    Keep,
    /// 32 bits.
    F32,
    /// bfloat16.
    Bf16,
    /// 8 bits with a scale per row.
    Int8,
    /// 4 bits in blocks of 64.
    Int4,
    /// NormalFloat4 in blocks of 64.
    Nf4,
}

impl From<Weights> for WeightFormat {
    fn from(weights: Weights) -> Self {
        match weights {
            Weights::Keep => Self::Keep,
            Weights::F32 => Self::F32,
            Weights::Bf16 => Self::Bf16,
            Weights::Int8 => Self::Int8,
            Weights::Int4 => Self::Int4,
            Weights::Nf4 => Self::Nf4,
        }
    }
}

fn context(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&context| context > 0).ok_or_else(|| "a whole number from 1 up is needed".to_owned())
}

/// A model whose weights are not read yet.
pub(crate) struct Opened {
    path: PathBuf,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) config: Config,
}

/// A model that is ready to run.
pub(crate) struct Loaded {
    pub(crate) model: Arc<Model>,
    pub(crate) device: Device,
    /// The most tokens of a session.
    pub(crate) context: usize,
    /// What loading took.
    pub(crate) time: Duration,
}

impl Opened {
    /// Opens the model at `path`.
    ///
    /// # Errors
    /// There is none, or it is of a kind that is not supported.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let checkpoint = open(path)?;
        let config = Config::from_checkpoint(&checkpoint).map_err(|error| named(path, error))?;
        Ok(Self { path: path.to_owned(), checkpoint, config })
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// There is none, or it is of a kind that is not supported.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer> {
        tokenizer(&self.checkpoint)
    }

    /// The session's length: what the options ask for, or else the longest that fits in memory.
    ///
    /// # Errors
    /// What is asked for is longer than the model's own context, or does not fit.
    pub(crate) fn choose_context(
        &self,
        device: &Device,
        available: Option<u64>,
        options: &ModelOptions,
        console: &Console,
    ) -> Result<usize> {
        let rows = SessionOptions::default().prefill_rows;
        let memory = self.memory(device, options.weights)?;
        let plan = |context| memory.plan(context, rows);
        let context = memory::choose_context(&self.config, options.context, available, plan)
            .with_context(|| self.cannot_use())?;
        if options.context.is_none() && context < self.config.context_length {
            console.note(format_args!(
                "note: {} of memory has room for {context} of the model's {} positions ({}); --context sets another number",
                available.map(format_bytes).unwrap_or_default(),
                self.config.context_length,
                plan(context)
            ));
        }
        if let (Device::Cuda(_), Some(available)) = (device, available) {
            note_plan(&plan(context), available, device, console);
        }
        Ok(context)
    }

    /// Tells what a session of `positions` positions takes, `rows` of them in a pass.
    ///
    /// # Errors
    /// It does not fit in `available` bytes; then `advice` is part of the message.
    pub(crate) fn check_memory(
        &self,
        device: &Device,
        available: Option<u64>,
        weights: Weights,
        (positions, rows): (usize, usize),
        advice: &'static str,
        console: &Console,
    ) -> Result<()> {
        let Some(available) = available else { return Ok(()) };
        let plan = self.memory(device, weights)?.plan(positions, rows);
        plan.check(available, advice).with_context(|| self.cannot_use())?;
        note_plan(&plan, available, device, console);
        Ok(())
    }

    fn memory<'a>(&'a self, device: &'a Device, weights: Weights) -> Result<RunMemory<'a>> {
        RunMemory::new(&self.config, &self.checkpoint, device, weights.into()).map_err(|error| named(&self.path, error))
    }

    fn cannot_use(&self) -> String {
        format!("cannot use {}", self.path.display())
    }

    /// Reads the weights.
    ///
    /// # Errors
    /// Tensors are missing, have unexpected shapes or types, or do not fit in memory.
    pub(crate) fn load(&self, device: Device, context: usize, weights: Weights, console: &Console) -> Result<Loaded> {
        let start = Instant::now();
        let progress = console.progress("loading", Unit::Bytes);
        let show = |done, total| progress.set(done, total);
        let options = LoadOptions { format: weights.into(), progress: Some(&show) };
        let model = Model::load(&self.checkpoint, &device, &options).map_err(|error| named(&self.path, error))?;
        drop(progress);
        warn_of_unused(&model, console);
        if let Device::Cuda(cuda) = &device
            && cuda.lacks_cublaslt()?
        {
            console.note(format_args!(
                "note: cuBLASLt was not found (libcublasLt.so.13 or .12): prompts run on the built-in kernels, slower; \
                 install it for more speed"
            ));
        }
        let slow = model.slow_formats();
        if !slow.is_empty() {
            console.warn(format_args!(
                "weights of type {} have no fast kernel on this device and run slowly; --weights holds them otherwise",
                slow.join(", ")
            ));
        }
        let widened = model.experts_held_as_bf16();
        if !widened.is_empty() {
            console.note(format_args!(
                "note: experts of type {} are held as BF16: this device has no kernel that reads them as they are",
                widened.join(", ")
            ));
        }
        Ok(Loaded { model: Arc::new(model), device, context, time: start.elapsed() })
    }
}

impl Loaded {
    /// An empty session.
    ///
    /// # Errors
    /// The context is longer than the model's.
    pub(crate) fn session(&self) -> Result<Session> {
        let options = SessionOptions { context: Some(self.context), ..SessionOptions::default() };
        Ok(Session::new(self.model.clone(), self.device.clone(), options)?)
    }
}

fn note_plan(plan: &MemoryPlan, available: u64, device: &Device, console: &Console) {
    console.note(format_args!("plan: {plan} of {} on {}", format_bytes(available), device.describe()));
}

/// Opens the files of a model without asking what it is.
///
/// # Errors
/// There are none, or they are damaged.
pub(crate) fn open(path: &Path) -> Result<Checkpoint> {
    Ok(ironloom_weights::open(path)?)
}

/// What a model is called: its folder, or its file without the ending.
pub(crate) fn name(path: &Path) -> String {
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The tokenizer of a model.
///
/// # Errors
/// There is none, or it is of a kind that is not supported.
pub(crate) fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    Tokenizer::from_checkpoint(checkpoint).map_err(|error| named(checkpoint.path(), error))
}

/// The chat template of a model; `None` when it has none.
///
/// # Errors
/// It has one that cannot be used.
pub(crate) fn template(checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>> {
    match ChatTemplate::from_checkpoint(checkpoint) {
        Ok(template) => Ok(Some(template)),
        Err(TextError::NoTemplate { .. }) => Ok(None),
        Err(error) => Err(error).with_context(|| {
            format!("cannot use the chat template of {} (`run --raw` works without)", checkpoint.path().display())
        }),
    }
}

/// An error that says which model it is about.
fn named(path: &Path, error: impl std::error::Error + Send + Sync + 'static) -> anyhow::Error {
    let path = path.display().to_string();
    let says_so = error.to_string().contains(&path);
    let error = anyhow::Error::new(error);
    if says_so { error } else { error.context(format!("cannot use {path}")) }
}

fn warn_of_unused(model: &Model, console: &Console) {
    const SHOWN: usize = 5;
    let unused = model.unused_tensors();
    if !unused.is_empty() {
        let more = if unused.len() > SHOWN { ", …" } else { "" };
        let names = unused.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
        console.warn(format_args!(
            "the model does not use {} of the file: {names}{more}",
            counted(unused.len(), "tensor")
        ));
    }
}
