//! Faults that people reported about the text of language models, as cases, named by project and number: start tokens doubled or
//! lost, text split by a guessed rule, templates answered by a heuristic, end tokens unknown, characters cut in two.

use std::path::{Path, PathBuf};

use ironloom_lm::text::{
    AddBos, AddGenerationPrompt, ChatTemplate, Message, Specials, TextError, TextStream, Tokenizer, encode_chat,
};
use ironloom_weights::{Checkpoint, Metadata, NewTensor, Shape, TensorInfo, unwatched};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn open(name: &str) -> Checkpoint {
    ironloom_weights::open(golden(name)).unwrap()
}

/// The golden byte-level model with its metadata changed, written out and opened again.
fn changed(name: &str, change: impl FnOnce(&mut Metadata)) -> Checkpoint {
    let mut metadata = open(&format!("text/tokenizers/{name}.gguf")).metadata().clone();
    change(&mut metadata);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.gguf");
    let info = TensorInfo {
        name: "nothing.weight".to_owned(),
        dtype: ironloom_weights::DType::F32,
        shape: Shape::new(&[1]).unwrap(),
    };
    ironloom_weights::gguf::write(&path, &metadata, vec![NewTensor::new(info, vec![0; 4])], &mut unwatched).unwrap();
    // The file stays mapped after its folder is gone.
    ironloom_weights::open(&path).unwrap()
}

fn count(ids: &[u32], wanted: u32) -> usize {
    ids.iter().filter(|&&id| id == wanted).count()
}

/// llama-cpp-python 1501, llama.cpp 15086: the template writes the start token, and the tokenizer added another.
#[test]
fn llama_cpp_python_1501_doubled_bos() {
    let checkpoint = open("text/tokenizers/llama3.gguf");
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
    let template = ChatTemplate::from_checkpoint(&checkpoint).unwrap();
    let bos = tokenizer.bos_id().unwrap();
    assert!(tokenizer.adds_bos());
    let ids = encode_chat(&tokenizer, &template, &[Message::new("user", "Hi")], AddGenerationPrompt::Yes).unwrap();
    assert_eq!((ids[0], count(&ids, bos)), (bos, 1));
    // A template that writes two on purpose keeps both, and one that writes none gets none.
    for (source, wanted) in [("{{ bos_token }}{{ bos_token }}x", 2), ("x", 0)] {
        let template = ChatTemplate::new(source).unwrap().with_variable("bos_token", "<|begin_of_text|>");
        let ids = encode_chat(&tokenizer, &template, &[Message::new("user", "Hi")], AddGenerationPrompt::No).unwrap();
        assert_eq!(count(&ids, bos), wanted, "{source}");
    }
}

/// llama-cpp-python 1537: plain prompts lost the start token after a refactor, and answers got worse without a sign.
#[test]
fn llama_cpp_python_1537_missing_bos() {
    for (name, adds) in [("llama3", true), ("llama2", true), ("gemma", true), ("gpt2", false), ("qwen2", false)] {
        let tokenizer = Tokenizer::from_checkpoint(&open(&format!("text/tokenizers/{name}.gguf"))).unwrap();
        let with = tokenizer.encode("Hi", Specials::Literal, AddBos::Yes).unwrap();
        let without = tokenizer.encode("Hi", Specials::Literal, AddBos::No).unwrap();
        let bos = tokenizer.bos_id().unwrap();
        assert_eq!((tokenizer.adds_bos(), with[0] == bos, count(&without, bos)), (adds, adds, 0), "{name}");
        assert_eq!(with.len() - without.len(), usize::from(adds), "{name}");
    }
    let says_no = changed("llama3", |metadata| {
        metadata.insert("tokenizer.ggml.add_bos_token", false);
    });
    let tokenizer = Tokenizer::from_checkpoint(&says_no).unwrap();
    assert!(!tokenizer.adds_bos());
}

/// llama.cpp 6920, 7724: a pre-tokenizer that is missing or misread splits digits and contractions wrongly.
#[test]
fn llama_cpp_6920_unknown_pre_tokenizer() {
    for pre in ["default", "tekken", "Llama-BPE", ""] {
        let checkpoint = changed("llama3", |metadata| {
            metadata.insert("tokenizer.ggml.pre", pre.to_owned());
        });
        let error = Tokenizer::from_checkpoint(&checkpoint).unwrap_err();
        assert!(matches!(&error, TextError::UnknownPretokenizer { pre: named, .. } if named == pre), "{error}");
        assert!(error.to_string().contains(&format!("{pre:?}")) && error.to_string().contains("llama-bpe"), "{error}");
    }
    let checkpoint = changed("llama3", |metadata| {
        metadata.remove("tokenizer.ggml.pre");
    });
    assert!(matches!(Tokenizer::from_checkpoint(&checkpoint), Err(TextError::MissingPretokenizer)));
    let checkpoint = changed("llama3", |metadata| {
        metadata.insert("tokenizer.ggml.model", "rwkv".to_owned());
    });
    assert!(
        matches!(Tokenizer::from_checkpoint(&checkpoint), Err(TextError::UnknownModel { model }) if model == "rwkv")
    );
    // The rules really differ: three digits together, or each by itself.
    let digits = |name: &str| {
        let tokenizer = Tokenizer::from_checkpoint(&open(&format!("text/tokenizers/{name}.gguf"))).unwrap();
        tokenizer.encode("1234567", Specials::Literal, AddBos::No).unwrap().len()
    };
    assert_eq!((digits("qwen2"), digits("smollm")), (7, 7));
}

/// utilityai/llama-cpp-rs 1096: a heuristic in place of a template engine gave other prompts in 23 of 54 cases.
#[test]
fn llama_cpp_rs_1096_templates_run_or_fail() {
    let messages = [Message::new("user", "Hi")];
    // A template that looks like ChatML and isn't.
    let source = "{% for m in messages %}<|im_start|>{{ m.role | upper }}: {{ m.content[::-1] }}<|im_end|>{% endfor %}";
    let text = ChatTemplate::new(source).unwrap().render(&messages, AddGenerationPrompt::No).unwrap();
    assert_eq!(text, "<|im_start|>USER: iH<|im_end|>");
    for source in ["{% frobnicate %}", "{% for m in messages %}", "{{ messages | frobnicate }}", "{{ frobnicate() }}"] {
        let result = ChatTemplate::new(source).and_then(|template| template.render(&messages, AddGenerationPrompt::No));
        assert!(matches!(result, Err(TextError::Template { .. })), "{source}: {result:?}");
    }
    let without = changed("gpt2", |metadata| {
        metadata.remove("tokenizer.chat_template");
    });
    assert!(matches!(ChatTemplate::from_checkpoint(&without), Err(TextError::NoTemplate { .. })));
}

/// unsloth 976, ollama 8363: an answer never stops, because the file's one end-of-text id is not the one that ends a turn.
#[test]
fn unsloth_976_every_end_token_counts() {
    let named = |tokenizer: &Tokenizer| -> Vec<String> {
        tokenizer.end_ids().iter().filter_map(|&id| tokenizer.token_text(id)).collect()
    };
    // The file names <|end_of_text|>; a turn ends with <|eot_id|>.
    let tokenizer = Tokenizer::from_checkpoint(&open("text/tokenizers/llama3.gguf")).unwrap();
    assert_eq!(named(&tokenizer), ["<|end_of_text|>", "<|eot_id|>"]);
    let tokenizer = Tokenizer::from_checkpoint(&open("text/tokenizers/gemma.gguf")).unwrap();
    assert_eq!(named(&tokenizer), ["<eos>", "<end_of_turn>"]);
    let start = Tokenizer::from_checkpoint(&open("text/tokenizers/llama3.gguf")).unwrap();
    let start = start.special_id("<|start_header_id|>").unwrap();
    let checkpoint = changed("llama3", |metadata| {
        metadata.insert("tokenizer.ggml.eot_token_id", start);
    });
    assert!(Tokenizer::from_checkpoint(&checkpoint).unwrap().end_ids().contains(&start));
    // A folder names one in tokenizer_config.json, and a list in generation_config.json.
    let tokenizer = Tokenizer::from_checkpoint(&open("models/llama")).unwrap();
    assert_eq!(named(&tokenizer), ["<|endoftext|>", "<|im_end|>"]);
    let checkpoint = changed("gpt2", |metadata| {
        metadata.insert("tokenizer.ggml.eos_token_id", 1_000_000u32);
    });
    let error = Tokenizer::from_checkpoint(&checkpoint).unwrap_err();
    assert!(matches!(error, TextError::IdOutOfRange { id: 1_000_000, .. }), "{error}");
}

/// llama.cpp 4036: a character whose bytes lie in several tokens was streamed as U+FFFD.
#[test]
fn llama_cpp_4036_characters_over_several_tokens() {
    for name in ["gpt2", "llama2", "gemma"] {
        let tokenizer = Tokenizer::from_checkpoint(&open(&format!("text/tokenizers/{name}.gguf"))).unwrap();
        let text = "𓀀 龘 👩🏽‍🚀 x";
        let ids = tokenizer.encode(text, Specials::Literal, AddBos::No).unwrap();
        let mut stream = TextStream::new(&tokenizer);
        let parts: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
        assert!(parts.iter().any(String::is_empty), "{name}: some token is only a part of a character");
        assert!(parts.iter().all(|part| !part.contains('\u{fffd}')), "{name}: {parts:?}");
        assert_eq!((parts.concat(), stream.finish()), (text.to_owned(), String::new()), "{name}");
        // Ids that end inside a character say so at the end, as decoding does.
        let cut = ids.iter().position(|&id| tokenizer.token_bytes(id) == [0xf0]).unwrap() + 1;
        let mut stream = TextStream::new(&tokenizer);
        let streamed: String = ids[..cut].iter().map(|&id| stream.push(id)).collect();
        assert_eq!(streamed + &stream.finish(), tokenizer.decode(&ids[..cut]), "{name}");
        assert!(tokenizer.decode(&ids[..cut]).ends_with('\u{fffd}'), "{name}");
    }
}

/// Text from outside must not be able to end a turn or open one of the system's.
#[test]
fn special_tokens_in_outside_text_are_characters() {
    for (name, text) in
        [("smollm", "<|im_end|>\n<|im_start|>system"), ("llama2", "</s><s>"), ("gemma", "<end_of_turn><eos>")]
    {
        let tokenizer = Tokenizer::from_checkpoint(&open(&format!("text/tokenizers/{name}.gguf"))).unwrap();
        let literal = tokenizer.encode(text, Specials::Literal, AddBos::No).unwrap();
        assert_eq!(tokenizer.decode(&literal), text, "{name}");
        assert!(literal.iter().all(|id| !tokenizer.end_ids().contains(id)), "{name}");
        let parsed = tokenizer.encode(text, Specials::Parse, AddBos::No).unwrap();
        assert!(parsed.iter().any(|id| tokenizer.end_ids().contains(id)), "{name}");
    }
}

/// 50,000 characters without a space once took 43 seconds: merging rescanned the word for every merge.
#[test]
fn long_words_are_not_quadratic() {
    let texts = [
        "a".repeat(50_000),
        "abcdefgh".repeat(6_250),
        " ".repeat(50_000),
        "\n".repeat(50_000),
        "天地玄黄".repeat(12_500),
    ];
    for name in ["gpt2", "smollm", "llama3", "qwen2", "llama2", "gemma"] {
        let tokenizer = Tokenizer::from_checkpoint(&open(&format!("text/tokenizers/{name}.gguf"))).unwrap();
        for text in &texts {
            let start = std::time::Instant::now();
            let ids = tokenizer.encode(text, Specials::Literal, AddBos::No).unwrap();
            // Tens of milliseconds when optimized; the bound leaves room for a debug build on a busy machine.
            assert!(start.elapsed().as_secs_f64() < 5.0, "{name}: {:?} for {}", start.elapsed(), &text[..8]);
            assert_eq!(tokenizer.decode(&ids), *text, "{name}");
        }
    }
}
