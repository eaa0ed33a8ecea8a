//! An answer from a session: step, text, stop.
//!
//! In: a session that was fed a prompt. Out: pieces of text as they become certain, and the whole answer with the reason
//! it ended. The session goes on from there: the next turn is fed to it as it is.

use std::{ops::ControlFlow, time::Instant};

use ironloom_lm::text::Tokenizer;
use serde::{Deserialize, Serialize};

use crate::{AnswerText, LanguageModel, Result, Sampler, Session};

/// When an answer ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateOptions {
    /// The most ids to sample; 0 samples none.
    pub max_tokens: usize,
    /// Strings that end the text before they start. They are found in the text, however it was cut into tokens.
    pub stop: Vec<String>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_tokens: 512, stop: Vec::new() }
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// The model sampled one of its end tokens.
    EndToken,
    /// A stop string was complete.
    StopString,
    /// As many ids were sampled as were allowed.
    MaxTokens,
    /// The session holds no further id.
    ContextFull,
    /// The caller had enough.
    Cancelled,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Generation {
    /// The sampled ids, an end token and those of a stop string among them.
    pub ids: Vec<u32>,
    /// The text that was given out.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
    /// Ids fed to the session since its last answer.
    pub prompt_tokens: usize,
    /// Ids sampled.
    pub generated: usize,
    /// The time that feeding took.
    pub prefill_seconds: f64,
    /// The time that sampling and the passes between samples took.
    pub decode_seconds: f64,
}

impl Generation {
    /// Passes of one row per second: the first id of an answer comes out of the prompt's pass and is not counted.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let passes = self.generated.checked_sub(1).filter(|&passes| passes > 0)?;
        Some(passes as f64 / self.decode_seconds).filter(|rate| rate.is_finite())
    }
}

/// Samples an answer to what the session was fed.
///
/// `on_text` is called once for each id, with the text that became certain (often none), so that it can cancel within one
/// step, and once more where text was still held at the end. All it was given is [`Generation::text`]. After it breaks it is
/// not called again, and text still held is dropped.
///
/// # Errors
/// [`Error::EmptySession`](crate::Error::EmptySession), [`Error::EmptyStop`](crate::Error::EmptyStop), before any work; the
/// model's and the sampler's. The session then holds the ids sampled before.
pub fn generate<M: LanguageModel>(
    session: &mut Session<M>,
    tokenizer: &Tokenizer,
    sampler: &mut Sampler,
    options: &GenerateOptions,
    on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Generation> {
    let mut answer = AnswerText::new(tokenizer, &options.stop)?;
    session.check_not_empty()?;
    let fed = session.take_fed();
    let start = Instant::now();
    let (mut ids, mut text) = (Vec::new(), String::new());
    let mut finish = loop {
        if ids.len() >= options.max_tokens {
            break FinishReason::MaxTokens;
        }
        if session.is_full() {
            break FinishReason::ContextFull;
        }
        let id = session.step(sampler)?;
        ids.push(id);
        if tokenizer.end_ids().contains(&id) {
            break FinishReason::EndToken;
        }
        let released = answer.push(id);
        text.push_str(&released.text);
        let flow = on_text(&released.text);
        if released.stopped_by.is_some() {
            break FinishReason::StopString;
        }
        if flow.is_break() {
            break FinishReason::Cancelled;
        }
    };
    if !matches!(finish, FinishReason::StopString | FinishReason::Cancelled) {
        let rest = answer.finish();
        if rest.stopped_by.is_some() {
            finish = FinishReason::StopString;
        }
        if !rest.text.is_empty() {
            text.push_str(&rest.text);
            let _ = on_text(&rest.text);
        }
    }
    Ok(Generation {
        generated: ids.len(),
        ids,
        text,
        finish,
        prompt_tokens: fed.tokens,
        prefill_seconds: fed.time.as_secs_f64(),
        decode_seconds: start.elapsed().as_secs_f64(),
    })
}
