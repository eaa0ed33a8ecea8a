//! A tokenizer from the metadata of a GGUF file: the keys under `tokenizer.ggml`.
//!
//! `model` is `gpt2` for byte-level BPE, whose splitting rule `pre` names and whose `merges` are listed, or `llama` for
//! SentencePiece BPE, whose merges follow from the `scores`. `token_type` says which tokens are marks, bytes or always whole.
//! Format: the GGUF specification's tokenizer section.

use ironloom_weights::{Metadata, Strings};

use super::{
    Result, TextError, TokenKind, Tokenizer,
    byte_level::{self, ByteLevel},
    merge::{TokenBytes, listed_merges, score_ranks},
    pretokenize::Pretokenizer,
    sentencepiece::{self, MergeSource, SentencePiece, SpacePrefix},
    special_tokens::{SpecialToken, SpecialTokens},
    tokenizer::Engine,
    vocabulary::{Vocabulary, VocabularyBuilder},
};

/// The tokenizer that the metadata describes.
pub(crate) fn tokenizer(metadata: &Metadata) -> Result<Tokenizer> {
    let texts = metadata.required_strings("tokenizer.ggml.tokens")?;
    let kinds = kinds(metadata, texts.len())?;
    match metadata.required_string("tokenizer.ggml.model")? {
        "gpt2" => byte_level(metadata, texts, &kinds),
        "llama" => sentencepiece(metadata, texts, &kinds),
        other => Err(TextError::UnknownModel { model: other.to_owned() }),
    }
}

/// What GGUF names a tokenizer's algorithm by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GgufAlgorithm {
    /// `gpt2`, with the name of its splitting rule, and the rule's expression where it is one of its own.
    ByteLevel { pre: &'static str, expression: Option<&'static str> },
    /// `llama`, with or without a space before each section; `only_first` where the tokenizer itself puts it before a text's
    /// first section only, for which GGUF has no key.
    SentencePiece { space: bool, only_first: bool },
}

/// How GGUF names the tokenizer's algorithm; `None` when it has no name for it.
pub(crate) fn algorithm(tokenizer: &Tokenizer) -> Option<GgufAlgorithm> {
    match &tokenizer.engine {
        Engine::ByteLevel(engine) => Some(GgufAlgorithm::ByteLevel {
            pre: engine.pretokenizer.name(),
            expression: engine.pretokenizer.expression(),
        }),
        Engine::SentencePiece(engine) => Some(GgufAlgorithm::SentencePiece {
            space: engine.space != SpacePrefix::Never,
            only_first: engine.space == SpacePrefix::First,
        }),
        Engine::Library(_) => None,
    }
}

fn byte_level(metadata: &Metadata, texts: &Strings, kinds: &[TokenKind]) -> Result<Tokenizer> {
    let name = metadata.string("tokenizer.ggml.pre")?.ok_or(TextError::MissingPretokenizer)?;
    let pretokenizer = Pretokenizer::named(name)
        .ok_or_else(|| TextError::UnknownPretokenizer { pre: name.to_owned(), known: Pretokenizer::names() })?;
    let vocabulary = vocabulary(texts, kinds, byte_level::token_bytes)?;
    let listed = metadata.required_strings("tokenizer.ggml.merges")?;
    let halves = listed.iter().map(|merge| merge.split_once(' '));
    let merges = listed_merges(halves, &vocabulary, byte_level::token_bytes)?;
    let llama3 = pretokenizer == Pretokenizer::Llama3;
    let engine = Engine::ByteLevel(ByteLevel {
        pretokenizer,
        merges,
        byte_ids: ByteLevel::byte_ids(&vocabulary),
        whole_words: llama3,
        compose: pretokenizer == Pretokenizer::Qwen2,
    });
    finish(metadata, texts, kinds, vocabulary, engine, Defaults { add_bos: llama3, bos_id: None, eos_id: None })
}

fn sentencepiece(metadata: &Metadata, texts: &Strings, kinds: &[TokenKind]) -> Result<Tokenizer> {
    let vocabulary = vocabulary(texts, kinds, sentencepiece::token_bytes)?;
    let scores = metadata.required_f32s("tokenizer.ggml.scores")?;
    expect_length("tokenizer.ggml.scores", scores.len(), texts.len())?;
    let add_space = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let engine = Engine::SentencePiece(SentencePiece {
        merges: MergeSource::Scores(score_ranks(&scores)),
        space: if add_space { SpacePrefix::Always } else { SpacePrefix::Never },
        unknown: special_id(metadata, "tokenizer.ggml.unknown_token_id", Some(0), texts.len())?,
        fuse_unknown: true,
        before_space: sentencepiece::characters_before_spaces(&vocabulary),
    });
    let defaults = Defaults { add_bos: true, bos_id: Some(1), eos_id: Some(2) };
    finish(metadata, texts, kinds, vocabulary, engine, defaults)
}

/// What holds where the file doesn't say.
struct Defaults {
    add_bos: bool,
    bos_id: Option<u32>,
    eos_id: Option<u32>,
}

fn finish(
    metadata: &Metadata,
    texts: &Strings,
    kinds: &[TokenKind],
    vocabulary: Vocabulary,
    engine: Engine,
    defaults: Defaults,
) -> Result<Tokenizer> {
    let id = |key: &str, default| special_id(metadata, key, default, texts.len());
    let bos_id = id("tokenizer.ggml.bos_token_id", defaults.bos_id)?;
    let eos_id = id("tokenizer.ggml.eos_token_id", defaults.eos_id)?;
    let ends = [eos_id, id("tokenizer.ggml.eot_token_id", None)?, id("tokenizer.ggml.eom_token_id", None)?];
    let add_bos = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(defaults.add_bos);
    let add_eos = metadata.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let written = texts.iter().zip(kinds).zip(0..).filter_map(|((text, kind), id)| {
        let control = match kind {
            TokenKind::Control | TokenKind::Unknown => true,
            TokenKind::UserDefined => false,
            TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => return None,
        };
        Some(SpecialToken { id, text: text.to_owned(), control, strip_left: false, strip_right: false })
    });
    let drops_first_space = matches!(&engine, Engine::SentencePiece(engine) if engine.space != SpacePrefix::Never);
    let mut tokenizer = Tokenizer {
        vocabulary,
        passes: vec![SpecialTokens::new(written)],
        engine,
        prefix: bos_id.filter(|_| add_bos).into_iter().collect(),
        suffix: eos_id.filter(|_| add_eos).into_iter().collect(),
        bos_id,
        end_ids: Vec::new(),
        drops_first_space,
    };
    tokenizer.set_end_ids(ends.into_iter().flatten());
    Ok(tokenizer)
}

fn vocabulary(texts: &Strings, kinds: &[TokenKind], token_bytes: TokenBytes) -> Result<Vocabulary> {
    let mut bytes = Vec::new();
    let mut builder = VocabularyBuilder::with_capacity(texts.len());
    for (text, &kind) in texts.iter().zip(kinds) {
        match kind {
            TokenKind::Normal | TokenKind::Unused => {
                token_bytes(text, &mut bytes);
                builder.push(&bytes, kind)?;
            }
            TokenKind::Byte => match sentencepiece::byte_of(text) {
                Some(byte) => builder.push(&[byte], kind)?,
                None => builder.push(text.as_bytes(), TokenKind::Unused)?,
            },
            TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown => builder.push(text.as_bytes(), kind)?,
        }
    }
    Vocabulary::new(builder)
}

/// The kind of each token; all are normal where the file doesn't say.
fn kinds(metadata: &Metadata, tokens: usize) -> Result<Vec<TokenKind>> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(array) = metadata.array(KEY)? else { return Ok(vec![TokenKind::Normal; tokens]) };
    expect_length(KEY, array.len(), tokens)?;
    let numbers = array.integers().into_iter().flatten();
    let kinds: Vec<TokenKind> = numbers
        .enumerate()
        .map(|(id, number)| match number {
            1 => Ok(TokenKind::Normal),
            2 => Ok(TokenKind::Unknown),
            3 => Ok(TokenKind::Control),
            4 => Ok(TokenKind::UserDefined),
            5 => Ok(TokenKind::Unused),
            6 => Ok(TokenKind::Byte),
            found => Err(TextError::TokenType { id, found }),
        })
        .collect::<Result<_>>()?;
    expect_length(KEY, kinds.len(), tokens)?;
    Ok(kinds)
}

fn expect_length(key: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(TextError::Length { key, found, expected }) }
}

/// A token named by its id. A default past the vocabulary means there is none.
fn special_id(metadata: &Metadata, key: &str, default: Option<u32>, vocab_size: usize) -> Result<Option<u32>> {
    let within = |id: u32| (id as usize) < vocab_size;
    match metadata.u32(key)? {
        Some(id) if within(id) => Ok(Some(id)),
        Some(id) => Err(TextError::IdOutOfRange { what: key.to_owned(), id: id.into(), vocab_size }),
        None => Ok(default.filter(|&id| within(id))),
    }
}
