//! Rows of a table: `out[i] = table[ids[i]]`, unpacked on look-up, so that a packed table never becomes dense.

use ironloom_kernels::{self as kernels, Form};

use crate::{Context, Error, Indices, Result, Tensor, Weight};

/// The rows `ids` of `table` `[vocabulary, width]` times `scale`, as `[ids, width]`.
///
/// # Errors
/// An id is outside the table, or a tape records. Ids on a graphics card are not looked at: one outside gives NaN.
pub fn embedding(cx: &Context, table: &Weight, ids: &Indices, scale: f32) -> Result<Tensor> {
    const NAME: &str = "embedding";
    cx.without_gradient(NAME)?;
    if let Some(gpu) = cx.gpu() {
        let matrix = table.as_cuda(NAME)?;
        let out = Tensor::allocate(gpu, Form::F32, [ids.len(), matrix.cols], NAME)?;
        let call = kernels::Embedding {
            table: matrix.slice()?,
            layout: matrix.layout,
            rows: matrix.rows,
            width: matrix.cols,
            ids: ids.cuda(NAME)?,
            n: ids.len(),
            scale,
            out: out.cuda(NAME, Form::F32)?,
        };
        kernels::embedding(gpu, &call)?;
        return Ok(out);
    }
    let (ids, limit) = (ids.cpu(NAME)?, table.rows());
    if let Some((row, &id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= limit) {
        return Err(Error::IdOutOfRange { operation: "embedding", id, row, limit });
    }
    let width = table.cols();
    let mut out = vec![0.0; ids.len() * width];
    let matrix = table.as_cpu(NAME)?;
    for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width.max(1))) {
        matrix.row(id as usize, out)?;
    }
    if scale != 1.0 {
        out.iter_mut().for_each(|value| *value *= scale);
    }
    Tensor::from_f32(out, [ids.len(), width])
}
