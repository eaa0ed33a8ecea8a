//! From stored weights to a [`TiledMatrix`].
//!
//! A task has whole tiles. The codes of a tile's sixteen rows are read into bytes, side by side, and then laid out eight
//! columns of two rows at a time, by shifts on 64-bit integers. Scales are copied as they are stored.

use std::sync::{
    Mutex, OnceLock, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use half::{bf16, f16};
use ironloom_core::{DType, Threads};

use super::{
    DeviceFormat, TileFormat, TiledMatrix,
    layout::{self, CHUNK, ROWS, place},
};
use crate::{
    Error, Result, StoredMatrix,
    formats::{
        blocks64::{self, CodeBook},
        codes::{self, unpack_codes},
        int8_rows, unpack,
    },
    packed::WeightFormat,
};

impl TiledMatrix {
    /// Lays out stored weights. [`WeightFormat::Keep`] holds exactly the stored ones; any other format converts them.
    /// [`DeviceFormat::of`] tells the result's format.
    ///
    /// # Errors
    /// The type holds no weights, the columns are not whole blocks of it, the bytes have another length, the row order has
    /// another length or names a row that is not there, or a weight cannot be packed.
    pub fn from_stored(stored: &StoredMatrix<'_>, format: WeightFormat, threads: &Threads) -> Result<Self> {
        let StoredMatrix { dtype, bytes, rows, cols, .. } = *stored;
        let mut device = DeviceFormat::of(dtype, format)?;
        stored.checked()?;
        if device == DeviceFormat::Tiles(TileFormat::Q8_0) && has_lowest_code(bytes, threads) {
            device = DeviceFormat::Plain(dtype);
        }
        let held = device.bytes_for(rows, cols)?;
        let overflow = || Error::Core(ironloom_core::Error::SizeOverflow);
        let mut tiled = bytemuck::allocation::try_zeroed_slice_box(held).map_err(|()| overflow())?;
        match device {
            DeviceFormat::Plain(_) | DeviceFormat::Tiles(TileFormat::Bf16) => {
                let row_held = held.checked_div(rows).unwrap_or(0);
                fill(&mut tiled, held, ROWS * row_held, threads, |tile, scratch, out, _| {
                    for (row, out) in out.chunks_exact_mut(row_held).enumerate() {
                        stored.copy_row(tile * ROWS + row, device, scratch, out)?;
                    }
                    Ok(())
                })?;
            }
            DeviceFormat::Tiles(format) => {
                let unit = layout::tile_bytes(format, cols).ok_or_else(overflow)?;
                fill(&mut tiled, unit * rows.div_ceil(ROWS), unit, threads, |tile, scratch, out, row_scales| {
                    stored.lay_tile(tile, format, scratch, out, row_scales)
                })?;
            }
        }
        Ok(Self { rows, cols, format: device, bytes: tiled })
    }

    /// Lays out f32 weights, row-major; [`WeightFormat::Keep`] is F32.
    ///
    /// # Errors
    /// `values` is not `rows * cols` long, or a weight cannot be packed.
    pub fn from_f32(values: &[f32], rows: usize, cols: usize, format: WeightFormat, threads: &Threads) -> Result<Self> {
        Self::from_stored(&StoredMatrix::from_f32(values, rows, cols), format, threads)
    }
}

/// Whether Q8_0 blocks hold a code of -128, which has no magnitude of seven bits.
fn has_lowest_code(bytes: &[u8], threads: &Threads) -> bool {
    let blocks = bytes.as_chunks::<34>().0;
    let found = AtomicBool::new(false);
    threads.run_ranges(blocks.len(), 1 << 12, |range| {
        // Counted rather than searched for, which vectorizes.
        let lowest = |block: &[u8; 34]| block[2..].iter().map(|&code| u8::from(code == 0x80)).sum::<u8>();
        if blocks[range].iter().any(|block| lowest(block) > 0) {
            found.store(true, Relaxed);
        }
    });
    found.into_inner()
}

/// Splits the first `tiles_bytes` of `bytes` into tiles of `unit` bytes, and what follows into 64 bytes for each tile, and
/// calls `lay(tile, .., its bytes, its share of the rest)` for each.
fn fill(
    bytes: &mut [u8],
    tiles_bytes: usize,
    unit: usize,
    threads: &Threads,
    lay: impl Fn(usize, &mut Scratch, &mut [u8], &mut [u8]) -> Result<()> + Sync,
) -> Result<()> {
    let (tiles, rest) = bytes.split_at_mut(tiles_bytes);
    let mut rest = rest.chunks_mut(ROWS * size_of::<f32>());
    let tiles = tiles.chunks_mut(unit.max(1));
    let tiles: Vec<_> = tiles.map(|tile| Mutex::new((tile, rest.next().unwrap_or_default()))).collect();
    let failure = OnceLock::new();
    threads.run_ranges(tiles.len(), 1, |range| {
        let mut scratch = Scratch::default();
        for tile in range {
            let mut parts = tiles[tile].lock().unwrap_or_else(PoisonError::into_inner);
            let (out, row_scales) = &mut *parts;
            if let Err(error) = lay(tile, &mut scratch, out, row_scales) {
                let _ = failure.set(error);
                return;
            }
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// What lies between stored and laid out; kept from tile to tile.
#[derive(Default)]
struct Scratch {
    /// The codes of sixteen rows with their padding, a byte each.
    codes: Vec<u8>,
    values: Vec<f32>,
    nibbles: Vec<u8>,
    scales: Vec<f32>,
    mins: Vec<f32>,
}

impl StoredMatrix<'_> {
    /// Row `row` as f32.
    fn values<'a>(&self, row: usize, values: &'a mut Vec<f32>) -> Result<&'a [f32]> {
        values.resize(self.cols, 0.0);
        unpack(self.dtype, self.row(row), values)?;
        Ok(values)
    }

    /// A row of a format that keeps rows in order.
    fn copy_row(&self, row: usize, device: DeviceFormat, scratch: &mut Scratch, out: &mut [u8]) -> Result<()> {
        match (device, self.dtype) {
            (DeviceFormat::Tiles(_), DType::BF16) => {
                let stored = self.row(row);
                out[..stored.len()].copy_from_slice(stored);
            }
            (DeviceFormat::Tiles(_), _) => {
                let values = self.values(row, &mut scratch.values)?;
                for (out, &value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                    *out = bf16::from_f32(value).to_le_bytes();
                }
            }
            (DeviceFormat::Plain(held), stored) if held == stored => out.copy_from_slice(self.row(row)),
            (DeviceFormat::Plain(_), _) => {
                let values = self.values(row, &mut scratch.values)?;
                for (out, &value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                    *out = value.to_le_bytes();
                }
            }
        }
        Ok(())
    }

    fn lay_tile(
        &self,
        tile: usize,
        format: TileFormat,
        scratch: &mut Scratch,
        out: &mut [u8],
        row_scales: &mut [u8],
    ) -> Result<()> {
        let padded = self.cols.next_multiple_of(CHUNK);
        // Padding keeps a code of weight zero; its scales stay zero.
        scratch.codes.clear();
        scratch.codes.resize(ROWS * padded, zero_code(format));
        for r in 0..ROWS.min(self.rows - tile * ROWS) {
            let mut codes = std::mem::take(&mut scratch.codes);
            let row_codes = &mut codes[r * padded..][..padded];
            let read = self.read_row(tile * ROWS + r, r, format, scratch, row_codes, out, row_scales);
            scratch.codes = codes;
            read?;
        }
        for chunk in 0..padded / CHUNK {
            let out = &mut out[place(format, self.cols, chunk).codes..][..layout::sizes(format).0];
            lay_codes(format, &scratch.codes, padded, chunk * CHUNK, out);
        }
        Ok(())
    }

    /// Reads the codes of `row` and writes its scales, as row `r` of the tile.
    #[allow(clippy::too_many_arguments)]
    fn read_row(
        &self,
        row: usize,
        r: usize,
        format: TileFormat,
        scratch: &mut Scratch,
        row_codes: &mut [u8],
        out: &mut [u8],
        row_scales: &mut [u8],
    ) -> Result<()> {
        match format {
            TileFormat::Int8 => {
                let values = self.values(row, &mut scratch.values)?;
                let codes: &mut [i8] = bytemuck::cast_slice_mut(&mut row_codes[..self.cols]);
                let scale = int8_rows::pack_row(values, codes)?;
                row_scales[4 * r..][..4].copy_from_slice(&scale.to_le_bytes());
                row_codes.iter_mut().for_each(sign_and_magnitude);
            }
            TileFormat::Nf4 | TileFormat::Int4 => {
                let (book, steps) =
                    if format == TileFormat::Nf4 { (CodeBook::Nf4, 1.0) } else { (CodeBook::Int4, INT4_STEPS) };
                let values = self.values(row, &mut scratch.values)?;
                let blocks = blocks64::row_blocks(self.cols);
                scratch.nibbles.resize(blocks * blocks64::BLOCK_BYTES, 0);
                scratch.scales.resize(blocks, 0.0);
                blocks64::pack_row(book, values, &mut scratch.nibbles, &mut scratch.scales)?;
                for (codes, bytes) in
                    row_codes.as_chunks_mut::<CHUNK>().0.iter_mut().zip(scratch.nibbles.as_chunks::<32>().0)
                {
                    let (low, high) = codes.split_at_mut(32);
                    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
                        (*low, *high) = (byte & 15, byte >> 4);
                    }
                }
                for (chunk, absmax) in scratch.scales.iter().enumerate() {
                    let place = place(format, self.cols, chunk);
                    let at = place.scales + (r * 4 + place.index) * 4;
                    out[at..][..4].copy_from_slice(&(absmax / steps).to_le_bytes());
                }
            }
            _ => self.read_blocks(row, r, format, scratch, row_codes, out)?,
        }
        Ok(())
    }

    /// Reads the codes of a row of GGML blocks and copies their scales, as row `r` of the tile.
    fn read_blocks(
        &self,
        row: usize,
        r: usize,
        format: TileFormat,
        scratch: &mut Scratch,
        row_codes: &mut [u8],
        out: &mut [u8],
    ) -> Result<()> {
        let (dtype, bytes) = (self.dtype, self.row(row));
        let Some(stored) = codes::layout(dtype) else {
            return Err(Error::Unsupported { operation: "tile", dtype, supported: "Q4_0 Q4_1 Q8_0 Q4_K Q6_K" });
        };
        scratch.scales.resize(self.cols / stored.group, 0.0);
        scratch.mins.resize(self.cols / stored.group, 0.0);
        let row_codes = &mut row_codes[..self.cols];
        let (scales, mins) = (&mut scratch.scales, &mut scratch.mins);
        unpack_codes(dtype, bytes, bytemuck::cast_slice_mut(row_codes), scales, mins)?;
        if format == TileFormat::Q8_0 {
            row_codes.iter_mut().for_each(sign_and_magnitude);
        } else {
            row_codes.iter_mut().for_each(|code| *code = code.wrapping_sub(stored.lowest as u8));
        }
        for (index, block) in bytes.chunks_exact(dtype.block_bytes()).enumerate() {
            let scales_at = place(format, self.cols, index * dtype.block_elements() / CHUNK).scales;
            let mut put = |at: usize, bytes: &[u8]| out[scales_at + at..][..bytes.len()].copy_from_slice(bytes);
            match format {
                TileFormat::Q4_1 => put((r * 8 + index % 8) * 4, &block[..4]),
                TileFormat::Q4_K => {
                    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
                    let (d, dmin) = (half(0), half(2));
                    put(r * 4, &block[..4]);
                    for i in 0..8 {
                        put(64 + r * 8 + i, &[factor(scales[index * 8 + i], d)]);
                        put(192 + r * 8 + i, &[factor(-mins[index * 8 + i], dmin)]);
                    }
                }
                TileFormat::Q6_K => {
                    put(r * 2, &block[208..210]);
                    put(32 + r * 16, &block[192..208]);
                }
                _ => put((r * 8 + index % 8) * 2, &block[..2]),
            }
        }
        Ok(())
    }
}

/// Levels of int4 above zero: the scale is this share of the absmax.
const INT4_STEPS: f32 = 7.0;

/// The code, before it is laid out, of a weight of zero.
fn zero_code(format: TileFormat) -> u8 {
    match format {
        TileFormat::Int4 => CodeBook::Int4.zero_code(),
        TileFormat::Nf4 => CodeBook::Nf4.zero_code(),
        TileFormat::Q4_0 => 8,
        TileFormat::Q6_K => 32,
        _ => 0,
    }
}

/// A signed byte other than -128 as a sign and a magnitude.
fn sign_and_magnitude(code: &mut u8) {
    *code = *code & 0x80 | (*code as i8).unsigned_abs();
}

/// The integer s of `product = whole * s`, a product of 11 and 6 bits and so exact in f32.
fn factor(product: f32, whole: f32) -> u8 {
    (product / whole) as u8
}

/// Lays out the codes of sixteen rows, `stride` bytes apart, at columns `column .. column + 64`.
fn lay_codes(format: TileFormat, codes: &[u8], stride: usize, column: usize, out: &mut [u8]) {
    let row = |row: usize| &codes[row * stride + column..][..CHUNK];
    for g in 0..8 {
        let (upper, lower) = (row(g).as_chunks::<8>().0, row(g + 8).as_chunks::<8>().0);
        match format {
            TileFormat::Int8 | TileFormat::Q8_0 => {
                for eight in 0..8 {
                    let (half, lane) = (eight / 4, 4 * g + eight % 4);
                    let out = &mut out[half * 512 + lane * 16..][..16];
                    for (out, (a, b)) in out
                        .as_chunks_mut::<4>()
                        .0
                        .iter_mut()
                        .zip(upper[eight].as_chunks::<2>().0.iter().zip(lower[eight].as_chunks::<2>().0))
                    {
                        *out = [a[0], a[1], b[0], b[1]];
                    }
                }
            }
            TileFormat::Q6_K => {
                for eight in 0..8 {
                    let (a, b) = (u64::from_le_bytes(upper[eight]), u64::from_le_bytes(lower[eight]));
                    let low = spread(a & LOW_NIBBLES, b & LOW_NIBBLES);
                    // Four bits of a column: two of each row.
                    let pairs = a >> 4 & LOW_PAIRS | (b >> 4 & LOW_PAIRS) << 2;
                    let (step, first_lane) = (eight / 2, 4 * g + eight % 2 * 2);
                    for (lane, (low, pairs)) in [(low as u32, pairs as u32), ((low >> 32) as u32, (pairs >> 32) as u32)]
                        .into_iter()
                        .enumerate()
                        .map(|(i, words)| (first_lane + i, words))
                    {
                        out[lane * 16 + step * 4..][..4].copy_from_slice(&low.to_le_bytes());
                        // Elements 0 are bytes 0 and 2, elements 1 bytes 1 and 3: one byte for each element.
                        let both = pairs | pairs >> 12;
                        let at = 512 + lane * 8 + step / 2 * 4 + step % 2;
                        out[at] = both as u8;
                        out[at + 2] = (both >> 8) as u8;
                    }
                }
            }
            _ => {
                for eight in 0..8 {
                    let (a, b) = (u64::from_le_bytes(upper[eight]), u64::from_le_bytes(lower[eight]));
                    let words = if format == TileFormat::Nf4 { pair(a) | pair(b) << 8 } else { spread(a, b) };
                    let (half, lane) = (eight / 4, 4 * g + eight % 4);
                    out[lane * 16 + half * 8..][..8].copy_from_slice(&words.to_le_bytes());
                }
            }
        }
    }
}

const LOW_NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;
const LOW_PAIRS: u64 = 0x0303_0303_0303_0303;

/// Two words of spread codes, from eight codes of each row.
fn spread(a: u64, b: u64) -> u64 {
    let both = a | b << 4;
    // Bytes 0 to 3 are columns (j, e) = (0, 0), (0, 1), (1, 0), (1, 1), and elements 1 belong in the upper half of the word.
    both & 0xff00_00ff_ff00_00ff | (both & 0x0000_ff00_0000_ff00) << 8 | both >> 8 & 0x0000_ff00_0000_ff00
}

/// Eight codes as four bytes of two, each followed by a zero byte.
fn pair(codes: u64) -> u64 {
    (codes | codes >> 4) & 0x00ff_00ff_00ff_00ff
}
