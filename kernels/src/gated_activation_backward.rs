//! The gradients of the gated half of a feed-forward block: the launcher of `cuda/gated_activation_backward.cu`.

use bytemuck::NoUninit;

use crate::{
    Activation, Error, Form, Gpu, Result, Slice,
    add::row_grid,
    checks::{by, int, strided},
    launch::{Arguments, Launch},
};

/// Columns in bfloat16: the slice starts at the first one, and rows are `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// From the first row's first element on.
    pub slice: Slice<'a>,
    /// From the start of one row to the next, in elements.
    pub stride: usize,
}

/// What [`gated_activation_backward`] works on: all `[rows, width]` in bfloat16.
#[derive(Clone, Copy, Debug)]
pub struct GatedActivationBackward<'a> {
    /// What the activation took.
    pub gate: Columns<'a>,
    /// What it was multiplied by.
    pub up: Columns<'a>,
    /// The gradient of the product.
    pub gradient: Columns<'a>,
    /// The gradient of `gate`; it may be the memory of `gate` with the same stride.
    pub gate_gradient: Columns<'a>,
    /// The gradient of `up`; it may be the memory of `up` with the same stride.
    pub up_gradient: Columns<'a>,
    /// The product `act(gate) * up` once more, where it was not kept; it may be the memory of `gradient` with the same stride.
    pub product: Option<Columns<'a>>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// The activation.
    pub activation: Activation,
}

const NAME: &str = "gated activation backward";
/// Threads of a block at most.
const THREADS: usize = 256;

/// For `y = act(gate) * up` and the gradient `g` of `y`: `gate_gradient = g * up * act'(gate)`,
/// `up_gradient = g * act(gate)`, `product = y`.
///
/// # Errors
/// A slice is too small, rows overlap, or the launch fails.
pub fn gated_activation_backward(gpu: &Gpu, call: &GatedActivationBackward<'_>) -> Result<()> {
    let (arguments, vectors) = checked(call, 0)?;
    let GatedActivationBackward { rows, width, .. } = *call;
    let (name, per_row) = match vectors {
        true => ("gated_activation_backward", width / 8),
        false => ("gated_activation_backward_any", width),
    };
    // As many threads as cover a row in the fewest blocks: a row of 1,536 takes one block of 192.
    let across = per_row.div_ceil(THREADS).max(1);
    let threads = per_row.div_ceil(across).next_multiple_of(32).max(32);
    let launch = Launch { grid: row_grid(per_row, threads, rows)?, threads: threads as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("gated_activation_backward", name)?, launch, arguments)
}

/// [`gated_activation_backward`], and `dots[row]`, `[rows]` in F32: the sum of `g * y` over the row. Columns start at
/// multiples of 16 bytes; strides and the width are multiples of 8.
///
/// # Errors
/// A slice is too small or not aligned, rows overlap, or the launch fails.
pub fn gated_activation_backward_dots(gpu: &Gpu, call: &GatedActivationBackward<'_>, dots: Slice<'_>) -> Result<()> {
    let bytes = call.rows.checked_mul(4).ok_or(Error::SizeOverflow)?;
    let (arguments, vectors) = checked(call, dots.expect(NAME, "the dots in bytes", bytes)?)?;
    if !vectors {
        let what = "dots of columns that are not aligned to eight elements".to_owned();
        return Err(Error::Unsupported { operation: NAME, what });
    }
    let grid = [int(NAME, call.rows.div_ceil(THREADS / 32))? as u32, 1, 1];
    let launch = Launch { grid, threads: THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("gated_activation_backward", "gated_activation_backward_dots")?, launch, arguments)
}

/// The kernels' argument, and whether all of it is aligned to eight elements.
fn checked(call: &GatedActivationBackward<'_>, dots: u64) -> Result<(Arguments, bool)> {
    let GatedActivationBackward { rows, width, .. } = *call;
    let mut vectors = width.is_multiple_of(8);
    let mut place = |columns: Columns<'_>, what: &'static str| -> Result<u64> {
        let address = strided(NAME, what, columns.slice, Form::Bf16, [rows, columns.stride, width])?;
        vectors &= by(8, Form::Bf16, address, columns.stride);
        Ok(address)
    };
    let argument = Call {
        gate: place(call.gate, "the gate in bytes")?,
        up: place(call.up, "up in bytes")?,
        gradient: place(call.gradient, "the gradient in bytes")?,
        gate_gradient: place(call.gate_gradient, "the gate's gradient in bytes")?,
        up_gradient: place(call.up_gradient, "the gradient of up in bytes")?,
        product: call.product.map_or(Ok(0), |product| place(product, "the product in bytes"))?,
        dots,
        gate_stride: call.gate.stride as u64,
        up_stride: call.up.stride as u64,
        gradient_stride: call.gradient.stride as u64,
        gate_gradient_stride: call.gate_gradient.stride as u64,
        up_gradient_stride: call.up_gradient.stride as u64,
        product_stride: call.product.map_or(0, |product| product.stride as u64),
        rows: int(NAME, rows)?,
        width: int(NAME, width)?,
        activation: call.activation as i32,
        unused: 0,
    };
    Ok((Arguments::new().value(argument), vectors))
}

/// The kernels' argument: `Call` in `cuda/gated_activation_backward.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    gate: u64,
    up: u64,
    gradient: u64,
    gate_gradient: u64,
    up_gradient: u64,
    product: u64,
    dots: u64,
    gate_stride: u64,
    up_stride: u64,
    gradient_stride: u64,
    gate_gradient_stride: u64,
    up_gradient_stride: u64,
    product_stride: u64,
    rows: i32,
    width: i32,
    activation: i32,
    unused: i32,
}

// SAFETY: thirteen integers of eight bytes, then four of four: without a gap.
unsafe impl NoUninit for Call {}
