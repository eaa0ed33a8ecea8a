//! SentencePiece BPE (Llama 2, Mistral, InternLM2, Gemma): a section's characters merge as one word.
//!
//! In: a section of text. Out: token ids. A space is a character like any other (files write it `▁`, U+2581, so that mark in a
//! text means a space too), and merges may cross it. A character without a token becomes the tokens of its bytes,
//! `<0x00>` to `<0xFF>`. Kudo and Richardson, arXiv:1808.06226.

use std::collections::HashSet;

use super::{
    merge::{Merger, PairTable, ScoreMerges},
    vocabulary::{TokenKind, Vocabulary},
};

/// How SentencePiece writes a space in a vocabulary.
pub(super) const SPACE_MARK: char = '▁';

/// A SentencePiece tokenizer, apart from its vocabulary.
#[derive(Clone, Debug)]
pub(super) struct SentencePiece {
    /// Which tokens merge.
    pub(super) merges: MergeSource,
    /// Which sections get a space before them.
    pub(super) space: SpacePrefix,
    /// The token for characters that have neither a token nor tokens for their bytes.
    pub(super) unknown: Option<u32>,
    /// Whether neighbouring unknown characters are one token.
    pub(super) fuse_unknown: bool,
    /// The characters that some token has before a space. After any other no merge crosses a space, so the text is merged
    /// word by word.
    pub(super) before_space: HashSet<char>,
}

/// Where the merges come from.
#[derive(Clone, Debug)]
pub(super) enum MergeSource {
    /// From the vocabulary's scores: [`super::merge::score_ranks`].
    Scores(Vec<u32>),
    /// From a list.
    Pairs(PairTable),
}

/// Which sections get a space before them, so that a word is the same token at the start as after another word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpacePrefix {
    /// None (Gemma).
    Never,
    /// Each section, also one that starts with a space (Llama 2, and all GGUF files that ask for it).
    Always,
    /// The section that starts the text, unless it starts with a space (Mistral v0.3).
    First,
}

impl SentencePiece {
    /// Appends the tokens of a section; `first` when it starts the whole text.
    pub(super) fn encode(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        first: bool,
        merger: &mut Merger,
        ids: &mut Vec<u32>,
    ) {
        if text.is_empty() {
            return;
        }
        let prefix = match self.space {
            SpacePrefix::Never => false,
            SpacePrefix::Always => true,
            SpacePrefix::First => first && !text.starts_with([' ', SPACE_MARK]),
        };
        let mut tokens = Vec::with_capacity(text.len() + 1);
        let (mut before, mut after_unknown) = (None, false);
        for character in prefix.then_some(' ').into_iter().chain(text.chars()) {
            let character = if character == SPACE_MARK { ' ' } else { character };
            if character == ' ' && before.is_some_and(|before| !self.before_space.contains(&before)) {
                self.merge(vocabulary, &mut tokens, merger, ids);
            }
            before = Some(character);
            let unknown = !push_character(vocabulary, character, &mut tokens);
            if unknown
                && let Some(id) = self.unknown
                && !(after_unknown && self.fuse_unknown)
            {
                tokens.push(id);
            }
            after_unknown = unknown;
        }
        self.merge(vocabulary, &mut tokens, merger, ids);
    }

    /// Merges `tokens` and moves the result to `ids`.
    fn merge(&self, vocabulary: &Vocabulary, tokens: &mut Vec<u32>, merger: &mut Merger, ids: &mut Vec<u32>) {
        match &self.merges {
            MergeSource::Scores(ranks) => merger.run(tokens, &ScoreMerges { vocabulary, ranks }),
            MergeSource::Pairs(pairs) => merger.run(tokens, pairs),
        }
        ids.append(tokens);
    }
}

/// The characters that some token has before a space: see [`SentencePiece::before_space`].
pub(super) fn characters_before_spaces(vocabulary: &Vocabulary) -> HashSet<char> {
    let texts = (0..vocabulary.len() as u32).filter_map(|id| std::str::from_utf8(vocabulary.bytes(id)).ok());
    texts
        .filter(|text| text.bytes().skip(1).any(|byte| byte == b' '))
        .flat_map(|text| text.match_indices(' ').filter_map(|(place, _)| text[..place].chars().next_back()))
        .collect()
}

/// Pushes the token of a character, or those of its bytes. False when it has neither.
fn push_character(vocabulary: &Vocabulary, character: char, tokens: &mut Vec<u32>) -> bool {
    let mut buffer = [0; 4];
    let bytes = character.encode_utf8(&mut buffer).as_bytes();
    let is_text = |&id: &u32| !matches!(vocabulary.kind(id), TokenKind::Control | TokenKind::Unknown);
    if let Some(id) = vocabulary.find(bytes).filter(is_text) {
        tokens.push(id);
        return true;
    }
    let start = tokens.len();
    for &byte in bytes {
        let Some(id) = vocabulary.byte_token(byte) else {
            tokens.truncate(start);
            return false;
        };
        tokens.push(id);
    }
    true
}

/// Puts the bytes that a SentencePiece token's text stands for into `bytes`.
pub(super) fn token_bytes(text: &str, bytes: &mut Vec<u8>) {
    bytes.clear();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(SPACE_MARK) {
        bytes.extend_from_slice(before.as_bytes());
        bytes.push(b' ');
        rest = after;
    }
    bytes.extend_from_slice(rest.as_bytes());
}

/// The byte that `<0x0A>` and its like stand for.
pub(super) fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let two_digits = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    two_digits.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_tokens_are_two_hexadecimal_digits() {
        assert_eq!(byte_of("<0x0A>"), Some(10));
        assert_eq!(byte_of("<0xff>"), Some(255));
        for text in ["<0xA>", "<0x+A>", "<0x0A", "0x0A", "<0x000>", "<0xGG>", ""] {
            assert_eq!(byte_of(text), None, "{text}");
        }
    }
}
