//! Rows: the documents of one source, an epoch after another, as rows of tokens.
//!
//! [`Packing::Continuous`] cuts the stream of all documents every `sequence_length` tokens, from a place that each epoch draws
//! anew; the stream's end joins its beginning, so that every row is full. [`Packing::Documents`] takes 1,024 documents at a time in
//! the epoch's order and packs them whole into rows. Either way a row is found by its epoch, group and number alone.

use std::ops::Range;

use ironloom_core::Philox;
use serde::{Deserialize, Serialize};

use super::{
    Batch, DataError, Documents,
    cursor::SourceCursor,
    packing::{Part, pack},
    permutation::Permutation,
};
use crate::Result;

/// How documents become rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// Rows are cut from the stream of all documents. A document that crosses a row's end goes on in another row as a document of its
    /// own. For pretraining: every row is full.
    #[default]
    Continuous,
    /// Rows hold whole documents, as many as fit, and are not always full. For fine-tuning.
    Documents,
}

/// What becomes of a document that is longer than a row, when documents stay whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overlong {
    /// It becomes several documents.
    #[default]
    Split,
    /// What does not fit is left out.
    Cut,
}

/// In which order an epoch goes through the documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Another in each epoch, by the seed.
    #[default]
    Shuffled,
    /// As they are stored, from the first to the last.
    Stored,
}

/// What rows are made by.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowOptions {
    pub(super) sequence_length: usize,
    pub(super) packing: Packing,
    pub(super) overlong: Overlong,
    pub(super) order: Order,
    pub(super) seed: u64,
    pub(super) vocab_size: usize,
}

/// The rows of one source from a place on.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    documents: Documents,
    options: RowOptions,
    /// The source's number in its mix, so that two sources with the same documents go different ways.
    number: u16,
    place: SourceCursor,
    /// The rows of the group at `place`, when it was made.
    group: Option<Vec<Vec<Part>>>,
}

/// Documents that are packed together.
const GROUP: usize = 1024;

/// What a stream of random numbers is for: streams of other purposes in a run have smaller numbers.
#[derive(Clone, Copy)]
enum Purpose {
    Start = 0xda01,
    RowOrder = 0xda02,
    DocumentOrder = 0xda03,
}

impl Rows {
    pub(super) fn new(documents: Documents, number: u16, options: RowOptions) -> Self {
        Self { documents, options, number, place: SourceCursor::default(), group: None }
    }

    pub(super) fn place(&self) -> SourceCursor {
        self.place
    }

    pub(super) fn seek(&mut self, place: SourceCursor) {
        self.place = place;
        self.group = None;
    }

    pub(super) fn documents(&self) -> &Documents {
        &self.documents
    }

    /// The next row in which something counts; `None` at an epoch's end, after which the next epoch begins.
    pub(super) fn next(&mut self) -> Result<Option<Batch>> {
        while let Some(row) = self.next_of_any()? {
            if row.counted() > 0 {
                return Ok(Some(row));
            }
        }
        self.place = SourceCursor { epoch: self.place.epoch.wrapping_add(1), group: 0, row: 0 };
        self.group = None;
        Ok(None)
    }

    fn next_of_any(&mut self) -> Result<Option<Batch>> {
        match self.options.packing {
            Packing::Continuous => self.next_continuous(),
            Packing::Documents => self.next_packed(),
        }
    }

    /// How many rows the epoch at hand has, with those in which nothing counts.
    pub(super) fn rows_in_epoch(&self) -> usize {
        match self.options.packing {
            Packing::Continuous => self.continuous_rows(),
            Packing::Documents => (0..self.groups()).map(|group| self.pack_group(group).len()).sum(),
        }
    }

    fn continuous_rows(&self) -> usize {
        let (tokens, length) = (self.documents.tokens(), self.options.sequence_length);
        match self.options.order {
            Order::Shuffled => (tokens / length).max(1),
            Order::Stored => tokens.div_ceil(length),
        }
    }

    fn next_continuous(&mut self) -> Result<Option<Batch>> {
        let (tokens, length) = (self.documents.tokens(), self.options.sequence_length);
        let rows = self.continuous_rows() as u64;
        if self.place.row >= rows {
            return Ok(None);
        }
        let (row, start) = match self.options.order {
            Order::Stored => (self.place.row, 0),
            Order::Shuffled => {
                let order = self.permutation(Purpose::RowOrder, 0, rows);
                let start = if tokens > length { self.draw_start(length) } else { 0 };
                (order.at(self.place.row), start)
            }
        };
        self.place.row += 1;
        let first = start + row as usize * length;
        let mut left = match self.options.order {
            Order::Shuffled => length.min(tokens),
            Order::Stored => length.min(tokens - first),
        };
        let mut batch = Batch::default();
        let (mut number, mut offset) = self.documents.find(first % tokens);
        while left > 0 {
            let end = self.documents.range(number).len().min(offset + left);
            left -= end - offset;
            self.append(&Part { document: number, tokens: offset..end }, &mut batch)?;
            (number, offset) = ((number + 1) % self.documents.len(), 0);
        }
        Ok(Some(batch))
    }

    /// Where the first row of an epoch begins.
    fn draw_start(&self, length: usize) -> usize {
        let mut draws = Philox::new(self.options.seed, self.stream(Purpose::Start));
        let drawn = u64::from(draws.next_u32()) << 32 | u64::from(draws.next_u32());
        (drawn % length as u64) as usize
    }

    fn groups(&self) -> usize {
        self.documents.len().div_ceil(GROUP)
    }

    fn next_packed(&mut self) -> Result<Option<Batch>> {
        while (self.place.group as usize) < self.groups() {
            let number = self.place.group as usize;
            if self.group.is_none() {
                self.group = Some(self.pack_group(number));
            }
            let group = self.group.as_deref().unwrap_or_default();
            let rows = group.len() as u64;
            if self.place.row < rows {
                let row = match self.options.order {
                    Order::Stored => self.place.row,
                    // Packing put the rows of the longest documents first.
                    Order::Shuffled => self.permutation(Purpose::RowOrder, number, rows).at(self.place.row),
                };
                let mut batch = Batch::default();
                group[row as usize].iter().try_for_each(|part| self.append(part, &mut batch))?;
                self.place.row += 1;
                return Ok(Some(batch));
            }
            self.place.group += 1;
            self.place.row = 0;
            self.group = None;
        }
        Ok(None)
    }

    fn pack_group(&self, group: usize) -> Vec<Vec<Part>> {
        let documents = self.documents.len();
        let order = self.permutation(Purpose::DocumentOrder, 0, documents as u64);
        let mut parts = Vec::new();
        for position in group * GROUP..documents.min((group + 1) * GROUP) {
            let document = match self.options.order {
                Order::Stored => position,
                Order::Shuffled => order.at(position as u64) as usize,
            };
            for tokens in self.parts(self.documents.range(document).len()) {
                // A part in which nothing counts would only take time.
                if self.documents.counted_in(document, &tokens) > 0 {
                    parts.push(Part { document, tokens });
                }
            }
        }
        pack(parts, self.options.sequence_length)
    }

    fn parts(&self, tokens: usize) -> impl Iterator<Item = Range<usize>> {
        let length = self.options.sequence_length;
        let end = match self.options.overlong {
            Overlong::Split => tokens,
            Overlong::Cut => tokens.min(length),
        };
        (0..end).step_by(length).map(move |start| start..end.min(start + length))
    }

    fn append(&self, part: &Part, batch: &mut Batch) -> Result<()> {
        self.documents.append(part.document, part.tokens.clone(), self.options.vocab_size, batch)
    }

    fn permutation(&self, purpose: Purpose, group: usize, count: u64) -> Permutation {
        // Groups of one epoch take seeds of their own: the stream's number has no room for them.
        let seed = self.options.seed ^ (group as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Permutation::new(seed, self.stream(purpose), count)
    }

    fn stream(&self, purpose: Purpose) -> u64 {
        (purpose as u64) << 48 | u64::from(self.number) << 32 | u64::from(self.place.epoch)
    }
}

/// Fails when no epoch would ever have a row.
pub(super) fn nothing_to_learn(rows: &Rows) -> DataError {
    DataError::NothingToLearn { what: rows.documents.name().to_owned(), sequence_length: rows.options.sequence_length }
}
