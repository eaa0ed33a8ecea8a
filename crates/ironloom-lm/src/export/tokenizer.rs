//! A Hugging Face folder's tokenizer, end tokens and chat template as the `tokenizer.*` keys of GGUF.
//!
//! Byte-level BPE keeps its merges, and its splitting rule becomes the name that readers know it by. SentencePiece BPE
//! loses its list of merges: GGUF has a score for each token instead, and of all neighbours the pair whose joined token scores best
//! merges. So a token's score is the place of its merges in the list, which must be next to each other and complete; a list
//! that scores can't express is refused.
//!
//! What was written is read back and held against the folder's own tokenizer: start and end tokens, and the ids of a text
//! that splitting rules disagree about. A tokenizer that comes back different would give wrong ids without a sign.

use std::collections::HashMap;

use ironloom_weights::{Checkpoint, Metadata, Strings};
use serde_json::Value;

use super::refuse;
use crate::{
    Result,
    text::{
        AddBos, ChatTemplate, GgufAlgorithm, Specials, TextError, TokenKind, Tokenizer, gguf_algorithm, token_content,
        tokenizer_of_metadata,
    },
};

/// Contractions, digits, white space, marks, letters of several scripts and characters without tokens of their own.
const PROBE: &str = "It's 1234567 o'clock; we'LL see: naïve cafe\u{301}s, Ünïcode!!\n\n\tif x == 42:\r\n    return  [3.14]   \
                     東京タワー привет שלום नमस्ते 🙂👩\u{200d}🚀 \u{a0}end  ";

/// Adds tokenizer and chat template to `metadata`, with a token for each of the model's `vocab_size` logits.
///
/// # Errors
/// The tokenizer is damaged, has more tokens than the model, or is of a kind that GGUF can't describe.
pub(super) fn add_tokenizer(
    metadata: &mut Metadata,
    checkpoint: &Checkpoint,
    vocab_size: usize,
    notes: &mut Vec<String>,
) -> Result<()> {
    let Some(bytes) = checkpoint.folder_file("tokenizer.json")? else {
        metadata.insert("tokenizer.ggml.model", "no_vocab");
        notes.push("the folder has no tokenizer.json: the file takes ids and no text".into());
        return Ok(());
    };
    let tokenizer = Tokenizer::from_checkpoint(checkpoint)?;
    let file = Json::read("tokenizer.json", &bytes)?;
    drop(bytes);
    let algorithm = gguf_algorithm(&tokenizer).ok_or_else(|| {
        refuse("the tokenizer", "GGUF", "its splitting rule or its model is none that GGUF names: keep the folder")
    })?;
    if tokenizer.vocab_size() > vocab_size {
        let what = format!("a tokenizer of {} tokens", tokenizer.vocab_size());
        return Err(refuse(what, "GGUF", format!("the model's embedding has {vocab_size} rows, one for each token")));
    }
    let pieces = pieces(&file.0, &tokenizer, algorithm, vocab_size);
    add_pieces(metadata, &file.0, &pieces, algorithm)?;
    if let GgufAlgorithm::SentencePiece { only_first: true, .. } = algorithm {
        notes.push(
            "the tokenizer puts a space before the first word of a text only; readers of GGUF also put one after special tokens"
                .into(),
        );
    }
    let settings = checkpoint.folder_file("tokenizer_config.json")?.unwrap_or_else(|| b"{}".to_vec());
    let settings = Json::read("tokenizer_config.json", &settings)?.0;
    add_frame(metadata, checkpoint, &tokenizer, &settings)?;
    add_ends(metadata, &tokenizer, notes)?;
    add_templates(metadata, checkpoint, &settings)?;
    let found = tokenizer_of_metadata(metadata)?;
    hold_against(&tokenizer, &found, "GGUF")
}

struct Json(Value);

impl Json {
    fn read(file: &str, bytes: &[u8]) -> Result<Self> {
        let parsed = serde_json::from_slice(bytes);
        let error = |error: serde_json::Error| TextError::Json { file: file.to_owned(), reason: error.to_string() };
        Ok(Self(parsed.map_err(error)?))
    }
}

/// A token as GGUF lists it.
struct Piece {
    text: String,
    kind: TokenKind,
}

fn pieces(file: &Value, tokenizer: &Tokenizer, algorithm: GgufAlgorithm, vocab_size: usize) -> Vec<Piece> {
    let is_sentencepiece = matches!(algorithm, GgufAlgorithm::SentencePiece { .. });
    let listed = file["model"]["vocab"].as_object().into_iter().flatten();
    let listed = listed.filter_map(|(text, id)| Some((text.as_str(), id.as_u64()?)));
    let added = file["added_tokens"].as_array().into_iter().flatten();
    let added = added.filter_map(|token| Some((token["content"].as_str()?, token["id"].as_u64()?)));
    let mut texts: Vec<Option<&str>> = vec![None; vocab_size];
    for (text, id) in listed.chain(added) {
        // Ids past the vocabulary were refused before this.
        if let Some(slot) = usize::try_from(id).ok().and_then(|id| texts.get_mut(id)) {
            *slot = Some(text);
        }
    }
    let unknown = file["model"]["unk_token"].as_str().filter(|_| is_sentencepiece);
    let piece = |(id, text): (usize, Option<&str>)| match text {
        None => Piece { text: format!("[PAD{id}]"), kind: TokenKind::Unused },
        Some(text) if unknown == Some(text) => Piece { text: text.to_owned(), kind: TokenKind::Unknown },
        Some(text) => match tokenizer.token_kind(id as u32).unwrap_or(TokenKind::Unused) {
            // Found in the text as it is, where a space is a space.
            TokenKind::UserDefined if is_sentencepiece => {
                Piece { text: text.replace('▁', " "), kind: TokenKind::UserDefined }
            }
            kind => Piece { text: text.to_owned(), kind },
        },
    };
    texts.into_iter().enumerate().map(piece).collect()
}

fn add_pieces(metadata: &mut Metadata, file: &Value, pieces: &[Piece], algorithm: GgufAlgorithm) -> Result<()> {
    let merges = merges(file)?;
    let (model, pre) = match algorithm {
        GgufAlgorithm::ByteLevel { pre, .. } => ("gpt2", pre),
        GgufAlgorithm::SentencePiece { .. } => ("llama", "default"),
    };
    metadata.insert("tokenizer.ggml.model", model);
    metadata.insert("tokenizer.ggml.pre", pre);
    metadata.insert("tokenizer.ggml.tokens", pieces.iter().map(|piece| piece.text.as_str()).collect::<Strings>());
    let kinds: Vec<i32> = pieces.iter().map(|piece| type_number(piece.kind)).collect();
    metadata.insert("tokenizer.ggml.token_type", kinds);
    match algorithm {
        GgufAlgorithm::ByteLevel { .. } => {
            let merges: Strings = merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
            metadata.insert("tokenizer.ggml.merges", merges);
        }
        GgufAlgorithm::SentencePiece { space, .. } => {
            metadata.insert("tokenizer.ggml.scores", scores(pieces, &merges)?);
            metadata.insert("tokenizer.ggml.add_space_prefix", space);
            if let Some(id) = pieces.iter().position(|piece| piece.kind == TokenKind::Unknown) {
                metadata.insert("tokenizer.ggml.unknown_token_id", id as u32);
            }
        }
    }
    Ok(())
}

/// GGUF's number of a kind of token.
fn type_number(kind: TokenKind) -> i32 {
    match kind {
        TokenKind::Normal => 1,
        TokenKind::Unknown => 2,
        TokenKind::Control => 3,
        TokenKind::UserDefined => 4,
        TokenKind::Unused => 5,
        TokenKind::Byte => 6,
    }
}

/// The merges, written `"a b"` in older files and `["a", "b"]` in newer ones.
fn merges(file: &Value) -> Result<Vec<(&str, &str)>> {
    let listed = file["model"]["merges"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut merges = Vec::with_capacity(listed.len());
    for (rank, merge) in listed.iter().enumerate() {
        let halves = halves(merge).ok_or_else(|| TextError::Merge { rank, merge: merge.to_string() })?;
        merges.push(halves);
    }
    Ok(merges)
}

fn halves(merge: &Value) -> Option<(&str, &str)> {
    match merge {
        Value::String(text) => text.split_once(' '),
        merge => Some((merge[0].as_str()?, merge[1].as_str()?)),
    }
}

/// Scores that merge as the list does: a token's is the place of its merges, counted down from the first.
fn scores(pieces: &[Piece], merges: &[(&str, &str)]) -> Result<Vec<f32>> {
    let normal = pieces.iter().enumerate().filter(|(_, piece)| piece.kind == TokenKind::Normal);
    let ids: HashMap<&str, usize> = normal.map(|(id, piece)| (piece.text.as_str(), id)).collect();
    let inexpressible = |token: &str, reason: &str| {
        refuse(format!("the tokenizer's merges to {token:?}"), "GGUF", format!("{reason}, which scores cannot express"))
    };
    let mut places: Vec<Option<(usize, usize)>> = vec![None; pieces.len()];
    let (mut place, mut last) = (0, None);
    for (left, right) in merges {
        let joined = [*left, *right].concat();
        let of_normal = ids.contains_key(left) && ids.contains_key(right);
        let Some(&id) = ids.get(joined.as_str()).filter(|_| of_normal) else { continue };
        if last != Some(id) {
            place += 1;
            last = Some(id);
        }
        match &mut places[id] {
            Some((at, _)) if *at != place => return Err(inexpressible(&joined, "they are not next to each other")),
            Some((_, count)) => *count += 1,
            empty => *empty = Some((place, 1)),
        }
    }
    for (text, &id) in &ids {
        let splits = text.char_indices().skip(1).map(|(middle, _)| text.split_at(middle));
        let splits = splits.filter(|(left, right)| ids.contains_key(left) && ids.contains_key(right)).count();
        if splits != places[id].map_or(0, |(_, count)| count) {
            return Err(inexpressible(text, "not every pair of tokens that makes it is listed"));
        }
    }
    let unmerged = place + 1;
    Ok(places.into_iter().map(|found| -(found.map_or(unmerged, |(place, _)| place) as f32)).collect())
}

/// The start, end and padding tokens, and whether the first two are added around a text.
fn add_frame(metadata: &mut Metadata, checkpoint: &Checkpoint, tokenizer: &Tokenizer, settings: &Value) -> Result<()> {
    let named = |key: &str| token_content(&settings[key]).and_then(|text| tokenizer.special_id(text));
    let eos = match named("eos_token") {
        Some(id) => Some(id),
        None => first_configured_end(checkpoint)?.or(tokenizer.end_ids().first().copied()),
    };
    for (key, id) in
        [("bos_token_id", tokenizer.bos_id()), ("eos_token_id", eos), ("padding_token_id", named("pad_token"))]
    {
        if let Some(id) = id {
            metadata.insert(format!("tokenizer.ggml.{key}"), id);
        }
    }
    let frame = tokenizer.encode("", Specials::Literal, AddBos::Yes)?;
    let adds_eos = frame.len() > usize::from(tokenizer.adds_bos()) && frame.last().copied() == eos;
    metadata.insert("tokenizer.ggml.add_bos_token", tokenizer.adds_bos());
    metadata.insert("tokenizer.ggml.add_eos_token", adds_eos);
    Ok(())
}

/// The first end token that `config.json` or `generation_config.json` names.
fn first_configured_end(checkpoint: &Checkpoint) -> Result<Option<u32>> {
    for file in ["config.json", "generation_config.json"] {
        let Some(bytes) = checkpoint.folder_file(file)? else { continue };
        let config = Json::read(file, &bytes)?.0;
        let ends = &config["eos_token_id"];
        if let Some(id) = ends.as_u64().or_else(|| ends[0].as_u64()) {
            return Ok(u32::try_from(id).ok());
        }
    }
    Ok(None)
}

/// The end tokens beside the first. GGUF has keys for two, and readers find the usual ones by their text.
fn add_ends(metadata: &mut Metadata, tokenizer: &Tokenizer, notes: &mut Vec<String>) -> Result<()> {
    let found = tokenizer_of_metadata(metadata)?;
    let eos = metadata.u32("tokenizer.ggml.eos_token_id")?;
    let others = || tokenizer.end_ids().iter().copied().filter(move |id| Some(*id) != eos);
    // Those that nothing else would tell a reader of come first.
    let mut ends: Vec<u32> = others().filter(|id| !found.end_ids().contains(id)).collect();
    ends.extend(others().filter(|id| found.end_ids().contains(id)));
    for (key, id) in ["eot_token_id", "eom_token_id"].into_iter().zip(&ends) {
        metadata.insert(format!("tokenizer.ggml.{key}"), *id);
    }
    let found = tokenizer_of_metadata(metadata)?;
    let lost: Vec<String> = others()
        .filter(|id| !found.end_ids().contains(id))
        .map(|id| tokenizer.token_text(id).unwrap_or_else(|| id.to_string()))
        .collect();
    if !lost.is_empty() {
        notes.push(format!("GGUF has no place for these end tokens beside three others: {}", lost.join(", ")));
    }
    Ok(())
}

fn add_templates(metadata: &mut Metadata, checkpoint: &Checkpoint, settings: &Value) -> Result<()> {
    const KEY: &str = "tokenizer.chat_template";
    match ChatTemplate::from_checkpoint(checkpoint) {
        Ok(template) => _ = metadata.insert(KEY, template.source()),
        Err(TextError::NoTemplate { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let named = settings["chat_template"].as_array().into_iter().flatten();
    let named = named.filter_map(|entry| Some((entry["name"].as_str()?, entry["template"].as_str()?)));
    let others: Vec<(&str, &str)> = named.filter(|(name, _)| *name != "default").collect();
    for (name, source) in &others {
        metadata.insert(format!("{KEY}.{name}"), *source);
    }
    if !others.is_empty() {
        metadata.insert("tokenizer.chat_templates", others.iter().map(|(name, _)| name).collect::<Strings>());
    }
    Ok(())
}

/// Refuses when `found`, read back from what was written, gives other ids.
pub(super) fn hold_against(tokenizer: &Tokenizer, found: &Tokenizer, format: &'static str) -> Result<()> {
    let ids = |tokenizer: &Tokenizer| tokenizer.encode(PROBE, Specials::Literal, AddBos::Yes);
    if ids(found)? != ids(tokenizer)? {
        return Err(refuse("the tokenizer", format, "read back from there it gives other ids"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(texts: &[&str]) -> Vec<Piece> {
        texts.iter().map(|text| Piece { text: (*text).to_owned(), kind: TokenKind::Normal }).collect()
    }

    #[test]
    fn scores_follow_the_order_of_merges() {
        let pieces = normal(&["a", "b", "c", "ab", "bc", "abc"]);
        let merges = [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")];
        let scores = scores(&pieces, &merges).unwrap();
        assert_eq!(scores, [-4.0, -4.0, -4.0, -2.0, -1.0, -3.0]);
    }

    #[test]
    fn merges_that_scores_cannot_express_are_refused() {
        let pieces = normal(&["a", "b", "c", "ab", "bc", "abc"]);
        let refused = |merges: &[(&str, &str)]| scores(&pieces, merges).unwrap_err().to_string();
        let apart = [("a", "bc"), ("b", "c"), ("a", "b"), ("ab", "c")];
        assert!(refused(&apart).contains("next to each other"));
        let incomplete = [("b", "c"), ("a", "b"), ("a", "bc")];
        assert!(refused(&incomplete).contains("abc"));
    }
}
