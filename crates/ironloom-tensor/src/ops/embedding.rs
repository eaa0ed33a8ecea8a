//! Rows of a table: `out[i] = table[ids[i]]`, unpacked on look-up, so that a packed table never becomes dense.

use crate::{Context, Error, Result, Tensor, Weight};

/// The rows `ids` of `table` `[vocabulary, width]`, as `[ids, width]`.
///
/// # Errors
/// An id is outside the table, or a tape records.
pub fn embedding(cx: &Context, table: &Weight, ids: &[u32]) -> Result<Tensor> {
    cx.without_gradient("embedding")?;
    let limit = table.rows();
    if let Some((row, &id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= limit) {
        return Err(Error::IdOutOfRange { operation: "embedding", id, row, limit });
    }
    let width = table.cols();
    let mut out = vec![0.0; ids.len() * width];
    let matrix = table.as_cpu();
    for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width.max(1))) {
        matrix.row(id as usize, out)?;
    }
    Tensor::from_f32(out, [ids.len(), width])
}
