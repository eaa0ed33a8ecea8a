//! Stop strings in a text that arrives in pieces.
//!
//! In: pieces of text. Out: the text that certainly comes before any stop string. Text that could be the beginning of a
//! stop string is held back until the next characters decide, and a stop string itself never comes out.
//!
//! The rule, which the cuts between the pieces cannot change: reading character by character, the first stop string to be
//! complete ends the text where that string begins; of several complete at the same character, the longest. Each string
//! is followed by its own prefix automaton (Knuth, Morris, Pratt, 1977), so a character costs a constant number of steps
//! per string.

use crate::{Error, Result};

/// A watch for stop strings.
///
/// ```
/// use ironloom_decode::StopStrings;
/// let mut stops = StopStrings::new(&["\nUser:".to_string()])?;
/// assert_eq!(stops.push("Hello.\nUs").text, "Hello.");
/// assert_eq!(stops.push("e a comma.\nUse").text, "\nUse a comma.");
/// let last = stops.push("r: and more");
/// assert_eq!((last.text.as_str(), last.stopped_by), ("", Some(0)));
/// # Ok::<(), ironloom_decode::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    /// The end of the text so far, as long as the longest beginning of a stop string that it could be.
    held: String,
    stopped_by: Option<usize>,
}

/// What a piece of text let out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Released {
    /// Text that comes before any stop string.
    pub text: String,
    /// Which stop string ended the text, by its place in the list.
    pub stopped_by: Option<usize>,
}

impl StopStrings {
    /// A watch for these strings; without any, all text passes at once.
    ///
    /// # Errors
    /// [`Error::EmptyStop`]: one of them is empty.
    pub fn new(strings: &[String]) -> Result<Self> {
        if let Some(index) = strings.iter().position(String::is_empty) {
            return Err(Error::EmptyStop { index });
        }
        let patterns = strings.iter().map(|string| Pattern::new(string.as_bytes())).collect();
        Ok(Self { patterns, held: String::new(), stopped_by: None })
    }

    /// Takes the next piece and gives what is certain. After a stop, everything is swallowed.
    pub fn push(&mut self, piece: &str) -> Released {
        if self.stopped_by.is_some() {
            return Released { text: String::new(), stopped_by: self.stopped_by };
        }
        let mut text = std::mem::take(&mut self.held);
        for (i, byte) in piece.bytes().enumerate() {
            self.patterns.iter_mut().for_each(|pattern| pattern.step(byte));
            let complete = self.patterns.iter().enumerate().filter(|(_, pattern)| pattern.is_complete());
            // `rev` so that of equal strings the first in the list is the one named.
            if let Some((index, pattern)) = complete.rev().max_by_key(|(_, pattern)| pattern.bytes.len()) {
                let end = text.len() + i + 1;
                let start = end - pattern.bytes.len();
                text.push_str(piece);
                text.truncate(start);
                self.stopped_by = Some(index);
                return Released { text, stopped_by: self.stopped_by };
            }
        }
        text.push_str(piece);
        // A pattern begins with the first byte of a character, so this is a boundary between characters.
        let certain = text.len() - self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        self.held = text.split_off(certain);
        Released { text, stopped_by: None }
    }

    /// The text held back, now that nothing follows that could complete a stop string.
    pub fn finish(&mut self) -> String {
        self.patterns.iter_mut().for_each(|pattern| pattern.matched = 0);
        std::mem::take(&mut self.held)
    }
}

/// One stop string, and how many of its first bytes the text so far ends with.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// `borders[n]`: the longest proper beginning of the first `n` bytes that is also their end.
    borders: Vec<usize>,
    matched: usize,
}

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        let mut borders = vec![0; bytes.len() + 1];
        let mut border = 0;
        for n in 1..bytes.len() {
            while border > 0 && bytes[n] != bytes[border] {
                border = borders[border];
            }
            border += usize::from(bytes[n] == bytes[border]);
            borders[n + 1] = border;
        }
        Self { bytes: bytes.to_vec(), borders, matched: 0 }
    }

    /// Follows one byte of text. The text ends at the first complete match, so there is no step after one.
    fn step(&mut self, byte: u8) {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
    }

    fn is_complete(&self) -> bool {
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn watch(strings: &[&str]) -> StopStrings {
        StopStrings::new(&strings.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap()
    }

    /// The rule as it is said: character by character over the whole text, looking back for each string.
    fn naive(strings: &[String], text: &str) -> (String, Option<usize>) {
        for (start, character) in text.char_indices() {
            let read = &text[..start + character.len_utf8()];
            let ends = strings.iter().enumerate().filter(|(_, string)| read.ends_with(string.as_str()));
            if let Some((index, string)) = ends.min_by_key(|(index, string)| (usize::MAX - string.len(), *index)) {
                return (read[..read.len() - string.len()].to_string(), Some(index));
            }
        }
        (text.to_string(), None)
    }

    /// The end of `read` that could still become a stop string.
    fn naive_held(strings: &[String], read: &str) -> usize {
        let could_begin =
            |from: &usize| strings.iter().any(|s| s.len() > read.len() - from && s.starts_with(&read[*from..]));
        let start = (0..=read.len()).filter(|from| read.is_char_boundary(*from)).find(could_begin);
        read.len() - start.unwrap_or(read.len())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn pieces_give_what_the_rule_gives(
            // A small alphabet with a two-byte and a four-byte character: overlapping beginnings are the rule.
            strings in prop::collection::vec("[abé🦀]{1,5}", 0..4),
            pieces in prop::collection::vec("[abé🦀]{0,6}", 0..10),
        ) {
            let mut stops = StopStrings::new(&strings).unwrap();
            let (mut out, mut read) = (String::new(), String::new());
            let mut stopped_by = None;
            for piece in &pieces {
                read.push_str(piece);
                let released = stops.push(piece);
                out.push_str(&released.text);
                stopped_by = released.stopped_by;
                if stopped_by.is_some() {
                    break;
                }
                // Nothing is held that need not be, and nothing is let out too early.
                prop_assert_eq!(out.len(), read.len() - naive_held(&strings, &read));
            }
            out.push_str(&stops.finish());
            prop_assert_eq!((out, stopped_by), naive(&strings, &pieces.concat()));
        }
    }

    #[test]
    fn an_overlapping_beginning_is_found() {
        let mut stops = watch(&["aab"]);
        assert_eq!(stops.push("aa").text, "");
        assert_eq!(stops.push("a").text, "a");
        assert_eq!(stops.push("bc"), Released { text: String::new(), stopped_by: Some(0) });
        assert_eq!(stops.finish(), "");
    }

    #[test]
    fn the_first_complete_string_stops_and_the_longest_of_those() {
        assert_eq!(watch(&["abcd", "bc"]).push("xabcd"), Released { text: "xa".into(), stopped_by: Some(1) });
        assert_eq!(watch(&["c", "abc", "abc"]).push("xabc"), Released { text: "x".into(), stopped_by: Some(1) });
    }

    #[test]
    fn held_text_comes_out_at_the_end_and_nothing_after_a_stop() {
        let mut stops = watch(&["<|im_end|>"]);
        assert_eq!(stops.push("a < b <|im").text, "a < b ");
        assert_eq!(stops.finish(), "<|im");
        assert_eq!(stops.push("_end|>").stopped_by, None);
        assert_eq!(stops.push("<|im_end|>x").stopped_by, Some(0));
        assert_eq!(stops.push("more"), Released { text: String::new(), stopped_by: Some(0) });
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let strings = ["a".to_string(), String::new()];
        assert!(matches!(StopStrings::new(&strings), Err(Error::EmptyStop { index: 1 })));
    }
}
