//! How an activation is stored on the device.

use crate::{Error, Result};

/// How rows of numbers are stored. The numbers of the variants are those of `vocabulary/device.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Single precision, `[rows, width]`.
    F32 = 0,
    /// bfloat16, `[rows, width]`: the operand of products of many rows.
    Bf16 = 1,
    /// Two bfloat16 whose sum is the number to 16 bits of mantissa, `[rows, 2, width]`: the high parts of a row, then its low
    /// parts. The operand of products of few rows, which so lose next to nothing: the tensor cores have columns to spare.
    Split = 2,
}

impl Form {
    /// Bytes of `rows` rows of `width` numbers.
    ///
    /// # Errors
    /// The size overflows.
    pub fn bytes(self, rows: usize, width: usize) -> Result<usize> {
        let element = if self == Self::Bf16 { 2 } else { 4 };
        rows.checked_mul(width).and_then(|count| count.checked_mul(element)).ok_or(Error::SizeOverflow)
    }
}
