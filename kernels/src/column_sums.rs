//! Sums over rows, in two stages of a fixed order: the launchers of `cuda/column_sums.cu`.

use crate::{
    Form, Gpu, Result, Slice,
    checks::{by, int, strided},
    launch::{Arguments, Launch},
};

/// What [`column_sums`] works on.
#[derive(Clone, Copy, Debug)]
pub struct ColumnSums<'a> {
    /// Rows of `columns` elements in `form`, `stride` elements apart.
    pub x: Slice<'a>,
    /// F32 or bfloat16.
    pub form: Form,
    /// From the start of one row of `x` to the next, in elements.
    pub stride: usize,
    /// `[columns]` in F32.
    pub out: Slice<'a>,
    /// Whether the sums are added to what `out` holds; otherwise they replace it.
    pub add: bool,
    /// [`column_sums_workspace`] bytes.
    pub workspace: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
}

/// Threads of a block.
const THREADS: u32 = 256;
/// Columns that a block takes at least.
const LEAST_COLUMNS: usize = 32;
/// Rows that a piece has at least, and how many pieces there are at most.
const LEAST_ROWS: usize = 32;
const MOST_PIECES: usize = 256;

fn pieces(rows: usize) -> usize {
    rows.div_ceil(LEAST_ROWS).clamp(1, MOST_PIECES)
}

/// Bytes of the workspace of [`column_sums`].
///
/// # Errors
/// The size overflows.
pub fn column_sums_workspace(rows: usize, columns: usize) -> Result<usize> {
    Form::F32.bytes(pieces(rows), columns)
}

/// `out[j] = sum over i of x[i, j]`, or added to it: the gradient of a bias that every row had added.
///
/// # Errors
/// A slice is too small, rows overlap, the form is [`Form::Split`], or the launch fails.
pub fn column_sums(gpu: &Gpu, call: &ColumnSums<'_>) -> Result<()> {
    const NAME: &str = "column sums";
    let ColumnSums { form, stride, rows, columns, .. } = *call;
    let x = strided(NAME, "the rows in bytes", call.x, form, [rows, stride, columns])?;
    let partials = call.workspace.expect(NAME, "the workspace in bytes", column_sums_workspace(rows, columns)?)?;
    let pieces = pieces(rows);
    let vectors = columns.is_multiple_of(4) && by(4, form, x, stride);
    let (name, per_block) = match vectors {
        true => ("column_sums", 4 * LEAST_COLUMNS),
        false => ("column_sums_any", LEAST_COLUMNS),
    };
    let arguments = Arguments::new()
        .u64(x)
        .i32(form as i32)
        .u64(stride as u64)
        .u64(partials)
        .i32(int(NAME, rows)?)
        .i32(int(NAME, columns)?);
    let grid = [int(NAME, columns.div_ceil(per_block))? as u32, pieces as u32, 1];
    let function = gpu.function("column_sums", name)?;
    gpu.launch(&function, Launch { grid, threads: THREADS, shared_bytes: 0 }, arguments)?;
    add_partials(gpu, NAME, partials, pieces, call.out, columns, call.add)
}

/// `out[j] = sum over pieces, in order, of partials[piece, j]`, or added to it: F32, `partials` an address whose memory the
/// caller has checked.
pub(crate) fn add_partials(
    gpu: &Gpu,
    operation: &'static str,
    partials: u64,
    pieces: usize,
    out: Slice<'_>,
    columns: usize,
    add: bool,
) -> Result<()> {
    let out = out.expect(operation, "the sums in bytes", Form::F32.bytes(1, columns)?)?;
    let arguments = Arguments::new()
        .u64(partials)
        .u64(out)
        .i32(int(operation, pieces)?)
        .i32(int(operation, columns)?)
        .i32(i32::from(add));
    let grid = [int(operation, columns.div_ceil(32))? as u32, 1, 1];
    let function = gpu.function("column_sums", "add_partials")?;
    gpu.launch(&function, Launch { grid, threads: 1024, shared_bytes: 0 }, arguments)
}
