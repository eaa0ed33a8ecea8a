//! Rotary embedding of heads in training, with a norm of each head, forward and back: the launchers of
//! `cuda/rope_training.cu`.

use bytemuck::NoUninit;

use crate::{
    Error, Form, Gpu, NormWeightGradient, Result, Slice,
    checks::{by, int, strided},
    column_sums::add_partials,
    launch::{Arguments, Launch},
};

/// The norm of each head before it is rotated.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// `[head_width]` in F32.
    pub weight: Slice<'a>,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// What [`rope_training`] works on. Nothing of it is constant.
#[derive(Clone, Copy, Debug)]
pub struct RopeTraining<'a> {
    /// Rows of `heads * head_width` elements in bfloat16, `x_stride` elements apart.
    pub x: Slice<'a>,
    /// From the start of one row of `x` to the next, in elements.
    pub x_stride: usize,
    /// Rows in bfloat16, `out_stride` elements apart; it may be the memory of `x` with the same stride.
    pub out: Slice<'a>,
    /// From the start of one row of `out` to the next, in elements.
    pub out_stride: usize,
    /// The norm of each head, before the rotation.
    pub norm: Option<HeadNorm<'a>>,
    /// `[rows, 2 * half]` in F32: cosines, then sines.
    pub phases: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Heads of a row.
    pub heads: usize,
    /// Elements of a head.
    pub head_width: usize,
    /// Pairs of a head that are rotated: elements i and i + half; elements from 2 half on stay.
    pub half: usize,
}

/// What [`rope_training_backward`] works on. Nothing of it is constant.
#[derive(Clone, Copy, Debug)]
pub struct RopeTrainingBackward<'a> {
    /// The gradient of what [`rope_training`] gave: rows in bfloat16, `gradient_stride` elements apart.
    pub gradient: Slice<'a>,
    /// From the start of one row of `gradient` to the next, in elements.
    pub gradient_stride: usize,
    /// The norm, where there was one.
    pub norm: Option<HeadNormBackward<'a>>,
    /// `[rows, 2 * half]` in F32: cosines, then sines.
    pub phases: Slice<'a>,
    /// The gradient of the input: rows in bfloat16, `out_stride` elements apart; it may be the memory of `gradient` with the
    /// same stride.
    pub out: Slice<'a>,
    /// From the start of one row of `out` to the next, in elements.
    pub out_stride: usize,
    /// Rows.
    pub rows: usize,
    /// Heads of a row.
    pub heads: usize,
    /// Elements of a head.
    pub head_width: usize,
    /// Pairs of a head that were rotated.
    pub half: usize,
}

/// The norm of each head, on the way back.
#[derive(Clone, Copy, Debug)]
pub struct HeadNormBackward<'a> {
    /// The norm.
    pub norm: HeadNorm<'a>,
    /// What was normed: rows of `heads * head_width` elements in bfloat16, `x_stride` elements apart.
    pub x: Slice<'a>,
    /// From the start of one row of `x` to the next, in elements.
    pub x_stride: usize,
    /// The gradient of the norm's weight, with [`rope_training_workspace`] bytes of partial sums; none where it is frozen.
    pub weight_gradient: Option<NormWeightGradient<'a>>,
}

/// Bytes of [`NormWeightGradient::partials`] for heads of this width, however many rows there are.
///
/// # Errors
/// The size overflows.
pub fn rope_training_workspace(head_width: usize) -> Result<usize> {
    Form::F32.bytes(MOST_BLOCKS, head_width)
}

/// Norms each head where there is a norm, then turns its pairs: `out[i] = x[i] cos_i - x[i + half] sin_i`,
/// `out[i + half] = x[i + half] cos_i + x[i] sin_i`.
///
/// # Errors
/// A slice is too small, rows overlap, more pairs than a head has, or the launch fails.
pub fn rope_training(gpu: &Gpu, call: &RopeTraining<'_>) -> Result<()> {
    const NAME: &str = "rope of training";
    let RopeTraining { x, x_stride, phases, out, out_stride, rows, heads, head_width, half, norm } = *call;
    let weight = norm.map(|norm| norm.weight);
    let epsilon = norm.map_or(0.0, |norm| norm.epsilon);
    let heads = Heads { x, x_stride, weight, phases, out, out_stride, rows, heads, head_width, half };
    let (call, fits) = heads.call(NAME)?;
    let names = match norm {
        None => ["rope_training_64", "rope_training_128", "rope_training_256"],
        Some(_) => ["rope_training_norm_64", "rope_training_norm_128", "rope_training_norm_256"],
    };
    launch(gpu, names, fits, usize::MAX, &Call { epsilon, direction: 1.0, ..call })?;
    Ok(())
}

/// The gradient of what [`rope_training`] took: rotation by the negative angle, then the gradients of the norm.
///
/// # Errors
/// A slice is too small, rows overlap, more pairs than a head has, or the launch fails.
pub fn rope_training_backward(gpu: &Gpu, call: &RopeTrainingBackward<'_>) -> Result<()> {
    const NAME: &str = "rope of training backward";
    let RopeTrainingBackward { gradient, gradient_stride, phases, out, out_stride, .. } = *call;
    let RopeTrainingBackward { rows, heads, head_width, half, norm, .. } = *call;
    let row_width = heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?;
    let weight = norm.map(|back| back.norm.weight);
    let (x, x_stride) = (gradient, gradient_stride);
    let heads = Heads { x, x_stride, weight, phases, out, out_stride, rows, heads, head_width, half };
    let (call, mut fits) = heads.call(NAME)?;
    let call = Call { direction: -1.0, ..call };
    let Some(HeadNormBackward { norm, x, x_stride, weight_gradient }) = norm else {
        launch(gpu, ["rope_training_64", "rope_training_128", "rope_training_256"], fits, usize::MAX, &call)?;
        return Ok(());
    };
    let input = strided(NAME, "what was normed in bytes", x, Form::Bf16, [rows, x_stride, row_width])?;
    fits &= by(8, Form::Bf16, input, x_stride);
    let (partials, bytes) = (weight_gradient.map(|wanted| wanted.partials), rope_training_workspace(head_width)?);
    let partials = Slice::expect_optional(partials, NAME, "the partial sums in bytes", bytes)?;
    let names = ["rope_training_backward_64", "rope_training_backward_128", "rope_training_backward_256"];
    let call = Call { input, input_stride: x_stride as u64, partials, epsilon: norm.epsilon, ..call };
    let blocks = launch(gpu, names, fits, MOST_BLOCKS, &call)?;
    match &weight_gradient {
        Some(wanted) => add_partials(gpu, NAME, partials, blocks, wanted.out, head_width, wanted.add),
        None => Ok(()),
    }
}

/// Blocks at most where each leaves partial sums.
const MOST_BLOCKS: usize = 512;
/// Rows of a block, a warp each.
const ROWS: usize = 4;

/// Starts the kernel for this width of heads, or for any; how many blocks it has.
fn launch(gpu: &Gpu, names: [&'static str; 3], fits: bool, most: usize, call: &Call) -> Result<usize> {
    let (rows, heads) = (call.rows as usize, call.heads as usize);
    let (name, blocks, threads) = match call.head_width {
        ..=64 if fits => (names[0], rows.div_ceil(ROWS), 128),
        ..=128 if fits => (names[1], rows.div_ceil(ROWS), 128),
        ..=256 if fits => (names[2], rows.div_ceil(ROWS), 128),
        _ => ("rope_training_any", rows * heads, 32),
    };
    let blocks = blocks.min(most).min(i32::MAX as usize);
    let function = gpu.function("rope_training", name)?;
    let launch = Launch { grid: [blocks as u32, 1, 1], threads, shared_bytes: 0 };
    gpu.launch(&function, launch, Arguments::new().value(*call))?;
    Ok(blocks)
}

/// What both ways have.
struct Heads<'a> {
    x: Slice<'a>,
    x_stride: usize,
    weight: Option<Slice<'a>>,
    phases: Slice<'a>,
    out: Slice<'a>,
    out_stride: usize,
    rows: usize,
    heads: usize,
    head_width: usize,
    half: usize,
}

impl Heads<'_> {
    /// The kernel's argument, and whether rows, heads and phases can be read by 16 bytes.
    fn call(&self, name: &'static str) -> Result<(Call, bool)> {
        let Self { rows, heads, head_width, half, x_stride, out_stride, .. } = *self;
        let row_width = heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?;
        if half > head_width / 2 {
            return Err(Error::Shape {
                operation: name,
                what: "the pairs of a head",
                expected: head_width / 2,
                found: half,
            });
        }
        let x = strided(name, "the rows in bytes", self.x, Form::Bf16, [rows, x_stride, row_width])?;
        let out = strided(name, "the output in bytes", self.out, Form::Bf16, [rows, out_stride, row_width])?;
        let phases = self.phases.expect(name, "the phases in bytes", Form::F32.bytes(rows, 2 * half)?)?;
        let weight_bytes = Form::F32.bytes(1, head_width)?;
        let weight = Slice::expect_optional(self.weight, name, "the weight in bytes", weight_bytes)?;
        let fits = head_width.is_multiple_of(16)
            && half.is_multiple_of(8)
            && by(8, Form::Bf16, x, x_stride)
            && by(8, Form::Bf16, out, out_stride)
            && phases.is_multiple_of(16)
            && weight.is_multiple_of(16);
        let call = Call {
            x,
            input: 0,
            weight,
            phases,
            out,
            partials: 0,
            x_stride: x_stride as u64,
            input_stride: 0,
            out_stride: out_stride as u64,
            rows: int(name, rows)?,
            heads: int(name, heads)?,
            head_width: int(name, head_width)?,
            half: int(name, half)?,
            epsilon: 0.0,
            direction: 0.0,
        };
        Ok((call, fits))
    }
}

/// The kernels' argument: `Call` in `cuda/rope_training.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    x: u64,
    input: u64,
    weight: u64,
    phases: u64,
    out: u64,
    partials: u64,
    x_stride: u64,
    input_stride: u64,
    out_stride: u64,
    rows: i32,
    heads: i32,
    head_width: i32,
    half: i32,
    epsilon: f32,
    direction: f32,
}

// SAFETY: nine integers of eight bytes, then six numbers of four: without a gap.
unsafe impl NoUninit for Call {}
