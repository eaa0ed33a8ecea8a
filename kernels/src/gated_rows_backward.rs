//! The way back through rows weighted by a sigmoid: the launcher of `cuda/gated_rows_backward.cu`.

use crate::{
    Form, Gpu, Result, Slice,
    checks::{int, multiple},
    gemm::result,
    launch::{Arguments, Launch},
};

/// What [`gated_rows_backward`] works on. Slices start at multiples of 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct GatedRowsBackward<'a> {
    /// `[rows, width]` in F32: the gradient of the sum.
    pub gradient: Slice<'a>,
    /// `[rows, width]` in F32: what was weighted.
    pub y: Slice<'a>,
    /// `[rows]` in F32.
    pub gate: Slice<'a>,
    /// `[rows, width]` in bfloat16, written.
    pub y_gradient: Slice<'a>,
    /// `[rows, 8]` in bfloat16, written: the gradient of the gate, then zeros.
    pub gate_gradient: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row, a multiple of 4.
    pub width: usize,
}

const WARPS: usize = 8;

/// For `out[i] = residual[i] + s_i y[i]` with `s_i = 1 / (1 + e^-gate[i])` and the gradient `g` of `out`:
/// `y_gradient[i] = s_i g[i]`, `gate_gradient[i] = s_i (1 - s_i) g[i] . y[i]`.
///
/// # Errors
/// A slice is too small or not aligned, the width is no multiple of 4, or the launch fails.
pub fn gated_rows_backward(gpu: &Gpu, call: &GatedRowsBackward<'_>) -> Result<()> {
    const NAME: &str = "gated rows backward";
    let GatedRowsBackward { rows, width, .. } = *call;
    multiple(NAME, "the width (needed: a multiple of)", width, 4)?;
    let arguments = Arguments::new()
        .u64(result(NAME, call.gradient, Form::F32, [rows, width, width])?)
        .u64(result(NAME, call.y, Form::F32, [rows, width, width])?)
        .u64(call.gate.expect(NAME, "the gate in bytes", Form::F32.bytes(rows, 1)?)?)
        .u64(result(NAME, call.y_gradient, Form::Bf16, [rows, width, width])?)
        .u64(result(NAME, call.gate_gradient, Form::Bf16, [rows, 8, 8])?)
        .i32(int(NAME, rows)?)
        .i32(int(NAME, width)?);
    let launch =
        Launch { grid: [int(NAME, rows.div_ceil(WARPS))? as u32, 1, 1], threads: 32 * WARPS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("gated_rows_backward", "gated_rows_backward")?, launch, arguments)
}
