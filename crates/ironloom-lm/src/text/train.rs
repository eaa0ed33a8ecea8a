//! Trains a byte-level BPE tokenizer and writes it as `tokenizer.json`.
//!
//! In: texts. Out: the file's text, which Hugging Face's libraries and [`super::Tokenizer::from_json`] read. Words are split by
//! GPT-2's rule and counted; the trainer of the `tokenizers` crate then merges the commonest neighbours. The same texts in the
//! same order give the same file: ties between pairs go to the lower ids.

use tokenizers::{
    AddedToken, Model, Tokenizer, Trainer,
    models::bpe::{BPE, BpeTrainer},
    pre_tokenizers::byte_level::ByteLevel,
};

use super::{Result, TextError, byte_level::byte_character, pretokenize::Pretokenizer};

/// What a trained tokenizer should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainOptions {
    /// How many tokens it has: 256 bytes, the special tokens, and merges up to here while pairs are common enough.
    pub vocab_size: usize,
    /// How often a pair must occur to be merged.
    pub min_frequency: u64,
    /// Special tokens, in the order of their ids from 0.
    pub special_tokens: Vec<String>,
}

impl Default for TrainOptions {
    /// 32,000 tokens of pairs that occur twice, and `<|endoftext|>`.
    fn default() -> Self {
        Self { vocab_size: 32_000, min_frequency: 2, special_tokens: vec!["<|endoftext|>".to_owned()] }
    }
}

/// The text of a `tokenizer.json` trained on `texts`.
///
/// # Errors
/// The vocabulary is too small for the bytes and the special tokens.
pub fn train_bpe<'a>(texts: impl IntoIterator<Item = &'a str>, options: &TrainOptions) -> Result<String> {
    let refuse = |reason: tokenizers::Error| TextError::Train { reason: reason.to_string() };
    let specials: Vec<AddedToken> =
        options.special_tokens.iter().map(|text| AddedToken::from(text.as_str(), true)).collect();
    if options.vocab_size < 256 + specials.len() {
        return Err(TextError::VocabularyTooSmall { vocab_size: options.vocab_size, specials: specials.len() });
    }
    let mut trainer = BpeTrainer::builder()
        .vocab_size(options.vocab_size)
        .min_frequency(options.min_frequency)
        .special_tokens(specials.clone())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    let texts: Vec<&str> = texts.into_iter().collect();
    let spell = |word: &str| word.bytes().map(byte_character).collect::<String>();
    trainer.feed(texts.iter(), |text| Ok(Pretokenizer::Gpt2.words(text).map(spell).collect())).map_err(refuse)?;
    let mut model = BPE::default();
    trainer.train(&mut model).map_err(refuse)?;
    debug_assert!(model.get_vocab_size() <= options.vocab_size);
    let mut tokenizer = Tokenizer::new(model);
    tokenizer
        .with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)))
        .with_decoder(Some(ByteLevel::default()));
    tokenizer.add_special_tokens(&specials);
    tokenizer.to_string(false).map_err(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_without_room_is_refused() {
        let options = TrainOptions { vocab_size: 256, ..TrainOptions::default() };
        assert!(matches!(
            train_bpe([""], &options),
            Err(TextError::VocabularyTooSmall { vocab_size: 256, specials: 1 })
        ));
    }
}
