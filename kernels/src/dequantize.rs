//! Rows of a weight matrix as bfloat16, for products of many rows: `cuda/dequantize.cu`.

use crate::{
    Error, Gpu, Result, Slice,
    checks::padded_int,
    launch::{Arguments, Launch},
    weights::{TILE_ROWS, TileFormat, WeightLayout, kernel_of},
};

/// The sizes and places of a [`dequantize`] call.
#[derive(Clone, Copy, Debug)]
pub struct Dequantize<'a> {
    /// The matrix `[rows, cols]`, in `layout`, at an address that is a multiple of 16.
    pub matrix: Slice<'a>,
    /// How it lies.
    pub layout: WeightLayout,
    /// Its rows, all of them.
    pub rows: usize,
    /// Its columns, without padding.
    pub cols: usize,
    /// The first row to unpack; whole tiles (a multiple of 16) are fastest.
    pub first_row: usize,
    /// How many rows to unpack.
    pub count: usize,
    /// bfloat16 `[count, padded_cols]`, see [`WeightLayout::padded_cols`]; the padding becomes zero.
    pub out: Slice<'a>,
}

/// Unpacks rows of a weight matrix: each weight as the host reads it, rounded to bfloat16 (to nearest, ties to even).
///
/// # Errors
/// The rows are not there, a slice is too small, the type holds no weights, or the launch fails.
pub fn dequantize(gpu: &Gpu, call: &Dequantize<'_>) -> Result<()> {
    const OPERATION: &str = "dequantize";
    let Dequantize { matrix, layout, rows, cols, first_row, count, out } = *call;
    let name = kernel_of!("dequantize", layout)
        .ok_or_else(|| Error::Unsupported { operation: OPERATION, what: format!("{layout:?}") })?;
    let end = first_row.checked_add(count).ok_or(Error::SizeOverflow)?;
    if end > rows {
        return Err(Error::Shape { operation: OPERATION, what: "rows of the matrix", expected: end, found: rows });
    }
    let matrix = matrix.expect(OPERATION, "the matrix in bytes", layout.bytes(rows, cols)?)?;
    let (rows, cols_i32) = (padded_int(OPERATION, "rows", rows)?, padded_int(OPERATION, "columns", cols)?);
    let padded = WeightLayout::padded_cols(cols);
    let out_bytes = padded.checked_mul(2).and_then(|row| row.checked_mul(count)).ok_or(Error::SizeOverflow)?;
    let out = out.expect(OPERATION, "the unpacked rows in bytes", out_bytes)?;
    if count == 0 || cols == 0 {
        return Ok(());
    }
    let arguments = Arguments::new().u64(out).u64(matrix).i32(rows).i32(cols_i32).i32(first_row as i32);
    let function = gpu.function(OPERATION, name)?;
    match layout {
        WeightLayout::Plain(_) | WeightLayout::Tiles(TileFormat::Bf16) => {
            // A thread has eight columns.
            let grid = [count as u32, (padded / 8).div_ceil(ROW_THREADS) as u32, 1];
            gpu.launch(&function, Launch { grid, threads: ROW_THREADS as u32, shared_bytes: 0 }, arguments)
        }
        WeightLayout::Tiles(_) => {
            let tiles = end.div_ceil(TILE_ROWS) - first_row / TILE_ROWS;
            // A warp has a chunk of a tile.
            let items = tiles.checked_mul(padded / 64).ok_or(Error::SizeOverflow)?;
            padded_int(OPERATION, "chunks of 16 rows and 64 columns", items)?;
            let grid = [items.div_ceil(WARPS_PER_BLOCK) as u32, 1, 1];
            let launch = Launch { grid, threads: 32 * WARPS_PER_BLOCK as u32, shared_bytes: 0 };
            gpu.launch(&function, launch, arguments.i32(count as i32))
        }
    }
}

/// As in the kernels.
const WARPS_PER_BLOCK: usize = 8;
/// As in the kernels.
const ROW_THREADS: usize = 128;
