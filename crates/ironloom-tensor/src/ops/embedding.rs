//! Rows of a table: `out[i] = table[ids[i]]`, unpacked on look-up, so that a packed table never becomes dense.

use ironloom_core::DType;
use ironloom_kernels::{self as kernels, Form, WeightLayout};

use super::rows::add_rows;
use crate::{Context, Error, Indices, Result, Tensor, Weight};

/// The rows `ids` of `table` `[vocabulary, width]` times `scale`, as `[ids, width]`. Has a gradient for a dense table.
///
/// # Errors
/// An id is outside the table. Ids on a graphics card are not looked at: one outside gives NaN.
pub fn embedding(cx: &Context, table: &Weight, ids: &Indices, scale: f32) -> Result<Tensor> {
    const NAME: &str = "embedding";
    if let Some(gpu) = cx.gpu() {
        let (vocabulary, width) = (table.rows(), table.cols());
        let out = Tensor::allocate(gpu, Form::F32, [ids.len(), width], NAME)?;
        let (slice, layout) = match table.as_dense() {
            Some(values) => (values.cuda(NAME, Form::F32)?, WeightLayout::Plain(DType::F32)),
            None => {
                let matrix = table.as_cuda(NAME)?;
                (matrix.slice()?, matrix.layout)
            }
        };
        let call = kernels::Embedding {
            table: slice,
            layout,
            rows: vocabulary,
            width,
            ids: ids.cuda(NAME)?,
            n: ids.len(),
            scale,
            out: out.cuda(NAME, Form::F32)?,
        };
        kernels::embedding(gpu, &call)?;
        if let Some(table) = table.as_dense() {
            super::cuda::rows::record_embedding(cx, gpu, table, ids, scale, &out);
        }
        return Ok(out);
    }
    let (ids, limit) = (ids.cpu(NAME)?, table.rows());
    if let Some((row, &id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= limit) {
        return Err(Error::IdOutOfRange { operation: "embedding", id, row, limit });
    }
    let width = table.cols();
    let mut out = vec![0.0; ids.len() * width];
    for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width.max(1))) {
        table.row(id as usize, out)?;
    }
    if scale != 1.0 {
        out.iter_mut().for_each(|value| *value *= scale);
    }
    let out = Tensor::from_f32(out, [ids.len(), width])?;
    if let Some(table) = table.as_dense()
        && let Some((tape, [Some(slot)])) = cx.slots([table])
    {
        let ids = ids.to_vec();
        tape.record(&out, move |gradient, gradients| {
            let g = gradient.as_f32()?;
            gradients.write(&slot, |out, first| {
                add_rows(out, first, &ids, g, width, scale);
                Ok(())
            })
        });
    }
    Ok(out)
}
