//! Draws batches from a weighted mix of sources.
//!
//! In: [`Documents`] with weights. Out: [`Batch`]es of rows, forever: a source that was gone through begins anew in
//! another order. Rows are shared out so that after any number of them each source has given its part to within a row: the next row
//! comes from the source that is furthest behind. Nothing depends on time, threads or how many rows a batch has.

use serde::{Deserialize, Serialize};

use super::{
    Batch, Cursor, DataError, Documents, Order, Overlong, Packing,
    cursor::SourceState,
    rows::{RowOptions, Rows, nothing_to_learn},
};
use crate::Result;

/// A source and its part of the mix.
#[derive(Clone, Debug)]
pub struct Share {
    /// Its documents.
    pub documents: Documents,
    /// Its part of the rows, in relation to the other weights.
    pub weight: f64,
}

/// How batches are made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderOptions {
    /// The most tokens a row has: 2 or more.
    pub sequence_length: usize,
    /// Rows a batch: 1 or more.
    pub rows: usize,
    /// How documents become rows.
    #[serde(default)]
    pub packing: Packing,
    /// What becomes of documents longer than a row where they stay whole.
    #[serde(default)]
    pub overlong: Overlong,
    /// The order of an epoch.
    #[serde(default)]
    pub order: Order,
    /// Decides the order.
    #[serde(default)]
    pub seed: u64,
    /// How many ids the model knows.
    pub vocab_size: usize,
}

impl LoaderOptions {
    pub(super) fn check(&self) -> Result<RowOptions> {
        let refuse = |option, value: usize, limits| DataError::Option { option, value: value.to_string(), limits };
        let &Self { sequence_length, packing, overlong, order, seed, vocab_size, rows } = self;
        if sequence_length < 2 {
            let limits = "2 or more: a token is learned from those before it";
            return Err(refuse("sequence_length", sequence_length, limits).into());
        }
        if rows == 0 {
            return Err(refuse("the number of rows a batch", rows, "1 or more").into());
        }
        Ok(RowOptions { sequence_length, packing, overlong, order, seed, vocab_size })
    }
}

/// Fails when documents can't be learned by a model of this vocabulary.
pub(super) fn check_documents(documents: &Documents, vocab_size: usize) -> Result<()> {
    let what = documents.name().to_owned();
    if documents.is_empty() {
        return Err(DataError::NoDocuments { what }.into());
    }
    if documents.largest_id() as usize >= vocab_size {
        return Err(DataError::IdOutOfRange { what, id: documents.largest_id(), vocab_size }.into());
    }
    Ok(())
}

/// Draws batches from a weighted mix of sources.
///
/// ```
/// use ironloom_train::data::{Document, DocumentsBuilder, Loader, LoaderOptions, Order, Overlong, Packing, Place, Share};
///
/// let mut builder = DocumentsBuilder::new("numbers", 100);
/// let place = Place { path: "numbers".into(), line: None };
/// builder.push(&Document { ids: (0..100).collect(), learned: None }, &place)?;
/// let shares = vec![Share { documents: builder.finish()?, weight: 1.0 }];
/// let options = LoaderOptions {
///     sequence_length: 8,
///     rows: 2,
///     packing: Packing::Continuous,
///     overlong: Overlong::Split,
///     order: Order::Shuffled,
///     seed: 1,
///     vocab_size: 100,
/// };
/// let mut loader = Loader::new(shares, &options)?;
/// let batch = loader.next_batch()?;
/// assert_eq!(batch.ids.len(), 16);
/// assert_eq!(batch.targets[0], i64::from(batch.ids[1]));
///
/// let cursor = loader.cursor();
/// let next = loader.next_batch()?;
/// loader.restore(&cursor)?;
/// assert_eq!(loader.next_batch()?, next);
/// # Ok::<(), ironloom_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Loader {
    sources: Vec<SourceRows>,
    options: LoaderOptions,
}

#[derive(Clone, Debug)]
struct SourceRows {
    rows: Rows,
    weight: f64,
    fingerprint: u64,
    drawn: u64,
}

impl Loader {
    /// A loader at the beginning of the first epoch.
    ///
    /// # Errors
    /// There are no sources, a weight is not a finite number above 0, an id is past the vocabulary, or an option means nothing.
    pub fn new(shares: Vec<Share>, options: &LoaderOptions) -> Result<Self> {
        let row_options = options.check()?;
        if shares.is_empty() {
            return Err(DataError::NoDocuments { what: "the mix of sources".to_owned() }.into());
        }
        let mut sources = Vec::with_capacity(shares.len());
        for (number, Share { documents, weight }) in shares.into_iter().enumerate() {
            let what = || documents.name().to_owned();
            if !(weight.is_finite() && weight > 0.0) {
                return Err(DataError::Weight { what: what(), weight }.into());
            }
            let number = u16::try_from(number).map_err(|_| DataError::Option {
                option: "the number of sources",
                value: (number + 1).to_string(),
                limits: "65,536 or fewer",
            })?;
            check_documents(&documents, options.vocab_size)?;
            let fingerprint = documents.fingerprint();
            sources.push(SourceRows { rows: Rows::new(documents, number, row_options), weight, fingerprint, drawn: 0 });
        }
        Ok(Self { sources, options: options.clone() })
    }

    /// The next batch.
    ///
    /// # Errors
    /// A source has nothing to learn, or a token file holds an id past the vocabulary that its head does not tell of.
    pub fn next_batch(&mut self) -> Result<Batch> {
        let before = self.cursor();
        let batch = (0..self.options.rows).try_fold(Batch::default(), |mut batch, _| {
            batch.append(self.next_row()?);
            Ok(batch)
        });
        if batch.is_err() {
            self.seek(&before);
        }
        batch
    }

    /// The batches of a step that is made of several.
    ///
    /// # Errors
    /// As of [`next_batch`](Self::next_batch).
    pub fn next_step(&mut self, batches: usize) -> Result<Vec<Batch>> {
        (0..batches).map(|_| self.next_batch()).collect()
    }

    fn next_row(&mut self) -> Result<Batch> {
        let total: f64 = self.sources.iter().map(|source| source.weight).sum();
        let drawn: u64 = self.sources.iter().map(|source| source.drawn).sum();
        let behind = |source: &SourceRows| source.weight / total * (drawn + 1) as f64 - source.drawn as f64;
        let mut chosen = 0;
        for number in 1..self.sources.len() {
            if behind(&self.sources[number]) > behind(&self.sources[chosen]) {
                chosen = number;
            }
        }
        let source = &mut self.sources[chosen];
        // What is left of an epoch may have no row; then whole epochs are tried, which cut the stream at different places.
        for _ in 0..3 {
            if let Some(row) = source.rows.next()? {
                source.drawn += 1;
                return Ok(row);
            }
        }
        Err(nothing_to_learn(&source.rows).into())
    }

    /// Where the loader stands: before the next batch.
    pub fn cursor(&self) -> Cursor {
        let &LoaderOptions { seed, sequence_length, packing, overlong, order, .. } = &self.options;
        let state = |source: &SourceRows| SourceState {
            weight: source.weight,
            fingerprint: source.fingerprint,
            drawn: source.drawn,
            next: source.rows.place(),
        };
        let sources = self.sources.iter().map(state).collect();
        Cursor { seed, sequence_length, packing, overlong, order, sources }
    }

    /// Tokens of a row.
    pub fn sequence_length(&self) -> usize {
        self.options.sequence_length
    }

    /// Goes on where a loader of the same data and options stood: with exactly the batches that it would have given. The
    /// number of rows a batch may differ; the rows are the same ones.
    ///
    /// # Errors
    /// The cursor was made with other data or options.
    pub fn restore(&mut self, cursor: &Cursor) -> Result<()> {
        let now = self.cursor();
        let differs = |what: &str, saved: String, found: String| -> Result<()> {
            match saved == found {
                true => Ok(()),
                false => Err(DataError::OtherCursor { what: what.to_owned(), saved, found }.into()),
            }
        };
        differs("seed", cursor.seed.to_string(), now.seed.to_string())?;
        differs("sequence_length", cursor.sequence_length.to_string(), now.sequence_length.to_string())?;
        differs("packing", format!("{:?}", cursor.packing), format!("{:?}", now.packing))?;
        differs("overlong", format!("{:?}", cursor.overlong), format!("{:?}", now.overlong))?;
        differs("order", format!("{:?}", cursor.order), format!("{:?}", now.order))?;
        differs("the number of sources", cursor.sources.len().to_string(), now.sources.len().to_string())?;
        for ((saved, found), source) in cursor.sources.iter().zip(&now.sources).zip(&self.sources) {
            let name = source.rows.documents().name();
            differs(&format!("the weight of {name}"), saved.weight.to_string(), found.weight.to_string())?;
            let contents = |fingerprint: u64| format!("{fingerprint:016x}");
            let what = format!("the contents of {name}");
            differs(&what, contents(saved.fingerprint), contents(found.fingerprint))?;
        }
        self.seek(cursor);
        Ok(())
    }

    fn seek(&mut self, cursor: &Cursor) {
        for (source, state) in self.sources.iter_mut().zip(&cursor.sources) {
            source.rows.seek(state.next);
            source.drawn = state.drawn;
        }
    }

    /// How many rows each source has in the epoch it is in. Where documents stay whole, epochs differ by a few rows.
    pub fn rows_in_epoch(&self) -> Vec<usize> {
        self.sources.iter().map(|source| source.rows.rows_in_epoch()).collect()
    }
}
