//! The gradient's norm, and whether a step may be learned from: the launchers of `cuda/gradient_norm.cu`.
//!
//! What a step needs to know before any weight moves (its loss, the norm of the whole gradient, whether the loss is a spike)
//! is found on the device, so that forward pass, backward pass and optimizer follow each other without waiting for the host.
//! The host says before a step what it allows ([`StepLimits`]), and reads after it what became of it ([`StepResult`]).

use bytemuck::{Pod, Zeroable};

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{aligned, aligned_to, int},
    launch::{Arguments, Launch},
};

/// What changes from step to step, as optimizers read it on the device. The host writes it before a step; [`judge_step`] then
/// writes the last two.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepValues {
    /// The learning rate `η`.
    pub learning_rate: f32,
    /// For AdamW in step `t`, counted from 1: `η / (1 - β₁ᵗ)`, made in double precision.
    pub adam_rate: f32,
    /// For AdamW: `1 / √(1 - β₂ᵗ)`, made in double precision.
    pub adam_root_factor: f32,
    /// What gradients are multiplied with as they are read.
    pub gradient_factor: f32,
    /// 0: weights and states stay as they are. Else 1.
    pub apply: u32,
}

/// What the host says of a step beforehand.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLimits {
    /// One over the targets that count in the whole step.
    pub loss_scale: f64,
    /// The factor of squared log-sum-exps; 0 for none.
    pub z_loss: f64,
    /// The largest loss, side losses included, that is learned from; infinity where every finite one is.
    pub loss_limit: f64,
    /// The largest norm of the gradient: a larger one is scaled down to it. Infinity takes every finite one as it is.
    pub max_gradient_norm: f64,
}

/// What the batches of a step came to, as the loss adds it up on the device: plain sums.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LossTotals {
    /// Of `-log p` of the targets that count.
    pub nll: f64,
    /// Of their squared log-sum-exps.
    pub lse_squared: f64,
    /// How many count.
    pub counted: f64,
    /// How many of them had the highest logit.
    pub correct: f64,
}

/// What became of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepResult {
    /// The mean of `-log p`.
    pub loss: f64,
    /// The losses beside it, as they are added to it.
    pub side_loss: f64,
    /// The norm of the whole gradient before clipping.
    pub gradient_norm: f64,
    /// How many targets counted.
    pub counted: f64,
    /// How many of them had the highest logit.
    pub correct: f64,
    /// Whether the weights moved: 1 or 0.
    pub applied: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: all its fields are numbers for which zeros are a value.
unsafe impl Zeroable for StepValues {}
// SAFETY: five numbers of 4 bytes in C's layout, so there is no padding.
unsafe impl Pod for StepValues {}
// SAFETY: all its fields are numbers for which zeros are a value.
unsafe impl Zeroable for StepLimits {}
// SAFETY: four numbers of 8 bytes in C's layout, so there is no padding.
unsafe impl Pod for StepLimits {}
// SAFETY: all its fields are numbers for which zeros are a value.
unsafe impl Zeroable for LossTotals {}
// SAFETY: four numbers of 8 bytes in C's layout, so there is no padding.
unsafe impl Pod for LossTotals {}
// SAFETY: all its fields are numbers for which zeros are a value.
unsafe impl Zeroable for StepResult {}
// SAFETY: five numbers of 8 bytes before two of 4 in C's layout, so there is no padding.
unsafe impl Pod for StepResult {}

/// Threads of a block, and the elements each should have before there is another block.
const THREADS: usize = 256;
const PER_THREAD: usize = 16;
/// Eight blocks a multiprocessor of the largest cards; a constant, as the order of sums hangs on it.
const MOST_PIECES: usize = 1024;
const JUDGE_THREADS: u32 = 1024;

/// How many sums [`sum_of_squares`] makes of `count` elements.
pub fn sum_of_squares_pieces(count: usize) -> usize {
    count.div_ceil(THREADS * PER_THREAD).clamp(1, MOST_PIECES)
}

/// `partial[b] = Σ gradient[i]²` over the elements of piece `b`, for `gradient [count]` in F32 at a multiple of 16 bytes and
/// `partial [sum_of_squares_pieces(count)]` in F64. Always the same elements in the same order.
///
/// # Errors
/// A slice is too small or not aligned, or the launch fails.
pub fn sum_of_squares(gpu: &Gpu, gradient: Slice<'_>, partial: Slice<'_>, count: usize) -> Result<()> {
    const NAME: &str = "sum of squares";
    let pieces = sum_of_squares_pieces(count);
    let gradient = aligned(NAME, "the gradient in bytes", gradient, Form::F32.bytes(1, count)?)?;
    let partial = aligned(NAME, "the sums in bytes", partial, pieces * 8)?;
    let launch = Launch { grid: [pieces as u32, 1, 1], threads: THREADS as u32, shared_bytes: 0 };
    let arguments = Arguments::new().u64(gradient).u64(partial).u64(count as u64);
    gpu.launch(&gpu.function("gradient_norm", "sum_of_squares")?, launch, arguments)
}

/// What [`judge_step`] works on.
#[derive(Clone, Copy, Debug)]
pub struct JudgeStep<'a> {
    /// `[pieces]` in F64: what [`sum_of_squares`] made of the gradient, or of each part of it.
    pub partial: Slice<'a>,
    /// How many sums these are.
    pub pieces: usize,
    /// [`LossTotals`] of the whole step.
    pub totals: Slice<'a>,
    /// One F64: losses of routers, already scaled.
    pub side_losses: Option<Slice<'a>>,
    /// [`StepLimits`].
    pub limits: Slice<'a>,
    /// [`StepValues`], whose last two fields are written.
    pub step: Slice<'a>,
    /// [`StepResult`], which is written.
    pub result: Slice<'a>,
}

/// Whether the step may be learned from, and what its gradient is multiplied with:
///
/// ```text
/// norm = √Σ partial,   loss = loss_scale · nll,   side_loss = side_losses + loss_scale · z_loss · lse_squared
/// apply = loss + side_loss is finite and at most loss_limit, and norm is finite
/// gradient_factor = max_gradient_norm / norm where norm is larger, else 1
/// ```
///
/// All in double precision.
///
/// # Errors
/// A slice is too small or not aligned, or the launch fails.
pub fn judge_step(gpu: &Gpu, call: &JudgeStep<'_>) -> Result<()> {
    const NAME: &str = "judge step";
    let JudgeStep { pieces, .. } = *call;
    let sums = pieces.checked_mul(8).ok_or(Error::SizeOverflow)?;
    let eight = |what, slice: Slice<'_>, bytes| aligned_to(8, NAME, what, slice.expect(NAME, what, bytes)?);
    let partial = eight("the sums of squares in bytes", call.partial, sums)?;
    let totals = eight("the loss totals in bytes", call.totals, size_of::<LossTotals>())?;
    let side_losses = call.side_losses.map_or(Ok(0), |losses| eight("the side losses in bytes", losses, 8))?;
    let limits = eight("the limits in bytes", call.limits, size_of::<StepLimits>())?;
    let step = eight("the step's values in bytes", call.step, size_of::<StepValues>())?;
    let result = eight("the step's result in bytes", call.result, size_of::<StepResult>())?;
    let arguments = Arguments::new()
        .u64(partial)
        .i32(int(NAME, pieces)?)
        .u64(totals)
        .u64(side_losses)
        .u64(limits)
        .u64(step)
        .u64(result);
    let launch = Launch { grid: [1, 1, 1], threads: JUDGE_THREADS, shared_bytes: 0 };
    gpu.launch(&gpu.function("gradient_norm", "judge_step")?, launch, arguments)
}
