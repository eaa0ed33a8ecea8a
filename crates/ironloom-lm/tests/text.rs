//! Tokenizers and chat templates against the reference implementations: ids of Hugging Face's `tokenizers` and text of
//! transformers' `apply_chat_template`, written by `tests/golden/text.py`.

use std::{
    path::{Path, PathBuf},
    sync::LazyLock,
};

use ironloom_lm::text::{
    AddBos, AddGenerationPrompt, ChatTemplate, Message, Specials, TextError, TextStream, Tokenizer, TrainOptions,
    encode_chat, train_bpe,
};
use proptest::prelude::*;
use serde_json::Value;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text").join(name)
}

fn json(name: &str) -> Value {
    let path = golden(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap()
}

fn of_json(name: &str) -> Tokenizer {
    Tokenizer::from_json(&std::fs::read(golden(&format!("tokenizers/{name}.json"))).unwrap()).unwrap()
}

fn of_gguf(name: &str) -> Tokenizer {
    Tokenizer::from_checkpoint(&ironloom_weights::open(golden(&format!("tokenizers/{name}.gguf"))).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

/// Holds a tokenizer against the recorded ids and texts, and its streams against its own decoding.
fn hold(tokenizer: &Tokenizer, texts: &[&str], expected: &Value, name: &str) {
    let prefix = ids(&expected["prefix"]);
    assert!(texts.len() > 30);
    for (place, &text) in texts.iter().enumerate() {
        let parsed = tokenizer.encode(text, Specials::Parse, AddBos::No).unwrap();
        assert_eq!(parsed, ids(&expected["parsed"][place]), "{name}, parsed, of {text:?}");
        let framed = tokenizer.encode(text, Specials::Parse, AddBos::Yes).unwrap();
        assert_eq!(framed, [prefix.clone(), parsed.clone()].concat(), "{name}, framed, of {text:?}");
        let literal = tokenizer.encode(text, Specials::Literal, AddBos::No).unwrap();
        assert_eq!(literal, ids(&expected["literal"][place]), "{name}, literal, of {text:?}");
        let decoded = tokenizer.decode(&parsed);
        assert_eq!(decoded, expected["decoded"][place].as_str().unwrap(), "{name}, decoded, of {text:?}");
        assert_eq!(streamed(tokenizer, &parsed), decoded, "{name}, streamed, of {text:?}");
    }
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = TextStream::new(tokenizer);
    let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
    text.push_str(&stream.finish());
    text
}

#[test]
fn ids_from_tokenizer_json_are_the_reference_ids() {
    let golden = json("ids.json");
    let texts = strings(&golden["texts"]);
    let names = ["gpt2", "smollm", "llama3", "qwen2", "llama2", "gemma", "mistral_v0_3", "tekken", "unigram"];
    for name in names {
        hold(&of_json(name), &texts, &golden["tokenizers"][name], name);
    }
}

#[test]
fn ids_from_gguf_are_the_reference_ids() {
    let golden = json("ids.json");
    let texts = strings(&golden["texts"]);
    for name in ["gpt2", "smollm", "llama3", "qwen2", "llama2", "gemma"] {
        hold(&of_gguf(name), &texts, &golden["tokenizers"][name], name);
    }
}

/// The file of a package, where it was fetched; the test says so and passes where it wasn't.
fn cached(file: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("IRONLOOM_CACHE")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/ironloom")))?;
    let path = folder.join(file);
    if !path.exists() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

#[test]
fn smollm2_gives_the_reference_ids() {
    let Some(path) = cached("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let checkpoint = ironloom_weights::open(path).unwrap();
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
    let golden = json("smollm2.json");
    hold(&tokenizer, &strings(&golden["texts"]), &golden, "SmolLM2");
    assert_eq!(tokenizer.end_ids(), [0, 2]);
    let template = ChatTemplate::from_checkpoint(&checkpoint).unwrap();
    let chat = encode_chat(&tokenizer, &template, &[Message::new("user", "Hi")], AddGenerationPrompt::Yes).unwrap();
    assert_eq!(chat[..4], [1, 9690, 198, 2683]);
    assert_eq!(chat[chat.len() - 4..], [1, 520, 9531, 198]);
}

#[test]
fn gemma3_gives_the_reference_ids() {
    let Some(path) = cached("gemma-3-270m-q4_k_m.gguf") else { return };
    let tokenizer = Tokenizer::from_checkpoint(&ironloom_weights::open(path).unwrap()).unwrap();
    let golden = json("gemma3.json");
    hold(&tokenizer, &strings(&golden["texts"]), &golden, "Gemma 3");
    assert_eq!((tokenizer.bos_id(), tokenizer.end_ids()), (Some(2), &[1, 106][..]));
}

#[test]
fn chats_are_the_reference_text_byte_for_byte() {
    let golden = json("chat.json");
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() >= 20);
    for case in cases {
        let name = case["template"].as_str().unwrap();
        let source = std::fs::read_to_string(self::golden(&format!("templates/{name}"))).unwrap();
        let template = ChatTemplate::new(source)
            .unwrap_or_else(|error| panic!("{name}: {error}"))
            .with_variable("bos_token", &case["bos_token"])
            .with_variable("eos_token", &case["eos_token"])
            .at_time(golden["now"].as_u64().unwrap());
        for (conversation, expected) in case["rendered"].as_object().unwrap() {
            let messages: Vec<Message> = golden["conversations"][conversation]
                .as_array()
                .unwrap()
                .iter()
                .map(|pair| Message::new(pair[0].as_str().unwrap(), pair[1].as_str().unwrap()))
                .collect();
            for (place, add) in [AddGenerationPrompt::Yes, AddGenerationPrompt::No].into_iter().enumerate() {
                let found = template.render(&messages, add);
                let wanted = &expected[place];
                match (&found, wanted["text"].as_str(), wanted["error"].as_str()) {
                    (Ok(found), Some(text), None) => assert_eq!(found, text, "{name}, {conversation}, {add:?}"),
                    (Err(TextError::Refused { message }), None, Some(error)) => {
                        assert_eq!(message, error, "{name}, {conversation}, {add:?}");
                    }
                    // What jinja2 itself says is worded otherwise here.
                    (Err(TextError::Template { .. } | TextError::EmptyConversation), None, Some(_)) => {}
                    _ => panic!("{name}, {conversation}, {add:?}: {found:?}, and the reference gives {wanted}"),
                }
            }
        }
    }
}

#[test]
fn templates_come_with_their_model() {
    let checkpoint = ironloom_weights::open(golden("tokenizers/llama2.gguf")).unwrap();
    let template = ChatTemplate::from_checkpoint(&checkpoint).unwrap();
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
    let messages = [Message::new("user", "Hi"), Message::new("assistant", "Yes"), Message::new("user", "So?")];
    let ids = encode_chat(&tokenizer, &template, &messages, AddGenerationPrompt::Yes).unwrap();
    let bos = tokenizer.bos_id().unwrap();
    // This template starts each turn of the user with the token, and none is added to those two.
    assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 2);
    assert_eq!((ids[0], ids[1] == bos), (bos, false));
}

#[test]
fn trained_tokenizers_are_the_same_each_time_and_read_back() {
    let texts = [include_str!("text.rs"), "naïve 東京 😀 naïve 東京 😀"];
    let options = TrainOptions {
        vocab_size: 600,
        special_tokens: vec!["<|endoftext|>".to_owned(), "<|im_end|>".to_owned()],
        ..TrainOptions::default()
    };
    let file = train_bpe(texts, &options).unwrap();
    assert_eq!(file, train_bpe(texts, &options).unwrap());
    let tokenizer = Tokenizer::from_json(file.as_bytes()).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.end_ids()), (600, &[0, 1][..]));
    let library = tokenizers::Tokenizer::from_bytes(file.as_bytes()).unwrap();
    for text in texts {
        let ids = tokenizer.encode(text, Specials::Parse, AddBos::Yes).unwrap();
        assert_eq!(ids, library.encode(text, true).unwrap().get_ids());
        assert_eq!(tokenizer.decode(&ids), text.replace("<|endoftext|>", "").replace("<|im_end|>", ""));
    }
    let ids = tokenizer.encode(texts[0], Specials::Literal, AddBos::No).unwrap();
    assert!(ids.len() < texts[0].len() / 2, "{} ids of {} bytes", ids.len(), texts[0].len());
}

/// Pieces of text that special tokens, merges and byte fallback tell apart.
fn mixed_text() -> impl Strategy<Value = String> {
    let pieces = prop_oneof![
        4 => ".{0,6}",
        2 => "[a-z ]{0,12}",
        1 => proptest::sample::select(vec!["<|im_end|>", "</s>", "<eos>", "<bos>", "\n\n", "   ", "▁", "<table>", "<|eot_id|>"]).prop_map(str::to_owned),
    ];
    proptest::collection::vec(pieces, 0..8).prop_map(|pieces| pieces.concat())
}

/// Read once, and not for every case.
static FROM_GGUF: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(|| {
    ["gpt2", "smollm", "llama3", "llama2", "gemma"].into_iter().map(|name| (name, of_gguf(name))).collect()
});
static WITH_LIBRARY: LazyLock<Vec<(&str, Tokenizer, tokenizers::Tokenizer)>> = LazyLock::new(|| {
    let library = |name| tokenizers::Tokenizer::from_file(golden(&format!("tokenizers/{name}.json"))).unwrap();
    ["gpt2", "smollm", "llama3", "qwen2", "llama2", "gemma", "mistral_v0_3"]
        .into_iter()
        .map(|name| (name, of_json(name), library(name)))
        .collect()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Text that is characters to the end comes back whole, whatever it holds.
    #[test]
    fn literal_text_survives_encoding_and_decoding(text in mixed_text()) {
        for (name, tokenizer) in &*FROM_GGUF {
            let ids = tokenizer.encode(&text, Specials::Literal, AddBos::No).unwrap();
            // SentencePiece spells a space as this mark, so the mark itself is a space.
            let wanted = if matches!(*name, "llama2" | "gemma") { text.replace('▁', " ") } else { text.clone() };
            prop_assert_eq!(tokenizer.decode(&ids), wanted, "{}", name);
            prop_assert_eq!(streamed(tokenizer, &ids), tokenizer.decode(&ids), "{}", name);
            prop_assert!(ids.iter().all(|id| !tokenizer.end_ids().contains(id)), "{}", name);
        }
    }

    /// The library runs the same file; its own pipeline is the reference for ours.
    #[test]
    fn ids_are_those_of_the_library(text in mixed_text()) {
        for (name, own, library) in &*WITH_LIBRARY {
            let ids = own.encode(&text, Specials::Parse, AddBos::Yes).unwrap();
            let wanted = library.encode(text.as_str(), true).unwrap();
            prop_assert_eq!(&ids[..], wanted.get_ids(), "{}", name);
        }
    }

    /// Any ids at all stream to their decoding, also those that break characters.
    #[test]
    fn any_ids_stream_to_their_decoding(ids in proptest::collection::vec(0u32..1000, 0..40)) {
        for (name, tokenizer) in &*FROM_GGUF {
            prop_assert_eq!(streamed(tokenizer, &ids), tokenizer.decode(&ids), "{}", name);
        }
    }
}
