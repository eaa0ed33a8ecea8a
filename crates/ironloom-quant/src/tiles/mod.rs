//! Weight matrices as an accelerator reads them: [`TiledMatrix`].
//!
//! The kernels multiply by 16 x 16 pieces of a matrix that lie in the registers of 32 lanes, so the matrix is laid out once,
//! here on the host, such that a lane finds all its codes of 64 columns in one 16-byte load. Codes and scales stay exactly
//! those that were stored; only the order of the bytes changes. This module packs, and reads single rows back for tests and
//! references; it multiplies nothing.
//!
//! A matrix lies in tiles of 16 rows (padded with zero weights), a tile in chunks of 64 columns (padded likewise), and chunks
//! in records of up to four: the codes of its chunks, then the scales of four. `layout.rs` has the bytes. BF16 is no tile:
//! rows in order, padded with zeros to 64 columns. A type without a tile form stays as it is stored
//! ([`DeviceFormat::Plain`]), for slower kernels.
//!
//! ```
//! use ironloom_core::Threads;
//! use ironloom_quant::{WeightFormat, tiles::{DeviceFormat, TileFormat, TiledMatrix}};
//! let values: Vec<f32> = (0..3 * 70).map(|i| i as f32 - 100.0).collect();
//! let matrix = TiledMatrix::from_f32(&values, 3, 70, WeightFormat::Int8, &Threads::new(1))?;
//! assert_eq!(matrix.format(), DeviceFormat::Tiles(TileFormat::Int8));
//! let mut row = [0.0; 70];
//! matrix.row(1, &mut row)?;
//! assert!(row.iter().zip(&values[70..]).all(|(read, value)| (read - value).abs() <= 0.3));
//! # Ok::<(), ironloom_quant::Error>(())
//! ```

mod layout;
mod pack;
mod read;
#[cfg(test)]
mod tests;

use ironloom_core::DType;

use crate::{Error, Result, packed::WeightFormat};

/// A format whose bytes are laid out for tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum TileFormat {
    /// bfloat16 rows in order, each padded with zeros to 64 columns.
    Bf16,
    /// Signed bytes with one f32 scale per row: [`int8_rows`](crate::formats::int8_rows).
    Int8,
    /// NormalFloat4 in blocks of 64 with an f32 absmax, the levels rounded to bfloat16:
    /// [`blocks64`](crate::formats::blocks64).
    Nf4,
    /// Four-bit integers in blocks of 64 with an f32 scale, a seventh of the absmax of
    /// [`blocks64`](crate::formats::blocks64).
    Int4,
    /// GGML's Q4_0.
    Q4_0,
    /// GGML's Q4_1.
    Q4_1,
    /// GGML's Q8_0 without the code -128.
    Q8_0,
    /// GGML's Q4_K.
    Q4_K,
    /// GGML's Q6_K.
    Q6_K,
}

/// How a weight matrix is held on an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceFormat {
    /// Laid out for tensor cores.
    Tiles(TileFormat),
    /// Row-major, as the type is stored: for types that have no tiles.
    Plain(DType),
}

impl DeviceFormat {
    /// What [`TiledMatrix::from_stored`] makes of weights stored as `dtype`.
    ///
    /// A Q8_0 matrix with a code of -128, which packers do not write, becomes [`DeviceFormat::Plain`] although this says
    /// tiles: that takes looking at the weights.
    ///
    /// # Errors
    /// `dtype` holds no weights.
    pub fn of(dtype: DType, format: WeightFormat) -> Result<Self> {
        if crate::formats::codes::layout(dtype).is_none() && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            let supported = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K";
            return Err(Error::Unsupported { operation: "tile", dtype, supported });
        }
        Ok(match (format, dtype) {
            (WeightFormat::F32, _) => Self::Plain(DType::F32),
            (WeightFormat::Bf16, _) | (WeightFormat::Keep, DType::BF16) => Self::Tiles(TileFormat::Bf16),
            (WeightFormat::Int8, _) => Self::Tiles(TileFormat::Int8),
            (WeightFormat::Int4, _) => Self::Tiles(TileFormat::Int4),
            (WeightFormat::Nf4, _) => Self::Tiles(TileFormat::Nf4),
            (WeightFormat::Keep, DType::Q4_0) => Self::Tiles(TileFormat::Q4_0),
            (WeightFormat::Keep, DType::Q4_1) => Self::Tiles(TileFormat::Q4_1),
            (WeightFormat::Keep, DType::Q8_0) => Self::Tiles(TileFormat::Q8_0),
            (WeightFormat::Keep, DType::Q4_K) => Self::Tiles(TileFormat::Q4_K),
            (WeightFormat::Keep, DType::Q6_K) => Self::Tiles(TileFormat::Q6_K),
            (WeightFormat::Keep, other) => Self::Plain(other),
        })
    }

    /// Bytes that a matrix `[rows, cols]` takes.
    ///
    /// # Errors
    /// A row is not whole blocks of the type, or the size overflows.
    pub fn bytes_for(self, rows: usize, cols: usize) -> Result<usize> {
        let overflow = ironloom_core::Error::SizeOverflow;
        let bytes = match self {
            Self::Plain(dtype) => dtype.bytes_for(cols)?.checked_mul(rows),
            Self::Tiles(format) => layout::bytes_for(format, rows, cols),
        };
        Ok(bytes.ok_or(overflow)?)
    }

    /// The format's name, such as `Q4_1` or `NF4`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(dtype) => dtype.name(),
            Self::Tiles(TileFormat::Bf16) => "BF16",
            Self::Tiles(TileFormat::Int8) => "int8",
            Self::Tiles(TileFormat::Nf4) => "NF4",
            Self::Tiles(TileFormat::Int4) => "int4",
            Self::Tiles(TileFormat::Q4_0) => "Q4_0",
            Self::Tiles(TileFormat::Q4_1) => "Q4_1",
            Self::Tiles(TileFormat::Q8_0) => "Q8_0",
            Self::Tiles(TileFormat::Q4_K) => "Q4_K",
            Self::Tiles(TileFormat::Q6_K) => "Q6_K",
        }
    }
}

/// A weight matrix `[rows, cols]` in the bytes that an accelerator takes.
pub struct TiledMatrix {
    rows: usize,
    cols: usize,
    format: DeviceFormat,
    bytes: Box<[u8]>,
}

impl TiledMatrix {
    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How it is held.
    pub fn format(&self) -> DeviceFormat {
        self.format
    }

    /// All of it, as it goes to the device.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// All of it, as it goes to the device.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_vec()
    }
}

impl std::fmt::Debug for TiledMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TiledMatrix({} [{}, {}], {} bytes)", self.format.name(), self.rows, self.cols, self.bytes.len())
    }
}
