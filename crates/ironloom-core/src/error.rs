//! What can go wrong in this crate.

use std::path::PathBuf;

use crate::DType;

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A packed type was asked to hold a part of a block.
    #[error("{elements} elements are not whole blocks of {dtype} ({} elements each)", dtype.block_elements())]
    PartialBlock {
        /// The packed type.
        dtype: DType,
        /// How many elements were asked for.
        elements: usize,
    },
    /// A size does not fit in the address space.
    #[error("a size overflows the address space")]
    SizeOverflow,
    /// A shape has too many dimensions.
    #[error("{rank} dimensions, and at most {limit} are supported")]
    Rank {
        /// How many there were.
        rank: usize,
        /// The most there may be.
        limit: usize,
    },
    /// A file could not be opened or mapped.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A plan asks for more memory than there is.
    #[error(
        "{what} needs {} and {} is available: {advice}",
        crate::format_bytes(*needed),
        crate::format_bytes(*available)
    )]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// Bytes asked for.
        needed: u64,
        /// Bytes at hand.
        available: u64,
        /// What to do about it.
        advice: &'static str,
    },
}
