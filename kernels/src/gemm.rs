//! Products of many rows by our own tensor-core kernel, where cuBLASLt is absent.
//!
//! [`Product`] is also what [`CublasLt::matmul`](crate::CublasLt::matmul) takes. A row's result depends on the row and
//! the weights only: the same bits in a product of 17 rows and of 4,096.

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{aligned_to, int, multiple, strided, strided_by_eight},
    launch::{Arguments, Launch},
};

/// What becomes of the sums of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// They are stored in single precision.
    F32,
    /// They are stored as bfloat16.
    Bf16,
    /// They are added to what is there, in single precision: the residual stream.
    AddF32,
}

impl Output {
    /// How the result is stored.
    pub(crate) fn form(self) -> Form {
        if self == Self::Bf16 { Form::Bf16 } else { Form::F32 }
    }
}

/// `out[n, outputs] = x[n, inputs] weight[outputs, inputs]^T + bias[outputs]`, operands bfloat16, sums in single
/// precision.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// `[rows, inputs]` bfloat16; starts at a multiple of 16 bytes.
    pub x: Slice<'a>,
    /// Elements from one row of `x` to the next, a multiple of 8.
    pub x_stride: usize,
    /// `[outputs, inputs]` bfloat16; starts at a multiple of 16 bytes.
    pub weight: Slice<'a>,
    /// Elements from one row of `weight` to the next, a multiple of 8.
    pub weight_stride: usize,
    /// `[outputs]`, of the type of `out`.
    pub bias: Option<Slice<'a>>,
    /// `[rows, outputs]`; starts at a multiple of 16 bytes.
    pub out: Slice<'a>,
    /// Elements from one row of `out` to the next.
    pub out_stride: usize,
    /// The type of `out`, and whether the product is added to it.
    pub output: Output,
    /// Rows of `x` and `out`.
    pub rows: usize,
    /// Rows of `weight`.
    pub outputs: usize,
    /// The summed dimension, a multiple of 8.
    pub inputs: usize,
}

/// `out[m, n] = a[m, k] b[k, n]` (+ start), operands bfloat16 and each as it is or transposed, sums in single precision: the
/// products of training, forward and back.
#[derive(Clone, Copy, Debug)]
pub struct Multiply<'a> {
    /// `[m, k]`.
    pub a: Operand<'a>,
    /// `[k, n]`.
    pub b: Operand<'a>,
    /// `[m, n]`; starts at a multiple of 16 bytes.
    pub out: Slice<'a>,
    /// Elements from one row of `out` to the next.
    pub out_stride: usize,
    /// The type of `out`; [`Output::AddF32`] adds to what `out` holds.
    pub output: Output,
    /// What the product is added to instead of being set, in the type and layout of `out`.
    pub start: Option<Slice<'a>>,
    /// m, n and k.
    pub size: [usize; 3],
}

/// A matrix of a [`Multiply`].
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Its rows, or where it is transposed its columns; starts at a multiple of 16 bytes.
    pub slice: Slice<'a>,
    /// Elements from one of them to the next, a multiple of 8.
    pub stride: usize,
    /// Whether the rows in memory are the matrix's columns.
    pub transposed: bool,
}

impl<'a> Operand<'a> {
    /// Rows that are the matrix's rows.
    pub fn rows(slice: Slice<'a>, stride: usize) -> Self {
        Self { slice, stride, transposed: false }
    }

    /// Rows that are the matrix's columns.
    pub fn columns(slice: Slice<'a>, stride: usize) -> Self {
        Self { slice, stride, transposed: true }
    }

    fn address(&self, what: &'static str, [rows, columns]: [usize; 2]) -> Result<u64> {
        let (rows, width) = if self.transposed { (columns, rows) } else { (rows, columns) };
        strided_by_eight(OPERATION, what, self.slice, [rows, self.stride, width])
    }
}

impl Multiply<'_> {
    /// Where a, b and out lie, and what the product is added to.
    pub(crate) fn addresses(&self) -> Result<([u64; 3], Option<u64>)> {
        let [m, n, k] = self.size;
        let form = self.output.form();
        let a = self.a.address("a's size in bytes", [m, k])?;
        let b = self.b.address("b's size in bytes", [k, n])?;
        let out = result(OPERATION, self.out, form, [m, self.out_stride, n])?;
        let start = match self.start {
            Some(start) => Some(result(OPERATION, start, form, [m, self.out_stride, n])?),
            None => (self.output == Output::AddF32).then_some(out),
        };
        Ok(([a, b, out], start))
    }
}

const OPERATION: &str = "product of many rows";
/// As in `gemm/tile.cuh`.
const THREADS: u32 = 128;
const COLUMNS: usize = 128;

/// A product by the built-in kernel.
///
/// # Errors
/// A slice is too short, a stride or an address is not aligned, a size does not fit, or the driver fails.
pub fn gemm(gpu: &Gpu, call: &Product<'_>) -> Result<()> {
    let addresses = call.addresses()?;
    if call.rows == 0 || call.outputs == 0 {
        return Ok(());
    }
    let tile = TileRows::of(gpu, call.rows, call.outputs.div_ceil(COLUMNS));
    let name = match (call.output, tile) {
        (Output::F32, TileRows::Large) => "gemm_f32_rows128",
        (Output::F32, TileRows::Small) => "gemm_f32_rows64",
        (Output::Bf16, TileRows::Large) => "gemm_bf16_rows128",
        (Output::Bf16, TileRows::Small) => "gemm_bf16_rows64",
        (Output::AddF32, TileRows::Large) => "gemm_add_rows128",
        (Output::AddF32, TileRows::Small) => "gemm_add_rows64",
    };
    let arguments = Arguments::new()
        .u64(addresses.x)
        .u64(addresses.weight)
        .u64(addresses.bias)
        .u64(addresses.out)
        .i32(int(OPERATION, call.x_stride)?)
        .i32(int(OPERATION, call.weight_stride)?)
        .i32(int(OPERATION, call.out_stride)?)
        .i32(int(OPERATION, call.rows)?)
        .i32(int(OPERATION, call.outputs)?)
        .i32(int(OPERATION, call.inputs)?);
    let launch = tile.launch(OPERATION, call.rows.div_ceil(tile.rows()), call.outputs.div_ceil(COLUMNS))?;
    gpu.launch(&gpu.function("gemm", name)?, launch, arguments)
}

/// Where the parts of a product lie; a bias that is not there is at 0.
pub(crate) struct Addresses {
    pub(crate) x: u64,
    pub(crate) weight: u64,
    pub(crate) bias: u64,
    pub(crate) out: u64,
}

impl Product<'_> {
    /// The addresses, once the slices hold what the product touches.
    pub(crate) fn addresses(&self) -> Result<Addresses> {
        let form = self.output.form();
        let bias_bytes = form.bytes(1, self.outputs)?;
        Ok(Addresses {
            x: operand(OPERATION, "x's size in bytes", self.x, [self.rows, self.x_stride, self.inputs])?,
            weight: operand(
                OPERATION,
                "the weight's size in bytes",
                self.weight,
                [self.outputs, self.weight_stride, self.inputs],
            )?,
            bias: Slice::expect_optional(self.bias, OPERATION, "the bias's size in bytes", bias_bytes)?,
            out: result(OPERATION, self.out, form, [self.rows, self.out_stride, self.outputs])?,
        })
    }
}

/// How many rows a block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TileRows {
    /// 128: each operand read serves the most products.
    Large,
    /// 64: twice the blocks where there are fewer large tiles than multiprocessors.
    Small,
}

impl TileRows {
    fn of(gpu: &Gpu, rows: usize, column_tiles: usize) -> Self {
        let large = rows.div_ceil(Self::Large.rows()).saturating_mul(column_tiles);
        if rows <= 64 || large <= gpu.properties().multiprocessors as usize { Self::Small } else { Self::Large }
    }

    pub(crate) fn rows(self) -> usize {
        match self {
            Self::Large => 128,
            Self::Small => 64,
        }
    }

    /// Three stages of 64 columns of the tile's rows of x and of 128 rows of weights.
    pub(crate) fn launch(self, operation: &'static str, row_tiles: usize, column_tiles: usize) -> Result<Launch> {
        let tiles = int(operation, row_tiles.checked_mul(column_tiles).ok_or(Error::SizeOverflow)?)?;
        let shared_bytes = 3 * (self.rows() + COLUMNS) * 64 * 2;
        Ok(Launch { grid: [tiles as u32, 1, 1], threads: THREADS, shared_bytes: shared_bytes as u32 })
    }
}

/// The address of an operand: `rows` rows of `width` bfloat16, `stride` elements apart, which the kernels read in
/// pieces of 16 bytes.
pub(crate) fn operand(
    operation: &'static str,
    what: &'static str,
    slice: Slice<'_>,
    [rows, stride, width]: [usize; 3],
) -> Result<u64> {
    multiple(operation, "the summed dimension (needed: a multiple of)", width, 8)?;
    if width == 0 {
        return Err(Error::Shape { operation, what: "the summed dimension", expected: 8, found: 0 });
    }
    // The kernels count pieces of an operand in 32 bits.
    if u32::try_from(rows.checked_mul(stride / 8).ok_or(Error::SizeOverflow)?).is_err() {
        return Err(Error::SizeOverflow);
    }
    strided_by_eight(operation, what, slice, [rows, stride, width])
}

/// The address of a result: `rows` rows of `width` elements, `stride` apart, which the kernels write in pairs.
pub(crate) fn result(operation: &'static str, slice: Slice<'_>, form: Form, shape: [usize; 3]) -> Result<u64> {
    let what = "the result's size in bytes";
    aligned_to(16, operation, what, strided(operation, what, slice, form, shape)?)
}
