//! Splits text into the words that byte-level merging works on.
//!
//! In: a section of text without special tokens. Out: its words, in order and without gaps. Each rule is a regular expression
//! published in the model's `tokenizer.json`; here it is a scan by hand, because a backtracking engine takes 20 to 100 ms
//! for 50,000 characters where the scan takes under one. The tests hold every rule against the expression itself.

use super::letters::Class;

/// A rule that splits text into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pretokenizer {
    /// GPT-2, MPT, OLMo.
    Gpt2,
    /// SmolLM, StarCoder: each digit by itself, then GPT-2's rule on what is between.
    SmolLm,
    /// Llama 3: up to three digits together.
    Llama3,
    /// Qwen2 to Qwen3: each digit by itself.
    Qwen2,
}

/// Names of `tokenizer.ggml.pre`, and their rules.
const NAMES: &[(&str, Pretokenizer)] = &[
    ("gpt-2", Pretokenizer::Gpt2),
    ("gpt2", Pretokenizer::Gpt2),
    ("mpt", Pretokenizer::Gpt2),
    ("olmo", Pretokenizer::Gpt2),
    ("smollm", Pretokenizer::SmolLm),
    ("starcoder", Pretokenizer::SmolLm),
    ("llama-bpe", Pretokenizer::Llama3),
    ("llama3", Pretokenizer::Llama3),
    ("llama-v3", Pretokenizer::Llama3),
    ("qwen2", Pretokenizer::Qwen2),
    ("deepseek-r1-qwen", Pretokenizer::Qwen2),
];

const LLAMA3_EXPRESSION: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_EXPRESSION: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Pretokenizer {
    /// The rule of this `tokenizer.ggml.pre`.
    pub(super) fn named(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|&(_, rule)| rule)
    }

    /// The regular expression of a rule that is one; the others are GPT-2's, which a `tokenizer.json` leaves to the byte-level step.
    pub(super) fn expression(self) -> Option<&'static str> {
        match self {
            Self::Gpt2 | Self::SmolLm => None,
            Self::Llama3 => Some(LLAMA3_EXPRESSION),
            Self::Qwen2 => Some(QWEN2_EXPRESSION),
        }
    }

    /// The usual name of the rule.
    pub(super) fn name(self) -> &'static str {
        NAMES.iter().find(|(_, rule)| *rule == self).map_or("gpt-2", |(name, _)| name)
    }

    /// The names of all rules, for messages.
    pub(super) fn names() -> String {
        NAMES.iter().map(|&(name, _)| name).collect::<Vec<_>>().join(", ")
    }

    /// The rule that this regular expression of a `tokenizer.json` states.
    pub(super) fn of_expression(expression: &str) -> Option<Self> {
        match expression {
            LLAMA3_EXPRESSION => Some(Self::Llama3),
            QWEN2_EXPRESSION => Some(Self::Qwen2),
            _ => None,
        }
    }

    /// The words of a text: together they are the text.
    pub(super) fn words(self, text: &str) -> Words<'_> {
        Words { rule: self, rest: text }
    }

    fn word_length(self, text: &str) -> usize {
        match self {
            Self::Gpt2 => gpt2_word(text),
            Self::SmolLm => smollm_word(text),
            Self::Llama3 => contraction(text, Case::Any).unwrap_or_else(|| modern_word(text, 3)),
            Self::Qwen2 => contraction(text, Case::Any).unwrap_or_else(|| modern_word(text, 1)),
        }
    }
}

/// The words of a text.
#[derive(Debug)]
pub(super) struct Words<'a> {
    rule: Pretokenizer,
    rest: &'a str,
}

impl<'a> Iterator for Words<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (word, rest) = self.rest.split_at(self.rule.word_length(self.rest));
        self.rest = rest;
        Some(word)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    Lower,
    Any,
}

/// `'s|'t|'re|'ve|'m|'ll|'d` at the start.
fn contraction(text: &str, case: Case) -> Option<usize> {
    let rest = text.strip_prefix('\'')?;
    let mut characters = rest.chars();
    let first = characters.next()?;
    let second = characters.next();
    let fold = |character: char| match character {
        // The long s is an s to a case-insensitive expression.
        'ſ' if case == Case::Any => 's',
        _ if case == Case::Any => character.to_ascii_lowercase(),
        _ => character,
    };
    match (fold(first), second.map(fold)) {
        ('s' | 't' | 'm' | 'd', _) => Some(1 + first.len_utf8()),
        ('r' | 'v', Some('e')) | ('l', Some('l')) => Some(3),
        _ => None,
    }
}

/// GPT-2's rule: `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
fn gpt2_word(text: &str) -> usize {
    if let Some(length) = contraction(text, Case::Lower) {
        return length;
    }
    let after_space = text.strip_prefix(' ').unwrap_or(text);
    match after_space.chars().next().map(Class::of) {
        Some(class) if class != Class::Space => text.len() - after_space.len() + run(after_space, class),
        _ => space_word(text),
    }
}

/// Each digit by itself. What is between digits is a text of its own to GPT-2's rule, so white space before a digit is at its
/// text's end and stays whole; no other word reaches a digit.
fn smollm_word(text: &str) -> usize {
    let digit = |text: &str| text.chars().next().filter(|first| Class::of(*first) == Class::Number);
    if let Some(first) = digit(text) {
        return first.len_utf8();
    }
    let spaces = run(text, Class::Space);
    if spaces > 0 && digit(&text[spaces..]).is_some() { spaces } else { gpt2_word(text) }
}

/// What follows the contractions in Llama 3's and Qwen2's rule:
/// `[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`.
fn modern_word(text: &str, digits: usize) -> usize {
    let Some(first) = text.chars().next() else { return 0 };
    let class = Class::of(first);
    let after_first = &text[first.len_utf8()..];
    let second = after_first.chars().next().map(Class::of);
    match class {
        Class::Letter => run(text, Class::Letter),
        Class::Number => {
            text.chars().take(digits).take_while(|&c| Class::of(c) == Class::Number).map(char::len_utf8).sum()
        }
        _ if second == Some(Class::Letter) && !matches!(first, '\r' | '\n') => {
            first.len_utf8() + run(after_first, Class::Letter)
        }
        Class::Other => with_line_ends(text, run(text, Class::Other)),
        Class::Space if first == ' ' && second == Some(Class::Other) => {
            with_line_ends(text, 1 + run(after_first, Class::Other))
        }
        Class::Space => {
            let spaces = &text[..run(text, Class::Space)];
            match spaces.rfind(['\r', '\n']) {
                Some(last) => last + 1,
                None => space_word(text),
            }
        }
    }
}

/// `\s+(?!\S)|\s+`: white space up to the text's end, or all but the last character before something else.
fn space_word(text: &str) -> usize {
    let spaces = run(text, Class::Space);
    let last = text[..spaces].chars().next_back().map_or(0, char::len_utf8);
    if spaces == text.len() || spaces == last { spaces } else { spaces - last }
}

fn with_line_ends(text: &str, length: usize) -> usize {
    length + text[length..].bytes().take_while(|byte| matches!(byte, b'\r' | b'\n')).count()
}

/// The length in bytes of the run of characters of one class at the start.
fn run(text: &str, class: Class) -> usize {
    text.find(|character| Class::of(character) != class).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use tokenizers::utils::SysRegex;

    use super::*;

    const GPT2_EXPRESSION: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

    /// The expressions, compiled once: compiling takes longer than a case.
    static EXPRESSIONS: LazyLock<[SysRegex; 4]> = LazyLock::new(|| {
        [GPT2_EXPRESSION, LLAMA3_EXPRESSION, QWEN2_EXPRESSION, r"\p{N}|\P{N}+"].map(|text| SysRegex::new(text).unwrap())
    });

    fn wanted(rule: Pretokenizer, text: &str) -> Vec<&str> {
        let [gpt2, llama3, qwen2, digits] = &*EXPRESSIONS;
        match rule {
            Pretokenizer::Gpt2 => matches(gpt2, text),
            Pretokenizer::Llama3 => matches(llama3, text),
            Pretokenizer::Qwen2 => matches(qwen2, text),
            Pretokenizer::SmolLm => {
                matches(digits, text).into_iter().flat_map(|section| matches(gpt2, section)).collect()
            }
        }
    }

    fn matches<'a>(expression: &SysRegex, text: &'a str) -> Vec<&'a str> {
        expression.find_iter(text).map(|(start, end)| &text[start..end]).collect()
    }

    fn agree(text: &str) -> Result<(), TestCaseError> {
        for rule in [Pretokenizer::Gpt2, Pretokenizer::SmolLm, Pretokenizer::Llama3, Pretokenizer::Qwen2] {
            prop_assert_eq!(rule.words(text).collect::<Vec<_>>(), wanted(rule, text), "{:?} on {:?}", rule, text);
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Characters that the expressions tell apart, in every order.
        #[test]
        fn words_are_those_of_the_expression(
            parts in proptest::collection::vec(
                proptest::sample::select(vec![
                    "a", "Z", "é", "ſ", "語", "ก็", "1", "²", "Ⅷ", "٣", " ", "  ", "\t", "\n", "\r\n", "\u{a0}", "\u{3000}", "\u{85}",
                    "'", "'s", "'S", "'re", "'VE", "'ll", "'lL", "!", "...", "_", "🙂", "\u{301}", "\u{200d}",
                ]),
                0..12,
            ),
        ) {
            agree(&parts.concat())?;
        }

        #[test]
        fn words_of_any_text_are_those_of_the_expression(text in ".{0,40}") {
            agree(&text)?;
        }
    }

    /// Characters of Unicode 17, which the standard library knows and the expressions' engine does not.
    #[test]
    fn newer_characters_are_no_numbers_to_any_rule() {
        for text in ["\u{11de0}\u{a1}", "\u{16ff4}\u{323b0}", " \u{16ff6}1"] {
            agree(text).unwrap();
        }
    }

    #[test]
    fn every_name_has_a_rule_and_no_other() {
        for name in ["gpt-2", "smollm", "llama-bpe", "llama3", "llama-v3", "qwen2"] {
            assert!(Pretokenizer::named(name).is_some(), "{name}");
        }
        for name in ["", "default", "tekken", "Qwen2"] {
            assert_eq!(Pretokenizer::named(name), None, "{name}");
        }
    }
}
