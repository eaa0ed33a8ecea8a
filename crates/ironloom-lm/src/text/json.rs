//! A tokenizer from a Hugging Face `tokenizer.json`, and the ids that the files beside it name.
//!
//! The file is a pipeline: normalizer, pre-tokenizer, model, post-processor, decoder, and added tokens. The pipelines of the
//! model families this crate runs are recognized and run on its own code; any other is run by the `tokenizers` crate, whose
//! format this is.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;
use tokenizers::{Encoding, PostProcessor, PostProcessorWrapper, Token};

use super::{
    Result, TextError, TokenKind, Tokenizer,
    byte_level::{self, ByteLevel},
    merge::{TokenBytes, listed_merges},
    pretokenize::Pretokenizer,
    sentencepiece::{self, MergeSource, SentencePiece, SpacePrefix},
    special_tokens::{SpecialToken, SpecialTokens},
    tokenizer::{Engine, Library},
    vocabulary::{Vocabulary, VocabularyBuilder},
};

/// Ids in a file are checked against this, so that a damaged one can't make a table of billions of tokens.
const MOST_TOKENS: usize = 1 << 24;

/// The tokenizer that a `tokenizer.json` describes.
pub(super) fn tokenizer(bytes: &[u8]) -> Result<Tokenizer> {
    let file: File = serde_json::from_slice(bytes).map_err(|error| unreadable(&error.to_string()))?;
    let decoding = Decoding::of(&file.decoder)?;
    let vocabulary = vocabulary(&file, &decoding)?;
    let (prefix, suffix) = frame(&file.post_processor)?;
    let (engine, passes) = match own_engine(&file, &vocabulary)? {
        Some(engine) => (engine, passes(&file.added_tokens)),
        None => (library(bytes)?, Vec::new()),
    };
    let bos_id = prefix.first().copied();
    let mut tokenizer = Tokenizer {
        vocabulary,
        passes,
        engine,
        prefix,
        suffix,
        bos_id,
        end_ids: Vec::new(),
        drops_first_space: decoding.drops_first_space,
    };
    tokenizer.set_end_ids([]);
    Ok(tokenizer)
}

/// Takes the start and end tokens over from `tokenizer_config.json`, `generation_config.json` or `config.json`.
pub(super) fn add_configured_ids(tokenizer: &mut Tokenizer, file: &str, bytes: &[u8]) -> Result<()> {
    let config: Value = serde_json::from_slice(bytes)
        .map_err(|error| TextError::Json { file: file.to_owned(), reason: error.to_string() })?;
    let mut ends = Vec::new();
    for part in [&config, &config["text_config"]] {
        match &part["eos_token_id"] {
            Value::Array(ids) => ends.extend(ids.iter().filter_map(Value::as_u64)),
            id => ends.extend(id.as_u64()),
        }
    }
    let vocab_size = tokenizer.vocab_size();
    let ids = ends
        .into_iter()
        .map(|id| match u32::try_from(id) {
            Ok(small) if (small as usize) < vocab_size => Ok(small),
            _ => Err(TextError::IdOutOfRange { what: format!("eos_token_id of {file}"), id, vocab_size }),
        })
        .collect::<Result<Vec<u32>>>()?;
    let named = token_content(&config["eos_token"]).and_then(|text| tokenizer.special_id(text));
    if let Some(bos) = token_content(&config["bos_token"]).and_then(|text| tokenizer.special_id(text)) {
        tokenizer.bos_id = Some(bos);
    }
    tokenizer.set_end_ids(ids.into_iter().chain(named));
    Ok(())
}

/// A token as configuration files write it: its text, or an object with its text as `content`.
pub(crate) fn token_content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

fn unreadable(reason: &str) -> TextError {
    TextError::Json { file: "tokenizer.json".to_owned(), reason: reason.to_owned() }
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(default)]
    vocab: Pieces,
    #[serde(default)]
    merges: Vec<MergeEntry>,
}

/// A vocabulary: texts with their ids. Unigram models list texts with scores instead; there the ids are the places.
#[derive(Default)]
struct Pieces {
    ids: Vec<(String, u32)>,
    listed: bool,
}

/// A merge: `"a b"` in older files, `["a", "b"]` in newer ones.
enum MergeEntry {
    Joined(String),
    Pair(String, String),
}

impl MergeEntry {
    fn halves(&self) -> Option<(&str, &str)> {
        match self {
            Self::Joined(text) => text.split_once(' '),
            Self::Pair(left, right) => Some((left, right)),
        }
    }
}

// Hand-written, because serde's untagged enumerations copy their whole input first: a vocabulary has 250,000 entries.
impl<'de> Deserialize<'de> for Pieces {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Pieces;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Pieces, A::Error> {
                let mut ids = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    ids.push(entry);
                }
                Ok(Pieces { ids, listed: false })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Pieces, A::Error> {
                let mut ids = Vec::new();
                while let Some((text, _score)) = list.next_element::<(String, f64)>()? {
                    let id = u32::try_from(ids.len()).map_err(A::Error::custom)?;
                    ids.push((text, id));
                }
                Ok(Pieces { ids, listed: true })
            }
        }
        deserializer.deserialize_any(Either)
    }
}

impl<'de> Deserialize<'de> for MergeEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = MergeEntry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge of two tokens")
            }

            fn visit_str<E: Error>(self, text: &str) -> std::result::Result<MergeEntry, E> {
                Ok(MergeEntry::Joined(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<MergeEntry, A::Error> {
                let two = |place: usize| A::Error::invalid_length(place, &"two tokens");
                let left = list.next_element()?.ok_or_else(|| two(0))?;
                let right = list.next_element()?.ok_or_else(|| two(1))?;
                match list.next_element::<String>()? {
                    None => Ok(MergeEntry::Pair(left, right)),
                    Some(_) => Err(two(3)),
                }
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// How tokens stand for text.
struct Decoding {
    token_bytes: TokenBytes,
    /// Whether `<0x0A>` stands for a byte.
    byte_tokens: bool,
    drops_first_space: bool,
}

impl Decoding {
    fn of(decoder: &Value) -> Result<Self> {
        let steps: Vec<&Value> = match decoder["decoders"].as_array() {
            Some(steps) if decoder["type"] == "Sequence" => steps.iter().collect(),
            _ => vec![decoder],
        };
        if let [step] = steps[..]
            && step["type"] == "ByteLevel"
        {
            return Ok(Self { token_bytes: byte_level::token_bytes, byte_tokens: false, drops_first_space: false });
        }
        let mut spaces = false;
        let mut decoding =
            Self { token_bytes: sentencepiece::token_bytes, byte_tokens: false, drops_first_space: false };
        for step in steps {
            match step["type"].as_str().unwrap_or_default() {
                "Replace" if step["pattern"]["String"] == "▁" && step["content"] == " " => spaces = true,
                "ByteFallback" => decoding.byte_tokens = true,
                "Fuse" => {}
                "Strip" if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => {
                    decoding.drops_first_space = true;
                }
                "Metaspace" if step["replacement"] == "▁" => {
                    spaces = true;
                    decoding.drops_first_space = step["prepend_scheme"] != "never" && step["add_prefix_space"] != false;
                }
                _ => return Err(TextError::UnknownDecoder { decoder: step.to_string() }),
            }
        }
        if spaces { Ok(decoding) } else { Err(TextError::UnknownDecoder { decoder: decoder.to_string() }) }
    }
}

fn vocabulary(file: &File, decoding: &Decoding) -> Result<Vocabulary> {
    let added = file.added_tokens.iter().map(|token| (token.content.as_str(), token.id as usize));
    let pieces = || file.model.vocab.ids.iter().map(|(text, id)| (text.as_str(), *id as usize));
    let size = pieces().chain(added).map(|(_, id)| id + 1).max().unwrap_or(0);
    if size > MOST_TOKENS {
        let what = "the last token of tokenizer.json".to_owned();
        return Err(TextError::IdOutOfRange { what, id: size as u64 - 1, vocab_size: MOST_TOKENS });
    }
    let mut tokens = vec![("", TokenKind::Unused); size];
    for (text, id) in pieces() {
        tokens[id] = (text, TokenKind::Normal);
    }
    for token in &file.added_tokens {
        let kind = if token.special { TokenKind::Control } else { TokenKind::UserDefined };
        tokens[token.id as usize] = (token.content.as_str(), kind);
    }
    let mut builder = VocabularyBuilder::with_capacity(size);
    let mut bytes = Vec::new();
    for (text, kind) in tokens {
        match (kind, sentencepiece::byte_of(text).filter(|_| decoding.byte_tokens)) {
            (TokenKind::Normal, Some(byte)) => builder.push(&[byte], TokenKind::Byte)?,
            (TokenKind::Normal, None) => {
                (decoding.token_bytes)(text, &mut bytes);
                builder.push(&bytes, kind)?;
            }
            _ => builder.push(text.as_bytes(), kind)?,
        }
    }
    Vocabulary::new(builder)
}

/// What the post-processor puts before and after a text.
fn frame(post_processor: &Value) -> Result<(Vec<u32>, Vec<u32>)> {
    if post_processor.is_null() {
        return Ok((Vec::new(), Vec::new()));
    }
    // No token has this id: what comes before it is the prefix, what comes after it the suffix.
    let marker = u32::MAX;
    let processor: PostProcessorWrapper =
        serde_json::from_value(post_processor.clone()).map_err(|error| unreadable(&error.to_string()))?;
    let text = Encoding::from_tokens(vec![Token::new(marker, String::new(), (0, 0))], 0);
    let framed = processor.process(text, None, true).map_err(|error| unreadable(&error.to_string()))?;
    let ids = framed.get_ids();
    let place = ids.iter().position(|&id| id == marker).unwrap_or(ids.len());
    Ok((ids[..place].to_vec(), ids.get(place + 1..).unwrap_or_default().to_vec()))
}

/// The engine for a pipeline that this crate runs itself; `None` for any other.
fn own_engine(file: &File, vocabulary: &Vocabulary) -> Result<Option<Engine>> {
    let model = &file.model;
    let empty = |affix: &Option<String>| affix.as_ref().is_none_or(String::is_empty);
    let plain = model.kind.as_deref() == Some("BPE")
        && !model.vocab.listed
        && model.dropout.is_none_or(|dropout| dropout == 0.0)
        && empty(&model.continuing_subword_prefix)
        && empty(&model.end_of_word_suffix)
        && !file.added_tokens.iter().any(|token| token.single_word);
    if !plain {
        return Ok(None);
    }
    let listed = model.merges.iter().map(MergeEntry::halves);
    if file.decoder["type"] == "ByteLevel" {
        let (Some(pretokenizer), Some(compose)) = (splitting(&file.pre_tokenizer), composing(&file.normalizer)) else {
            return Ok(None);
        };
        let byte_ids = ByteLevel::byte_ids(vocabulary);
        let lacks_bytes = byte_ids.iter().any(Option::is_none);
        if model.byte_fallback || (model.unk_token.is_some() && lacks_bytes) {
            return Ok(None);
        }
        let merges = listed_merges(listed, vocabulary, byte_level::token_bytes)?;
        let whole_words = model.ignore_merges;
        return Ok(Some(Engine::ByteLevel(ByteLevel { pretokenizer, merges, byte_ids, whole_words, compose })));
    }
    let Some(space) = spacing(&file.normalizer, &file.pre_tokenizer) else { return Ok(None) };
    // A token that is found in normalized text is spelled with the space that normalizing puts before it.
    let normalized = space != SpacePrefix::Never && file.added_tokens.iter().any(|token| token.normalized);
    if normalized || model.ignore_merges || !model.byte_fallback {
        return Ok(None);
    }
    Ok(Some(Engine::SentencePiece(SentencePiece {
        merges: MergeSource::Pairs(listed_merges(listed, vocabulary, sentencepiece::token_bytes)?),
        space,
        unknown: model.unk_token.as_ref().and_then(|text| vocabulary.find(text.as_bytes())),
        fuse_unknown: model.fuse_unk,
        before_space: sentencepiece::characters_before_spaces(vocabulary),
    })))
}

/// The splitting rule of a byte-level pipeline, where it is one of those known.
fn splitting(pre_tokenizer: &Value) -> Option<Pretokenizer> {
    let bytes = |step: &Value, splits: bool| {
        step["type"] == "ByteLevel" && step["add_prefix_space"] == false && (step["use_regex"] != false) == splits
    };
    if bytes(pre_tokenizer, true) {
        return Some(Pretokenizer::Gpt2);
    }
    let steps = pre_tokenizer["pretokenizers"].as_array().filter(|_| pre_tokenizer["type"] == "Sequence")?;
    match &steps[..] {
        [digits, last] if digits["type"] == "Digits" && digits["individual_digits"] == true && bytes(last, true) => {
            Some(Pretokenizer::SmolLm)
        }
        [split, last] if split["type"] == "Split" && split["behavior"] == "Isolated" && bytes(last, false) => {
            let plain = split["invert"] != true;
            split["pattern"]["Regex"].as_str().filter(|_| plain).and_then(Pretokenizer::of_expression)
        }
        _ => None,
    }
}

/// Whether a byte-level pipeline composes characters; `None` when it normalizes in another way.
fn composing(normalizer: &Value) -> Option<bool> {
    match normalizer["type"].as_str() {
        None => normalizer.is_null().then_some(false),
        Some("NFC") => Some(true),
        Some("Sequence") if normalizer["normalizers"].as_array().is_some_and(Vec::is_empty) => Some(false),
        Some(_) => None,
    }
}

/// Where a SentencePiece pipeline puts a space before a section; `None` when it does more than that.
fn spacing(normalizer: &Value, pre_tokenizer: &Value) -> Option<SpacePrefix> {
    let marks_spaces =
        |step: &Value| step["type"] == "Replace" && step["pattern"]["String"] == " " && step["content"] == "▁";
    // Gemma's pre-tokenizer splits at spaces, of which its normalizer leaves none.
    let splits_nothing = pre_tokenizer.is_null()
        || (pre_tokenizer["type"] == "Split"
            && pre_tokenizer["pattern"]["String"] == " "
            && pre_tokenizer["behavior"] == "MergedWithPrevious");
    if marks_spaces(normalizer) {
        return splits_nothing.then_some(SpacePrefix::Never);
    }
    if let Some([prepend, replace]) = normalizer["normalizers"].as_array().map(Vec::as_slice) {
        let always = prepend["type"] == "Prepend" && prepend["prepend"] == "▁" && marks_spaces(replace);
        return (always && splits_nothing).then_some(SpacePrefix::Always);
    }
    let whole = normalizer.is_null()
        && pre_tokenizer["type"] == "Metaspace"
        && pre_tokenizer["replacement"] == "▁"
        && pre_tokenizer["split"] == false;
    match pre_tokenizer["prepend_scheme"].as_str() {
        Some("first") if whole => Some(SpacePrefix::First),
        Some("never") if whole => Some(SpacePrefix::Never),
        _ => None,
    }
}

/// The added tokens, in the order in which they are looked for: those found in the text as it is, then those found in
/// normalized text.
fn passes(added: &[AddedToken]) -> Vec<SpecialTokens> {
    [false, true]
        .into_iter()
        .map(|normalized| {
            let tokens = added.iter().filter(|token| token.normalized == normalized);
            SpecialTokens::new(tokens.map(|token| SpecialToken {
                id: token.id,
                text: token.content.clone(),
                control: token.special,
                strip_left: token.lstrip,
                strip_right: token.rstrip,
            }))
        })
        .collect()
}

fn library(bytes: &[u8]) -> Result<Engine> {
    let tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| unreadable(&error.to_string()))?;
    let mut literal = tokenizer.get_added_vocabulary().clone();
    literal.set_encode_special_tokens(true);
    Ok(Engine::Library(Box::new(Library { tokenizer, literal })))
}
