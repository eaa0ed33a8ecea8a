//! A GGUF file's tokenizer and chat template as `tokenizer.json` and `tokenizer_config.json`.
//!
//! The pipelines are those of the families' own files: GPT-2's, SmolLM's, Llama 3's and Qwen2's byte-level ones, and
//! SentencePiece BPE with a space before each text (Llama 2) or without (Gemma). GGUF's scores become merges: every pair of tokens
//! that makes a token, best score first. What was written is read back and held against the file's own tokenizer.

use ironloom_weights::{Metadata, Strings};
use serde_json::{Map, Value, json};

use super::{hugging_face::FORMAT, tokenizer::hold_against};
use crate::{
    Result,
    text::{AddBos, GgufAlgorithm, Specials, TokenKind, Tokenizer, gguf_algorithm, tokenizer_of_metadata},
};

/// The contents of the two files.
pub(super) struct TokenizerFiles {
    pub(super) tokenizer: Value,
    pub(super) settings: Value,
}

/// The files of the tokenizer that the metadata describe.
///
/// # Errors
/// There is none, it isn't supported, or its files read back as another.
pub(super) fn tokenizer_files(metadata: &Metadata) -> Result<TokenizerFiles> {
    let tokenizer = tokenizer_of_metadata(metadata)?;
    let texts = metadata.required_strings("tokenizer.ggml.tokens")?;
    let algorithm = gguf_algorithm(&tokenizer)
        .ok_or_else(|| super::refuse("the tokenizer", FORMAT, "its model is none that GGUF names"))?;
    let settings = settings(metadata, texts)?;
    let mut json = match algorithm {
        GgufAlgorithm::ByteLevel { pre, expression } => byte_level(metadata, pre, expression)?,
        GgufAlgorithm::SentencePiece { space, .. } => sentencepiece(metadata, &tokenizer, texts, space)?,
    };
    json["version"] = "1.0".into();
    json["truncation"] = Value::Null;
    json["padding"] = Value::Null;
    json["added_tokens"] = added_tokens(&tokenizer, texts);
    json["post_processor"] = frame(&tokenizer, texts)?;
    let kinds = (0..).zip(texts.iter()).map(|(id, text)| (id, text, tokenizer.token_kind(id)));
    let used = kinds.filter(|(_, _, kind)| *kind != Some(TokenKind::Unused));
    json["model"]["vocab"] = Value::Object(used.map(|(id, text, _)| (text.to_owned(), id.into())).collect());
    hold_against(&tokenizer, &Tokenizer::from_json(json.to_string().as_bytes())?, FORMAT)?;
    Ok(TokenizerFiles { tokenizer: json, settings })
}

fn byte_level(metadata: &Metadata, pre: &str, expression: Option<&str>) -> Result<Value> {
    let merges = metadata.required_strings("tokenizer.ggml.merges")?;
    let bytes = |splits: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits});
    let sequence = |first: Value, splits| json!({"type": "Sequence", "pretokenizers": [first, bytes(splits)]});
    let splitting = match (expression, pre) {
        (Some(expression), _) => {
            let split =
                json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false});
            sequence(split, false)
        }
        (None, "smollm") => sequence(json!({"type": "Digits", "individual_digits": true}), true),
        (None, _) => bytes(true),
    };
    Ok(json!({
        "normalizer": if pre == "qwen2" { json!({"type": "NFC"}) } else { Value::Null },
        "pre_tokenizer": splitting,
        "decoder": bytes(true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            // Llama 3's words that are tokens are taken whole.
            "ignore_merges": pre == "llama-bpe",
            "merges": merges.iter().collect::<Vec<_>>(),
        },
    }))
}

fn sentencepiece(metadata: &Metadata, tokenizer: &Tokenizer, texts: &Strings, space: bool) -> Result<Value> {
    let scores = metadata.required_f32s("tokenizer.ggml.scores")?;
    let unknown = (0..).zip(texts.iter()).find(|(id, _)| tokenizer.token_kind(*id) == Some(TokenKind::Unknown));
    let marks = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let spaces = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
    let mut decoders = vec![spaces, json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    let normalizer = match space {
        true => {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, marks]})
        }
        false => marks,
    };
    Ok(json!({
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown.map(|(_, text)| text),
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "merges": merges_of_scores(tokenizer, texts, &scores),
        },
    }))
}

/// Every pair of tokens that makes a token: best score of the whole first, then the lower ids.
fn merges_of_scores(tokenizer: &Tokenizer, texts: &Strings, scores: &[f32]) -> Vec<[String; 2]> {
    let is_normal = |id: &u32| tokenizer.token_kind(*id) == Some(TokenKind::Normal);
    let normal = (0..).zip(texts.iter()).filter(|(id, _)| is_normal(id));
    let ids: std::collections::HashMap<&str, u32> = normal.map(|(id, text)| (text, id)).collect();
    let mut merges = Vec::new();
    for (text, id) in &ids {
        for (middle, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(middle);
            if let (Some(left_id), Some(right_id)) = (ids.get(left), ids.get(right)) {
                merges.push((
                    scores.get(*id as usize).copied().unwrap_or(0.0),
                    *id,
                    *left_id,
                    *right_id,
                    [left, right],
                ));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
    merges.into_iter().map(|merge| merge.4.map(str::to_owned)).collect()
}

/// Tokens that are found in a text as they are written.
fn added_tokens(tokenizer: &Tokenizer, texts: &Strings) -> Value {
    let added = (0..).zip(texts.iter()).filter_map(|(id, text)| {
        let special = match tokenizer.token_kind(id)? {
            TokenKind::Control | TokenKind::Unknown => true,
            TokenKind::UserDefined => false,
            TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => return None,
        };
        Some(json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special}))
    });
    added.collect()
}

/// The start and end tokens around a text.
fn frame(tokenizer: &Tokenizer, texts: &Strings) -> Result<Value> {
    let ids = tokenizer.encode("", Specials::Literal, AddBos::Yes)?;
    if ids.is_empty() {
        return Ok(Value::Null);
    }
    let (before, after) = ids.split_at(usize::from(tokenizer.adds_bos()));
    let text = |id: &u32| texts.get(*id as usize).unwrap_or_default();
    let mark = |id: &u32| json!({"SpecialToken": {"id": text(id), "type_id": 0}});
    let template = |names: &[&str]| -> Value {
        let sequences = names.iter().flat_map(|name| {
            let sequence = std::iter::once(json!({"Sequence": {"id": name, "type_id": 0}}));
            before.iter().map(mark).chain(sequence).chain(after.iter().map(mark))
        });
        sequences.collect()
    };
    let specials: Map<String, Value> = ids
        .iter()
        .map(|id| (text(id).to_owned(), json!({"id": text(id), "ids": [id], "tokens": [text(id)]})))
        .collect();
    let (single, pair) = (template(&["A"]), template(&["A", "B"]));
    Ok(json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}))
}

/// The special tokens by name and the chat templates.
fn settings(metadata: &Metadata, texts: &Strings) -> Result<Value> {
    const TEMPLATE: &str = "tokenizer.chat_template";
    let mut settings = Map::new();
    for (name, key) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        let id = metadata.u32(&format!("tokenizer.ggml.{key}_token_id"))?;
        if let Some(text) = id.and_then(|id| texts.get(id as usize)) {
            settings.insert(format!("{name}_token"), text.into());
        }
    }
    let default = metadata.string(TEMPLATE)?;
    let mut templates: Vec<Value> =
        default.iter().map(|source| json!({"name": "default", "template": source})).collect();
    for name in metadata.strings("tokenizer.chat_templates")?.into_iter().flat_map(Strings::iter) {
        if let Some(source) = metadata.string(&format!("{TEMPLATE}.{name}"))? {
            templates.push(json!({"name": name, "template": source}));
        }
    }
    match (default, templates.len()) {
        (_, 0) => {}
        (Some(source), 1) => _ = settings.insert("chat_template".into(), source.into()),
        _ => _ = settings.insert("chat_template".into(), templates.into()),
    }
    settings.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    Ok(Value::Object(settings))
}
