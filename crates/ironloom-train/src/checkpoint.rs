//! Checkpoints: folders from which a run goes on as if it had never ended, and from which the model runs.
//!
//! ```text
//! checkpoints/step-00000200/
//!   config.json  model.safetensors  tokenizer.json …    the model, as `ironloom run` and transformers load it
//!   (adapter_config.json  adapter_model.safetensors     instead, where adapters are trained, as peft loads them)
//!   training.safetensors                                moments (`optimizer.…`), the weights' average (`average.…`)
//!   training.json                                       step, guard, place in the data, and the options it all belongs to
//! ```
//!
//! A checkpoint is written under another name and renamed when all of it is on disk. So whenever a process ends, each folder of
//! this form is whole; what an end left half is removed by the next writer.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use ironloom_core::{DType, PartialFolder, Shape, replace_file};
use ironloom_lm::{
    LoadOptions, Model,
    export::{TextFiles, write_trained},
};
use ironloom_quant::WeightFormat;
use ironloom_tensor::Device;
use ironloom_weights::{Metadata, NewTensor, TensorInfo, unwatched};
use serde::{Deserialize, Serialize};

use crate::{Error, Result, SavedTensor, Trainer, TrainerOptions, TrainerState, data::Cursor, lora::peft};

const TENSORS: &str = "training.safetensors";
const STATE: &str = "training.json";
const PREFIX: &str = "step-";

/// What a checkpoint remembers beside tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Where the trainer stands.
    pub trainer: TrainerState,
    /// Where the data stand.
    pub cursor: Cursor,
    /// What the steps were taken with.
    pub options: TrainerOptions,
    /// Why it was written.
    #[serde(default)]
    pub occasion: Occasion,
    /// What the caller wants to find again ([`RunOptions::notes`](crate::run::RunOptions)).
    #[serde(default)]
    pub notes: serde_json::Value,
}

/// Why a checkpoint is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Occasion {
    /// A number of steps is done.
    #[default]
    Planned,
    /// The run was told to stop, which can be anywhere, also among steps that the guard refuses. So the guard never goes back to
    /// such a one, and it goes when the next is written.
    Stop,
}

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    /// How many of the planned ones are kept; the oldest go.
    keep: usize,
    notes: serde_json::Value,
}

impl Checkpoints {
    /// Those in `folder`, which is made when the first is written; the newest `keep` (1 at least) stay.
    pub fn new(folder: impl Into<PathBuf>, keep: usize) -> Self {
        Self { folder: folder.into(), keep: keep.max(1), notes: serde_json::Value::Null }
    }

    /// The same with what each is to hold for the caller.
    #[must_use]
    pub fn with_notes(self, notes: serde_json::Value) -> Self {
        Self { notes, ..self }
    }

    /// Whole checkpoints with their steps, oldest first.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn list(&self) -> Result<Vec<(u64, PathBuf)>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|source| Error::Read { path: self.folder.clone(), source })?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(|source| Error::Read { path: self.folder.clone(), source })?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if let Some(step) = name.strip_prefix(PREFIX).and_then(|step| step.parse().ok()) {
                found.push((step, path));
            }
        }
        found.sort();
        Ok(found)
    }

    /// The newest whole checkpoint.
    ///
    /// # Errors
    /// As [`Checkpoints::list`].
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        Ok(self.list()?.pop().map(|(_, path)| path))
    }

    /// The newest that the guard may go back to, with its steps: a planned one, or the newest of all where there is none.
    ///
    /// # Errors
    /// As [`Checkpoints::list`], or one has no whole state.
    pub fn latest_planned(&self) -> Result<Option<(u64, PathBuf)>> {
        let mut newest = None;
        for (step, path) in self.list()?.into_iter().rev() {
            if read_state(&path)?.occasion == Occasion::Planned {
                return Ok(Some((step, path)));
            }
            newest.get_or_insert((step, path));
        }
        Ok(newest)
    }

    /// Writes a checkpoint of where everything stands, then removes the oldest. Gives its folder.
    ///
    /// # Errors
    /// There is a checkpoint of this step, the disk is full or can't be written, or the model can't be written (see [`write_trained`]). Earlier checkpoints are then as they
    /// were.
    pub fn write(&self, trainer: &Trainer, cursor: &Cursor, text: &TextFiles, occasion: Occasion) -> Result<PathBuf> {
        let state = RunState {
            trainer: trainer.state(),
            cursor: cursor.clone(),
            options: trainer.options().clone(),
            occasion,
            notes: self.notes.clone(),
        };
        let target = self.folder.join(format!("{PREFIX}{:08}", state.trainer.step));
        if target.exists() {
            return Err(Error::FolderInUse { path: target });
        }
        let error = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Write { path, source }
        };
        fs::create_dir_all(&self.folder).map_err(error(&self.folder))?;
        self.remove_unfinished()?;
        let unfinished = PartialFolder::create(&target).map_err(error(&target))?;
        let folder = unfinished.path();
        match trainer.adapter()? {
            Some(adapter) => peft::save(folder, &adapter)?,
            None => write_trained(trainer.model(), folder, text)?,
        }
        let tensors = trainer.saved_tensors()?.into_iter().map(new_tensor).collect();
        ironloom_weights::safetensors::write(folder.join(TENSORS), &Metadata::new(), tensors, &mut unwatched)?;
        let json = serde_json::to_vec_pretty(&state).map_err(|source| error(folder)(source.into()))?;
        replace_file(&folder.join(STATE), &json).map_err(error(folder))?;
        unfinished.finish().map_err(error(&target))?;
        let mut planned = 0;
        for (_, path) in self.list()?.into_iter().rev() {
            let is_planned = read_state(&path)?.occasion == Occasion::Planned;
            planned += usize::from(is_planned);
            if path != target && (!is_planned || planned > self.keep) {
                self.remove(&path)?;
            }
        }
        Ok(target)
    }

    /// Removes those past a step, as when the guard went back to it.
    ///
    /// # Errors
    /// The folder can't be read, or one can't be removed.
    pub fn remove_after(&self, step: u64) -> Result<()> {
        let after = self.list()?.into_iter().filter(|(of, _)| *of > step);
        after.map(|(_, path)| path).try_for_each(|path| self.remove(&path))
    }

    /// Removes one, under another name first: what has the name of a checkpoint is whole.
    fn remove(&self, path: &Path) -> Result<()> {
        let unfinished = PathBuf::from(format!("{}{}", path.display(), PartialFolder::ENDING));
        let removed = fs::rename(path, &unfinished).and_then(|()| fs::remove_dir_all(&unfinished));
        removed.map_err(|source| Error::Write { path: path.to_owned(), source })
    }

    /// What an end of the process left half.
    fn remove_unfinished(&self) -> Result<()> {
        let entries = fs::read_dir(&self.folder).map_err(|source| Error::Read { path: self.folder.clone(), source })?;
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().ends_with(PartialFolder::ENDING) {
                fs::remove_dir_all(entry.path()).map_err(|source| Error::Write { path: entry.path(), source })?;
            }
        }
        Ok(())
    }
}

/// Reads a checkpoint's state, so that the options can be compared before the model is loaded.
///
/// # Errors
/// The file isn't there or isn't what [`Checkpoints::write`] wrote.
pub fn read_state(checkpoint: &Path) -> Result<RunState> {
    let path = checkpoint.join(STATE);
    let bytes = fs::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Read { path, source: source.into() })
}

/// A trainer on `device` that goes on from a checkpoint, and where the data stood. The model is read on the processor. `steps` and the schedule may differ from what the checkpoint was
/// made with: a run can be prolonged.
///
/// # Errors
/// A file is missing or damaged, `options` have another optimizer, or the device can't train the model ([`Trainer::to_device`]).
pub fn resume(checkpoint: &Path, device: &Device, options: TrainerOptions) -> Result<(Trainer, Cursor)> {
    let stored = ironloom_weights::open(checkpoint)?;
    let load = LoadOptions { format: WeightFormat::F32, ..LoadOptions::default() };
    let mut model = Model::load(&stored, &device.processor(), &load)?;
    model.make_trainable()?;
    restored(Trainer::new(model, options)?.to_device(device)?, checkpoint)
}

/// As [`resume`], where adapters of `base` are trained.
///
/// # Errors
/// As [`resume`], or the adapters are another model's.
pub fn resume_adapters(checkpoint: &Path, base: Model, options: TrainerOptions) -> Result<(Trainer, Cursor)> {
    restored(Trainer::with_adapters(base, &peft::load(checkpoint)?, options)?, checkpoint)
}

/// The trainer gone back to a checkpoint of its own run.
///
/// # Errors
/// As [`resume`].
pub fn roll_back(trainer: Trainer, checkpoint: &Path) -> Result<Trainer> {
    let (options, has_adapters) = (trainer.options().clone(), trainer.adapter()?.is_some());
    let device = trainer.model().device().clone();
    let (trainer, _) = match has_adapters {
        true => resume_adapters(checkpoint, trainer.into_model(), options)?,
        false => {
            // Two of them may be more than fits in memory.
            drop(trainer);
            resume(checkpoint, &device, options)?
        }
    };
    Ok(trainer)
}

fn restored(mut trainer: Trainer, checkpoint: &Path) -> Result<(Trainer, Cursor)> {
    let state = read_state(checkpoint)?;
    let tensors = ironloom_weights::open(checkpoint.join(TENSORS))?;
    let names: Vec<String> = tensors.tensors().map(|info| info.name.clone()).collect();
    let mut saved = Vec::with_capacity(names.len());
    for name in names {
        let data = tensors.tensor(&name)?;
        saved.push(SavedTensor::from_bytes(name, data.dtype, &data.bytes)?);
    }
    trainer.restore(&state.trainer, saved)?;
    Ok((trainer, state.cursor))
}

fn new_tensor(tensor: SavedTensor<'_>) -> NewTensor<'_> {
    let info = TensorInfo { name: tensor.name.clone(), dtype: tensor.dtype(), shape: Shape::from([tensor.len()]) };
    debug_assert!(matches!(info.dtype, DType::F32 | DType::U8));
    NewTensor::made(info, move || Ok(tensor.bytes().to_vec()))
}
