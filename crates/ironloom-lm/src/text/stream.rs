//! Text as ids arrive, never with a character cut in two.
//!
//! In: one id at a time. Out: the text that is certain by then. Bytes that may be the start of a character wait for the rest
//! of it. What has been given out, with [`TextStream::finish`], is [`Tokenizer::decode`] of the ids.

use super::Tokenizer;

/// Turns ids into text one at a time.
///
/// ```
/// use ironloom_lm::text::{AddBos, Specials, TextStream, Tokenizer, TrainOptions, train_bpe};
///
/// let json = train_bpe(["no words"], &TrainOptions { vocab_size: 257, ..TrainOptions::default() })?;
/// let tokenizer = Tokenizer::from_json(json.as_bytes())?;
/// let ids = tokenizer.encode("織", Specials::Literal, AddBos::No)?; // three tokens, one for each byte
/// let mut stream = TextStream::new(&tokenizer);
/// let parts: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
/// assert_eq!((parts, stream.finish()), (vec![String::new(), String::new(), "織".to_owned()], String::new()));
/// # Ok::<(), ironloom_lm::text::TextError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The start of a character that isn't complete: at most three bytes between calls.
    pending: Vec<u8>,
    /// Whether a space that comes next is the one that encoding put before the text.
    drop_space: bool,
}

impl<'a> TextStream<'a> {
    /// A stream of a text that starts with the first id.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, pending: Vec::new(), drop_space: tokenizer.drops_first_space }
    }

    /// A stream that goes on after other text, so that a space at its start is kept.
    pub fn after_text(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, pending: Vec::new(), drop_space: false }
    }

    /// The text that is certain now and wasn't before.
    pub fn push(&mut self, id: u32) -> String {
        let mut bytes = self.tokenizer.shown_bytes(id);
        if self.drop_space && !bytes.is_empty() {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            self.drop_space = false;
        }
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut done = 0;
        loop {
            let rest = &self.pending[done..];
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    done += valid.len();
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    done += valid.len();
                    // No length means the bytes so far may still become a character.
                    let Some(length) = error.error_len().filter(|&length| length <= after.len()) else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    done += length;
                }
            }
        }
        self.pending.drain(..done);
        text
    }

    /// What is left: U+FFFD when the ids end inside a character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
