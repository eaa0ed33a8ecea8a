//! Elementwise sums, factors and conversions: the launchers of `cuda/add.cu`.

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{by_vectors, int},
    launch::{Arguments, Launch},
};

/// Threads of a block of these kernels.
const THREADS: usize = 256;
/// Elements of a thread where it may take several.
const VECTOR: usize = 4;
/// Blocks from which on a block takes several places in turn.
const MOST_BLOCKS: usize = 8192;

/// Blocks for rows of `per_row` threads' work: a row along x, the rows along y, where a block takes several in turn past
/// the grid's limit.
pub(crate) fn row_grid(per_row: usize, threads: usize, rows: usize) -> Result<[u32; 3]> {
    let across = u32::try_from(per_row.div_ceil(threads)).map_err(|_| Error::SizeOverflow)?;
    Ok([across, rows.min(65_535) as u32, 1])
}

/// The kernel for an input's form, by vectors or by elements.
fn by_input(operation: &'static str, form: Form, vectors: bool, names: [&'static str; 4]) -> Result<&'static str> {
    match (form, vectors) {
        (Form::F32, true) => Ok(names[0]),
        (Form::Bf16, true) => Ok(names[1]),
        (Form::F32, false) => Ok(names[2]),
        (Form::Bf16, false) => Ok(names[3]),
        (Form::Split, _) => Err(Error::Unsupported { operation, what: "an input in two parts".to_owned() }),
    }
}

fn element_grid(count: usize, vectors: bool) -> [u32; 3] {
    let per_block = THREADS * if vectors { VECTOR } else { 1 };
    [count.div_ceil(per_block).min(MOST_BLOCKS) as u32, 1, 1]
}

/// `residual[i] += y[i]` for `count` elements: `residual` in F32, `y` in F32 or bfloat16.
///
/// # Errors
/// A slice is too small, the form is [`Form::Split`], or the launch fails.
pub fn add(gpu: &Gpu, residual: Slice<'_>, y: Slice<'_>, form: Form, count: usize) -> Result<()> {
    const NAME: &str = "add";
    let residual = residual.expect(NAME, "the residual in bytes", Form::F32.bytes(1, count)?)?;
    let y = y.expect(NAME, "the term in bytes", form.bytes(1, count)?)?;
    let vectors = by_vectors(count, &[residual, y]);
    let name = by_input(NAME, form, vectors, ["add_f32", "add_bf16", "add_f32_any", "add_bf16_any"])?;
    let launch = Launch { grid: element_grid(count, vectors), threads: THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("add", name)?, launch, Arguments::new().u64(residual).u64(y).u64(count as u64))
}

/// What [`add_gated_rows`] works on.
#[derive(Clone, Copy, Debug)]
pub struct AddGatedRows<'a> {
    /// `[rows, width]` in F32: the sums.
    pub residual: Slice<'a>,
    /// `[rows, width]` in `form`.
    pub y: Slice<'a>,
    /// F32 or bfloat16.
    pub form: Form,
    /// `[rows]` in F32.
    pub gate: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

/// `residual[i, j] += y[i, j] / (1 + e^-gate[i])`: the gate of a shared expert.
///
/// # Errors
/// A slice is too small, the form is [`Form::Split`], or the launch fails.
pub fn add_gated_rows(gpu: &Gpu, call: &AddGatedRows<'_>) -> Result<()> {
    const NAME: &str = "add gated rows";
    let AddGatedRows { form, rows, width, .. } = *call;
    let residual = call.residual.expect(NAME, "the residual in bytes", Form::F32.bytes(rows, width)?)?;
    let y = call.y.expect(NAME, "the rows to add in bytes", form.bytes(rows, width)?)?;
    let gate = call.gate.expect(NAME, "the gate in bytes", Form::F32.bytes(rows, 1)?)?;
    let vectors = by_vectors(width, &[residual, y]);
    let names = ["add_gated_rows_f32", "add_gated_rows_bf16", "add_gated_rows_f32_any", "add_gated_rows_bf16_any"];
    let name = by_input(NAME, form, vectors, names)?;
    let arguments = Arguments::new().u64(residual).u64(y).u64(gate).i32(int(NAME, rows)?).i32(int(NAME, width)?);
    gpu.launch(&gpu.function("add", name)?, row_launch(width, vectors, rows)?, arguments)
}

/// `x[i, j] += bias[j]` for `x [rows, width]` in `form` (F32 or bfloat16) and `bias [width]` in F32, which is constant: it
/// may be read before the kernel before has ended.
///
/// # Errors
/// A slice is too small, the form is [`Form::Split`], or the launch fails.
pub fn add_bias(gpu: &Gpu, x: Slice<'_>, form: Form, bias: Slice<'_>, rows: usize, width: usize) -> Result<()> {
    const NAME: &str = "add bias";
    let x = x.expect(NAME, "the rows in bytes", form.bytes(rows, width)?)?;
    let bias = bias.expect(NAME, "the bias in bytes", Form::F32.bytes(1, width)?)?;
    let vectors = by_vectors(width, &[x, bias]);
    let names = ["add_bias_f32", "add_bias_bf16", "add_bias_f32_any", "add_bias_bf16_any"];
    let name = by_input(NAME, form, vectors, names)?;
    let arguments = Arguments::new().u64(x).u64(bias).i32(int(NAME, rows)?).i32(int(NAME, width)?);
    gpu.launch(&gpu.function("add", name)?, row_launch(width, vectors, rows)?, arguments)
}

/// `x[i] *= factor` for `count` elements in F32.
///
/// # Errors
/// The slice is too small, or the launch fails.
pub fn scale(gpu: &Gpu, x: Slice<'_>, factor: f32, count: usize) -> Result<()> {
    let x = x.expect("scale", "the elements in bytes", Form::F32.bytes(1, count)?)?;
    let vectors = by_vectors(count, &[x]);
    let launch = Launch { grid: element_grid(count, vectors), threads: THREADS as u32, shared_bytes: 0 };
    let function = gpu.function("add", if vectors { "scale" } else { "scale_any" })?;
    gpu.launch(&function, launch, Arguments::new().u64(x).f32(factor).u64(count as u64))
}

/// `out[i, j] = x[i, j]` for `x [rows, width]` in F32 and `out` in `form`, bfloat16 or two parts.
///
/// # Errors
/// A slice is too small, the form is [`Form::F32`] (nothing to convert), or the launch fails.
pub fn convert(gpu: &Gpu, x: Slice<'_>, out: Slice<'_>, form: Form, rows: usize, width: usize) -> Result<()> {
    const NAME: &str = "convert";
    if form == Form::F32 {
        return Err(Error::Unsupported { operation: NAME, what: "F32 to F32".to_owned() });
    }
    let x = x.expect(NAME, "the input in bytes", Form::F32.bytes(rows, width)?)?;
    let out = out.expect(NAME, "the output in bytes", form.bytes(rows, width)?)?;
    let vectors = by_vectors(width, &[x, out]);
    let function = gpu.function("add", if vectors { "convert" } else { "convert_any" })?;
    let arguments = Arguments::new().u64(x).u64(out).i32(form as i32).i32(int(NAME, rows)?).i32(int(NAME, width)?);
    gpu.launch(&function, row_launch(width, vectors, rows)?, arguments)
}

fn row_launch(width: usize, vectors: bool, rows: usize) -> Result<Launch> {
    let per_row = if vectors { width / VECTOR } else { width };
    Ok(Launch { grid: row_grid(per_row, THREADS, rows)?, threads: THREADS as u32, shared_bytes: 0 })
}
