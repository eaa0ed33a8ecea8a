//! The gradient of an embedding table: the launcher of `cuda/embedding_backward.cu`.

use bytemuck::NoUninit;

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{aligned, by, int, strided},
    launch::{Arguments, Launch},
};

/// What [`embedding_backward`] works on. Nothing of it is constant.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingBackward<'a> {
    /// `[rows]` of u32 (or i32: a negative id is none of the vocabulary).
    pub ids: Slice<'a>,
    /// The gradient of the embedded rows, `[rows, width]` in `form`.
    pub gradient: Slice<'a>,
    /// F32 or bfloat16.
    pub form: Form,
    /// What embedded rows were multiplied by.
    pub scale: f32,
    /// `[vocabulary, width]` in F32.
    pub table_gradient: Slice<'a>,
    /// Whether the table's gradient is set to zero first; otherwise the sums are added to it (a head with the same weights
    /// has written its own).
    pub clear: bool,
    /// [`embedding_backward_workspace`] bytes.
    pub workspace: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Rows of the table.
    pub vocabulary: usize,
    /// Elements of a row.
    pub width: usize,
}

/// Places that a block adds up, in the order of ids: as in `cuda/embedding_backward.cu`.
const PIECE: usize = 32;
/// Threads of the kernels' blocks.
const SORT_THREADS: u32 = 256;
const SORT_WARPS: usize = 8;
const ADD_THREADS: usize = 64;
const JOIN_THREADS: u32 = 256;
/// Remainders that have a block of the sort each, and the counts that a warp of it has room for.
const LEAST_BINS_LOG2: u32 = 7;
const MOST_BINS_LOG2: u32 = 12;
const MOST_QUOTIENTS: usize = 2048;

/// Where the parts of the workspace begin: the number of places, the places, the partial sums; and its end.
fn parts(rows: usize, width: usize) -> Result<[usize; 4]> {
    const START: usize = 256;
    let partials = rows.checked_mul(8).and_then(|bytes| (START + 255).checked_add(bytes)).ok_or(Error::SizeOverflow)?;
    let partials = partials / 256 * 256;
    let bytes = Form::F32.bytes(rows.div_ceil(PIECE) * 2, width)?;
    Ok([0, START, partials, partials.checked_add(bytes).ok_or(Error::SizeOverflow)?])
}

/// Bytes of the workspace of [`embedding_backward`].
///
/// # Errors
/// The size overflows.
pub fn embedding_backward_workspace(rows: usize, width: usize) -> Result<usize> {
    parts(rows, width).map(|parts| parts[3])
}

/// `table_gradient[id] += scale * sum of gradient[i] over the rows i with ids[i] = id`, in a fixed order. Ids outside the
/// vocabulary are left out.
///
/// # Errors
/// A slice is too small, the form is [`Form::Split`], the vocabulary has more than 8,388,608 ids, or the launch fails.
pub fn embedding_backward(gpu: &Gpu, call: &EmbeddingBackward<'_>) -> Result<()> {
    const NAME: &str = "embedding backward";
    let EmbeddingBackward { form, scale, rows, vocabulary, width, .. } = *call;
    let ids = call.ids.expect(NAME, "the ids in bytes", Form::F32.bytes(rows, 1)?)?;
    let gradient = strided(NAME, "the gradient in bytes", call.gradient, form, [rows, width, width])?;
    let table_bytes = Form::F32.bytes(vocabulary, width)?;
    let table = call.table_gradient.expect(NAME, "the table's gradient in bytes", table_bytes)?;
    let [count, sorted, partials, bytes] = parts(rows, width)?;
    let workspace = aligned(NAME, "the workspace in bytes", call.workspace, bytes)?;
    let quotients = |log2: u32| vocabulary.div_ceil(1 << log2);
    let Some(bins_log2) = (LEAST_BINS_LOG2..=MOST_BINS_LOG2).find(|&log2| quotients(log2) <= MOST_QUOTIENTS) else {
        return Err(Error::Unsupported { operation: NAME, what: format!("a vocabulary of {vocabulary}") });
    };
    if call.clear {
        gpu.clear(call.table_gradient.part(0, table_bytes)?)?;
    }
    if rows == 0 || vocabulary == 0 || width == 0 {
        return Ok(());
    }
    let arguments = Call {
        ids,
        gradient,
        table,
        count: workspace + count as u64,
        sorted: workspace + sorted as u64,
        partials: workspace + partials as u64,
        rows: int(NAME, rows)?,
        vocabulary: int(NAME, vocabulary)?,
        width: int(NAME, width)?,
        form: form as i32,
        bins_log2: bins_log2 as i32,
        scale,
    };
    let start = |name: &'static str, grid: [u32; 2], threads: u32, shared_bytes: usize| {
        let launch = Launch { grid: [grid[0], grid[1], 1], threads, shared_bytes: shared_bytes as u32 };
        gpu.launch(&gpu.function("embedding_backward", name)?, launch, Arguments::new().value(arguments))
    };
    start("embedding_sort", [1 << bins_log2, 1], SORT_THREADS, 4 * SORT_WARPS * quotients(bins_log2))?;
    let vectors = width.is_multiple_of(4) && by(4, form, gradient, width) && table.is_multiple_of(16);
    let (add, join, columns) = match vectors {
        true => ("embedding_add", "embedding_join", 4),
        false => ("embedding_add_any", "embedding_join_any", 1),
    };
    let pieces = int(NAME, rows.div_ceil(PIECE))? as u32;
    start(add, [pieces, width.div_ceil(ADD_THREADS * columns) as u32], ADD_THREADS as u32, 0)?;
    start(join, [pieces, width.div_ceil(32 * columns) as u32], JOIN_THREADS, 0)
}

/// The kernels' argument: `Call` in `cuda/embedding_backward.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    ids: u64,
    gradient: u64,
    table: u64,
    count: u64,
    sorted: u64,
    partials: u64,
    rows: i32,
    vocabulary: i32,
    width: i32,
    form: i32,
    bins_log2: i32,
    scale: f32,
}

// SAFETY: six integers of eight bytes, then six numbers of four: without a gap.
unsafe impl NoUninit for Call {}
