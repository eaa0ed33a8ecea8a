//! What can go wrong in this crate.

use ironloom_core::DType;

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The type is stored in some other way than this operation understands.
    #[error("cannot {operation} {dtype}; {operation} works on {supported}")]
    Unsupported {
        /// What was asked for, as a verb.
        operation: &'static str,
        /// The type given.
        dtype: DType,
        /// The types that would do, separated by blanks.
        supported: &'static str,
    },
    /// A slice is longer or shorter than the sizes around it say.
    #[error("{what}: expected length {expected}, found {found}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// The length the other arguments ask for.
        expected: usize,
        /// The length it has.
        found: usize,
    },
    /// A length is not whole blocks, or not whole rows.
    #[error("{what}: length {found} is not a multiple of {unit}")]
    NotWhole {
        /// Which slice.
        what: &'static str,
        /// The length of one block or row.
        unit: usize,
        /// The length it has.
        found: usize,
    },
    /// A weight is infinite or not a number, and no packed type can hold it.
    #[error("weight {index} is {value}: packing needs finite numbers")]
    NotFinite {
        /// Its place in the slice given.
        index: usize,
        /// What it is.
        value: f32,
    },
    /// A weight is finite but larger than the type's scale can express.
    #[error("weight {index} is {value:e}, and {dtype} holds at most about {limit:e} here; store it as F32")]
    OutOfRange {
        /// Its place in the slice given.
        index: usize,
        /// What it is.
        value: f32,
        /// The type to pack into.
        dtype: DType,
        /// The largest magnitude that fits.
        limit: f32,
    },
    /// The sizes of a matrix product do not agree.
    #[error(
        "product {index}: x of {n} rows has length {x} and out has length {out}; the matrix is [{rows}, {cols}], so x must be \
         [{n}, {cols}] (the same for all products of a call) and out [{n}, {rows}]"
    )]
    Product {
        /// Which product of the call.
        index: usize,
        /// Rows of x.
        n: usize,
        /// Length of x.
        x: usize,
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Length of the output.
        out: usize,
    },
    /// A matrix has no such row.
    #[error("row {row} of a matrix of {rows} rows")]
    Row {
        /// The row asked for.
        row: usize,
        /// Rows there are.
        rows: usize,
    },
    /// A size or a block count that the lower room refuses.
    #[error(transparent)]
    Core(#[from] ironloom_core::Error),
}
