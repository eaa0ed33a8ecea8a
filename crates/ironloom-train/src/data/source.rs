//! Sources: files of one kind of data, read into documents of token ids.
//!
//! In: paths and a [`SourceFormat`], as a configuration names them. Out: a [`Document`] a text, a line or a conversation, with
//! the tokens around it that the model expects: its start token where the tokenizer adds one, and a token that ends it.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use ironloom_lm::text::{AddBos, ChatTemplate, Specials, Tokenizer};
use serde::{Deserialize, Serialize};

use super::{Answers, DataError, Document, Documents, DocumentsBuilder, Place, chat, json_lines, texts, token_file};
use crate::{Error, Result};

/// Files of one kind of data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Files, and folders whose files are taken in the order of their names, with those of the folders inside.
    pub paths: Vec<PathBuf>,
    /// What is in them.
    pub format: SourceFormat,
    /// How the names of files end that are taken from folders, such as `txt`; empty for those that the format has.
    #[serde(default)]
    pub endings: Vec<String>,
}

/// What is in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum SourceFormat {
    /// Plain text: documents with `separator` between them, or one document a file.
    Text {
        /// What stands between two documents, such as `"\n\n\n"` or `"<|endoftext|>"`.
        #[serde(default)]
        separator: Option<String>,
    },
    /// A JSON object a line, with a text in one field.
    JsonText {
        /// The field's name.
        #[serde(default = "text_field")]
        field: String,
    },
    /// A JSON object a line: `{"messages": [{"role": "user", "content": "…"}, …]}`. The assistant's messages are learned.
    Chat {
        /// Which of them.
        #[serde(default)]
        answers: Answers,
    },
    /// A JSON object a line: `{"prompt": "…", "completion": "…"}`. The completion is learned.
    Completion,
    /// A token file: one a source. See [`Documents::open`].
    Tokens,
}

fn text_field() -> String {
    "text".to_owned()
}

/// Which token follows a text or a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndToken {
    /// The tokenizer's token for the end of a text, where it has one.
    #[default]
    Auto,
    /// None.
    None,
    /// This id.
    Id(u32),
}

/// How texts become ids.
#[derive(Clone, Copy, Debug)]
pub struct Tokenization<'a> {
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The chat template, which conversations need.
    pub template: Option<&'a ChatTemplate>,
    /// What follows texts and completions. Conversations end as their template ends them.
    pub end: EndToken,
}

impl Source {
    /// A source of one file, whose format is told by its name and its first line.
    ///
    /// # Errors
    /// The file can't be read, or is JSONL with none of the known fields.
    pub fn guess(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        let format = if path.is_dir() {
            SourceFormat::Text { separator: None }
        } else if token_file::is_token_file(&path) || (ending == "bin" && path.with_extension("json").exists()) {
            SourceFormat::Tokens
        } else if JSON_ENDINGS.contains(&ending.as_str()) {
            json_lines::guess(&path)?
        } else {
            SourceFormat::Text { separator: None }
        };
        Ok(Self { paths: vec![path], format, endings: Vec::new() })
    }

    /// All documents: mapped of a token file, else in memory.
    ///
    /// # Errors
    /// A file can't be read, or something in it is not what the format says; the error names file and line.
    pub fn load(&self, tokenization: &Tokenization<'_>) -> Result<Documents> {
        if self.format == SourceFormat::Tokens {
            let documents = Documents::open(self.token_file()?)?;
            documents.check_tokenizer(tokenization.tokenizer)?;
            return Ok(documents);
        }
        let mut builder = DocumentsBuilder::for_tokenizer(self.name(), tokenization.tokenizer);
        self.read(tokenization, &mut |document, place| builder.push(&document, place))?;
        builder.finish()
    }

    /// Hands every document to `each`, with its place, in order.
    ///
    /// # Errors
    /// As of [`load`](Self::load), and those of `each`.
    pub fn read(
        &self,
        tokenization: &Tokenization<'_>,
        each: &mut dyn FnMut(Document, &Place) -> Result<()>,
    ) -> Result<()> {
        if self.format == SourceFormat::Tokens {
            let path = self.token_file()?;
            let documents = Documents::open(path)?;
            documents.check_tokenizer(tokenization.tokenizer)?;
            let place = Place::file(path);
            return (0..documents.len()).try_for_each(|number| each(documents.document(number), &place));
        }
        for path in self.files()? {
            match &self.format {
                SourceFormat::Text { separator } => {
                    texts::read(&path, separator.as_deref(), &mut |text, place| {
                        each(tokenization.text(text, place)?, place)
                    })?;
                }
                SourceFormat::JsonText { field } => json_lines::read(&path, &mut |object, place| {
                    let text = json_lines::string(object, field, place)?;
                    each(tokenization.text(text, place)?, place)
                })?,
                SourceFormat::Chat { answers } => {
                    let template = tokenization.template;
                    let template =
                        template.ok_or_else(|| DataError::NoTemplate { what: path.display().to_string() })?;
                    json_lines::read(&path, &mut |object, place| {
                        let messages = json_lines::messages(object, place)?;
                        chat::read(&messages, *answers, tokenization.tokenizer, template, place, each)
                    })?;
                }
                SourceFormat::Completion => json_lines::read(&path, &mut |object, place| {
                    let prompt = json_lines::string(object, "prompt", place)?;
                    let completion = json_lines::string(object, "completion", place)?;
                    each(tokenization.completion(prompt, completion, place)?, place)
                })?,
                SourceFormat::Tokens => {}
            }
        }
        Ok(())
    }

    /// What the source is called in messages.
    pub fn name(&self) -> String {
        match self.paths.as_slice() {
            [] => "a source of data".to_owned(),
            [path] => path.display().to_string(),
            [path, others @ ..] => format!("{} and {} more", path.display(), others.len()),
        }
    }

    fn token_file(&self) -> Result<&Path> {
        match self.paths.as_slice() {
            [path] => Ok(path),
            paths => Err(DataError::Option {
                option: "the number of token files in a source",
                value: paths.len().to_string(),
                limits: "1: make a source of each",
            }
            .into()),
        }
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        let of_format: &[&str] = match &self.format {
            SourceFormat::Text { .. } => &["txt", "md"],
            _ => &JSON_ENDINGS,
        };
        let mut endings: Vec<&str> = self.endings.iter().map(|ending| ending.trim_start_matches('.')).collect();
        if endings.is_empty() {
            endings.extend(of_format);
        }
        let mut files = Vec::new();
        for path in &self.paths {
            if path.is_dir() {
                add_files_below(path, &endings, &mut files)?;
            } else {
                files.push(path.clone());
            }
        }
        if files.is_empty() {
            return Err(DataError::NoFiles { what: self.name(), endings: endings.join(", ") }.into());
        }
        Ok(files)
    }
}

const JSON_ENDINGS: [&str; 3] = ["jsonl", "ndjson", "json"];

/// Files below a folder in the order of their names. Hidden ones, and links, which may lead in circles, are passed over.
fn add_files_below(folder: &Path, endings: &[&str], files: &mut Vec<PathBuf>) -> Result<()> {
    let error = |source| Error::Read { path: folder.to_owned(), source };
    let entries: std::io::Result<Vec<_>> = std::fs::read_dir(folder).map_err(error)?.collect();
    let mut entries = entries.map_err(error)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let (path, kind) = (entry.path(), entry.file_type().map_err(error)?);
        let ending = path.extension().unwrap_or_default();
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        } else if kind.is_dir() {
            add_files_below(&path, endings, files)?;
        } else if kind.is_file() && endings.iter().any(|&wanted| ending.eq_ignore_ascii_case(wanted)) {
            files.push(path);
        }
    }
    Ok(())
}

impl Tokenization<'_> {
    /// A whole text as a document.
    fn text(&self, text: &str, place: &Place) -> Result<Document> {
        if text.is_empty() {
            return Err(DataError::EmptyDocument { place: place.clone() }.into());
        }
        let mut ids = encode(self.tokenizer, text, Specials::Literal, AddBos::Yes, place)?;
        ids.extend(self.end_id().filter(|&end| ids.last() != Some(&end)));
        Ok(Document { ids, learned: None })
    }

    /// A prompt that is given and a completion that is learned, its end token too.
    ///
    /// Where the tokens of both texts together begin with those of the prompt, they are the ones; else the completion is
    /// tokenized as what follows the prompt's own tokens, which are all that a model will see when it is asked.
    fn completion(&self, prompt: &str, completion: &str, place: &Place) -> Result<Document> {
        if completion.is_empty() {
            return Err(DataError::EmptyDocument { place: place.clone() }.into());
        }
        let plain = |text: &str| encode(self.tokenizer, text, Specials::Literal, AddBos::No, place);
        let asked = plain(prompt)?;
        let mut texts = plain(&format!("{prompt}{completion}"))?;
        if !texts.starts_with(&asked) {
            texts.clone_from(&asked);
            texts.extend(encode_continuation(self.tokenizer, completion, Specials::Literal, place)?);
        }
        let mut ids: Vec<u32> = self.tokenizer.bos_id().filter(|_| self.tokenizer.adds_bos()).into_iter().collect();
        let given = ids.len() + asked.len();
        ids.extend(texts);
        ids.extend(self.end_id());
        let learned = (0..ids.len()).map(|token| token >= given).collect();
        Ok(Document { ids, learned: Some(learned) })
    }

    fn end_id(&self) -> Option<u32> {
        match self.end {
            EndToken::None => None,
            EndToken::Id(id) => Some(id),
            EndToken::Auto => END_OF_TEXT
                .iter()
                .find_map(|mark| self.tokenizer.special_id(mark))
                .filter(|id| self.tokenizer.end_ids().contains(id))
                .or_else(|| self.tokenizer.end_ids().first().copied()),
        }
    }
}

/// Tokens that end a text, as distinct from a turn, in the families that have them.
const END_OF_TEXT: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<｜end▁of▁sentence｜>"];

pub(super) fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    specials: Specials,
    add_bos: AddBos,
    place: &Place,
) -> Result<Vec<u32>> {
    let ids = tokenizer.encode(text, specials, add_bos);
    Ok(ids.map_err(|source| DataError::Text { place: place.clone(), source })?)
}

/// The ids of a text that goes on from another: without the space that some tokenizers put before a text.
pub(super) fn encode_continuation(
    tokenizer: &Tokenizer,
    text: &str,
    specials: Specials,
    place: &Place,
) -> Result<Vec<u32>> {
    let plain = |text: &str| encode(tokenizer, text, specials, AddBos::No, place);
    let start_of_text = plain("a")?;
    let bytes: Vec<u8> = start_of_text.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
    if bytes.first() == Some(&b' ') {
        // Behind something it does not merge with, a text has no such space.
        for before in ["\n", "a", "0", "."] {
            let (before, both) = (plain(before)?, plain(&format!("{before}{text}"))?);
            if let Some(after) = both.strip_prefix(before.as_slice()) {
                return Ok(after.to_vec());
            }
        }
    }
    plain(text)
}

/// The lines of a file, each with its place, without its end.
pub(super) fn read_lines(path: &Path, each: &mut dyn FnMut(&[u8], &Place) -> Result<()>) -> Result<()> {
    let error = |source| Error::Read { path: path.to_owned(), source };
    let mut reader = BufReader::with_capacity(1 << 16, std::fs::File::open(path).map_err(error)?);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(error)? == 0 {
            break;
        }
        each(line.trim_ascii(), &Place { path: path.to_owned(), line: Some(number) })?;
    }
    Ok(())
}
