//! Token files: documents as ids on disk, to be mapped.
//!
//! All numbers are little-endian.
//!
//! ```text
//! 0   8  "IRONTOKS"
//! 8   4  version, 1
//! 12  4  bytes an id, 2 or 4
//! 16  8  tokens
//! 24  8  documents
//! 32  4  size of the vocabulary
//! 36  4  largest id
//! 40  8  fingerprint of the vocabulary
//! 48  8  1 when there are learned bits, else 0
//! 56  8  0
//! 64     ids of all documents, then zeros up to a multiple of 8 bytes
//!        documents x 8: where each ends, in tokens
//!        one bit a token, lowest first: 1 where it is to be learned
//! ```
//!
//! A file of ids alone, as nanoGPT and others write, is read with a description in JSON beside it.

use std::{
    io::{self, Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use ironloom_core::{HostBuffer, MappedFile, PartialFile};
use ironloom_lm::text::Tokenizer;
use serde::Deserialize;

use super::{
    DataError, Document, Documents, Place, Source, Tokenization,
    documents::vocabulary_fingerprint,
    store::{Store, Tally, Width},
};
use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"IRONTOKS";
const VERSION: u32 = 1;
const HEAD: usize = 64;

/// Writes the ids of all documents of the sources to a token file, and opens it. `progress` hears of documents and tokens so far.
///
/// Only the ids of one document are in memory at a time.
///
/// # Errors
/// A source can't be read, or the file can't be written; then a file that was at `path` is as it was.
pub fn tokenize(
    sources: &[Source],
    tokenization: &Tokenization<'_>,
    path: impl AsRef<Path>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Documents> {
    let path = path.as_ref();
    let mut writer = TokenFileWriter::create(path, tokenization.tokenizer)?;
    for source in sources {
        source.read(tokenization, &mut |document, place| {
            writer.push(&document, place)?;
            progress(writer.documents(), writer.tokens());
            Ok(())
        })?;
    }
    writer.finish()?;
    Documents::open(path)
}

/// Writes a token file, document by document. The file appears under its name when it is whole.
pub struct TokenFileWriter {
    path: PathBuf,
    file: PartialFile,
    width: Width,
    vocab_size: u32,
    vocabulary: u64,
    tally: Tally,
    bytes: Vec<u8>,
}

impl TokenFileWriter {
    /// Starts a file of this tokenizer's ids.
    ///
    /// # Errors
    /// The file can't be made.
    pub fn create(path: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let vocab_size = tokenizer.vocab_size();
        let fitting = u32::try_from(vocab_size).ok().filter(|&size| size > 0);
        let vocab_size = fitting.ok_or(DataError::Vocabulary { vocab_size })?;
        let begin = || {
            let mut file = PartialFile::create(&path)?;
            file.write_all(&[0; HEAD])?;
            Ok(file)
        };
        let file = begin().map_err(|source| Error::Write { path: path.clone(), source })?;
        Ok(Self {
            path,
            file,
            width: Width::of_vocabulary(vocab_size as usize),
            vocab_size,
            vocabulary: vocabulary_fingerprint(tokenizer),
            tally: Tally::default(),
            bytes: Vec::new(),
        })
    }

    /// How many documents were written.
    pub fn documents(&self) -> usize {
        self.tally.ends.len() / 8
    }

    /// How many tokens were written.
    pub fn tokens(&self) -> usize {
        self.tally.tokens
    }

    /// Writes a document, found at `place`.
    ///
    /// # Errors
    /// It has no tokens, or one past the vocabulary, or the disk is full.
    pub fn push(&mut self, document: &Document, place: &Place) -> Result<()> {
        self.tally.push(document, place, self.vocab_size as usize)?;
        self.bytes.clear();
        document.ids.iter().for_each(|&id| self.width.write(id, &mut self.bytes));
        let written = self.file.write_all(&self.bytes);
        written.map_err(|source| Error::Write { path: self.path.clone(), source })
    }

    /// Completes the file.
    ///
    /// # Errors
    /// It has no documents, or the disk is full.
    pub fn finish(self) -> Result<()> {
        if self.tally.tokens == 0 {
            return Err(DataError::NoDocuments { what: self.path.display().to_string() }.into());
        }
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_le_bytes());
        head[12..16].copy_from_slice(&(self.width.bytes() as u32).to_le_bytes());
        head[16..24].copy_from_slice(&(self.tokens() as u64).to_le_bytes());
        head[24..32].copy_from_slice(&(self.documents() as u64).to_le_bytes());
        head[32..36].copy_from_slice(&self.vocab_size.to_le_bytes());
        head[36..40].copy_from_slice(&self.tally.largest_id.to_le_bytes());
        head[40..48].copy_from_slice(&self.vocabulary.to_le_bytes());
        head[48..56].copy_from_slice(&u64::from(self.tally.learned.is_some()).to_le_bytes());
        let Self { path, mut file, width, tally, .. } = self;
        let complete = || -> io::Result<()> {
            let ids = tally.tokens * width.bytes();
            file.write_all(&[0; 8][..ids.next_multiple_of(8) - ids])?;
            file.write_all(&tally.ends)?;
            file.write_all(tally.learned.as_deref().unwrap_or_default())?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&head)?;
            file.finish()
        };
        complete().map_err(|source| Error::Write { path, source })
    }
}

/// Whether a file starts as one of ours.
pub(super) fn is_token_file(path: &Path) -> bool {
    let start = || {
        let mut start = [0; MAGIC.len()];
        io::Read::read_exact(&mut std::fs::File::open(path).ok()?, &mut start).ok()?;
        Some(start)
    };
    start().as_ref() == Some(MAGIC)
}

/// Maps a token file, ours or of plain ids, and checks all that can be without reading every id.
pub(super) fn open(path: &Path) -> Result<Store> {
    let file = MappedFile::open(path).map_err(DataError::from)?;
    if file.starts_with(MAGIC) { open_ours(path, &file) } else { open_plain(path, &file) }
}

fn open_ours(path: &Path, file: &Arc<MappedFile>) -> Result<Store> {
    let refuse = |reason: String| DataError::TokenFile { path: path.to_owned(), reason };
    let head = file.get(..HEAD).ok_or_else(|| refuse(format!("it has {} bytes, fewer than its head", file.len())))?;
    let number =
        |range: Range<usize>| head[range].iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte));
    let version = number(8..12);
    if version != u64::from(VERSION) {
        return Err(refuse(format!("its version is {version}, and {VERSION} is the one known")).into());
    }
    let width = match number(12..16) {
        2 => Width::Two,
        4 => Width::Four,
        bytes => return Err(refuse(format!("its ids have {bytes} bytes, and 2 and 4 are known")).into()),
    };
    let (tokens, documents) = (number(16..24), number(24..32));
    let has_learned = number(48..56) == 1;
    let sections = || {
        let ids = usize::try_from(tokens).ok()?.checked_mul(width.bytes())?;
        let ends_start = HEAD.checked_add(ids)?.checked_next_multiple_of(8)?;
        let ends_end = ends_start.checked_add(usize::try_from(documents).ok()?.checked_mul(8)?)?;
        let learned_end = ends_end.checked_add(if has_learned { (tokens as usize).div_ceil(8) } else { 0 })?;
        (learned_end == file.len()).then_some((HEAD..HEAD + ids, ends_start..ends_end, ends_end..learned_end))
    };
    let part = |range| HostBuffer::mapped(file.clone(), range);
    let (ids, ends, learned) = sections()
        .and_then(|(ids, ends, learned)| Some((part(ids)?, part(ends)?, part(learned)?)))
        .ok_or_else(|| {
            refuse(format!(
                "its head tells of {tokens} tokens in {documents} documents, and it has {} bytes",
                file.len()
            ))
        })?;
    let store = Store {
        ids,
        width,
        ends,
        learned: has_learned.then_some(learned),
        vocab_size: number(32..36) as usize,
        largest_id: number(36..40) as u32,
        vocabulary: Some(number(40..48)),
    };
    let rising = (0..store.documents()).all(|document| store.end(document) < store.end(document + 1));
    if !rising || store.end(store.documents()) != store.tokens() {
        return Err(refuse("its documents do not follow each other to the last token".to_owned()).into());
    }
    if store.documents() == 0 {
        return Err(DataError::NoDocuments { what: path.display().to_string() }.into());
    }
    Ok(store)
}

/// What stands beside a file of plain ids.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    dtype: PlainType,
    vocab_size: usize,
    /// The token that ends each document and belongs to it; without it the file is one document.
    end_id: Option<u32>,
}

#[derive(Clone, Copy, Deserialize)]
enum PlainType {
    #[serde(rename = "u16", alias = "uint16")]
    U16,
    #[serde(rename = "u32", alias = "uint32")]
    U32,
}

fn open_plain(path: &Path, file: &Arc<MappedFile>) -> Result<Store> {
    let description = path.with_extension("json");
    let text = match std::fs::read(&description) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(DataError::NoDescription { path: path.to_owned(), description }.into());
        }
        Err(source) => return Err(Error::Read { path: description, source }),
    };
    let Description { dtype, vocab_size, end_id } = serde_json::from_slice(&text)
        .map_err(|error| DataError::Json { place: Place::file(&description), reason: error.to_string() })?;
    let width = match dtype {
        PlainType::U16 => Width::Two,
        PlainType::U32 => Width::Four,
    };
    if file.is_empty() {
        return Err(DataError::NoDocuments { what: path.display().to_string() }.into());
    }
    if !file.len().is_multiple_of(width.bytes()) {
        let reason = format!("it has {} bytes, which are not whole ids of {} bytes", file.len(), width.bytes());
        return Err(DataError::TokenFile { path: path.to_owned(), reason }.into());
    }
    let ids = HostBuffer::mapped(file.clone(), 0..file.len())
        .ok_or_else(|| DataError::NoDocuments { what: path.display().to_string() })?;
    let empty = HostBuffer::owned(Vec::new());
    let mut store = Store { ids, width, ends: empty, learned: None, vocab_size, largest_id: 0, vocabulary: None };
    let tokens = store.tokens();
    let mut ends = Vec::new();
    for token in 0..tokens {
        let id = store.id(token);
        store.largest_id = store.largest_id.max(id);
        if Some(id) == end_id || token + 1 == tokens {
            ends.extend_from_slice(&(token as u64 + 1).to_le_bytes());
        }
    }
    // Reading it all to find the ends brought it into memory.
    store.ids.release();
    store.ends = HostBuffer::owned(ends);
    if store.largest_id as usize >= vocab_size {
        let what = path.display().to_string();
        return Err(DataError::IdOutOfRange { what, id: store.largest_id, vocab_size }.into());
    }
    Ok(store)
}
