//! A conversation with a model whose cache lives on from turn to turn.
//!
//! In: a user's message. Out: the answer, and a session that holds both. A turn's prompt is the template's text of the whole
//! conversation. As long as that text begins with what the session already stands for, only the rest of it is fed, behind
//! the very ids that were sampled. Where the template rewrites the past (trims an answer, drops its thoughts), the ids
//! are made anew and the longest beginning that they share with the session stays.

use std::ops::ControlFlow;

use anyhow::{Result, bail};
use ironloom_decode::{FeedProgress, FinishReason, Generation, Session};
use ironloom_lm::text::{AddBos, AddGenerationPrompt, ChatTemplate, Message, Specials, TokenKind, Tokenizer};

use crate::prompt;

/// A conversation and the session that holds it.
pub(crate) struct Conversation {
    session: Session,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Vec<Message>,
    /// What the session's ids stand for, where that is known to the letter.
    held: Option<Held>,
    /// The prompt of the last turn, to answer it once more.
    last_prompt: Option<(String, usize)>,
}

/// The text of a session's ids.
struct Held {
    text: String,
    /// The end token that follows the text.
    end: Option<u32>,
}

/// Samples an answer to what a session was fed.
pub(crate) type Answer<'a> = &'a mut dyn FnMut(&mut Session, &Tokenizer) -> Result<Generation>;

impl Conversation {
    /// A conversation without messages, or with a system message only.
    pub(crate) fn new(session: Session, tokenizer: Tokenizer, template: ChatTemplate, system: Option<&str>) -> Self {
        let messages = system.map(|text| Message::new("system", text)).into_iter().collect();
        Self { session, tokenizer, template, messages, held: None, last_prompt: None }
    }

    /// The messages so far.
    pub(crate) fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// How many tokens the session holds.
    pub(crate) fn len(&self) -> usize {
        self.session.len()
    }

    /// The most tokens the session holds.
    pub(crate) fn context(&self) -> usize {
        self.session.context()
    }

    /// Forgets all messages but the system's.
    pub(crate) fn reset(&mut self) {
        self.messages.retain(|message| message.role == "system");
        self.last_prompt = None;
    }

    /// Sets the system message, or removes it where `text` is empty.
    pub(crate) fn set_system(&mut self, text: &str) {
        self.messages.retain(|message| message.role != "system");
        if !text.is_empty() {
            self.messages.insert(0, Message::new("system", text));
        }
        self.last_prompt = None;
    }

    /// Says something and gets the answer. `None` when it was cancelled before it said anything.
    ///
    /// # Errors
    /// The template refuses the message, the conversation outgrows the context, the model failed. The conversation is then as
    /// it was.
    pub(crate) fn ask(
        &mut self,
        text: &str,
        progress: &mut dyn FnMut(FeedProgress) -> ControlFlow<()>,
        answer: Answer<'_>,
    ) -> Result<Option<Generation>> {
        self.messages.push(Message::new("user", text));
        let answered = self.turn(progress, answer);
        if !matches!(answered, Ok(Some(_))) {
            self.messages.pop();
        }
        answered
    }

    /// Takes the last answer back and answers once more.
    ///
    /// # Errors
    /// There is no answer yet; those of [`Conversation::ask`], and then the last answer stays.
    pub(crate) fn regenerate(
        &mut self,
        progress: &mut dyn FnMut(FeedProgress) -> ControlFlow<()>,
        answer: Answer<'_>,
    ) -> Result<Option<Generation>> {
        let Some(last) = self.messages.pop_if(|message| message.role == "assistant") else {
            bail!("there is no answer to write anew");
        };
        if let Some((text, length)) = self.last_prompt.take() {
            self.session.truncate(length)?;
            self.held = Some(Held { text, end: None });
        }
        let answered = self.turn(progress, answer);
        if !matches!(answered, Ok(Some(_))) {
            self.messages.push(last);
        }
        answered
    }

    fn turn(
        &mut self,
        progress: &mut dyn FnMut(FeedProgress) -> ControlFlow<()>,
        answer: Answer<'_>,
    ) -> Result<Option<Generation>> {
        let text = self.template.render(&self.messages, AddGenerationPrompt::Yes)?;
        // Whatever fails below leaves a session whose text is not known.
        let held = self.held.take();
        let fed = match held.and_then(|held| self.continuation(&held, &text)) {
            Some(ids) => self.session.feed_with(&ids, progress),
            None => {
                let ids = prompt::chat_ids(&self.tokenizer, &self.template, &self.messages)?;
                self.session.replace_with(&ids, progress).map(drop)
            }
        };
        if let Err(error) = fed {
            let too_long = matches!(error, ironloom_decode::Error::PromptTooLong { .. });
            let error = anyhow::Error::new(error);
            return Err(if too_long {
                error.context("the conversation is too long (/reset begins a new one)")
            } else {
                error
            });
        }
        let length = self.session.len();
        let generation = answer(&mut self.session, &self.tokenizer)?;
        if generation.text.is_empty() && generation.finish == FinishReason::Cancelled {
            return Ok(None);
        }
        self.held = self.held_after(&text, &generation);
        self.last_prompt = Some((text, length));
        self.messages.push(Message::new("assistant", &generation.text));
        Ok(Some(generation))
    }

    /// The ids of `text` that follow those the session holds; `None` when the two do not fit together.
    fn continuation(&self, held: &Held, text: &str) -> Option<Vec<u32>> {
        let rest = text.strip_prefix(held.text.as_str())?;
        if rest.is_empty() && held.end.is_none() {
            return Some(Vec::new());
        }
        let mut ids = self.tokenizer.encode(rest, Specials::Parse, AddBos::No).ok()?;
        // Only a special token parts texts for certain: the ids on its two sides do not depend on each other.
        let first = *ids.first()?;
        let parts = matches!(self.tokenizer.token_kind(first), Some(TokenKind::Control | TokenKind::UserDefined));
        match held.end {
            Some(end) if end == first => drop(ids.remove(0)),
            None if parts => {}
            _ => return None,
        }
        Some(ids)
    }

    /// What the session stands for after an answer, unless a part of the ids is not in its text, as with a stop string.
    fn held_after(&self, prompt: &str, generation: &Generation) -> Option<Held> {
        let (end, ids) = match (generation.finish, generation.ids.split_last()) {
            (FinishReason::EndToken, Some((&end, ids))) => (Some(end), ids),
            _ => (None, generation.ids.as_slice()),
        };
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.tokenizer.token_bytes(id)).collect();
        (String::from_utf8_lossy(&bytes) == generation.text)
            .then(|| Held { text: format!("{prompt}{}", generation.text), end })
    }
}
