//! A model whose every answer is known, for tests of what surrounds a model.

#![allow(dead_code)] // each test file takes what it needs

pub(crate) mod steps;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
};

use ironloom_core::Philox;
use ironloom_decode::{Cache, LanguageModel, Result, Sampler, SamplerOptions, Session, SessionOptions, Span, Steps};
use ironloom_lm::text::{AddBos, Specials, Tokenizer, TrainOptions, train_bpe};
use ironloom_tensor::Device;
use steps::DeviceLog;

/// The ids of [`tokenizer`]: one special token and 256 bytes.
pub(crate) const VOCABULARY: usize = 257;

/// Gives logits that depend on every id of a sequence, or those of a script, and notes its passes.
#[derive(Debug, Default)]
pub(crate) struct ScriptedModel {
    pub(crate) context: usize,
    /// The id at each position of the sequence, where the answer is to be known; else logits are drawn from a hash of all
    /// ids before, so that one wrong, missing or doubled id changes everything after it.
    pub(crate) script: Option<Vec<u32>>,
    /// Numbers of passes that fail, half-way.
    pub(crate) failing: Mutex<HashSet<usize>>,
    /// After this id the logits are NaN.
    pub(crate) poisonous: Option<u32>,
    /// The rows of each span of each pass.
    pub(crate) passes: Mutex<Vec<Vec<usize>>>,
    /// A pretended device that makes steps ahead, where there is one.
    pub(crate) device: Option<Arc<Mutex<DeviceLog>>>,
}

/// The ids that went through the model.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScriptedCache(Vec<u32>);

#[derive(Debug, thiserror::Error)]
#[error("pass {0} was to fail")]
pub(crate) struct Failed(usize);

impl Cache for ScriptedCache {
    fn positions(&self) -> usize {
        self.0.len()
    }
    fn truncate(&mut self, length: usize) {
        self.0.truncate(length);
    }
}

impl LanguageModel for ScriptedModel {
    type Cache = ScriptedCache;
    type Error = Failed;

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }
    fn context_length(&self) -> usize {
        self.context
    }
    fn new_cache(&self) -> ScriptedCache {
        ScriptedCache::default()
    }
    fn forward(
        &self,
        _: &Device,
        ids: &[u32],
        spans: &mut [Span<'_, ScriptedCache>],
        logits: &mut Vec<f32>,
    ) -> std::result::Result<(), Failed> {
        let number = {
            let mut passes = self.passes.lock().unwrap();
            passes.push(spans.iter().map(|span| span.rows).collect());
            passes.len() - 1
        };
        let fails = self.failing.lock().unwrap().contains(&number);
        logits.clear();
        let mut start = 0;
        for span in spans.iter_mut() {
            let rows = &ids[start..start + span.rows];
            start += span.rows;
            match fails {
                // What a pass leaves that failed half-way is worth nothing.
                true => span.cache.0.extend(rows.iter().take(rows.len().div_ceil(2)).map(|_| u32::MAX)),
                false => span.cache.0.extend_from_slice(rows),
            }
            logits.extend(self.logits_after(&span.cache.0));
        }
        if fails { Err(Failed(number)) } else { Ok(()) }
    }
    fn steps(
        self: &Arc<Self>,
        _: &Device,
        rows: usize,
        sampled: bool,
    ) -> Result<Option<Box<dyn Steps<ScriptedCache>>>> {
        let Some(log) = &self.device else { return Ok(None) };
        Ok(Some(Box::new(steps::ScriptedSteps::capture(self.rule(), log.clone(), rows, sampled)?)))
    }
}

impl ScriptedModel {
    /// A model whose logits hash the whole sequence.
    pub(crate) fn hashing(context: usize) -> Arc<Self> {
        Arc::new(Self { context, ..Self::default() })
    }

    /// A model that answers `answer` to `prompt`, by greedy sampling, then the end token.
    pub(crate) fn answering(prompt: &[u32], answer: &[u32], context: usize) -> Arc<Self> {
        Arc::new(Self { context, script: Some([prompt, answer].concat()), ..Self::default() })
    }

    /// The same model without its notes and its device.
    fn rule(&self) -> Self {
        let (context, script, poisonous) = (self.context, self.script.clone(), self.poisonous);
        Self { context, script, poisonous, ..Self::default() }
    }

    /// The same model, with a device that makes steps ahead.
    pub(crate) fn on_device(&self) -> Arc<Self> {
        Arc::new(Self { device: Some(Arc::default()), ..self.rule() })
    }

    /// What its device was asked for.
    pub(crate) fn log(&self) -> std::sync::MutexGuard<'_, DeviceLog> {
        self.device.as_ref().expect("the model has a device").lock().unwrap()
    }

    pub(crate) fn logits_after(&self, ids: &[u32]) -> Vec<f32> {
        if ids.last().is_some_and(|last| self.poisonous == Some(*last)) {
            return vec![f32::NAN; VOCABULARY];
        }
        match &self.script {
            Some(script) => {
                let mut logits = vec![0.0; VOCABULARY];
                logits[script.get(ids.len()).map_or(0, |&id| id as usize)] = 1.0;
                logits
            }
            None => {
                let hash = ids.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &id| {
                    (hash ^ u64::from(id)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17)
                });
                let mut draws = Philox::new(hash, ids.len() as u64);
                (0..VOCABULARY).map(|_| draws.next_f32() * 8.0).collect()
            }
        }
    }

    pub(crate) fn session(self: &Arc<Self>) -> Session<Self> {
        self.session_of(SessionOptions::default().prefill_rows)
    }

    /// A session that puts this many ids of a prompt through the model at a time.
    pub(crate) fn session_of(self: &Arc<Self>, prefill_rows: usize) -> Session<Self> {
        let options = SessionOptions { prefill_rows, ..Default::default() };
        Session::new(self.clone(), Device::cpu(1), options).unwrap()
    }

    /// All passes since this was last asked.
    pub(crate) fn take_passes(&self) -> Vec<Vec<usize>> {
        std::mem::take(&mut *self.passes.lock().unwrap())
    }
}

/// A tokenizer of single bytes, whose id 0 ends a text.
pub(crate) fn tokenizer() -> Tokenizer {
    let options = TrainOptions { vocab_size: VOCABULARY, ..TrainOptions::default() };
    Tokenizer::from_json(train_bpe([""], &options).unwrap().as_bytes()).unwrap()
}

/// The ids of a text's bytes.
pub(crate) fn bytes_of(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, Specials::Literal, AddBos::No).unwrap()
}

/// A sampler with every option in use.
pub(crate) fn sampler(seed: u64) -> Sampler {
    let options = SamplerOptions {
        temperature: 0.9,
        top_k: 60,
        top_p: 0.97,
        min_p: 0.01,
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        frequency_penalty: 0.1,
        penalty_window: Some(20),
        seed,
    };
    Sampler::new(options).unwrap()
}

/// What a fresh session samples after this prompt.
pub(crate) fn alone(model: &Arc<ScriptedModel>, prompt: &[u32], sampler: &mut Sampler, steps: usize) -> Vec<u32> {
    let mut session = model.session();
    session.feed(prompt).unwrap();
    (0..steps).map(|_| session.step(sampler).unwrap()).collect()
}
