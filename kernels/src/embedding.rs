//! Rows of a table by ids on the device: `cuda/embedding.cu`.

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::padded_int,
    launch::{Arguments, Launch},
    weights::{WeightLayout, kernel_of},
};

/// The sizes and places of an [`embedding`] call.
#[derive(Clone, Copy, Debug)]
pub struct Embedding<'a> {
    /// The table `[rows, width]`, in `layout`, at an address that is a multiple of 16.
    pub table: Slice<'a>,
    /// How it lies.
    pub layout: WeightLayout,
    /// Its rows: ids are below.
    pub rows: usize,
    /// The width of a row.
    pub width: usize,
    /// u32 `[n]`.
    pub ids: Slice<'a>,
    /// How many ids.
    pub n: usize,
    /// What every element is multiplied by.
    pub scale: f32,
    /// f32 `[n, width]`.
    pub out: Slice<'a>,
}

/// `out[i, :] = table[ids[i], :] * scale`; NaN where an id is not below `rows`.
///
/// # Errors
/// A slice is too small, the type holds no weights, or the launch fails.
pub fn embedding(gpu: &Gpu, call: &Embedding<'_>) -> Result<()> {
    const OPERATION: &str = "embedding";
    let Embedding { table, layout, rows, width, ids, n, scale, out } = *call;
    let name = kernel_of!("embedding", layout)
        .ok_or_else(|| Error::Unsupported { operation: OPERATION, what: format!("{layout:?}") })?;
    let table = table.expect(OPERATION, "the table in bytes", layout.bytes(rows, width)?)?;
    let out = out.expect(OPERATION, "the rows in bytes", Form::F32.bytes(n, width)?)?;
    let ids = ids.expect(OPERATION, "the ids in bytes", n.checked_mul(4).ok_or(Error::SizeOverflow)?)?;
    let rows = padded_int(OPERATION, "rows", rows)?;
    padded_int(OPERATION, "ids", n)?;
    // A thread has eight columns.
    let grid = [n as u32, width.div_ceil(8 * THREADS) as u32, 1];
    let width = padded_int(OPERATION, "width", width)?;
    let function = gpu.function(OPERATION, name)?;
    let arguments = Arguments::new().u64(out).u64(table).u64(ids).i32(rows).i32(width).f32(scale);
    gpu.launch(&function, Launch { grid, threads: THREADS as u32, shared_bytes: 0 }, arguments)
}

/// As in the kernels.
const THREADS: usize = 128;
