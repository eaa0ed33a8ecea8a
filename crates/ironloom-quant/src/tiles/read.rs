//! Reading single rows of a [`TiledMatrix`]: the plain reading that the kernels are checked against.

use half::{bf16, f16};

use super::{
    DeviceFormat, TileFormat, TiledMatrix,
    layout::{self, CHUNK, ROWS, place},
};
use crate::{
    Error, Result,
    formats::{blocks64::CodeBook, unpack},
};

impl TiledMatrix {
    /// Unpacks row `row` into `out`: the weights that kernels multiply with, bit for bit.
    ///
    /// # Errors
    /// There is no such row, or `out` is not `cols` long.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        if row >= self.rows {
            return Err(Error::Row { row, rows: self.rows });
        }
        if out.len() != self.cols {
            return Err(Error::Length { what: "a row's weights", expected: self.cols, found: out.len() });
        }
        let format = match self.format {
            DeviceFormat::Plain(dtype) => {
                let row_bytes = dtype.bytes_for(self.cols)?;
                return unpack(dtype, &self.bytes[row * row_bytes..][..row_bytes], out);
            }
            DeviceFormat::Tiles(TileFormat::Bf16) => {
                let stride = 2 * self.cols.next_multiple_of(CHUNK);
                for (out, &bytes) in out.iter_mut().zip(self.bytes[row * stride..][..stride].as_chunks().0) {
                    *out = bf16::from_le_bytes(bytes).to_f32();
                }
                return Ok(());
            }
            DeviceFormat::Tiles(format) => format,
        };
        let overflow = ironloom_core::Error::SizeOverflow;
        let unit = layout::tile_bytes(format, self.cols).ok_or(overflow)?;
        let (tiles, row_scales) = self.bytes.split_at(unit * self.rows.div_ceil(ROWS));
        let tile = &tiles[row / ROWS * unit..][..unit];
        for (chunk, out) in out.chunks_mut(CHUNK).enumerate() {
            let place = place(format, self.cols, chunk);
            let (codes, scales) = (&tile[place.codes..], &tile[place.scales..]);
            for (column, out) in out.iter_mut().enumerate() {
                let code = code(format, codes, row % ROWS, column);
                let (scale, minimum) = match format {
                    TileFormat::Int8 => (f32_at(row_scales, row), NO_MINIMUM),
                    _ => scale(format, scales, row % ROWS, place.index * CHUNK + column),
                };
                *out = scale * code + minimum;
            }
        }
        Ok(())
    }
}

/// Adding it keeps every weight, the sign of zero included.
const NO_MINIMUM: f32 = -0.0;

/// What scale and minimum of a weight are multiplied with and added to.
fn code(format: TileFormat, codes: &[u8], r: usize, column: usize) -> f32 {
    let (upper, j, e) = (r / 8, column % 4 / 2, column % 2);
    let i = 2 * j + upper;
    let (step, t) = match format {
        TileFormat::Q6_K => (column / 16, column % 16 / 4),
        _ => (2 * (column / 32) + column % 8 / 4, column % 32 / 8),
    };
    let lane = r % 8 * 4 + t;
    let word = |at: usize| u32::from_le_bytes([codes[at], codes[at + 1], codes[at + 2], codes[at + 3]]);
    match format {
        TileFormat::Int8 | TileFormat::Q8_0 => {
            let byte = codes[step / 2 * 512 + lane * 16 + step % 2 * 8 + i * 2 + e];
            let magnitude = f32::from(byte & 127);
            if byte & 128 == 0 { magnitude } else { -magnitude }
        }
        TileFormat::Nf4 => {
            let code = word(lane * 16 + step * 4) >> (8 * i + 4 * e) & 15;
            bf16::from_f32(CodeBook::Nf4.levels()[code as usize]).to_f32()
        }
        _ => {
            let low = (word(lane * 16 + step * 4) >> (4 * i + 16 * e) & 15) as f32;
            match format {
                TileFormat::Q6_K => {
                    let high = word(512 + lane * 8 + step / 2 * 4) >> (8 * (step % 2) + 2 * i + 16 * e) & 3;
                    low + (16 * high) as f32 - 32.0
                }
                TileFormat::Q4_0 | TileFormat::Int4 => low - 8.0,
                _ => low,
            }
        }
    }
}

/// Scale and minimum of row `r` at column `column` of a record.
fn scale(format: TileFormat, scales: &[u8], r: usize, column: usize) -> (f32, f32) {
    let block = r * 8 + column / 32;
    match format {
        TileFormat::Nf4 | TileFormat::Int4 => (f32_at(scales, r * 4 + column / 64), NO_MINIMUM),
        TileFormat::Q4_1 => (f16_at(scales, 2 * block), f16_at(scales, 2 * block + 1)),
        TileFormat::Q4_K => {
            let (scale, minimum) = (f32::from(scales[64 + block]), f32::from(scales[192 + block]));
            (f16_at(scales, 2 * r) * scale, -(f16_at(scales, 2 * r + 1) * minimum))
        }
        TileFormat::Q6_K => (f16_at(scales, r) * f32::from(scales[32 + r * 16 + column / 16] as i8), NO_MINIMUM),
        _ => (f16_at(scales, block), NO_MINIMUM),
    }
}

fn f16_at(bytes: &[u8], index: usize) -> f32 {
    f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f32()
}

fn f32_at(bytes: &[u8], index: usize) -> f32 {
    let at = 4 * index;
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
