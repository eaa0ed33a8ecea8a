//! Dropout with the random numbers of the processor's: the launcher of `cuda/dropout.cu`.

use bytemuck::NoUninit;

use crate::{
    Error, Form, Gpu, Result, Slice,
    add::row_grid,
    checks::{aligned_to, by, int, strided},
    launch::{Arguments, Launch},
};

/// What [`dropout`] works on. Nothing of it is constant.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// Rows of `width` elements in `form`, `x_stride` elements apart.
    pub x: Slice<'a>,
    /// From the start of one row of `x` to the next, in elements.
    pub x_stride: usize,
    /// Rows of `width` elements in `form`, `out_stride` elements apart; it may be the memory of `x` with the same stride.
    pub out: Slice<'a>,
    /// From the start of one row of `out` to the next, in elements.
    pub out_stride: usize,
    /// F32 or bfloat16.
    pub form: Form,
    /// `[1]` of u64, at a multiple of 8 bytes: the seed.
    pub seed: Slice<'a>,
    /// The stream's number: each place in a model has its own.
    pub stream: u64,
    /// The probability that an element is dropped, in `[0, 1)`.
    pub probability: f32,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

const THREADS: usize = 256;

/// `out_i = x_i / (1 - probability)` where number i of the Philox stream is at least `probability * 2^32`, else 0; i counts
/// the elements of all rows. The gradient of the input is the same call on the gradient of the output.
///
/// # Errors
/// A slice is too small, rows overlap, the form is [`Form::Split`], the probability is not in `[0, 1)`, or the launch fails.
pub fn dropout(gpu: &Gpu, call: &Dropout<'_>) -> Result<()> {
    const NAME: &str = "dropout of rows";
    let Dropout { x_stride, out_stride, form, stream, probability, rows, width, .. } = *call;
    if !(0.0..1.0).contains(&probability) {
        return Err(Error::Unsupported { operation: NAME, what: format!("a probability of {probability}") });
    }
    let x = strided(NAME, "the input in bytes", call.x, form, [rows, x_stride, width])?;
    let out = strided(NAME, "the output in bytes", call.out, form, [rows, out_stride, width])?;
    let seed = aligned_to(8, NAME, "the seed in bytes", call.seed.expect(NAME, "the seed in bytes", 8)?)?;
    let vectors = width.is_multiple_of(4) && by(4, form, x, x_stride) && by(4, form, out, out_stride);
    let (kernel, per_row) = if vectors { ("dropout", width / 4) } else { ("dropout_any", width) };
    let arguments = Arguments::new().value(Call {
        x,
        out,
        seed,
        x_stride: x_stride as u64,
        out_stride: out_stride as u64,
        stream,
        rows: int(NAME, rows)?,
        width: int(NAME, width)?,
        form: form as i32,
        threshold: (f64::from(probability) * 4_294_967_296.0) as u32,
        scale: (1.0 / (1.0 - f64::from(probability))) as f32,
        unused: 0,
    });
    // As many threads as cover a row in the fewest blocks.
    let across = per_row.div_ceil(THREADS).max(1);
    let threads = per_row.div_ceil(across).next_multiple_of(32).max(32);
    let launch = Launch { grid: row_grid(per_row, threads, rows)?, threads: threads as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("dropout", kernel)?, launch, arguments)
}

/// The kernels' argument: `Call` in `cuda/dropout.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    x: u64,
    out: u64,
    seed: u64,
    x_stride: u64,
    out_stride: u64,
    stream: u64,
    rows: i32,
    width: i32,
    form: i32,
    threshold: u32,
    scale: f32,
    unused: i32,
}

// SAFETY: six integers of eight bytes, then six numbers of four: without a gap.
unsafe impl NoUninit for Call {}
