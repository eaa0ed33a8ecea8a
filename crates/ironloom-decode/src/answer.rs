//! The text of an answer as its ids arrive.
//!
//! In: one id at a time. Out: text that is certain: whole characters that cannot belong to a stop string any more. All
//! pieces together are the text before the first stop string.

use ironloom_lm::text::{TextStream, Tokenizer};

use crate::{Released, Result, StopStrings};

/// Turns the ids of one answer into text, up to a stop string.
#[derive(Clone, Debug)]
pub struct AnswerText<'a> {
    stream: TextStream<'a>,
    stops: StopStrings,
}

impl<'a> AnswerText<'a> {
    /// An answer that ends at any of the `stop` strings. It follows other text (a prompt), so a space at its start stays.
    ///
    /// # Errors
    /// [`Error::EmptyStop`](crate::Error::EmptyStop): a stop string is empty.
    pub fn new(tokenizer: &'a Tokenizer, stop: &[String]) -> Result<Self> {
        Ok(Self { stream: TextStream::after_text(tokenizer), stops: StopStrings::new(stop)? })
    }

    /// The text that became certain with this id, and whether a stop string did.
    pub fn push(&mut self, id: u32) -> Released {
        let piece = self.stream.push(id);
        self.stops.push(&piece)
    }

    /// The text still held, now that no id follows. The rest of a cut character becomes U+FFFD.
    pub fn finish(mut self) -> Released {
        let tail = self.stream.finish();
        let mut released = self.stops.push(&tail);
        released.text.push_str(&self.stops.finish());
        released
    }
}
