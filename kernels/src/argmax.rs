//! The most likely token of each row: the launcher of `cuda/argmax.cu`.

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{by_vectors, int},
    launch::{Arguments, Launch},
};

/// What [`argmax`] works on.
#[derive(Clone, Copy, Debug)]
pub struct Argmax<'a> {
    /// `[rows, vocabulary]` in F32.
    pub logits: Slice<'a>,
    /// `[rows]` of u32.
    pub ids: Slice<'a>,
    /// [`argmax_workspace`] bytes, cleared once before the first call; calls of fewer rows of the
    /// same vocabulary may share it.
    pub workspace: Slice<'a>,
    /// Rows, at most 65,535.
    pub rows: usize,
    /// Logits of a row.
    pub vocabulary: usize,
}

/// Threads of a block, and the logits it takes.
const THREADS: u32 = 256;
const PER_BLOCK: usize = 2048;

/// Bytes of the workspace for up to `rows` rows of one vocabulary: for each row a ticket and the best of each of its blocks.
/// The tickets must be zero before the first call, and each call leaves them so.
///
/// # Errors
/// The size overflows.
pub fn argmax_workspace(rows: usize, vocabulary: usize) -> Result<usize> {
    let of_row = 1 + vocabulary.div_ceil(PER_BLOCK);
    rows.checked_mul(of_row).and_then(|count| count.checked_mul(8)).ok_or(Error::SizeOverflow)
}

/// `ids[i]` = the lowest id whose logit is the largest of row `i`. NaN loses; a row of nothing but NaN gives `u32::MAX`.
///
/// # Errors
/// A slice is too small, there are no logits or too many rows, or the launch fails.
pub fn argmax(gpu: &Gpu, call: &Argmax<'_>) -> Result<()> {
    const NAME: &str = "argmax";
    let Argmax { rows, vocabulary, .. } = *call;
    if rows > 65_535 || vocabulary == 0 {
        return Err(Error::Unsupported { operation: NAME, what: format!("{rows} rows of {vocabulary} logits") });
    }
    let logits = call.logits.expect(NAME, "the logits in bytes", Form::F32.bytes(rows, vocabulary)?)?;
    let ids = call.ids.expect(NAME, "the ids in bytes", Form::F32.bytes(rows, 1)?)?;
    let workspace = call.workspace.expect(NAME, "the workspace in bytes", argmax_workspace(rows, vocabulary)?)?;
    let vectors = by_vectors(vocabulary, &[logits]);
    let arguments =
        Arguments::new().u64(logits).u64(ids).u64(workspace).i32(int(NAME, vocabulary)?).i32(i32::from(vectors));
    let grid = [int(NAME, vocabulary.div_ceil(PER_BLOCK))? as u32, rows as u32, 1];
    gpu.launch(&gpu.function("argmax", "argmax")?, Launch { grid, threads: THREADS, shared_bytes: 0 }, arguments)
}
