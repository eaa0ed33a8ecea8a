//! The slow product for types that have no tiles: `cuda/linear_plain.cu`.

use ironloom_core::DType;

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{padded_int, strided},
    launch::{Arguments, Launch},
    weights::{WeightLayout, kernel_of},
};

/// The sizes and places of a [`linear_plain`] call.
#[derive(Clone, Copy, Debug)]
pub struct LinearPlain<'a> {
    /// [`Form::Split`] `[n, 2, cols]`.
    pub x: Slice<'a>,
    /// Rows of x.
    pub n: usize,
    /// The matrix `[rows, cols]`, as files store `dtype`, at an address that is a multiple of 16.
    pub matrix: Slice<'a>,
    /// Its type.
    pub dtype: DType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// f32 `[rows]`.
    pub bias: Option<Slice<'a>>,
    /// Whether the product is added to what `out` holds (a residual) or takes its place.
    pub add: bool,
    /// f32, `n` rows of `rows`.
    pub out: Slice<'a>,
    /// From one row of `out` to the next, in elements: `rows` where they follow each other.
    pub out_stride: usize,
}

/// `out = x W^T + bias`, or added to `out`. A row's bits do not depend on the other rows.
///
/// # Errors
/// A slice is too small, the type holds no weights, or the launch fails.
pub fn linear_plain(gpu: &Gpu, call: &LinearPlain<'_>) -> Result<()> {
    const OPERATION: &str = "linear_plain";
    let LinearPlain { x, n, matrix, dtype, rows, cols, bias, add, out, out_stride } = *call;
    let layout = WeightLayout::Plain(dtype);
    let name = kernel_of!("linear", layout)
        .ok_or_else(|| Error::Unsupported { operation: OPERATION, what: dtype.name().to_owned() })?;
    let x = x.expect(OPERATION, "the operand in bytes", Form::Split.bytes(n, cols)?)?;
    let matrix = matrix.expect(OPERATION, "the matrix in bytes", layout.bytes(rows, cols)?)?;
    let out = strided(OPERATION, "the result in bytes", out, Form::F32, [n, out_stride, rows])?;
    let bias = Slice::expect_optional(bias, OPERATION, "the bias in bytes", Form::F32.bytes(1, rows)?)?;
    if n == 0 {
        return Ok(());
    }
    // A warp has an output feature; of a narrow matrix, one for one or four rows of x. All add in the same order.
    let narrow =
        dtype == DType::F32 && rows.max(n) <= NARROW && cols.is_multiple_of(8) && (matrix | x).is_multiple_of(16);
    let (name, groups) = if !narrow {
        (name, 1)
    } else if rows * n <= WARPS_OF_MULTIPROCESSOR * gpu.properties().multiprocessors as usize {
        ("linear_plain_f32_narrow_1", n)
    } else {
        ("linear_plain_f32_narrow_4", n.div_ceil(4))
    };
    let grid = [rows.div_ceil(WARPS_PER_BLOCK) as u32, groups as u32, 1];
    let (n, rows) = (padded_int(OPERATION, "rows of x", n)?, padded_int(OPERATION, "output features", rows)?);
    let (cols, stride) =
        (padded_int(OPERATION, "input features", cols)?, padded_int(OPERATION, "the stride of out", out_stride)?);
    let function = gpu.function(OPERATION, name)?;
    let arguments = Arguments::new()
        .u64(out)
        .u64(matrix)
        .u64(x)
        .u64(bias)
        .i32(n)
        .i32(rows)
        .i32(cols)
        .i32(stride)
        .i32(i32::from(add));
    gpu.launch(&function, Launch { grid, threads: 32 * WARPS_PER_BLOCK as u32, shared_bytes: 0 }, arguments)
}

/// As in the kernels.
const WARPS_PER_BLOCK: usize = 4;
/// The most output features of a narrow matrix, and rows of x: more of them fill a card as they are.
const NARROW: usize = 512;
/// Warps that a multiprocessor runs at once.
const WARPS_OF_MULTIPROCESSOR: usize = 16;
