//! The gated half of a feed-forward block: the launcher of `cuda/gated_activation.cu`.

use crate::{
    Form, Gpu, Result, Slice,
    add::row_grid,
    checks::{by, int, strided},
    launch::{Arguments, Launch},
};

/// The activation of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu = 0,
    /// GELU in its tanh form.
    GeluTanh = 1,
}

/// What [`gated_activation`] works on.
#[derive(Clone, Copy, Debug)]
pub struct GatedActivation<'a> {
    /// Rows of `width` elements in `input_form`, `gate_stride` apart.
    pub gate: Slice<'a>,
    /// From one row of `gate` to the next, in elements.
    pub gate_stride: usize,
    /// Rows of `width` elements in `input_form`, `up_stride` apart. It may be the second half of `gate`'s buffer.
    pub up: Slice<'a>,
    /// From one row of `up` to the next, in elements.
    pub up_stride: usize,
    /// How `gate` and `up` are stored: F32 or bfloat16.
    pub input_form: Form,
    /// `[rows, width]` in `form`; not the memory of `gate` or `up`.
    pub out: Slice<'a>,
    /// How `out` is stored.
    pub form: Form,
    /// Rows.
    pub rows: usize,
    /// Elements of a row of `out`.
    pub width: usize,
    /// The activation.
    pub activation: Activation,
}

const THREADS: usize = 128;
/// From bfloat16 to bfloat16: what a block takes, by eight elements.
const EIGHTS_OF_BLOCK: u32 = 512;

/// `out[i, j] = act(gate[i, j]) * up[i, j]`.
///
/// # Errors
/// A slice is too small, rows overlap, the input's form is [`Form::Split`], or the launch fails.
pub fn gated_activation(gpu: &Gpu, call: &GatedActivation<'_>) -> Result<()> {
    const NAME: &str = "gated activation";
    let GatedActivation { gate_stride, up_stride, input_form, form, rows, width, .. } = *call;
    let gate = strided(NAME, "the gate in bytes", call.gate, input_form, [rows, gate_stride, width])?;
    let up = strided(NAME, "up in bytes", call.up, input_form, [rows, up_stride, width])?;
    let out = call.out.expect(NAME, "the output in bytes", form.bytes(rows, width)?)?;
    let vector = if input_form == Form::Bf16 { 8 } else { 4 };
    let vectors = width.is_multiple_of(vector)
        && by(vector, input_form, gate, gate_stride)
        && by(vector, input_form, up, up_stride)
        && out.is_multiple_of(16);
    let places = Arguments::new().u64(gate).u64(gate_stride as u64).u64(up).u64(up_stride as u64).u64(out);
    let sizes =
        |arguments: Arguments| Ok(arguments.i32(int(NAME, rows)?).i32(int(NAME, width)?).i32(call.activation as i32));
    let eights = rows.checked_mul(width / 8).and_then(|count| i32::try_from(count).ok());
    if let (true, Form::Bf16, Form::Bf16, Some(eights)) = (vectors, input_form, form, eights) {
        let grid = [(eights as u32).div_ceil(EIGHTS_OF_BLOCK), 1, 1];
        let launch = Launch { grid, threads: 256, shared_bytes: 0 };
        return gpu.launch(&gpu.function("gated_activation", "gated_activation_bf16")?, launch, sizes(places)?);
    }
    let (name, vector) = match (input_form, vectors) {
        (Form::F32, true) => ("gated_activation_f32", 4),
        (Form::F32, false) => ("gated_activation_f32_any", 1),
        _ => ("gated_activation_bf16_any", 1),
    };
    let arguments = sizes(places.i32(form as i32))?;
    let launch =
        Launch { grid: row_grid(width.div_ceil(vector), THREADS, rows)?, threads: THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("gated_activation", name)?, launch, arguments)
}
