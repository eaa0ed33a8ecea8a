//! The gradients of a root-mean-square norm: the launcher of `cuda/rmsnorm_backward.cu`.

use bytemuck::NoUninit;

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{by, int, strided},
    column_sums::add_partials,
    launch::{Arguments, Launch},
};

/// Where the gradient of a norm's weight goes.
#[derive(Clone, Copy, Debug)]
pub struct NormWeightGradient<'a> {
    /// `[width]` in F32.
    pub out: Slice<'a>,
    /// Whether the gradient is added to what `out` holds; otherwise it replaces it.
    pub add: bool,
    /// F32 workspace: [`rmsnorm_backward_workspace`] bytes.
    pub partials: Slice<'a>,
}

/// What [`rmsnorm_backward`] works on. Nothing of it is constant.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormBackward<'a> {
    /// What was normed: rows of `runs * width` elements in `x_form`, `x_stride` elements apart.
    pub x: Slice<'a>,
    /// F32 or bfloat16.
    pub x_form: Form,
    /// From the start of one row of `x` to the next, in elements.
    pub x_stride: usize,
    /// `[width]` in F32.
    pub weight: Slice<'a>,
    /// The gradient of what the norm gave: rows in `gradient_form`, `gradient_stride` elements apart.
    pub gradient: Slice<'a>,
    /// F32 or bfloat16.
    pub gradient_form: Form,
    /// From the start of one row of `gradient` to the next, in elements.
    pub gradient_stride: usize,
    /// `[rows, runs * width]` in F32: the gradient of `x` so far, which is added.
    pub residual: Option<Slice<'a>>,
    /// The gradient of `x`: rows in `out_form`, `out_stride` elements apart. It may be the memory of `residual`, or of
    /// `gradient` in the same form and stride.
    pub out: Slice<'a>,
    /// F32 or bfloat16.
    pub out_form: Form,
    /// From the start of one row of `out` to the next, in elements.
    pub out_stride: usize,
    /// `[rows, runs * width]` in bfloat16: the numbers of `out`, as the next products read them.
    pub operand: Option<Slice<'a>>,
    /// The gradient of `weight`; none where it is frozen.
    pub weight_gradient: Option<NormWeightGradient<'a>>,
    /// Rows.
    pub rows: usize,
    /// Runs of a row that were normed each for itself (heads); 1 for a norm of the row.
    pub runs: usize,
    /// Elements of a run.
    pub width: usize,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// The kernels by the largest width they take: for gradients in bfloat16, in F32; runs of a block, blocks at most.
const BY_WIDTH: [(usize, [&str; 2], usize, usize); 7] = [
    (256, ["rmsnorm_backward_bf16_256", "rmsnorm_backward_f32_256"], 8, 256),
    (512, ["rmsnorm_backward_bf16_512", "rmsnorm_backward_f32_512"], 8, 256),
    (768, ["rmsnorm_backward_bf16_768", "rmsnorm_backward_f32_768"], 8, 256),
    (1024, ["rmsnorm_backward_bf16_1024", "rmsnorm_backward_f32_1024"], 8, 128),
    (2048, ["rmsnorm_backward_bf16_2048", "rmsnorm_backward_f32_2048"], 1, 512),
    (4096, ["rmsnorm_backward_bf16_4096", "rmsnorm_backward_f32_4096"], 1, 256),
    (8192, ["rmsnorm_backward_bf16_8192", "rmsnorm_backward_f32_8192"], 1, 128),
];
/// The kernels that have the next run on its way, by the largest width, for `x` and gradients in bfloat16.
const AHEAD: [(usize, &str); 3] =
    [(512, "rmsnorm_backward_ahead_512"), (768, "rmsnorm_backward_ahead_768"), (1024, "rmsnorm_backward_ahead_1024")];
/// The narrowest run they take: below it, half of a warp's threads would have nothing.
const AHEAD_FROM: usize = 256;
/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks of any kernel at most, and of the one for any width.
const MOST_BLOCKS: usize = 512;

/// Bytes of [`NormWeightGradient::partials`] for a norm of `rows * runs` runs of `width`.
///
/// # Errors
/// The size overflows.
pub fn rmsnorm_backward_workspace(rows: usize, runs: usize, width: usize) -> Result<usize> {
    let count = rows.checked_mul(runs).ok_or(Error::SizeOverflow)?;
    Form::F32.bytes(count.min(MOST_BLOCKS), width)
}

/// For `y = h w` with `h = x r`, `r = 1 / sqrt(mean(x^2) + epsilon)` over each run, and the gradient `g` of `y`:
/// `out = r (g w - h mean(g w h)) + residual`, and the weight's gradient is the sum over runs of `g h`.
///
/// # Errors
/// A slice is too small, rows overlap, a form is [`Form::Split`], or the launch fails.
pub fn rmsnorm_backward(gpu: &Gpu, call: &RmsNormBackward<'_>) -> Result<()> {
    const NAME: &str = "rmsnorm backward";
    let RmsNormBackward { x_form, gradient_form, out_form, rows, runs, width, epsilon, .. } = *call;
    let RmsNormBackward { x_stride, gradient_stride, out_stride, .. } = *call;
    let row_width = runs.checked_mul(width).ok_or(Error::SizeOverflow)?;
    let count = rows.checked_mul(runs).ok_or(Error::SizeOverflow)?;
    let x = strided(NAME, "the input in bytes", call.x, x_form, [rows, x_stride, row_width])?;
    let shape = [rows, gradient_stride, row_width];
    let gradient = strided(NAME, "the gradient in bytes", call.gradient, gradient_form, shape)?;
    let out = strided(NAME, "the output in bytes", call.out, out_form, [rows, out_stride, row_width])?;
    let dense = |slice, what, form: Form| Slice::expect_optional(slice, NAME, what, form.bytes(rows, row_width)?);
    let residual = dense(call.residual, "the residual in bytes", Form::F32)?;
    let operand = dense(call.operand, "the operand in bytes", Form::Bf16)?;
    let weight = call.weight.expect(NAME, "the weight in bytes", Form::F32.bytes(1, width)?)?;
    let partials = call.weight_gradient.map(|wanted| wanted.partials);
    let partials_bytes = rmsnorm_backward_workspace(rows, runs, width)?;
    let partials = Slice::expect_optional(partials, NAME, "the partial sums in bytes", partials_bytes)?;
    let vectors = width.is_multiple_of(4)
        && by(4, x_form, x, x_stride)
        && by(4, gradient_form, gradient, gradient_stride)
        && by(4, out_form, out, out_stride)
        && by(4, Form::Bf16, operand, width)
        && [residual, weight, partials].iter().all(|&address| by(4, Form::F32, address, width));
    let fitting = BY_WIDTH.iter().find(|(largest, ..)| vectors && width <= *largest);
    // Two runs of each warp.
    let ahead_bytes = 128 * width;
    let ahead = vectors
        && width > AHEAD_FROM
        && width.is_multiple_of(8)
        && [x_form, gradient_form] == [Form::Bf16; 2]
        && by(8, Form::Bf16, x, x_stride)
        && by(8, Form::Bf16, gradient, gradient_stride)
        && ahead_bytes <= gpu.properties().shared_per_block as usize;
    let ahead = AHEAD.iter().find(|(largest, _)| ahead && width <= *largest);
    let (name, blocks) = match fitting {
        Some(&(_, names, runs, most)) => {
            let plain = names[usize::from(gradient_form == Form::F32)];
            (ahead.map_or(plain, |&(_, name)| name), count.div_ceil(runs).min(most))
        }
        None => ("rmsnorm_backward_any", count.min(MOST_BLOCKS)),
    };
    let shared_bytes = if ahead.is_some() { ahead_bytes as u32 } else { 0 };
    let arguments = Arguments::new().value(Call {
        x,
        gradient,
        weight,
        residual,
        out,
        operand,
        partials,
        x_stride: x_stride as u64,
        gradient_stride: gradient_stride as u64,
        out_stride: out_stride as u64,
        x_form: x_form as i32,
        gradient_form: gradient_form as i32,
        out_form: out_form as i32,
        count: int(NAME, count)?,
        runs: int(NAME, runs)?,
        width: int(NAME, width)?,
        epsilon,
        unused: 0,
    });
    let function = gpu.function("rmsnorm_backward", name)?;
    gpu.launch(&function, Launch { grid: [blocks as u32, 1, 1], threads: THREADS, shared_bytes }, arguments)?;
    match &call.weight_gradient {
        Some(wanted) => add_partials(gpu, NAME, partials, blocks, wanted.out, width, wanted.add),
        None => Ok(()),
    }
}

/// The kernels' argument: `Call` in `cuda/rmsnorm_backward.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    x: u64,
    gradient: u64,
    weight: u64,
    residual: u64,
    out: u64,
    operand: u64,
    partials: u64,
    x_stride: u64,
    gradient_stride: u64,
    out_stride: u64,
    x_form: i32,
    gradient_form: i32,
    out_form: i32,
    count: i32,
    runs: i32,
    width: i32,
    epsilon: f32,
    unused: i32,
}

// SAFETY: ten integers of eight bytes, then eight numbers of four: without a gap.
unsafe impl NoUninit for Call {}
