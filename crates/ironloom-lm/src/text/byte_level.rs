//! Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): words become the tokens of their bytes, then neighbours merge.
//!
//! In: a section of text. Out: token ids. Vocabulary files write each byte as a printable character (GPT-2's `bytes_to_unicode`):
//! 188 bytes stand for themselves, and the rest, in order, for the characters from U+0100 on.

use tokenizers::{NormalizedString, Normalizer, normalizers::NFC};

use super::{
    merge::{Merger, PairTable},
    pretokenize::Pretokenizer,
    vocabulary::{TokenKind, Vocabulary},
};

/// A byte-level tokenizer, apart from its vocabulary.
#[derive(Clone, Debug)]
pub(super) struct ByteLevel {
    /// How text is split into words.
    pub(super) pretokenizer: Pretokenizer,
    /// Which tokens merge.
    pub(super) merges: PairTable,
    /// The token of each byte.
    pub(super) byte_ids: Box<[Option<u32>; 256]>,
    /// Whether a word that is a token is taken whole, without merging (Llama 3).
    pub(super) whole_words: bool,
    /// Whether text is composed first, to Unicode normal form C (Qwen).
    pub(super) compose: bool,
}

impl ByteLevel {
    /// The token of each byte.
    pub(super) fn byte_ids(vocabulary: &Vocabulary) -> Box<[Option<u32>; 256]> {
        Box::new(std::array::from_fn(|byte| vocabulary.find(&[byte as u8])))
    }

    /// Appends the tokens of a section. A byte without a token is left out, as the `tokenizers` crate does: vocabularies
    /// only lack bytes that UTF-8 never has.
    pub(super) fn encode(&self, vocabulary: &Vocabulary, text: &str, merger: &mut Merger, ids: &mut Vec<u32>) {
        let composed = (self.compose && !text.chars().all(stays_in_normal_form)).then(|| compose(text));
        let mut tokens = Vec::new();
        for word in self.pretokenizer.words(composed.as_deref().unwrap_or(text)) {
            if self.whole_words
                && let Some(id) =
                    vocabulary.find(word.as_bytes()).filter(|&id| vocabulary.kind(id) == TokenKind::Normal)
            {
                ids.push(id);
                continue;
            }
            tokens.clear();
            tokens.extend(word.bytes().filter_map(|byte| self.byte_ids[usize::from(byte)]));
            merger.run(&mut tokens, &self.merges);
            ids.extend_from_slice(&tokens);
        }
    }
}

fn compose(text: &str) -> String {
    let mut normalized = NormalizedString::from(text);
    match NFC.normalize(&mut normalized) {
        Ok(()) => normalized.get().to_owned(),
        Err(_) => text.to_owned(),
    }
}

/// Whether a character neither changes nor combines under normal form C, whatever stands beside it, as far as whole blocks
/// tell: Latin, CJK, kana, Hangul syllables, full-width forms, emoji.
fn stays_in_normal_form(character: char) -> bool {
    matches!(
        character,
        '\0'..='\u{2ff}'
            | '\u{2010}'..='\u{2027}'
            | '\u{3001}'..='\u{3029}'
            | '\u{3030}'..='\u{3098}'
            | '\u{309b}'..='\u{30ff}'
            | '\u{4e00}'..='\u{9fff}'
            | '\u{ac00}'..='\u{d7a3}'
            | '\u{ff00}'..='\u{ffef}'
            | '\u{1f300}'..='\u{1faff}'
    )
}

/// Puts the bytes that a byte-level token's text stands for into `bytes`. Text with a character that stands for no byte is
/// itself.
pub(super) fn token_bytes(text: &str, bytes: &mut Vec<u8>) {
    bytes.clear();
    for character in text.chars() {
        let Some(byte) = character_byte(character) else {
            bytes.clear();
            bytes.extend_from_slice(text.as_bytes());
            return;
        };
        bytes.push(byte);
    }
}

/// The character that stands for a byte in a vocabulary.
pub(super) fn byte_character(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
        0..=0x20 => 0x100 + u32::from(byte),
        0x7f..=0xa0 => 0x121 - 0x7f + u32::from(byte),
        0xad => 0x143,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that a character of the vocabulary stands for.
fn character_byte(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tokenizers::pre_tokenizers::byte_level::ByteLevel as Reference;

    use super::*;

    #[test]
    fn each_byte_has_one_character_and_it_is_the_reference_alphabet() {
        let characters: Vec<char> = ('\0'..='\u{200}').filter(|&c| character_byte(c).is_some()).collect();
        let bytes: HashSet<u8> = characters.iter().filter_map(|&c| character_byte(c)).collect();
        assert_eq!((characters.len(), bytes.len()), (256, 256));
        assert_eq!(characters.into_iter().collect::<HashSet<_>>(), Reference::alphabet().into_iter().collect());
        assert!((0..=255).all(|byte| character_byte(byte_character(byte)) == Some(byte)));
        let spells: [(&str, &[u8]); 4] =
            [("Ġthe", b" the"), ("Ċ", b"\n"), ("ŃĢÿ", &[0xad, 0x80, 0xff]), ("<｜x▁y｜>", "<｜x▁y｜>".as_bytes())];
        let mut bytes = Vec::new();
        for (text, wanted) in spells {
            token_bytes(text, &mut bytes);
            assert_eq!(bytes, wanted, "{text}");
        }
    }

    #[test]
    fn characters_said_to_stay_do() {
        for character in ('\0'..=char::MAX).filter(|&c| stays_in_normal_form(c)) {
            // After a base it could join, and before each kind of mark's usual partner.
            for neighbour in ["e", "\u{1100}", "\u{ac00}", "か"] {
                let text = format!("{neighbour}{character}");
                assert_eq!(compose(&text), text, "{character:?}");
            }
        }
        assert_eq!(compose("e\u{301}"), "é");
        assert!(!stays_in_normal_form('\u{301}'));
    }
}
