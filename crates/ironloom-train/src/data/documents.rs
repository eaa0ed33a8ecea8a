//! Documents: the token ids of texts, found by number or by place in their stream.
//!
//! In: documents one by one ([`DocumentsBuilder`]), or a token file. Out: parts of documents as ids and targets, for
//! [`rows`](super::rows). Held-out documents and the rest of them are two `Documents` of one [`Store`].

use std::{ops::Range, path::Path, sync::Arc};

use ironloom_core::HostBuffer;
use ironloom_lm::text::Tokenizer;

use super::{
    Batch, DataError, IGNORED, Place,
    store::{Fingerprint, Store, Tally, Width},
    token_file,
};
use crate::Result;

/// The token ids of one document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Document {
    /// Token ids, with the start and end tokens that belong to it.
    pub ids: Vec<u32>,
    /// Which of them are to be learned (predicted from those before); all, where there is nothing said. One past the end counts
    /// as not to be learned.
    pub learned: Option<Vec<bool>>,
}

/// Documents as token ids, in memory or mapped from a token file. Cloning shares them.
#[derive(Clone, Debug)]
pub struct Documents {
    name: Arc<str>,
    store: Arc<Store>,
    index: Index,
}

/// Which tokens of the store are documents.
#[derive(Clone, Debug)]
enum Index {
    Whole,
    Chosen(Arc<Chosen>),
}

#[derive(Debug)]
struct Chosen {
    /// In tokens of the store, in its order.
    ranges: Vec<Range<usize>>,
    /// Where each of them ends in the stream of them.
    ends: Vec<usize>,
}

impl Documents {
    /// Opens a token file: one that [`tokenize`](super::tokenize) or a [`TokenFileWriter`](super::TokenFileWriter) wrote, or
    /// plain little-endian ids with a description beside it (`data.json` for `data.bin`, such as
    /// `{"dtype": "u16", "vocab_size": 50257, "end_id": 50256}`).
    ///
    /// The file is mapped, and must not be cut while it is open.
    ///
    /// # Errors
    /// It can't be read, or is not what its head or its description says.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Ok(Self::whole(path.display().to_string(), token_file::open(path)?))
    }

    pub(super) fn whole(name: String, store: Store) -> Self {
        Self { name: name.into(), store: Arc::new(store), index: Index::Whole }
    }

    /// A part of these documents: ranges of their store's tokens.
    pub(super) fn chosen(&self, name: String, ranges: Vec<Range<usize>>) -> Self {
        let mut end = 0;
        let ends = ranges.iter().map(|range| {
            end += range.len();
            end
        });
        let ends = ends.collect();
        Self { name: name.into(), store: self.store.clone(), index: Index::Chosen(Arc::new(Chosen { ranges, ends })) }
    }

    /// What they are called in messages: the files they came from.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many documents there are.
    pub fn len(&self) -> usize {
        match &self.index {
            Index::Whole => self.store.documents(),
            Index::Chosen(chosen) => chosen.ranges.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many tokens they have together.
    pub fn tokens(&self) -> usize {
        self.end(self.len())
    }

    /// How many predictions can count: the tokens to be learned, but for those that start a document.
    pub fn counted(&self) -> usize {
        (0..self.len())
            .map(|number| {
                let range = self.range(number);
                self.store.count_learned((range.start + 1).min(range.end)..range.end)
            })
            .sum()
    }

    /// How many documents end before their end, or have nothing to learn, when each is cut to `length` tokens.
    pub fn cut_to(&self, length: usize) -> CutDocuments {
        let longer = (0..self.len()).filter(|&number| self.range(number).len() > length);
        longer.fold(CutDocuments::default(), |mut count, number| {
            match self.counted_in(number, &(0..length)) {
                0 => count.left_out += 1,
                _ => count.shortened += 1,
            }
            count
        })
    }

    /// The vocabulary's size that the ids were made for.
    pub fn vocab_size(&self) -> usize {
        self.store.vocab_size
    }

    /// The largest id.
    pub fn largest_id(&self) -> u32 {
        self.store.largest_id
    }

    /// A document by its number.
    ///
    /// # Panics
    /// There are not so many.
    pub fn document(&self, number: usize) -> Document {
        let range = self.range(number);
        let ids = range.clone().map(|token| self.store.id(token)).collect();
        let learned = self.store.learned.is_some();
        Document { ids, learned: learned.then(|| range.map(|token| self.store.is_learned(token)).collect()) }
    }

    /// Fails when the ids were made with a tokenizer of another vocabulary. Files of plain ids can't tell.
    ///
    /// # Errors
    /// See above.
    pub fn check_tokenizer(&self, tokenizer: &Tokenizer) -> Result<()> {
        match self.store.vocabulary {
            Some(found) if found != vocabulary_fingerprint(tokenizer) => Err(DataError::OtherTokenizer {
                what: self.name.to_string(),
                expected: tokenizer.vocab_size(),
                found: self.store.vocab_size,
            }
            .into()),
            _ => Ok(()),
        }
    }

    /// Where a document lies in the store, in tokens.
    pub(super) fn range(&self, number: usize) -> Range<usize> {
        match &self.index {
            Index::Whole => self.store.end(number)..self.store.end(number + 1),
            Index::Chosen(chosen) => chosen.ranges[number].clone(),
        }
    }

    /// Where the first `documents` of them end in their stream.
    fn end(&self, documents: usize) -> usize {
        match &self.index {
            Index::Whole => self.store.end(documents),
            Index::Chosen(chosen) => documents.checked_sub(1).map_or(0, |last| chosen.ends[last]),
        }
    }

    /// The document that holds a token of the stream, and how many of its tokens come before.
    pub(super) fn find(&self, token: usize) -> (usize, usize) {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low.midpoint(high);
            if self.end(middle + 1) <= token {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        (low, token - self.end(low))
    }

    /// How many predictions of a part of a document count: its target is in the document, and to be learned.
    pub(super) fn counted_in(&self, number: usize, part: &Range<usize>) -> usize {
        let range = self.range(number);
        self.store.count_learned(range.start + part.start + 1..range.end.min(range.start + part.end + 1))
    }

    /// Appends a part of a document, as a document of its own, to a batch.
    pub(super) fn append(&self, number: usize, part: Range<usize>, vocab_size: usize, batch: &mut Batch) -> Result<()> {
        let range = self.range(number);
        let first = batch.ids.len();
        batch.ids.extend((range.start + part.start..range.start + part.end).map(|token| self.store.id(token)));
        if let Some(&id) = batch.ids[first..].iter().find(|&&id| id as usize >= vocab_size) {
            return Err(DataError::IdOutOfRange { what: self.name.to_string(), id, vocab_size }.into());
        }
        batch.targets.extend((range.start + part.start + 1..range.start + part.end + 1).map(|next| {
            if next < range.end && self.store.is_learned(next) { i64::from(self.store.id(next)) } else { IGNORED }
        }));
        batch.documents.push(part.len());
        Ok(())
    }

    /// Tells these documents from others: their counts, and 64 places of them.
    pub(super) fn fingerprint(&self) -> u64 {
        const PLACES: usize = 64;
        let mut fingerprint = Fingerprint::new();
        let tokens = self.tokens();
        fingerprint.add(&(self.len() as u64).to_le_bytes());
        fingerprint.add(&(tokens as u64).to_le_bytes());
        if tokens > 0 {
            for place in 0..PLACES {
                let (number, offset) = self.find((tokens - 1) / (PLACES - 1) * place);
                let range = self.range(number);
                for token in range.start + offset..range.end.min(range.start + offset + PLACES) {
                    fingerprint.add(&self.store.id(token).to_le_bytes());
                    fingerprint.add(&[u8::from(self.store.is_learned(token))]);
                }
            }
        }
        fingerprint.0
    }
}

/// What becomes of documents that are longer than a row and are cut to its length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CutDocuments {
    /// Of these the beginning is learned.
    pub shortened: usize,
    /// Of these nothing is: what they have to learn begins after the row's end.
    pub left_out: usize,
}

/// Gathers documents in memory.
#[derive(Debug)]
pub struct DocumentsBuilder {
    name: String,
    vocab_size: usize,
    vocabulary: Option<u64>,
    ids: Vec<u8>,
    tally: Tally,
}

impl DocumentsBuilder {
    /// A builder of documents that are called `name` in messages, for a vocabulary of this size.
    pub fn new(name: impl Into<String>, vocab_size: usize) -> Self {
        Self { name: name.into(), vocab_size, vocabulary: None, ids: Vec::new(), tally: Tally::default() }
    }

    /// A builder for this tokenizer's ids.
    pub(super) fn for_tokenizer(name: String, tokenizer: &Tokenizer) -> Self {
        let vocabulary = Some(vocabulary_fingerprint(tokenizer));
        Self { vocabulary, ..Self::new(name, tokenizer.vocab_size()) }
    }

    /// Adds a document, found at `place`.
    ///
    /// # Errors
    /// It has no tokens, or one past the vocabulary.
    pub fn push(&mut self, document: &Document, place: &Place) -> Result<()> {
        self.tally.push(document, place, self.vocab_size)?;
        let width = Width::of_vocabulary(self.vocab_size);
        document.ids.iter().for_each(|&id| width.write(id, &mut self.ids));
        Ok(())
    }

    /// The documents.
    ///
    /// # Errors
    /// There are none.
    pub fn finish(self) -> Result<Documents> {
        let Self { name, vocab_size, vocabulary, ids, tally } = self;
        if tally.tokens == 0 {
            return Err(DataError::NoDocuments { what: name }.into());
        }
        let store = Store {
            ids: HostBuffer::owned(ids),
            width: Width::of_vocabulary(vocab_size),
            ends: HostBuffer::owned(tally.ends),
            learned: tally.learned.map(HostBuffer::owned),
            vocab_size,
            largest_id: tally.largest_id,
            vocabulary,
        };
        Ok(Documents::whole(name, store))
    }
}

/// Tells one tokenizer's vocabulary from another's: every token's text in the order of their ids.
pub(super) fn vocabulary_fingerprint(tokenizer: &Tokenizer) -> u64 {
    let mut fingerprint = Fingerprint::new();
    for id in 0..tokenizer.vocab_size() as u32 {
        let text = tokenizer.token_text(id).unwrap_or_default();
        fingerprint.add(&(text.len() as u64).to_le_bytes());
        fingerprint.add(text.as_bytes());
    }
    fingerprint.0
}
