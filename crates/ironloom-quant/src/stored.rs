//! A matrix as a file holds it, from which [`PackedMatrix`](crate::PackedMatrix) and [`TiledMatrix`](crate::TiledMatrix) are
//! made.

use ironloom_core::DType;

use crate::{Error, Result};

/// What a file holds of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct StoredMatrix<'a> {
    /// The element type.
    pub dtype: DType,
    /// The rows, one after the other.
    pub bytes: &'a [u8],
    /// How many rows the matrix has.
    pub rows: usize,
    /// How many columns it has.
    pub cols: usize,
    /// Which stored row each row is (rotary embeddings are stored in another order); in order where it says nothing.
    pub row_order: Option<&'a [u32]>,
}

impl<'a> StoredMatrix<'a> {
    /// Of f32 weights, row-major.
    pub(crate) fn from_f32(values: &'a [f32], rows: usize, cols: usize) -> Self {
        Self { dtype: DType::F32, bytes: bytemuck::cast_slice(values), rows, cols, row_order: None }
    }

    /// Fails unless the bytes are whole rows, as many as there should be, and each row is one of them.
    pub(crate) fn checked(&self) -> Result<()> {
        let Self { dtype, bytes, rows, cols, row_order } = *self;
        let expected = dtype.bytes_for(cols)?.checked_mul(rows).ok_or(ironloom_core::Error::SizeOverflow)?;
        if bytes.len() != expected {
            return Err(Error::Length { what: "a matrix's stored bytes", expected, found: bytes.len() });
        }
        let Some(order) = row_order else { return Ok(()) };
        if order.len() != rows {
            return Err(Error::Length { what: "a matrix's row order", expected: rows, found: order.len() });
        }
        match order.iter().find(|&&row| row as usize >= rows) {
            Some(&row) => Err(Error::Row { row: row as usize, rows }),
            None => Ok(()),
        }
    }

    /// The stored bytes of row `row` of a checked matrix.
    pub(crate) fn row(&self, row: usize) -> &'a [u8] {
        let row = self.row_order.map_or(row, |order| order[row] as usize);
        let row_bytes = self.bytes.len() / self.rows;
        &self.bytes[row * row_bytes..][..row_bytes]
    }
}
