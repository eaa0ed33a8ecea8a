//! Root-mean-square norm, alone, added to the residual stream or in a training step: the launchers of `cuda/rmsnorm.cu`.

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{by_vectors, int, strided},
    launch::{Arguments, Launch},
};

/// What [`rmsnorm`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// Rows of `runs * width` elements in `x_form`, `x_stride` elements apart.
    pub x: Slice<'a>,
    /// F32 or bfloat16.
    pub x_form: Form,
    /// From the start of one row of `x` to the next, in elements: `runs * width` where rows follow each other.
    pub x_stride: usize,
    /// `[width]` in F32; constant: it may be read before the kernel before has ended.
    pub weight: Slice<'a>,
    /// `[rows, runs * width]` in `form`; not the memory of `x`.
    pub out: Slice<'a>,
    /// How `out` is stored.
    pub form: Form,
    /// `[rows, runs * width]` in bfloat16: `x` rounded, for the way back of a training step.
    pub copy: Option<Slice<'a>>,
    /// Rows.
    pub rows: usize,
    /// Runs of a row that are normed each for itself (heads); 1 for a norm of the row.
    pub runs: usize,
    /// Elements of a run.
    pub width: usize,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// What [`rmsnorm_add`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormAdd<'a> {
    /// `[rows, width]` in F32.
    pub x: Slice<'a>,
    /// `[width]` in F32; constant: it may be read before the kernel before has ended.
    pub weight: Slice<'a>,
    /// `[rows, width]` in F32: the sums. Not the memory of `x`.
    pub residual: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// `out[i, j] = x[i, j] / sqrt(mean_j(x[i, j]^2) + epsilon) * weight[j]`, the mean over each run of `width` elements.
///
/// # Errors
/// A slice is too small, the rows of `x` overlap or are in two parts, or the launch fails.
pub fn rmsnorm(gpu: &Gpu, call: &RmsNorm<'_>) -> Result<()> {
    norm(gpu, "rmsnorm", call, Kind::Alone)
}

/// `residual[i, j] += x[i, j] / sqrt(mean_j(x[i, j]^2) + epsilon) * weight[j]`: a norm behind a block, and the block's sum.
///
/// # Errors
/// A slice is too small, or the launch fails.
pub fn rmsnorm_add(gpu: &Gpu, call: &RmsNormAdd<'_>) -> Result<()> {
    let RmsNormAdd { x, weight, residual, rows, width, epsilon } = *call;
    let (out, form) = (residual, Form::F32);
    let call =
        RmsNorm { x, x_form: form, x_stride: width, weight, out, form, copy: None, rows, runs: 1, width, epsilon };
    norm(gpu, "rmsnorm and add", &call, Kind::Add)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Alone,
    Add,
}

/// The kernels by the largest width they take: its name and that of the sum, threads of a block, runs of a block.
const INFERENCE: [(usize, [&str; 2], u32, usize); 6] = [
    (256, ["rmsnorm_256", "rmsnorm_add_256"], 128, 4),
    (1024, ["rmsnorm_1024", "rmsnorm_add_1024"], 256, 1),
    (2048, ["rmsnorm_2048", "rmsnorm_add_2048"], 512, 1),
    (4096, ["rmsnorm_4096", "rmsnorm_add_4096"], 512, 1),
    (8192, ["rmsnorm_8192", "rmsnorm_add_8192"], 512, 1),
    (16384, ["rmsnorm_16384", "rmsnorm_add_16384"], 512, 1),
];
const TRAINING: [(usize, &str, u32, usize); 8] = [
    (256, "rmsnorm_training_256", 256, 8),
    (512, "rmsnorm_training_512", 256, 8),
    (768, "rmsnorm_training_768", 256, 8),
    (1024, "rmsnorm_training_1024", 256, 8),
    (2048, "rmsnorm_training_2048", 128, 1),
    (4096, "rmsnorm_training_4096", 256, 1),
    (8192, "rmsnorm_training_8192", 512, 1),
    (16384, "rmsnorm_training_16384", 512, 1),
];

fn norm(gpu: &Gpu, operation: &'static str, call: &RmsNorm<'_>, kind: Kind) -> Result<()> {
    let RmsNorm { x_form, x_stride, form, rows, runs, width, epsilon, .. } = *call;
    let row_width = runs.checked_mul(width).ok_or(Error::SizeOverflow)?;
    let x = strided(operation, "the input in bytes", call.x, x_form, [rows, x_stride, row_width])?;
    let weight = call.weight.expect(operation, "the weight in bytes", Form::F32.bytes(1, width)?)?;
    let out = call.out.expect(operation, "the output in bytes", form.bytes(rows, row_width)?)?;
    let copy_bytes = Form::Bf16.bytes(rows, row_width)?;
    let copy = Slice::expect_optional(call.copy, operation, "the copy in bytes", copy_bytes)?;
    // The choice looks at the width and at addresses of the model's own layout, never at the number of rows.
    let vectors = by_vectors(width, &[x, weight, out, copy]) && x_stride.is_multiple_of(4);
    let training = kind == Kind::Alone && !(x_form == Form::F32 && copy == 0);
    let fits = |largest: usize| vectors && width <= largest;
    let (name, threads, runs_of_block) = if training {
        let fitting = TRAINING.into_iter().find(|(largest, ..)| fits(*largest));
        fitting.map_or(("rmsnorm_training_any", 256, 1), |(_, name, threads, runs)| (name, threads, runs))
    } else {
        let fitting = INFERENCE.into_iter().find(|(largest, ..)| fits(*largest));
        let any = (["rmsnorm_any", "rmsnorm_add_any"], 256, 1);
        let (names, threads, runs) = fitting.map_or(any, |(_, names, threads, runs)| (names, threads, runs));
        (names[kind as usize], threads, runs)
    };
    let blocks = rows.checked_mul(runs).ok_or(Error::SizeOverflow)?.div_ceil(runs_of_block);
    let grid = [int(operation, blocks)? as u32, 1, 1];
    let arguments = Arguments::new()
        .u64(x)
        .u64(x_stride as u64)
        .u64(weight)
        .u64(out)
        .i32(form as i32)
        .i32(int(operation, rows)?)
        .i32(int(operation, runs)?)
        .i32(int(operation, width)?)
        .f32(epsilon);
    let arguments = if training { arguments.i32(x_form as i32).u64(copy) } else { arguments };
    let function = gpu.function("rmsnorm", name)?;
    gpu.launch(&function, Launch { grid, threads, shared_bytes: 0 }, arguments)
}
