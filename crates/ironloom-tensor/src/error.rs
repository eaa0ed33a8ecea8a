//! What can go wrong in an operation.

use ironloom_core::Shape;

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operand's shape does not fit.
    #[error("{operation}: {operand} has shape {found}, and {expected} is needed")]
    Shape {
        /// The operation.
        operation: &'static str,
        /// Which operand.
        operand: &'static str,
        /// What the other operands ask for.
        expected: Box<Shape>,
        /// What came.
        found: Box<Shape>,
    },
    /// A number of things does not fit.
    #[error("{operation}: {what} is {found}, and {expected} is needed")]
    Count {
        /// The operation.
        operation: &'static str,
        /// What was counted.
        what: &'static str,
        /// What is needed.
        expected: usize,
        /// What came.
        found: usize,
    },
    /// An operand holds another element type.
    #[error("{operation} needs {expected} elements, and the tensor holds {found}")]
    ElementType {
        /// The operation.
        operation: &'static str,
        /// The type needed.
        expected: &'static str,
        /// The type held.
        found: &'static str,
    },
    /// An id lies outside a table.
    #[error("{operation}: id {id} at row {row} is outside the table of {limit} entries")]
    IdOutOfRange {
        /// The operation.
        operation: &'static str,
        /// The id.
        id: u32,
        /// Which row asked for it.
        row: usize,
        /// How many entries there are.
        limit: usize,
    },
    /// A target is no id of the vocabulary.
    #[error(
        "{operation}: target {target} at row {row} is outside the vocabulary of {vocabulary}; {ignored} leaves a row out"
    )]
    TargetOutOfRange {
        /// The operation.
        operation: &'static str,
        /// The target.
        target: i64,
        /// Which row has it.
        row: usize,
        /// How many ids there are.
        vocabulary: usize,
        /// The target of rows that do not count.
        ignored: i64,
    },
    /// A number of an operation's options is out of its range.
    #[error("{operation}: {what} is {found}, and {expected} is needed")]
    Setting {
        /// The operation.
        operation: &'static str,
        /// What the number is.
        what: &'static str,
        /// What is needed.
        expected: &'static str,
        /// The number.
        found: f64,
    },
    /// The operation has no gradient.
    #[error("{operation} has no gradient: run it without a tape, or train a model that does not use it")]
    NoGradient {
        /// The operation.
        operation: &'static str,
    },
    /// A tensor or a weight lies elsewhere.
    #[error("{operation} needs its operands on {expected}, and one is {found}")]
    Device {
        /// The operation.
        operation: &'static str,
        /// Where they have to be.
        expected: &'static str,
        /// What and where it is.
        found: &'static str,
    },
    /// The operation does not run on the device.
    #[error("{operation} has no kernel for {device}: run it on the processor")]
    NoKernel {
        /// The operation.
        operation: &'static str,
        /// The device.
        device: &'static str,
    },
    /// What was asked for exists on graphics cards only.
    #[error("{operation}: only on a graphics card, and the device is the processor: open a card with Device::cuda")]
    NeedsCard {
        /// What was asked for.
        operation: &'static str,
    },
    /// A width is no multiple of what the device's products read at a time.
    #[error(
        "{operation} takes matrices whose width is a multiple of {multiple}, and one is {found} wide: run it on the processor"
    )]
    Width {
        /// The operation.
        operation: &'static str,
        /// What the width has to be a multiple of.
        multiple: usize,
        /// The width.
        found: usize,
    },
    /// A part that a tape runs again failed outside of an operation.
    #[error("{operation}: {reason}")]
    Part {
        /// The part.
        operation: &'static str,
        /// Why it failed.
        reason: String,
    },
    /// A kernel or its device refused.
    #[error(transparent)]
    Kernels(#[from] ironloom_kernels::Error),
    /// A packed matrix refused.
    #[error(transparent)]
    Quant(#[from] ironloom_quant::Error),
    /// A size or a shape refused.
    #[error(transparent)]
    Core(#[from] ironloom_core::Error),
}

impl Error {
    /// Whether a device had no room.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Kernels(error) if error.is_out_of_memory())
    }
}

/// Fails unless `found` is `expected`.
pub(crate) fn expect_count(operation: &'static str, what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Count { operation, what, expected, found }) }
}

/// Fails unless `found` is `expected`.
pub(crate) fn expect_shape(
    operation: &'static str,
    operand: &'static str,
    expected: impl Into<Shape>,
    found: &Shape,
) -> Result<()> {
    let expected = expected.into();
    if expected == *found {
        return Ok(());
    }
    Err(Error::Shape { operation, operand, expected: Box::new(expected), found: Box::new(*found) })
}
