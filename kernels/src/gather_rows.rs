//! Picking rows by numbers on the device: the launcher of `cuda/gather_rows.cu`.

use crate::{
    Form, Gpu, Result, Slice,
    add::row_grid,
    checks::{by_vectors, int},
    launch::{Arguments, Launch},
};

/// What [`gather_rows`] works on.
#[derive(Clone, Copy, Debug)]
pub struct GatherRows<'a> {
    /// `[x_rows, width]` in F32.
    pub x: Slice<'a>,
    /// Rows of `x`.
    pub x_rows: usize,
    /// `[count]` of i32.
    pub rows: Slice<'a>,
    /// `[count, width]` in F32; not the memory of `x`.
    pub out: Slice<'a>,
    /// How many rows are picked.
    pub count: usize,
    /// Elements of a row.
    pub width: usize,
}

const THREADS: usize = 256;
/// Vectors of four elements that a block takes.
const VECTORS_OF_BLOCK: usize = 1024;

/// `out[i] = x[rows[i]]`; zeros for a number outside `0..x_rows`.
///
/// # Errors
/// A slice is too small, or the launch fails.
pub fn gather_rows(gpu: &Gpu, call: &GatherRows<'_>) -> Result<()> {
    const NAME: &str = "gather rows";
    let GatherRows { x_rows, count, width, .. } = *call;
    let x = call.x.expect(NAME, "the input in bytes", Form::F32.bytes(x_rows, width)?)?;
    let rows = call.rows.expect(NAME, "the row numbers in bytes", Form::F32.bytes(count, 1)?)?;
    let out = call.out.expect(NAME, "the output in bytes", Form::F32.bytes(count, width)?)?;
    // The kernel of vectors counts them in 32 bits.
    let vectors =
        count.checked_mul(width / 4).filter(|&vectors| by_vectors(width, &[x, out]) && int(NAME, vectors).is_ok());
    let (name, grid) = match vectors {
        Some(vectors) => ("gather_rows", [vectors.div_ceil(VECTORS_OF_BLOCK) as u32, 1, 1]),
        None => ("gather_rows_any", row_grid(width, THREADS, count)?),
    };
    let arguments = Arguments::new()
        .u64(x)
        .u64(rows)
        .u64(out)
        .i32(int(NAME, x_rows)?)
        .i32(int(NAME, count)?)
        .i32(int(NAME, width)?);
    let launch = Launch { grid, threads: THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("gather_rows", name)?, launch, arguments)
}
