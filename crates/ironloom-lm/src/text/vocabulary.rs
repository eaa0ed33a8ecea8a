//! The tokens of a tokenizer: the bytes each stands for, its kind, and its id by its bytes.
//!
//! A token's bytes are those that decoding writes: byte-level characters are mapped back to bytes (`Ġt` is ` t`), the
//! SentencePiece mark `▁` is a space, `<0x0A>` is a line end. Encoding works on the same bytes, so one table serves both ways.
//! All bytes lie in one buffer, and the index is an open-addressed table of ids: a vocabulary of 262,144 tokens loads
//! with a handful of allocations.

use super::{Result, TextError};

/// What a token is for, as GGUF counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text, made by merging.
    Normal,
    /// What the tokenizer writes for text it has no token for.
    Unknown,
    /// A mark the model uses, such as `<|im_end|>`; never shown, and only matched where special tokens are parsed.
    Control,
    /// A piece of text that is always one token.
    UserDefined,
    /// In the vocabulary and never used.
    Unused,
    /// One byte of a character that has no token.
    Byte,
}

const EMPTY: u32 = u32::MAX;

/// The tokens of a tokenizer.
#[derive(Clone, Debug)]
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
    /// Open addressing with linear probing; at most half full.
    slots: Vec<u32>,
    byte_tokens: [u32; 256],
}

impl Vocabulary {
    /// An index over tokens. Where two have the same bytes, a normal one is found before any other, then the lower id.
    pub(super) fn new(builder: VocabularyBuilder) -> Result<Self> {
        let VocabularyBuilder { bytes, ends, kinds } = builder;
        if ends.is_empty() {
            return Err(TextError::EmptyVocabulary);
        }
        let slots = vec![EMPTY; (ends.len() * 2).next_power_of_two()];
        let mut vocabulary = Self { bytes, ends, kinds, slots, byte_tokens: [EMPTY; 256] };
        for id in 0..vocabulary.len() as u32 {
            match (vocabulary.kind(id), vocabulary.bytes(id)) {
                (TokenKind::Normal, _) => vocabulary.index(id),
                (TokenKind::Byte, &[byte]) => vocabulary.byte_tokens[usize::from(byte)] = id,
                _ => {}
            }
        }
        for id in 0..vocabulary.len() as u32 {
            if !matches!(vocabulary.kind(id), TokenKind::Normal | TokenKind::Byte) {
                vocabulary.index(id);
            }
        }
        Ok(vocabulary)
    }

    /// How many tokens there are.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes a token stands for; none when the id is past the vocabulary.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// What a token is for; an id past the vocabulary is unused.
    pub(super) fn kind(&self, id: u32) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or(TokenKind::Unused)
    }

    /// The token of these bytes, byte tokens aside.
    pub(super) fn find(&self, bytes: &[u8]) -> Option<u32> {
        self.find_joined(bytes, &[])
    }

    /// The token of `left` followed by `right`, byte tokens aside.
    pub(super) fn find_joined(&self, left: &[u8], right: &[u8]) -> Option<u32> {
        let mut slot = self.slot(hash(left, right));
        loop {
            let id = self.slots[slot];
            if id == EMPTY {
                return None;
            }
            let bytes = self.bytes(id);
            if bytes.len() == left.len() + right.len() && bytes.starts_with(left) && bytes.ends_with(right) {
                return Some(id);
            }
            slot = (slot + 1) & (self.slots.len() - 1);
        }
    }

    /// The token that stands for one byte of a character without a token.
    pub(super) fn byte_token(&self, byte: u8) -> Option<u32> {
        let id = self.byte_tokens[usize::from(byte)];
        (id != EMPTY).then_some(id)
    }

    fn index(&mut self, id: u32) {
        let mut slot = self.slot(hash(self.bytes(id), &[]));
        while self.slots[slot] != EMPTY {
            if self.bytes(self.slots[slot]) == self.bytes(id) {
                return;
            }
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        self.slots[slot] = id;
    }

    fn slot(&self, hash: u64) -> usize {
        // The top bits are the well mixed ones.
        (hash >> (64 - self.slots.len().trailing_zeros().max(1))) as usize & (self.slots.len() - 1)
    }
}

/// Gathers tokens in the order of their ids.
#[derive(Debug, Default)]
pub(super) struct VocabularyBuilder {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
}

impl VocabularyBuilder {
    /// Room for so many tokens.
    pub(super) fn with_capacity(tokens: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(tokens.saturating_mul(7)),
            ends: Vec::with_capacity(tokens),
            kinds: Vec::with_capacity(tokens),
        }
    }

    /// Adds the next token.
    ///
    /// # Errors
    /// The vocabulary grows past 4 GiB.
    pub(super) fn push(&mut self, bytes: &[u8], kind: TokenKind) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        let limit = u32::MAX as usize;
        let end = u32::try_from(self.bytes.len()).map_err(|_| TextError::TooLong {
            what: "the vocabulary",
            bytes: self.bytes.len(),
            limit,
        })?;
        self.ends.push(end);
        self.kinds.push(kind);
        Ok(())
    }
}

/// FNV-1a, with a last multiplication that carries every bit to the top.
fn hash(left: &[u8], right: &[u8]) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325u64;
    let mixed =
        left.iter().chain(right).fold(start, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (mixed ^ (mixed >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(tokens: &[(&str, TokenKind)]) -> Vocabulary {
        let mut builder = VocabularyBuilder::default();
        for (text, kind) in tokens {
            builder.push(text.as_bytes(), *kind).unwrap();
        }
        Vocabulary::new(builder).unwrap()
    }

    #[test]
    fn tokens_are_found_by_whole_and_by_halves() {
        let vocabulary = vocabulary(&[
            ("a", TokenKind::Byte),
            ("a", TokenKind::Control),
            ("a", TokenKind::Normal),
            ("ab", TokenKind::Normal),
            ("", TokenKind::Unused),
        ]);
        assert_eq!(vocabulary.find(b"a"), Some(2), "a normal token is found first");
        assert_eq!(vocabulary.byte_token(b'a'), Some(0));
        assert_eq!(vocabulary.byte_token(b'b'), None);
        assert_eq!(vocabulary.find_joined(b"a", b"b"), Some(3));
        assert_eq!(vocabulary.find(b"b"), None);
        assert_eq!((vocabulary.bytes(3), vocabulary.bytes(4), vocabulary.bytes(99)), (&b"ab"[..], &b""[..], &b""[..]));
    }

    #[test]
    fn halves_that_overlap_are_not_a_match() {
        // "aba" starts with "ab" and ends with "ba", and is not "abba".
        let vocabulary = vocabulary(&[("aba", TokenKind::Normal)]);
        assert_eq!(vocabulary.find_joined(b"ab", b"ba"), None);
        assert_eq!(vocabulary.find_joined(b"a", b"ba"), Some(0));
    }

    #[test]
    fn no_tokens_are_an_error() {
        assert!(matches!(Vocabulary::new(VocabularyBuilder::default()), Err(TextError::EmptyVocabulary)));
    }
}
