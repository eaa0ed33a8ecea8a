//! Many sequences in one pass of the model.
//!
//! In: sessions, each with its prompt, sampler and limits. Out, at each step: the next id of every sequence whose prompt is
//! through. One step is one pass over all of them: a row for each sequence that is answering, and as much of the waiting
//! prompts as fits beside them. Sequences are ragged (each has its own cache and length), rows leave as they finish, and new
//! ones join between steps.
//!
//! Each sequence gets exactly the ids it gets alone: a model's row depends on its own sequence only, prompts are cut into
//! passes by their own length only, and a sampler's draw depends on its seed and the position.

use std::sync::Arc;

use ironloom_lm::Model;
use ironloom_tensor::Device;
use serde::{Deserialize, Serialize};

use crate::{
    Error, FinishReason, LanguageModel, Result, Sampler, Session, Steps,
    model::{Engine, Span},
    steps::{AHEAD, MOST_ROWS, NO_ID},
};

/// When a row of a batch ends. Its text, and so its stop strings, are its owner's: see [`AnswerText`](crate::AnswerText) and
/// [`BatchDecoder::leave`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RowLimits {
    /// The most ids to sample; 0 samples none.
    pub max_tokens: usize,
    /// Ids that end the row: a tokenizer's `end_ids`.
    pub end_ids: Vec<u32>,
}

impl Default for RowLimits {
    fn default() -> Self {
        Self { max_tokens: 512, end_ids: Vec::new() }
    }
}

/// A row's number in its batch. Numbers are given in ascending order and never again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId(u64);

/// What a step brought to one row.
#[derive(Debug)]
pub enum RowEvent<M: LanguageModel = Model> {
    /// The next id; the row goes on.
    Token(u32),
    /// The row is done and has left.
    Finished {
        /// The last id, sampled in this step; none where the row could not sample any.
        last: Option<u32>,
        /// Why it ended.
        reason: FinishReason,
        /// Its session, to go on with.
        session: Session<M>,
    },
    /// No id could be sampled for this row alone. It has left.
    Failed {
        /// Why.
        error: Error,
        /// Its session, as it was before the step's sample.
        session: Session<M>,
    },
}

/// Decodes many sequences of one model together.
pub struct BatchDecoder<M: LanguageModel = Model> {
    engine: Engine<M>,
    rows_per_pass: usize,
    rows: Vec<Row<M>>,
    next_row: u64,
    logits: Vec<f32>,
    ahead: Option<Ahead<M::Cache>>,
    /// Whether the device makes steps by itself; asked until it does not, or has no room for them.
    has_steps: bool,
}

/// Steps that the device makes ahead of the batch.
struct Ahead<C> {
    steps: Box<dyn Steps<C>>,
    /// Rows they were made for, and whether they sample.
    capacity: usize,
    sampled: bool,
    /// The rows they run for now, in order; empty while they stand still.
    running: Vec<RowId>,
}

struct Row<M: LanguageModel> {
    id: RowId,
    session: Session<M>,
    sampler: Sampler,
    limits: RowLimits,
    generated: usize,
}

/// Where the logits for a row's next id are.
#[derive(Clone, Copy)]
enum Logits {
    /// The prompt is not through.
    None,
    /// In the session.
    Own,
    /// In this span of the pass.
    Span(usize),
}

/// What a row got from a step.
enum Sampled {
    GoesOn(u32),
    Ends { last: Option<u32>, reason: FinishReason },
}

impl<M: LanguageModel> BatchDecoder<M> {
    /// A batch without rows. A pass takes up to `rows_per_pass` rows of prompts; 512, what a session takes alone, is a good
    /// number. Every row that is answering takes part in every pass even where they are more, and so does the first prompt
    /// that waits, by as many rows as its session takes alone ([`SessionOptions`](crate::SessionOptions)).
    ///
    /// # Errors
    /// [`Error::InvalidOption`]: `rows_per_pass` is 0. [`Error::OtherDevice`]: the model is not on the device.
    pub fn new(model: Arc<M>, device: Device, rows_per_pass: usize) -> Result<Self> {
        if rows_per_pass == 0 {
            return Err(Error::InvalidOption { option: "rows_per_pass", value: 0.0, limits: "at least 1" });
        }
        let engine = Engine::new(model, device)?;
        let (rows, logits) = (Vec::new(), Vec::new());
        Ok(Self { engine, rows_per_pass, rows, next_row: 0, logits, ahead: None, has_steps: true })
    }

    /// Adds a row: `session`, continued by `prompt`. The prompt is computed by the next steps.
    ///
    /// # Errors
    /// [`Error::OtherModel`]; [`Error::PromptTooLong`]; [`Error::UnknownId`]; [`Error::EmptySession`].
    pub fn join(
        &mut self,
        mut session: Session<M>,
        prompt: &[u32],
        sampler: Sampler,
        limits: RowLimits,
    ) -> Result<RowId> {
        if !Arc::ptr_eq(&session.engine().model, &self.engine.model) {
            return Err(Error::OtherModel);
        }
        session.queue(prompt)?;
        session.check_not_empty()?;
        self.stop_steps();
        let id = RowId(self.next_row);
        self.next_row += 1;
        self.rows.push(Row { id, session, sampler, limits, generated: 0 });
        Ok(id)
    }

    /// Takes a row out before it is done, and gives its session.
    ///
    /// # Errors
    /// [`Error::UnknownRow`]: it has left, or was never here.
    pub fn leave(&mut self, row: RowId) -> Result<Session<M>> {
        let place = self.rows.iter().position(|held| held.id == row).ok_or(Error::UnknownRow { row: row.0 })?;
        self.stop_steps();
        Ok(self.rows.remove(place).session)
    }

    /// Rows that are not done.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether no row is left.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// One pass for all rows, and what it brought to each, in the order they joined. Rows whose prompt is not through are
    /// left out.
    ///
    /// # Errors
    /// [`Error::Model`]: the pass failed, and every row is as it was.
    pub fn step(&mut self) -> Result<Vec<(RowId, RowEvent<M>)>> {
        if let Some(ids) = self.step_ahead()? {
            return Ok(self.take_ids(&ids));
        }
        let sources = self.pass()?;
        let (vocabulary, logits) = (self.engine.model.vocabulary(), &self.logits);
        let mut events = Vec::with_capacity(self.rows.len());
        let mut staying = Vec::with_capacity(self.rows.len());
        for (mut row, source) in self.rows.drain(..).zip(sources) {
            let logits = match source {
                Logits::Span(span) => Some(&logits[span * vocabulary..(span + 1) * vocabulary]),
                Logits::Own => None,
                Logits::None => {
                    staying.push(row);
                    continue;
                }
            };
            let id = row.id;
            match row.sample(logits) {
                Ok(Sampled::GoesOn(token)) => {
                    events.push((id, RowEvent::Token(token)));
                    staying.push(row);
                }
                Ok(Sampled::Ends { last, reason }) => {
                    events.push((id, RowEvent::Finished { last, reason, session: row.session }));
                }
                Err(error) => events.push((id, RowEvent::Failed { error, session: row.session })),
            }
        }
        self.rows = staying;
        Ok(events)
    }

    /// The next id of every row where the device makes steps by itself and all rows are answering; `None` elsewhere.
    fn step_ahead(&mut self) -> Result<Option<Vec<u32>>> {
        let ids = self.next_ahead();
        match &ids {
            Ok(Some(_)) => {}
            // The way over the host says what is wrong with a row's logits that none could be chosen of.
            Ok(None) => self.stop_steps(),
            Err(_) => {
                self.stop_steps();
                self.rows.iter_mut().for_each(|row| row.session.forget_failed_steps());
            }
        }
        ids
    }

    fn next_ahead(&mut self) -> Result<Option<Vec<u32>>> {
        let count = self.rows.len();
        if !self.has_steps || count == 0 || count > MOST_ROWS {
            return Ok(None);
        }
        let is_running = |ahead: &Ahead<M::Cache>| {
            ahead.running.len() == count && ahead.running.iter().zip(&self.rows).all(|(id, row)| *id == row.id)
        };
        if !self.ahead.as_ref().is_some_and(is_running) && !self.begin_steps()? {
            return Ok(None);
        }
        let Some(ahead) = &mut self.ahead else { return Ok(None) };
        while ahead.steps.in_flight() < AHEAD {
            let caches: Option<Vec<_>> = self.rows.iter_mut().map(|row| row.session.step_cache()).collect();
            let Some(mut caches) = caches else { break };
            ahead.steps.launch(&mut caches)?;
        }
        if ahead.steps.in_flight() == 0 {
            return Ok(None);
        }
        Ok(Some(ahead.steps.next()?).filter(|ids| ids.len() == count && !ids.contains(&NO_ID)))
    }

    /// Lets the device start from the rows' last ids; false where it makes no steps, or a row cannot go on so.
    fn begin_steps(&mut self) -> Result<bool> {
        self.stop_steps();
        let count = self.rows.len();
        if self.rows.iter().any(|row| row.limit().is_some() || !row.session.awaits_step()) {
            return Ok(false);
        }
        let sampled = self.rows.iter().any(|row| !row.sampler.options().is_argmax());
        let fits = |ahead: &Ahead<M::Cache>| ahead.sampled == sampled && ahead.capacity >= count;
        if !self.ahead.as_ref().is_some_and(fits) {
            let capacity = count.next_power_of_two();
            // The old ones' memory first: a captured step holds the logits of all its rows.
            self.ahead = None;
            let steps = self.engine.steps(capacity, sampled)?;
            self.has_steps = steps.is_some();
            self.ahead = steps.map(|steps| Ahead { steps, capacity, sampled, running: Vec::new() });
        }
        let Some(ahead) = &mut self.ahead else { return Ok(false) };
        let mut rows: Vec<_> = self.rows.iter_mut().map(|row| row.session.step_row(row.sampler.options())).collect();
        ahead.steps.begin(&mut rows)?;
        drop(rows);
        ahead.running = self.rows.iter().map(|row| row.id).collect();
        Ok(true)
    }

    /// Gives every row its id of a step, and lets those that are done go.
    fn take_ids(&mut self, ids: &[u32]) -> Vec<(RowId, RowEvent<M>)> {
        let mut events = Vec::with_capacity(ids.len());
        let (mut staying, mut left) = (Vec::with_capacity(ids.len()), false);
        for (mut row, &id) in self.rows.drain(..).zip(ids) {
            row.session.push_chosen(id);
            row.generated += 1;
            match row.end_after(id) {
                Some(reason) => {
                    left = true;
                    row.session.forget_ahead();
                    events.push((row.id, RowEvent::Finished { last: Some(id), reason, session: row.session }));
                }
                None => {
                    events.push((row.id, RowEvent::Token(id)));
                    staying.push(row);
                }
            }
        }
        self.rows = staying;
        if left {
            self.stop_steps();
        }
        events
    }

    /// Counts steps in flight no more.
    fn stop_steps(&mut self) {
        if let Some(ahead) = &mut self.ahead
            && !ahead.running.is_empty()
        {
            ahead.running.clear();
            self.rows.iter_mut().for_each(|row| row.session.forget_ahead());
        }
    }

    /// Puts the next ids of all rows through the model, and says where each row's logits are.
    fn pass(&mut self) -> Result<Vec<Logits>> {
        let shares = self.shares();
        let (mut ids, mut spans, mut sources) = (Vec::new(), Vec::<Span<'_, M::Cache>>::new(), Vec::new());
        for (row, (pending, share)) in self.rows.iter_mut().zip(shares) {
            sources.push(match (pending, share) {
                (0, _) => Logits::Own,
                (pending, share) if pending == share => Logits::Span(spans.len()),
                _ => Logits::None,
            });
            if share > 0 {
                let (next, span) = row.session.next_pending(share);
                ids.extend_from_slice(next);
                spans.push(span);
            }
        }
        if !spans.is_empty() {
            self.engine.forward(&ids, &mut spans, &mut self.logits)?;
        }
        Ok(sources)
    }

    /// How many ids each row has to compute, and how many of them in this pass: one for each row that is answering, then
    /// the prompts in the order they joined, as far as the pass has room. A prompt is cut as it would be alone, never where
    /// the room ends: on a graphics card the cut decides how a row is rounded.
    fn shares(&mut self) -> Vec<(usize, usize)> {
        let pieces: Vec<usize> = self.rows.iter().map(|row| row.session.prefill_rows()).collect();
        let pending = |row: &mut Row<M>| if row.limit().is_some() { 0 } else { row.session.pending() };
        let pending: Vec<usize> = self.rows.iter_mut().map(pending).collect();
        let answering = pending.iter().filter(|&&pending| pending == 1).count();
        let mut room = self.rows_per_pass.saturating_sub(answering);
        // The first prompt goes on in any case: neither many answering rows nor a small pass can hold it off forever.
        let mut first = true;
        let share = |(pending, piece): (usize, usize)| {
            if pending <= 1 {
                return (pending, pending);
            }
            let mut share = pending.min(piece);
            if share > room && !first {
                share = 0;
            }
            first = false;
            room = room.saturating_sub(share);
            (pending, share)
        };
        pending.into_iter().zip(pieces).map(share).collect()
    }
}

impl<M: LanguageModel> Row<M> {
    /// Why the row can sample no further id, where it cannot.
    fn limit(&self) -> Option<FinishReason> {
        if self.generated >= self.limits.max_tokens {
            Some(FinishReason::MaxTokens)
        } else if self.session.is_full() {
            Some(FinishReason::ContextFull)
        } else {
            None
        }
    }

    /// Why the row ends with `id`, its latest, where it does.
    fn end_after(&self, id: u32) -> Option<FinishReason> {
        let ended = self.limits.end_ids.contains(&id).then_some(FinishReason::EndToken);
        ended.or(self.limit())
    }

    /// Samples the next id, where the limits allow one.
    fn sample(&mut self, logits: Option<&[f32]>) -> Result<Sampled> {
        if let Some(reason) = self.limit() {
            return Ok(Sampled::Ends { last: None, reason });
        }
        let id = self.session.sample_from(logits, &mut self.sampler)?;
        self.generated += 1;
        Ok(match self.end_after(id) {
            Some(reason) => Sampled::Ends { last: Some(id), reason },
            None => Sampled::GoesOn(id),
        })
    }
}

impl<M: LanguageModel> std::fmt::Debug for BatchDecoder<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchDecoder").field("rows", &self.rows.len()).finish_non_exhaustive()
    }
}
