//! Where a run stands in its data: a few numbers that a checkpoint holds.

use serde::{Deserialize, Serialize};

use super::{Order, Overlong, Packing};

/// Where a [`Loader`](super::Loader) stands, and what it must find again to go on with the same batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cursor {
    /// The seed of the order.
    pub seed: u64,
    /// Tokens a row.
    pub sequence_length: usize,
    /// How documents become rows.
    pub packing: Packing,
    /// What becomes of long ones.
    pub overlong: Overlong,
    /// The order.
    pub order: Order,
    /// Each source of the mix.
    pub sources: Vec<SourceState>,
}

/// A source of the mix as a [`Cursor`] knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceState {
    /// Its part of the mix.
    pub weight: f64,
    /// Tells its documents from others.
    pub fingerprint: u64,
    /// Rows that were drawn from it in all.
    pub drawn: u64,
    /// The next row.
    pub next: SourceCursor,
}

/// The place of a row in a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceCursor {
    /// How often all documents were gone through before.
    pub epoch: u32,
    /// Which documents of the epoch, where they are packed in groups.
    pub group: u64,
    /// The row's number in the epoch, or in the group.
    pub row: u64,
}
