//! One pass through documents, for measuring a loss on them: every document once, in the order they are stored.

use super::{
    Batch, Documents, LoaderOptions, Order,
    loader::check_documents,
    rows::{Rows, nothing_to_learn},
};
use crate::Result;

/// The batches of one pass; the last may have fewer rows. Every prediction counts once.
#[derive(Clone, Debug)]
pub struct OnePass {
    rows: Rows,
    rows_a_batch: usize,
    ended: bool,
    found: bool,
}

impl OnePass {
    /// A pass through these documents. The options' order and seed are of no account.
    ///
    /// # Errors
    /// There are no documents, an id is past the vocabulary, or an option means nothing.
    pub fn new(documents: &Documents, options: &LoaderOptions) -> Result<Self> {
        let stored = LoaderOptions { order: Order::Stored, ..options.clone() };
        let row_options = stored.check()?;
        check_documents(documents, options.vocab_size)?;
        let rows = Rows::new(documents.clone(), 0, row_options);
        Ok(Self { rows, rows_a_batch: options.rows, ended: false, found: false })
    }

    fn next_batch(&mut self) -> Result<Option<Batch>> {
        let mut batch = Batch::default();
        for _ in 0..self.rows_a_batch {
            let Some(row) = self.rows.next()? else {
                self.ended = true;
                break;
            };
            self.found = true;
            batch.append(row);
        }
        if !self.found {
            return Err(nothing_to_learn(&self.rows).into());
        }
        Ok((!batch.ids.is_empty()).then_some(batch))
    }
}

impl Iterator for OnePass {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let batch = self.next_batch();
        self.ended |= batch.is_err();
        batch.transpose()
    }
}
