//! Finds the tokens that are written out in a text: special tokens, and pieces that are always one token.
//!
//! In: a text. Out: sections, each a text to be tokenized or the id of a token found. The longest token at the leftmost place
//! wins, as in the `tokenizers` crate. A token may take the white space before or after it along (`lstrip`, `rstrip`).
//!
//! A place whose first two bytes start no token is passed over. At any other, the text is hashed once per length that tokens
//! of that first byte have: 6,400 tokens that start with `<` cost no more than their 20 lengths.

use std::collections::HashMap;

/// A token that is found as written.
#[derive(Clone, Debug)]
pub(super) struct SpecialToken {
    /// Its id.
    pub(super) id: u32,
    /// Its text.
    pub(super) text: String,
    /// Whether it is a mark, only found where special tokens are parsed.
    pub(super) control: bool,
    /// Whether it takes the white space before it along.
    pub(super) strip_left: bool,
    /// Whether it takes the white space after it along.
    pub(super) strip_right: bool,
}

/// What to do with the text of special tokens, such as `<|im_end|>`, inside a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// They are special tokens. For text that a chat template made.
    Parse,
    /// They are plain text. For text from outside, which must not be able to end a turn.
    Literal,
}

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section<'a> {
    /// Text to be tokenized; `first` when it starts the whole text.
    Text { text: &'a str, first: bool },
    /// A token that was found.
    Token(u32),
}

/// The tokens to be found.
#[derive(Clone, Debug, Default)]
pub(super) struct SpecialTokens {
    tokens: HashMap<String, SpecialToken>,
    /// By their first byte; none where there are no tokens at all.
    starts: Vec<Start>,
}

/// The tokens that start with one byte.
#[derive(Clone, Debug)]
struct Start {
    /// Their lengths in bytes, longest first.
    lengths: Vec<usize>,
    /// Which second bytes they have.
    seconds: [bool; 256],
    /// Whether one is that byte alone.
    alone: bool,
}

impl SpecialTokens {
    /// The tokens to be found; empty ones can't be and are left out, and of two with one text the first counts.
    pub(super) fn new(tokens: impl IntoIterator<Item = SpecialToken>) -> Self {
        let none = Start { lengths: Vec::new(), seconds: [false; 256], alone: false };
        let mut found = Self { tokens: HashMap::new(), starts: vec![none; 256] };
        for token in tokens {
            let Some((&first, rest)) = token.text.as_bytes().split_first() else { continue };
            let start = &mut found.starts[usize::from(first)];
            start.lengths.push(token.text.len());
            match rest.first() {
                Some(&second) => start.seconds[usize::from(second)] = true,
                None => start.alone = true,
            }
            found.tokens.entry(token.text.clone()).or_insert(token);
        }
        for start in &mut found.starts {
            start.lengths.sort_unstable_by(|a, b| b.cmp(a));
            start.lengths.dedup();
        }
        found
    }

    /// Hands the sections of `text` to `each`, in order.
    pub(super) fn split<'a>(&self, text: &'a str, first: bool, specials: Specials, each: &mut dyn FnMut(Section<'a>)) {
        let mut start = 0;
        let mut place = 0;
        while place < text.len() {
            let Some(token) = self.find(text, place, specials) else {
                place += 1;
                continue;
            };
            let mut end = place + token.text.len();
            let mut section = &text[start..place];
            if token.strip_left {
                section = section.trim_end();
            }
            if token.strip_right {
                end += text[end..].len() - text[end..].trim_start().len();
            }
            if !section.is_empty() {
                each(Section::Text { text: section, first: first && start == 0 });
            }
            each(Section::Token(token.id));
            start = end;
            place = end;
        }
        if start < text.len() {
            each(Section::Text { text: &text[start..], first: first && start == 0 });
        }
    }

    fn find(&self, text: &str, place: usize, specials: Specials) -> Option<&SpecialToken> {
        let bytes = &text.as_bytes()[place..];
        let start = self.starts.get(usize::from(bytes[0]))?;
        let may_start = start.alone || bytes.get(1).is_some_and(|&second| start.seconds[usize::from(second)]);
        if !may_start {
            return None;
        }
        start
            .lengths
            .iter()
            .filter_map(|&length| self.tokens.get(text.get(place..place.checked_add(length)?)?))
            .find(|token| specials == Specials::Parse || !token.control)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, text: &str, control: bool) -> SpecialToken {
        SpecialToken { id, text: text.to_owned(), control, strip_left: false, strip_right: false }
    }

    fn split(tokens: &SpecialTokens, text: &str, specials: Specials) -> Vec<String> {
        let mut sections = Vec::new();
        tokens.split(text, true, specials, &mut |section| {
            sections.push(match section {
                Section::Text { text, first } => format!("{text}{}", if first { "^" } else { "" }),
                Section::Token(id) => format!("#{id}"),
            });
        });
        sections
    }

    #[test]
    fn the_longest_token_at_the_leftmost_place_wins() {
        let tokens = SpecialTokens::new([
            token(1, "<a>", true),
            token(2, "<a><b>", true),
            token(3, "b>", false),
            token(4, "", true),
        ]);
        assert_eq!(split(&tokens, "x<a><b>é<a>b>", Specials::Parse), ["x^", "#2", "é", "#1", "#3"]);
        assert_eq!(split(&tokens, "x<a><b>é", Specials::Literal), ["x<a><^", "#3", "é"]);
        assert_eq!(split(&tokens, "<a>x", Specials::Parse), ["#1", "x"]);
        assert_eq!(split(&tokens, "", Specials::Parse), [""; 0]);
    }

    #[test]
    fn a_token_takes_white_space_along() {
        let both = SpecialToken { strip_left: true, strip_right: true, ..token(1, "<m>", true) };
        let tokens = SpecialTokens::new([both]);
        assert_eq!(split(&tokens, "a \n<m>\t <m> b", Specials::Parse), ["a^", "#1", "#1", "b"]);
        assert_eq!(split(&tokens, "a <m> b", Specials::Literal), ["a <m> b^"]);
    }
}
