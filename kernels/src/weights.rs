//! How a weight matrix lies on the device: what the host's packer made, and what kernels take.
//!
//! The bytes of each format are described in `cuda/vocabulary/tiles.cuh` and `cuda/vocabulary/blocks.cuh`; `tiles` of ironloom-quant
//! makes them.

use ironloom_core::DType;

use crate::{Error, Result};

/// A format that products of few rows read straight into tensor-core registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum TileFormat {
    /// Rows of bfloat16, each padded with zeros to 64 columns; no tiles.
    Bf16,
    /// Signed bytes, one f32 scale a row.
    Int8,
    /// NormalFloat4, one f32 absmax for 64 columns.
    Nf4,
    /// Four-bit integers, one f32 scale for 64 columns.
    Int4,
    /// Four-bit integers, one f16 scale for 32 columns.
    Q4_0,
    /// Four-bit integers, f16 scale and minimum for 32 columns.
    Q4_1,
    /// Signed bytes, one f16 scale for 32 columns.
    Q8_0,
    /// Four-bit integers, scale and minimum for 32 columns, their factors for 256.
    Q4_K,
    /// Six-bit integers, one scale for 16 columns, its factor for 256.
    Q6_K,
}

/// How a weight matrix lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightLayout {
    /// In tiles of 16 rows.
    Tiles(TileFormat),
    /// Row-major, as files store the type; for types without tiles.
    Plain(DType),
}

impl WeightLayout {
    /// Bytes of a matrix `[rows, cols]`.
    ///
    /// # Errors
    /// A row is not whole blocks of a stored type, or the size overflows.
    pub fn bytes(self, rows: usize, cols: usize) -> Result<usize> {
        let (codes, scales, row_bytes) = match self {
            Self::Plain(dtype) => {
                let row = dtype.bytes_for(cols).map_err(|_| Error::Unsupported {
                    operation: "a weight matrix",
                    what: format!("{cols} columns of {dtype}, which has blocks of {}", dtype.block_elements()),
                })?;
                return row.checked_mul(rows).ok_or(Error::SizeOverflow);
            }
            Self::Tiles(format) => match format {
                TileFormat::Bf16 => {
                    let padded = cols.checked_next_multiple_of(CHUNK).ok_or(Error::SizeOverflow)?;
                    return padded.checked_mul(2).and_then(|row| row.checked_mul(rows)).ok_or(Error::SizeOverflow);
                }
                TileFormat::Int8 => (1024, 0, 4),
                TileFormat::Nf4 | TileFormat::Int4 | TileFormat::Q4_0 => (512, 256, 0),
                TileFormat::Q4_1 => (512, 512, 0),
                TileFormat::Q8_0 => (1024, 256, 0),
                TileFormat::Q4_K => (512, 320, 0),
                TileFormat::Q6_K => (768, 288, 0),
            },
        };
        let chunks = cols.div_ceil(CHUNK);
        let tile = chunks.checked_mul(codes).and_then(|bytes| bytes.checked_add(chunks.div_ceil(4) * scales));
        let tile = tile.and_then(|bytes| bytes.checked_add(row_bytes * TILE_ROWS)).ok_or(Error::SizeOverflow)?;
        rows.div_ceil(TILE_ROWS).checked_mul(tile).ok_or(Error::SizeOverflow)
    }

    /// Columns of a row once padded: what [`dequantize`](crate::dequantize()) writes of each row.
    pub fn padded_cols(cols: usize) -> usize {
        cols.next_multiple_of(CHUNK)
    }
}

/// Columns that the tiles keep together.
const CHUNK: usize = 64;
/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;

/// The kernel of an operation for a layout: `operation_tiles_nf4`, `operation_plain_q5_k`; `None` for types that hold no
/// weights.
macro_rules! kernel_of {
    ($operation:literal, $layout:expr) => {{
        use ironloom_core::DType;
        use $crate::weights::{TileFormat, WeightLayout};
        match $layout {
            WeightLayout::Tiles(TileFormat::Bf16) => Some(concat!($operation, "_tiles_bf16")),
            WeightLayout::Tiles(TileFormat::Int8) => Some(concat!($operation, "_tiles_int8")),
            WeightLayout::Tiles(TileFormat::Nf4) => Some(concat!($operation, "_tiles_nf4")),
            WeightLayout::Tiles(TileFormat::Int4) => Some(concat!($operation, "_tiles_int4")),
            WeightLayout::Tiles(TileFormat::Q4_0) => Some(concat!($operation, "_tiles_q4_0")),
            WeightLayout::Tiles(TileFormat::Q4_1) => Some(concat!($operation, "_tiles_q4_1")),
            WeightLayout::Tiles(TileFormat::Q8_0) => Some(concat!($operation, "_tiles_q8_0")),
            WeightLayout::Tiles(TileFormat::Q4_K) => Some(concat!($operation, "_tiles_q4_k")),
            WeightLayout::Tiles(TileFormat::Q6_K) => Some(concat!($operation, "_tiles_q6_k")),
            WeightLayout::Plain(DType::F32) => Some(concat!($operation, "_plain_f32")),
            WeightLayout::Plain(DType::F16) => Some(concat!($operation, "_plain_f16")),
            WeightLayout::Plain(DType::BF16) => Some(concat!($operation, "_plain_bf16")),
            WeightLayout::Plain(DType::Q4_0) => Some(concat!($operation, "_plain_q4_0")),
            WeightLayout::Plain(DType::Q4_1) => Some(concat!($operation, "_plain_q4_1")),
            WeightLayout::Plain(DType::Q5_0) => Some(concat!($operation, "_plain_q5_0")),
            WeightLayout::Plain(DType::Q5_1) => Some(concat!($operation, "_plain_q5_1")),
            WeightLayout::Plain(DType::Q8_0) => Some(concat!($operation, "_plain_q8_0")),
            WeightLayout::Plain(DType::Q2_K) => Some(concat!($operation, "_plain_q2_k")),
            WeightLayout::Plain(DType::Q3_K) => Some(concat!($operation, "_plain_q3_k")),
            WeightLayout::Plain(DType::Q4_K) => Some(concat!($operation, "_plain_q4_k")),
            WeightLayout::Plain(DType::Q5_K) => Some(concat!($operation, "_plain_q5_k")),
            WeightLayout::Plain(DType::Q6_K) => Some(concat!($operation, "_plain_q6_k")),
            WeightLayout::Plain(_) => None,
        }
    }};
}
pub(crate) use kernel_of;
