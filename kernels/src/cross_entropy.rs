//! The loss of logits against targets, and their gradient in their place: the launcher of `cuda/cross_entropy.cu`.

use bytemuck::NoUninit;

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{aligned, by, int, strided},
    launch::{Arguments, Launch},
};

/// What [`cross_entropy`] works on. Nothing of it is constant.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// Rows of `vocabulary` elements in bfloat16, `logits_stride` elements apart; all of the last stride too.
    pub logits: Slice<'a>,
    /// From the start of one row of `logits` to the next, in elements; a multiple of 8 is fast.
    pub logits_stride: usize,
    /// `[rows]` of i32; one outside the vocabulary (a negative one, by custom) does not count.
    pub targets: Slice<'a>,
    /// `[1]` in F32: the factor of the gradient.
    pub scale: Slice<'a>,
    /// The factor of squared log-sum-exps in the loss; 0 for none.
    pub z_loss: f32,
    /// What becomes of the logits.
    pub logits_become: LogitsBecome,
    /// `[rows, 4]` in F32: for each row `-log p` of its target, the squared log-sum-exp, whether it counts, and whether the
    /// target's logit is the largest and the first of equal ones. Zeros for a row that does not count.
    pub row_figures: Slice<'a>,
    /// `[4]` in F64: the sums of these figures are added.
    pub totals: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Logits of a row.
    pub vocabulary: usize,
}

/// What [`cross_entropy`] makes of the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsBecome {
    /// They stay.
    Logits,
    /// Their gradient in bfloat16, zeros in rows that do not count and from the vocabulary to the stride.
    Slopes,
}

/// The kernels by the largest stride whose rows lie in registers: name, threads, columns.
const SMALL: (&str, usize, usize) = ("cross_entropy_8192", 256, 8192);
const MIDDLE: (&str, usize, usize) = ("cross_entropy_32768", 512, 32_768);
/// The same, where the next two rows are on their way to shared memory.
const AHEAD: (&str, usize, usize) = ("cross_entropy_ahead_32768", 1024, 32_768);
const AHEAD_BYTES: usize = 2 * 2 * 32_768;
const WIDE: (&str, usize, usize) = ("cross_entropy_65536", 1024, 65_536);
/// Shared memory of a block beside its row.
const OTHER_SHARED_BYTES: usize = 2048;

/// For each counted row with logits `x` and target `t`: `lse = log sum_j exp(x_j)`, `nll = lse - x_t`, and where slopes are
/// wanted `x_j` becomes `scale * (p_j (1 + 2 z_loss lse) - [j = t])`, the gradient of `scale * (nll + z_loss lse^2)`.
///
/// # Errors
/// A slice is too small, rows overlap, there are no logits, or the launch fails.
pub fn cross_entropy(gpu: &Gpu, call: &CrossEntropy<'_>) -> Result<()> {
    const NAME: &str = "cross entropy";
    let CrossEntropy { logits_stride: stride, rows, vocabulary, z_loss, logits_become, .. } = *call;
    if vocabulary == 0 {
        return Err(Error::Unsupported { operation: NAME, what: "a vocabulary of nothing".to_owned() });
    }
    if stride < vocabulary {
        return Err(Error::Shape { operation: NAME, what: "the stride of rows", expected: vocabulary, found: stride });
    }
    let logits = strided(NAME, "the logits in bytes", call.logits, Form::Bf16, [rows, stride, stride])?;
    let targets = call.targets.expect(NAME, "the targets in bytes", Form::F32.bytes(rows, 1)?)?;
    let scale = call.scale.expect(NAME, "the scale in bytes", 4)?;
    let figures = aligned(NAME, "the figures of rows in bytes", call.row_figures, Form::F32.bytes(rows, 4)?)?;
    let totals = call.totals.expect(NAME, "the totals in bytes", 32)?;
    let shared = gpu.properties().shared_per_block as usize;
    // Quads of eight logits that each thread keeps outside registers; those of two blocks share a multiprocessor's memory.
    let outside = |(_, threads, columns): (&str, usize, usize)| stride.saturating_sub(columns).div_ceil(8 * threads);
    let room = |(_, threads, _): (&str, usize, usize), blocks: usize| {
        (shared / blocks).saturating_sub(OTHER_SHARED_BYTES) / (16 * threads)
    };
    let (kernel, in_shared) = match by(8, Form::Bf16, logits, stride) {
        false => (("cross_entropy_any", 256, 0), 0),
        true if outside(SMALL) == 0 => (SMALL, 0),
        true if outside(AHEAD) == 0 && shared >= AHEAD_BYTES + OTHER_SHARED_BYTES => (AHEAD, 0),
        true if outside(MIDDLE) <= room(MIDDLE, 2) => (MIDDLE, outside(MIDDLE)),
        true => (WIDE, outside(WIDE).min(room(WIDE, 1))),
    };
    let arguments = Arguments::new().value(Call {
        logits,
        targets,
        scale,
        figures,
        stride: stride as u64,
        vocabulary: int(NAME, vocabulary)?,
        in_shared: int(NAME, in_shared)?,
        z_loss,
        slopes: i32::from(logits_become == LogitsBecome::Slopes),
        rows: int(NAME, rows)?,
        unused: 0,
    });
    // A row's columns are numbered in 32 bits.
    int(NAME, stride)?;
    let (name, threads, _) = kernel;
    let (blocks, shared_bytes) = match kernel {
        AHEAD => (rows.min(gpu.properties().multiprocessors as usize), AHEAD_BYTES),
        _ => (rows, in_shared * threads * 16),
    };
    let launch = Launch { grid: [blocks as u32, 1, 1], threads: threads as u32, shared_bytes: shared_bytes as u32 };
    gpu.launch(&gpu.function("cross_entropy", name)?, launch, arguments)?;
    let arguments = Arguments::new().u64(figures).u64(totals).i32(int(NAME, rows)?);
    let launch = Launch { grid: [1, 1, 1], threads: 1024, shared_bytes: 0 };
    gpu.launch(&gpu.function("cross_entropy", "add_figures")?, launch, arguments)
}

/// The kernels' argument: `Call` in `cuda/cross_entropy.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    logits: u64,
    targets: u64,
    scale: u64,
    figures: u64,
    stride: u64,
    vocabulary: i32,
    in_shared: i32,
    z_loss: f32,
    slopes: i32,
    rows: i32,
    unused: i32,
}

// SAFETY: five integers of eight bytes, then six numbers of four: without a gap.
unsafe impl NoUninit for Call {}
