//! One sequence of a model: fed, continued, cut back, forked.
//!
//! In: ids. Out: the logits after the last of them, and ids sampled from those. A session owns the ids and the model's cache
//! of them; ids that the cache does not hold yet (the one sampled last, as a rule) are computed when their logits are asked
//! for, so each is computed once. Because a model's rows depend on their sequence alone, a session that was truncated, forked
//! or fed in parts goes on exactly as a fresh one with the same ids; on a graphics card as a fresh one whose prompts were cut
//! into the same passes, for passes of many rows round differently there.

use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use ironloom_lm::Model;
use ironloom_tensor::Device;
use serde::{Deserialize, Serialize};

use crate::{
    Error, Result, Sampler, SamplerOptions, StepRow, Steps,
    model::{Cache, Engine, LanguageModel, Span},
    steps::{AHEAD, NO_ID},
};

/// What a session may be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SessionOptions {
    /// The most ids it holds; without a number, the model's own limit.
    pub context: Option<usize>,
    /// How many ids of a prompt go through the model at a time: more is not faster, and takes more memory.
    pub prefill_rows: usize,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self { context: None, prefill_rows: 512 }
    }
}

/// How far feeding has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeedProgress {
    /// Ids computed.
    pub done: usize,
    /// Ids to compute in all.
    pub total: usize,
}

/// What was fed since the last answer, for its report.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fed {
    pub(crate) tokens: usize,
    pub(crate) time: Duration,
}

/// One sequence of a model.
pub struct Session<M: LanguageModel = Model> {
    engine: Engine<M>,
    context: usize,
    prefill_rows: usize,
    ids: Vec<u32>,
    /// Holds a beginning of `ids`.
    cache: M::Cache,
    /// The logits after the first `logits_at` ids; stale where that is not all of them.
    logits: Vec<f32>,
    logits_at: usize,
    /// Where a pass writes, so that a failed one leaves `logits` alone.
    next_logits: Vec<f32>,
    fed: Fed,
    ahead: Ahead<M::Cache>,
}

/// Steps that the device makes ahead of this session.
enum Ahead<C> {
    /// Not asked for yet.
    Unknown,
    /// The device makes none, or had no room for them.
    None,
    /// Captured, for sampled ids or for largest logits only; `running` by these options, or standing still.
    Captured { steps: Box<dyn Steps<C>>, sampled: bool, running: Option<SamplerOptions> },
}

impl<M: LanguageModel> Session<M> {
    /// An empty session of a model on a device.
    ///
    /// # Errors
    /// [`Error::ContextOption`]: the context asked for is longer than the model's. [`Error::InvalidOption`]: a size is 0.
    /// [`Error::OtherDevice`]: the model is not on the device.
    pub fn new(model: Arc<M>, device: Device, options: SessionOptions) -> Result<Self> {
        let limit = model.context_length();
        let context = options.context.unwrap_or(limit);
        if context > limit {
            return Err(Error::ContextOption { asked: context, limit });
        }
        for (option, value) in [("context", context), ("prefill_rows", options.prefill_rows)] {
            if value == 0 {
                return Err(Error::InvalidOption { option, value: 0.0, limits: "at least 1" });
            }
        }
        Ok(Self {
            context,
            prefill_rows: options.prefill_rows,
            ids: Vec::new(),
            cache: model.new_cache(),
            logits: Vec::new(),
            logits_at: 0,
            next_logits: Vec::new(),
            fed: Fed::default(),
            ahead: Ahead::Unknown,
            engine: Engine::new(model, device)?,
        })
    }

    /// Appends ids and computes them.
    ///
    /// # Errors
    /// See [`Session::feed_with`].
    pub fn feed(&mut self, ids: &[u32]) -> Result<()> {
        self.feed_with(ids, &mut |_| ControlFlow::Continue(()))
    }

    /// Appends ids and computes them, some hundred at a time. `progress` is called before the first and after each of these
    /// passes; where it breaks, the feed is undone.
    ///
    /// # Errors
    /// [`Error::PromptTooLong`] and [`Error::UnknownId`], before any work; [`Error::Cancelled`]; [`Error::Model`]. After any
    /// of them the session is as it was.
    pub fn feed_with(&mut self, ids: &[u32], progress: &mut dyn FnMut(FeedProgress) -> ControlFlow<()>) -> Result<()> {
        let start = Instant::now();
        self.queue(ids)?;
        let (length, held) = (self.ids.len(), self.cache.positions());
        if let Err(error) = self.compute(progress) {
            self.ids.truncate(length - ids.len());
            self.cache.truncate(held);
            return Err(error);
        }
        self.fed.tokens += ids.len();
        self.fed.time += start.elapsed();
        Ok(())
    }

    /// Makes the session hold exactly `ids`, computing only what comes after the longest beginning it shares with them, and
    /// gives the length of that beginning. For a conversation whose whole text is written anew each turn.
    ///
    /// # Errors
    /// Those of [`Session::feed_with`]. One that comes before any work leaves the session as it was; after a later one it
    /// holds the shared beginning.
    pub fn replace_with(
        &mut self,
        ids: &[u32],
        progress: &mut dyn FnMut(FeedProgress) -> ControlFlow<()>,
    ) -> Result<usize> {
        self.check_room(0, ids.len())?;
        self.engine.check_ids(ids)?;
        let shared = self.ids.iter().zip(ids).take_while(|(held, wanted)| held == wanted).count();
        self.truncate(shared)?;
        self.feed_with(&ids[shared..], progress)?;
        Ok(shared)
    }

    /// Samples the next id and appends it. It goes through the model with what is asked for next: a session that ends here
    /// has not computed it for nothing.
    ///
    /// # Errors
    /// [`Error::EmptySession`]; [`Error::ContextFull`]; [`Error::Model`]; the sampler's. The ids are as they were.
    pub fn step(&mut self, sampler: &mut Sampler) -> Result<u32> {
        if self.is_full() {
            return Err(Error::ContextFull { context: self.context });
        }
        let id = match self.step_ahead(sampler.options())? {
            Some(id) => id,
            None => {
                self.settle()?;
                sampler.sample(&self.logits, &self.ids)?
            }
        };
        self.ids.push(id);
        Ok(id)
    }

    /// The logits after the last id, one per id of the vocabulary. Computes what has not been computed.
    ///
    /// # Errors
    /// [`Error::EmptySession`]; [`Error::Model`].
    pub fn logits(&mut self) -> Result<&[f32]> {
        self.settle()?;
        Ok(&self.logits)
    }

    /// Keeps the first `length` ids.
    ///
    /// # Errors
    /// [`Error::TruncateBeyond`]: there are fewer.
    pub fn truncate(&mut self, length: usize) -> Result<()> {
        if length > self.ids.len() {
            return Err(Error::TruncateBeyond { asked: length, length: self.ids.len() });
        }
        self.stop_steps();
        self.ids.truncate(length);
        self.cache.truncate(length);
        if length < self.logits_at {
            self.logits_at = 0;
        }
        Ok(())
    }

    /// An independent session that continues from the same ids. It copies the cache and shares the model.
    pub fn fork(&self) -> Self {
        Self {
            engine: self.engine.clone(),
            context: self.context,
            prefill_rows: self.prefill_rows,
            ids: self.ids.clone(),
            cache: self.cache.clone(),
            logits: self.logits.clone(),
            logits_at: self.logits_at,
            next_logits: Vec::new(),
            fed: self.fed,
            ahead: Ahead::Unknown,
        }
    }

    /// The ids so far, fed and sampled.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// How many ids there are.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The most ids it can hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Whether no id fits any more.
    pub fn is_full(&self) -> bool {
        self.ids.len() >= self.context
    }

    /// The model's cache of the sequence.
    pub fn cache(&self) -> &M::Cache {
        &self.cache
    }

    pub(crate) fn engine(&self) -> &Engine<M> {
        &self.engine
    }

    /// What was fed since this was last asked.
    pub(crate) fn take_fed(&mut self) -> Fed {
        std::mem::take(&mut self.fed)
    }

    /// Appends ids that fit and exist; they are computed later.
    pub(crate) fn queue(&mut self, ids: &[u32]) -> Result<()> {
        self.check_room(self.ids.len(), ids.len())?;
        self.engine.check_ids(ids)?;
        self.stop_steps();
        self.ids.extend_from_slice(ids);
        Ok(())
    }

    /// Readies the next ids to compute: how many ids must go through the model before the logits after the last are known.
    /// 0 when they are known.
    pub(crate) fn pending(&mut self) -> usize {
        self.stop_steps();
        if self.logits_at == self.ids.len() {
            return 0;
        }
        // Where the cache holds everything but the logits are of another length, the last id goes through once more.
        self.cache.truncate(self.ids.len() - 1);
        self.ids.len() - self.cache.positions()
    }

    /// How many ids of a prompt go through the model at a time.
    pub(crate) fn prefill_rows(&self) -> usize {
        self.prefill_rows
    }

    /// The next of the pending ids, at most `rows` of them, and the cache that a pass appends them to.
    pub(crate) fn next_pending(&mut self, rows: usize) -> (&[u32], Span<'_, M::Cache>) {
        next_pending(&self.ids, &mut self.cache, rows)
    }

    /// Whether a device's step can come next: only the last id is not computed, the logits after it are not known, and a
    /// position is left.
    pub(crate) fn awaits_step(&self) -> bool {
        self.logits_at != self.ids.len() && self.cache.positions() + 1 >= self.ids.len() && !self.is_full()
    }

    /// What a step of a batch takes of a session that awaits one.
    pub(crate) fn step_row<'a>(&'a mut self, options: &'a SamplerOptions) -> StepRow<'a, M::Cache> {
        self.stop_steps();
        self.cache.truncate(self.ids.len().saturating_sub(1));
        StepRow { ids: &self.ids, cache: &mut self.cache, options }
    }

    /// The cache for one more step of a batch; `None` where it has no position left.
    pub(crate) fn step_cache(&mut self) -> Option<&mut M::Cache> {
        if self.cache.positions() < self.context { Some(&mut self.cache) } else { None }
    }

    /// Appends an id that a step of a batch chose.
    pub(crate) fn push_chosen(&mut self, id: u32) {
        self.ids.push(id);
    }

    /// Counts positions past the ids no more: steps of a batch have run ahead.
    pub(crate) fn forget_ahead(&mut self) {
        self.cache.truncate(self.ids.len());
    }

    /// Counts no position that a step may have left half-written: the last id's and those past it.
    pub(crate) fn forget_failed_steps(&mut self) {
        self.stop_steps();
        self.cache.truncate(self.ids.len().saturating_sub(1));
    }

    /// Samples from logits computed elsewhere, or from this session's own, and appends the id.
    pub(crate) fn sample_from(&mut self, logits: Option<&[f32]>, sampler: &mut Sampler) -> Result<u32> {
        let id = sampler.sample(logits.unwrap_or(&self.logits), &self.ids)?;
        self.ids.push(id);
        Ok(id)
    }

    fn check_room(&self, held: usize, more: usize) -> Result<()> {
        if more > self.context - held.min(self.context) {
            return Err(Error::PromptTooLong { prompt: more, held, context: self.context });
        }
        Ok(())
    }

    /// Refuses to continue where there is nothing to continue from.
    pub(crate) fn check_not_empty(&self) -> Result<()> {
        if self.ids.is_empty() { Err(Error::EmptySession) } else { Ok(()) }
    }

    /// The next id where the device makes steps by itself; `None` where it is the host's to choose.
    fn step_ahead(&mut self, options: &SamplerOptions) -> Result<Option<u32>> {
        let chosen = self.next_ahead(options);
        match &chosen {
            Ok(Some(_)) => {}
            // The way over the host says what is wrong with logits that none could be chosen of.
            Ok(None) => self.stop_steps(),
            Err(_) => self.forget_failed_steps(),
        }
        chosen
    }

    fn next_ahead(&mut self, options: &SamplerOptions) -> Result<Option<u32>> {
        let is_running = matches!(&self.ahead, Ahead::Captured { running: Some(by), .. } if by == options);
        if !is_running && !self.begin_steps(options)? {
            return Ok(None);
        }
        let Self { context, cache, ahead: Ahead::Captured { steps, .. }, .. } = self else { return Ok(None) };
        while steps.in_flight() < AHEAD && cache.positions() < *context {
            steps.launch(&mut [&mut *cache])?;
        }
        if steps.in_flight() == 0 {
            return Ok(None);
        }
        Ok(steps.next()?.first().copied().filter(|&id| id != NO_ID))
    }

    /// Lets the device start from the last id; false where it makes no steps, or cannot go on from what is computed.
    fn begin_steps(&mut self, options: &SamplerOptions) -> Result<bool> {
        self.stop_steps();
        if !self.awaits_step() || matches!(self.ahead, Ahead::None) {
            return Ok(false);
        }
        let sampled = !options.is_argmax();
        // Sampling steps take the largest logit too, but captured ones for that alone are shorter.
        let fits = matches!(&self.ahead, Ahead::Captured { sampled: captured, .. } if *captured == sampled);
        if !fits {
            // The old ones' memory first.
            self.ahead = Ahead::Unknown;
            self.ahead = match self.engine.steps(1, sampled)? {
                Some(steps) => Ahead::Captured { steps, sampled, running: None },
                None => Ahead::None,
            };
        }
        let Self { ids, cache, ahead: Ahead::Captured { steps, running, .. }, .. } = self else { return Ok(false) };
        cache.truncate(ids.len() - 1);
        steps.begin(&mut [StepRow { ids: &ids[..], cache, options }])?;
        *running = Some(options.clone());
        Ok(true)
    }

    /// Counts steps in flight no more: what they write lies past the ids.
    fn stop_steps(&mut self) {
        if let Ahead::Captured { running, .. } = &mut self.ahead
            && running.take().is_some()
        {
            self.cache.truncate(self.ids.len());
        }
    }

    fn settle(&mut self) -> Result<()> {
        self.check_not_empty()?;
        self.compute(&mut |_| ControlFlow::Continue(()))
    }

    /// Puts all pending ids through the model.
    fn compute(&mut self, progress: &mut dyn FnMut(FeedProgress) -> ControlFlow<()>) -> Result<()> {
        let total = self.pending();
        let mut done = 0;
        loop {
            if progress(FeedProgress { done, total }).is_break() {
                return Err(Error::Cancelled { done, total });
            }
            if done == total {
                break;
            }
            let Self { engine, prefill_rows, ids, cache, next_logits, .. } = self;
            let (ids, span) = next_pending(ids, cache, *prefill_rows);
            let rows = span.rows;
            engine.forward(ids, &mut [span], next_logits)?;
            done += rows;
        }
        if total > 0 {
            std::mem::swap(&mut self.logits, &mut self.next_logits);
            self.logits_at = self.ids.len();
        }
        Ok(())
    }
}

fn next_pending<'a, C: Cache>(ids: &'a [u32], cache: &'a mut C, rows: usize) -> (&'a [u32], Span<'a, C>) {
    let held = cache.positions();
    let end = ids.len().min(held.saturating_add(rows));
    (&ids[held..end], Span { cache, rows: end - held })
}

impl<M: LanguageModel> std::fmt::Debug for Session<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { ids, context, .. } = self;
        f.debug_struct("Session").field("ids", ids).field("context", context).finish_non_exhaustive()
    }
}
