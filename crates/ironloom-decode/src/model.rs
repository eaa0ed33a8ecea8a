//! What decoding needs of a language model, and how `ironloom-lm`'s model gives it.
//!
//! Sessions, batches and text generation know a model by this seam alone: ids and caches in, logits out. So their rules are
//! tested with a scripted model whose every answer is known, and a model that lives elsewhere can be decoded the same way.

use std::sync::Arc;

use ironloom_lm::{LogitRows, Model};
use ironloom_nn::KvCache;
use ironloom_tensor::{Context, Device};

use crate::{CudaSteps, Error, Result, Steps};

/// A model that continues sequences of ids.
pub trait LanguageModel {
    /// What it keeps of a sequence between passes.
    type Cache: Cache;
    /// What goes wrong in it.
    type Error: std::error::Error + Send + Sync + 'static;

    /// How many ids there are; a pass gives that many logits per sequence.
    fn vocabulary(&self) -> usize;

    /// The most positions of one sequence.
    fn context_length(&self) -> usize;

    /// A cache that holds nothing.
    fn new_cache(&self) -> Self::Cache;

    /// Where it is, if it cannot run on another device.
    fn device(&self) -> Option<&Device> {
        None
    }

    /// One pass over consecutive ids of some sequences, each span's after those its cache holds. Appends them to the caches
    /// and replaces `logits` by those of each span's last row, `[spans, vocabulary]`.
    ///
    /// A row's logits must depend on its sequence alone, bit for bit: not on the spans beside it, nor on how its sequence
    /// was cut into passes. (On a graphics card a pass of many rows of a sequence rounds differently than one of few: there
    /// the logits may depend on the cut, and sessions and batches cut a prompt alike.) A session and a batch promise no more
    /// than the model does.
    ///
    /// # Errors
    /// The pass failed. The caches may hold some of its rows then; the caller cuts them back.
    fn forward(
        &self,
        device: &Device,
        ids: &[u32],
        spans: &mut [Span<'_, Self::Cache>],
        logits: &mut Vec<f32>,
    ) -> std::result::Result<(), Self::Error>;

    /// Steps of up to `rows` rows that `device` makes by itself; `None` where every id is chosen on the host. Where `sampled`
    /// is false, all rows take their largest logits.
    ///
    /// # Errors
    /// [`Error::NoRoomForSteps`]: the host chooses every id from then on, which is slower and gives the same ids. Another
    /// where the device fails.
    fn steps(
        self: &Arc<Self>,
        device: &Device,
        rows: usize,
        sampled: bool,
    ) -> Result<Option<Box<dyn Steps<Self::Cache>>>> {
        let _ = (device, rows, sampled);
        Ok(None)
    }
}

/// What a model keeps of one sequence. A clone shares nothing that changes.
pub trait Cache: Clone {
    /// Positions held.
    fn positions(&self) -> usize;

    /// Forgets every position from `length` on; a longer length changes nothing.
    fn truncate(&mut self, length: usize);
}

/// Consecutive ids of one sequence in a pass.
#[derive(Debug)]
pub struct Span<'a, C> {
    /// What the model keeps of the sequence.
    pub cache: &'a mut C,
    /// How many of the pass's ids are the sequence's.
    pub rows: usize,
}

impl LanguageModel for Model {
    type Cache = KvCache;
    type Error = ironloom_lm::Error;

    fn vocabulary(&self) -> usize {
        self.config().vocab_size
    }

    fn context_length(&self) -> usize {
        self.config().context_length
    }

    fn new_cache(&self) -> KvCache {
        Model::new_cache(self)
    }

    fn device(&self) -> Option<&Device> {
        Some(Model::device(self))
    }

    fn forward(
        &self,
        device: &Device,
        ids: &[u32],
        spans: &mut [Span<'_, KvCache>],
        logits: &mut Vec<f32>,
    ) -> ironloom_lm::Result<()> {
        let mut spans: Vec<ironloom_nn::Span<'_>> =
            spans.iter_mut().map(|span| ironloom_nn::Span { cache: &mut *span.cache, rows: span.rows }).collect();
        let last = Model::forward(self, &Context::inference(device), ids, &mut spans, LogitRows::Last)?;
        *logits = last.into_f32()?;
        Ok(())
    }

    fn steps(self: &Arc<Self>, device: &Device, rows: usize, sampled: bool) -> Result<Option<Box<dyn Steps<KvCache>>>> {
        let steps = CudaSteps::new(self, device, rows, sampled)?;
        Ok(steps.map(|steps| Box::new(steps) as Box<dyn Steps<KvCache>>))
    }
}

impl Cache for KvCache {
    fn positions(&self) -> usize {
        self.len()
    }

    fn truncate(&mut self, length: usize) {
        KvCache::truncate(self, length);
    }
}

/// Refuses to run a model on another device than its own.
pub(crate) fn check_device(model: &impl LanguageModel, device: &Device) -> Result<()> {
    match model.device() {
        Some(own) if !own.is(device) => Err(Error::OtherDevice { model: own.describe(), found: device.describe() }),
        _ => Ok(()),
    }
}

/// A model and where it runs: what sessions and batches share.
#[derive(Debug)]
pub(crate) struct Engine<M> {
    pub(crate) model: Arc<M>,
    pub(crate) device: Device,
}

impl<M> Clone for Engine<M> {
    fn clone(&self) -> Self {
        Self { model: self.model.clone(), device: self.device.clone() }
    }
}

impl<M: LanguageModel> Engine<M> {
    /// A model on `device`.
    ///
    /// # Errors
    /// The model is on another.
    pub(crate) fn new(model: Arc<M>, device: Device) -> Result<Self> {
        check_device(model.as_ref(), &device)?;
        Ok(Self { model, device })
    }

    /// The model's steps on the device; `None` where it makes none, or has no room for them.
    pub(crate) fn steps(&self, rows: usize, sampled: bool) -> Result<Option<Box<dyn Steps<M::Cache>>>> {
        match self.model.steps(&self.device, rows, sampled) {
            Err(Error::NoRoomForSteps { .. }) => Ok(None),
            steps => steps,
        }
    }

    /// One pass that happens whole or not at all: after a failure every cache holds what it held before.
    pub(crate) fn forward(&self, ids: &[u32], spans: &mut [Span<'_, M::Cache>], logits: &mut Vec<f32>) -> Result<()> {
        let held: Vec<usize> = spans.iter().map(|span| span.cache.positions()).collect();
        let passed = self.model.forward(&self.device, ids, spans, logits);
        let checked = match passed {
            Ok(()) => self.check_pass(spans, &held, logits),
            Err(source) => Err(Error::Model { source: Box::new(source) }),
        };
        if checked.is_err() {
            spans.iter_mut().zip(held).for_each(|(span, held)| span.cache.truncate(held));
        }
        checked
    }

    /// Holds a model to its word before anything is indexed by it.
    fn check_pass(&self, spans: &[Span<'_, M::Cache>], held: &[usize], logits: &[f32]) -> Result<()> {
        let expected = spans.len() * self.model.vocabulary();
        if logits.len() != expected {
            return Err(Error::WrongPass { what: "logits", found: logits.len(), expected });
        }
        for (span, held) in spans.iter().zip(held) {
            let (found, expected) = (span.cache.positions(), held + span.rows);
            if found != expected {
                return Err(Error::WrongPass { what: "positions in a cache", found, expected });
            }
        }
        Ok(())
    }

    /// Refuses ids that the model has no embedding for.
    pub(crate) fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let vocabulary = self.model.vocabulary();
        match ids.iter().position(|&id| id as usize >= vocabulary) {
            Some(position) => Err(Error::UnknownId { id: ids[position], position, vocabulary }),
            None => Ok(()),
        }
    }
}
