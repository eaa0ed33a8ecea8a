//! From files to batches: what is learned of each kind of data, that every token comes once an epoch, that a saved place goes on with
//! the same batches, and that damaged data are errors that name their place.

mod chats;
mod rows;
mod sources;
mod token_files;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use ironloom_lm::text::{AddBos, AddGenerationPrompt, ChatTemplate, Message, Specials, Tokenizer, encode_chat};
use ironloom_train::{
    Error,
    data::{
        Answers, Batch, Cursor, CutDocuments, DataError, Document, Documents, DocumentsBuilder, EndToken, HeldOut,
        IGNORED, Loader, LoaderOptions, OnePass, Order, Overlong, Packing, Place, Share, Source, SourceFormat,
        Tokenization, counted, tokenize,
    },
};
use proptest::prelude::*;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text").join(name)
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_json(&std::fs::read(golden(&format!("tokenizers/{name}.json"))).unwrap()).unwrap()
}

fn template(name: &str) -> ChatTemplate {
    let template = ChatTemplate::new(std::fs::read_to_string(golden(&format!("templates/{name}.jinja"))).unwrap());
    template.unwrap().with_variable("bos_token", "<s>").with_variable("eos_token", "</s>").at_time(1_764_374_400)
}

fn plain(tokenizer: &Tokenizer) -> Tokenization<'_> {
    Tokenization { tokenizer, template: None, end: EndToken::Auto }
}

/// The source's documents; its one file, named `data.<ending>`, holds `contents`.
fn load(
    contents: &str,
    ending: &str,
    format: SourceFormat,
    tokenization: &Tokenization<'_>,
) -> Result<Documents, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data").with_extension(ending);
    std::fs::write(&path, contents).unwrap();
    Source { paths: vec![path], format, endings: Vec::new() }.load(tokenization)
}

fn data_error(result: Result<impl Sized, Error>) -> DataError {
    match result {
        Err(Error::Data(error)) => *error,
        Err(error) => panic!("not an error of data: {error}"),
        Ok(_) => panic!("no error"),
    }
}

/// Documents of these lengths. The token `t` of document `d` is `1000 * d + t`, so that each can be told from all others.
fn numbered(lengths: &[usize]) -> Documents {
    let documents: Vec<Document> = lengths
        .iter()
        .enumerate()
        .map(|(d, &length)| Document { ids: (0..length as u32).map(|t| 1000 * d as u32 + t).collect(), learned: None })
        .collect();
    built("numbered", &documents)
}

const VOCABULARY: usize = 3_000_000;

fn built(name: &str, documents: &[Document]) -> Documents {
    let mut builder = DocumentsBuilder::new(name, VOCABULARY);
    let place = Place { path: name.into(), line: None };
    documents.iter().for_each(|document| builder.push(document, &place).unwrap());
    builder.finish().unwrap()
}

fn options(sequence_length: usize, rows: usize, packing: Packing) -> LoaderOptions {
    LoaderOptions {
        sequence_length,
        rows,
        packing,
        overlong: Overlong::Split,
        order: Order::Shuffled,
        seed: 7,
        vocab_size: VOCABULARY,
    }
}

fn one(documents: Documents) -> Vec<Share> {
    vec![Share { documents, weight: 1.0 }]
}

const LENGTHS: [usize; 9] = [5, 1, 40, 3, 17, 2, 90, 8, 31];

type Turns<'a> = &'a [(&'a str, &'a str)];

fn messages(turns: Turns<'_>) -> Vec<Message> {
    turns.iter().map(|&(role, content)| Message::new(role, content)).collect()
}

fn conversation(turns: Turns<'_>) -> String {
    serde_json::json!({"messages": messages(turns)}).to_string()
}

const TURNS: Turns<'static> =
    &[("user", "Hi"), ("assistant", "Hello!"), ("user", "And?"), ("assistant", "Nothing."), ("user", "Bye")];

fn chat(
    turns: Turns<'_>,
    answers: Answers,
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
) -> Result<Documents, Error> {
    let tokenization = Tokenization { tokenizer, template: Some(template), end: EndToken::Auto };
    load(&conversation(turns), "jsonl", SourceFormat::Chat { answers }, &tokenization)
}
