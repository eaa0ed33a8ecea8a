//! How one tensor of the output is made from rows of stored tensors, and the making.
//!
//! Both directions between GGUF and Hugging Face folders only ever move whole rows: one tensor's rows in another order
//! (rotary halves and neighbours), some rows of a fused one, the rows of several stacked, a block of a stacked one. So a recipe
//! is a list of sources, laid one after the other, and the order in which their rows are taken. A row keeps its bytes where the
//! type stays the same; else it's unpacked to f32, shifted (Gemma's norms, stored less one by one side and not by the other)
//! and packed.
//!
//! In: the mapped checkpoint. Out: the bytes of one tensor, made in parallel over pieces of rows; the pages of the sources are
//! given back after it, so that nothing but this tensor is in memory.

use std::sync::Mutex;

use ironloom_core::{DType, Shape, Threads};
use ironloom_weights::{Checkpoint, MakeError, NewTensor, TensorData, TensorInfo};

use crate::{Error, Result};

/// One tensor to write.
#[derive(Debug)]
pub(super) struct Recipe {
    /// The tensor as it will be.
    pub(super) info: TensorInfo,
    /// The stored tensors it's made from, with the shapes they must have.
    pub(super) sources: Vec<(String, Shape)>,
    /// Which row of the sources, laid one after the other, each row is; `None` for all in order.
    pub(super) order: Option<Vec<u32>>,
    /// Added to every element.
    pub(super) shift: f32,
}

/// Elements that one task makes, at least: a task should be longer than its dispatch.
const PIECE: usize = 1 << 16;

impl Recipe {
    /// A stored tensor, as it is.
    pub(super) fn copy(info: TensorInfo) -> Self {
        Self { sources: vec![(info.name.clone(), info.shape)], info, order: None, shift: 0.0 }
    }

    /// Notes the sources that the checkpoint lacks.
    ///
    /// # Errors
    /// A source has another shape than the configuration asks for.
    pub(super) fn check(&self, checkpoint: &Checkpoint, missing: &mut Vec<String>) -> Result<()> {
        for (name, expected) in &self.sources {
            match checkpoint.info(name) {
                None => missing.push(name.clone()),
                Some(info) if !same_but_for_ones(info.shape, *expected) => {
                    let (tensor, expected, found) = (name.clone(), Box::new(*expected), Box::new(info.shape));
                    return Err(Error::TensorShape { tensor, expected, found });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// The tensor for a writer, made when its turn comes.
    pub(super) fn into_tensor<'a>(self, checkpoint: &'a Checkpoint, threads: &'a Threads) -> NewTensor<'a> {
        NewTensor::made(self.info.clone(), move || self.bytes(checkpoint, threads).map_err(MakeError::from))
    }

    /// The tensor's bytes.
    fn bytes(&self, checkpoint: &Checkpoint, threads: &Threads) -> Result<Vec<u8>> {
        let stored = self
            .sources
            .iter()
            .map(|(name, _)| checkpoint.tensor(name))
            .collect::<ironloom_weights::Result<Vec<TensorData>>>()?;
        // A vector whose elements change places is a column of one-element rows.
        let dims = self.info.shape.dims();
        let columns = match (dims, &self.order) {
            ([_], Some(_)) => 1,
            _ => dims.last().copied().unwrap_or(1),
        };
        let dtype = self.info.dtype;
        let row_bytes = dtype.bytes_for(columns)?;
        let rows = Rows::of(&stored, columns)?;
        let count = self.info.shape.elements()? / columns.max(1);
        if count == 0 || row_bytes == 0 {
            return Ok(Vec::new());
        }
        let mut bytes = vec![0u8; count * row_bytes];
        let piece_rows = (PIECE / columns.max(1)).max(1);
        let pieces: Vec<Mutex<(&mut [u8], Result<()>)>> =
            bytes.chunks_mut(piece_rows * row_bytes).map(|piece| Mutex::new((piece, Ok(())))).collect();
        threads.run(pieces.len(), |number| {
            let mut piece = pieces[number].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let (out, result) = &mut *piece;
            let mut values = vec![0.0f32; columns];
            *result = out.chunks_exact_mut(row_bytes).enumerate().try_for_each(|(row, out)| {
                let row = number * piece_rows + row;
                let from = self.order.as_ref().map_or(Some(row), |order| order.get(row).map(|row| *row as usize));
                self.make_row(rows.get(from.unwrap_or(usize::MAX))?, &mut values, out)
            });
        });
        let failed = pieces.into_iter().find_map(|piece| piece.into_inner().ok()?.1.err());
        stored.iter().for_each(|data| data.bytes.release());
        match failed {
            Some(error) => Err(error),
            None => Ok(bytes),
        }
    }

    fn make_row(&self, (data, bytes): (&TensorData, &[u8]), values: &mut [f32], out: &mut [u8]) -> Result<()> {
        if data.dtype == self.info.dtype && self.shift == 0.0 {
            out.copy_from_slice(bytes);
            return Ok(());
        }
        let refuse = |source| Error::Pack { tensor: data.name.clone(), source };
        ironloom_quant::unpack(data.dtype, bytes, values).map_err(refuse)?;
        if self.shift != 0.0 {
            values.iter_mut().for_each(|value| *value += self.shift);
        }
        match self.info.dtype {
            // Without the packer's vector of its own for each row.
            DType::F32 => out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, v)| *out = v.to_le_bytes()),
            dtype => out.copy_from_slice(&ironloom_quant::pack(dtype, values).map_err(refuse)?),
        }
        Ok(())
    }
}

/// The rows of several tensors, laid one after the other.
struct Rows<'a> {
    stored: &'a [TensorData],
    columns: usize,
    /// For each tensor, the number of rows up to its end.
    ends: Vec<usize>,
}

impl<'a> Rows<'a> {
    fn of(stored: &'a [TensorData], columns: usize) -> Result<Self> {
        let mut ends = Vec::with_capacity(stored.len());
        let mut end = 0;
        for data in stored {
            end += data.shape.elements()? / columns.max(1);
            ends.push(end);
        }
        Ok(Self { stored, columns, ends })
    }

    fn get(&self, row: usize) -> Result<(&'a TensorData, &'a [u8])> {
        let number = self.ends.partition_point(|end| *end <= row);
        let outside = || Error::Count { what: "a row", expected: self.ends.last().copied().unwrap_or(0), found: row };
        let data = self.stored.get(number).ok_or_else(outside)?;
        let start = if number == 0 { 0 } else { self.ends[number - 1] };
        let row_bytes = data.dtype.bytes_for(self.columns)?;
        let bytes = data.bytes.get((row - start) * row_bytes..(row - start + 1) * row_bytes);
        Ok((data, bytes.ok_or_else(outside)?))
    }
}

/// Shapes that differ only in dimensions of one: a gate of one row is stored as a vector by some files.
fn same_but_for_ones(a: Shape, b: Shape) -> bool {
    a == b || a.dims().iter().filter(|dim| **dim != 1).eq(b.dims().iter().filter(|dim| **dim != 1))
}
