//! From logits to tokens on the device: the launcher of `cuda/sample.cu`.
//!
//! Every row has its own options, in device memory, so that a captured graph serves rows that come, go and change their
//! minds. The ids are those of the host's sampler with the same options, history and logits.

use bytemuck::{Pod, Zeroable};

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{by_vectors, int},
    launch::{Arguments, Launch},
};

/// How a row's next token is chosen: the host sampler's options as the kernels read them. The caller has checked the values.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleOptions {
    /// Address on the device of the row's ids so far (u32, by position), the prompt's among them. 0: no penalties.
    pub history: u64,
    /// Which of the many possible texts to write.
    pub seed: u64,
    /// How many of the last ids the penalties look at; `u32::MAX`: all.
    pub penalty_window: u32,
    /// Keep this many of the likeliest tokens; 0 keeps all. Up to 1,024 is fast.
    pub top_k: u32,
    /// Divides the logits; 0 takes the most likely token, the lowest id among equals.
    pub temperature: f32,
    /// Keep the fewest likeliest tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this many times as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits, and multiplies others, of tokens in the window; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the window.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time it is in the window.
    pub frequency_penalty: f32,
}

// SAFETY: all its fields are numbers for which zeros are a value.
unsafe impl Zeroable for SampleOptions {}
// SAFETY: plain numbers in C's layout, two of 8 bytes before eight of 4, so there is no padding.
unsafe impl Pod for SampleOptions {}

impl SampleOptions {
    /// The most likely token, without penalties.
    pub const GREEDY: Self = Self {
        history: 0,
        seed: 0,
        penalty_window: 0,
        top_k: 0,
        temperature: 0.0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
    };
}

/// What [`sample`] works on.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// `[rows, vocabulary]` in F32. The logits of penalized tokens are changed in place.
    pub logits: Slice<'a>,
    /// `[rows]` of [`SampleOptions`].
    pub options: Slice<'a>,
    /// `[rows]` of i32: the position of the token that made a row's logits, so that the row's history has one id more; -1
    /// for a row that is not in use.
    pub positions: Slice<'a>,
    /// `[rows]` of u32: what is chosen. 0 in a row that is not in use; `u32::MAX` where a logit is NaN or positive infinity,
    /// or where no token is left.
    pub ids: Slice<'a>,
    /// [`sample_workspace`] bytes, cleared once before the first call; calls of fewer rows of the same vocabulary may share
    /// it.
    pub workspace: Slice<'a>,
    /// Rows, at most 65,535.
    pub rows: usize,
    /// Logits of a row, at most 524,288.
    pub vocabulary: usize,
}

/// Sizes of the kernels; see `cuda/sample/weights.cuh`.
const GROUP: usize = 64;
const PER_BLOCK: usize = 2048;
const SCAN_THREADS: u32 = 256;
const DRAW_THREADS: u32 = 1024;
const BUCKETS: usize = 512;
const STATE_BYTES: usize = 32;
const LARGEST_VOCABULARY: usize = GROUP * 8 * DRAW_THREADS as usize;

/// Bytes of a row's part of the workspace: its state, the best of each block, the masses of buckets, the sum and the largest
/// logit of each group.
fn row_bytes(vocabulary: usize) -> usize {
    let (blocks, groups) = (vocabulary.div_ceil(PER_BLOCK), vocabulary.div_ceil(GROUP));
    (STATE_BYTES + 8 * blocks + 16 * BUCKETS + 12 * groups).next_multiple_of(16)
}

fn check(rows: usize, vocabulary: usize) -> Result<()> {
    if rows > 65_535 || vocabulary == 0 || vocabulary > LARGEST_VOCABULARY {
        return Err(Error::Unsupported { operation: "sample", what: format!("{rows} rows of {vocabulary} logits") });
    }
    Ok(())
}

/// Bytes of the workspace for up to `rows` rows.
///
/// # Errors
/// There are no logits, too many logits, or too many rows.
pub fn sample_workspace(rows: usize, vocabulary: usize) -> Result<usize> {
    check(rows, vocabulary)?;
    rows.checked_mul(row_bytes(vocabulary)).ok_or(Error::SizeOverflow)
}

/// Chooses the next token of each row: penalties, temperature, top-k, top-p, min-p, and a draw by the row's seed and the index
/// that the token will have. Three kernels.
///
/// # Errors
/// A slice is too small, there are no logits, too many logits or too many rows, or a launch fails.
pub fn sample(gpu: &Gpu, call: &Sample<'_>) -> Result<()> {
    const NAME: &str = "sample";
    let Sample { rows, vocabulary, .. } = *call;
    check(rows, vocabulary)?;
    let logits = call.logits.expect(NAME, "the logits in bytes", Form::F32.bytes(rows, vocabulary)?)?;
    let options = call.options.expect(NAME, "the options in bytes", rows * size_of::<SampleOptions>())?;
    let positions = call.positions.expect(NAME, "the positions in bytes", Form::F32.bytes(rows, 1)?)?;
    let ids = call.ids.expect(NAME, "the ids in bytes", Form::F32.bytes(rows, 1)?)?;
    let workspace = call.workspace.expect(NAME, "the workspace in bytes", sample_workspace(rows, vocabulary)?)?;
    let (of_row, count) = (row_bytes(vocabulary) as u64, int(NAME, vocabulary)?);
    let vectors = i32::from(by_vectors(vocabulary, &[logits]));
    let blocks = Launch {
        grid: [vocabulary.div_ceil(PER_BLOCK) as u32, rows as u32, 1],
        threads: SCAN_THREADS,
        shared_bytes: 0,
    };
    let arguments = Arguments::new()
        .u64(logits)
        .u64(options)
        .u64(positions)
        .u64(ids)
        .u64(workspace)
        .u64(of_row)
        .i32(count)
        .i32(vectors);
    gpu.launch(&gpu.function("sample", "sample_scan")?, blocks, arguments)?;
    let arguments = Arguments::new().u64(logits).u64(options).u64(workspace).u64(of_row).i32(count).i32(vectors);
    gpu.launch(&gpu.function("sample", "sample_weigh")?, blocks, arguments)?;
    let arguments =
        Arguments::new().u64(logits).u64(options).u64(positions).u64(ids).u64(workspace).u64(of_row).i32(count);
    let one_a_row = Launch { grid: [rows as u32, 1, 1], threads: DRAW_THREADS, shared_bytes: 0 };
    gpu.launch(&gpu.function("sample", "sample_draw")?, one_a_row, arguments)
}
