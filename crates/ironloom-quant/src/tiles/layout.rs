//! Where the bytes of a tile are.
//!
//! Lane 4 g + t of 32 holds rows g and g + 8 of a tile. A chunk is four steps of 16 columns; in step s the lane holds four
//! registers i = 2 j + (row >= 8) of two elements e, and the column in the chunk is 32 (s / 2) + 8 t + 4 (s % 2) + 2 j + e:
//! eight consecutive columns in each half of a chunk. Q6_K, whose scales change every 16 columns, has 16 s + 4 t + 2 j + e.
//!
//! | format | codes of a chunk | scales of a record (row r, chunk c) |
//! |---|---|---|
//! | int8 | 1024 | none; f32 of each row, padded to 16 rows, after all tiles |
//! | NF4, int4 | 512 | f32 `[r][c]` |
//! | Q4_0, Q8_0 | 512, 1024 | f16 d `[r][8]`, one for 32 columns |
//! | Q4_1 | 512 | f16 (d, m) `[r][8]` |
//! | Q4_K | 512 | f16 (d, dmin) `[r]`, u8 scale `[r][8]`, u8 minimum `[r][8]` |
//! | Q6_K | 512 + 256 | f16 d `[r]`, i8 scale `[r][16]` |
//!
//! Codes of 4 bits: lane's 16 bytes are one word a step. Spread (all but NF4), register i has its elements at bits 4 i and
//! 16 + 4 i, so that a shift and a mask give two codes 16 bits apart. Paired (NF4), byte i has element 0 low and 1 high.
//! Codes of 8 bits: two halves of 512 bytes for two steps each; lane's 16 bytes there are step by step registers 0 to 3 of two
//! bytes, each a sign (bit 7) and a magnitude. The upper two bits of Q6_K: lane's 8 bytes at 512 + 8 lane are one word for two
//! steps, register i's elements at bits 8 (s % 2) + 2 i and 16 more.

use super::TileFormat;

/// Rows of a tile.
pub(super) const ROWS: usize = 16;
/// Columns of a chunk.
pub(super) const CHUNK: usize = 64;
/// Chunks of a full record.
pub(super) const RECORD_CHUNKS: usize = 4;

/// Bytes of a chunk's codes and of a record's scales.
pub(super) const fn sizes(format: TileFormat) -> (usize, usize) {
    match format {
        TileFormat::Bf16 => (2 * CHUNK * ROWS, 0),
        TileFormat::Int8 => (1024, 0),
        TileFormat::Nf4 | TileFormat::Int4 | TileFormat::Q4_0 => (512, 256),
        TileFormat::Q4_1 => (512, 512),
        TileFormat::Q8_0 => (1024, 256),
        TileFormat::Q4_K => (512, 320),
        TileFormat::Q6_K => (768, 288),
    }
}

/// Bytes of a tile of `cols` columns; `None` if that overflows.
pub(super) fn tile_bytes(format: TileFormat, cols: usize) -> Option<usize> {
    let (codes, scales) = sizes(format);
    let chunks = cols.div_ceil(CHUNK);
    chunks.checked_mul(codes)?.checked_add(chunks.div_ceil(RECORD_CHUNKS).checked_mul(scales)?)
}

/// Bytes of scales that follow all tiles, for each tile.
pub(super) const fn trailing_bytes(format: TileFormat) -> usize {
    if matches!(format, TileFormat::Int8) { ROWS * size_of::<f32>() } else { 0 }
}

/// Bytes of a matrix; `None` if that overflows.
pub(super) fn bytes_for(format: TileFormat, rows: usize, cols: usize) -> Option<usize> {
    let tile = tile_bytes(format, cols)?;
    if format == TileFormat::Bf16 {
        return (tile / ROWS).checked_mul(rows);
    }
    rows.div_ceil(ROWS).checked_mul(tile.checked_add(trailing_bytes(format))?)
}

/// Where a chunk lies in its tile.
pub(super) struct Place {
    /// Its codes.
    pub(super) codes: usize,
    /// The scales of its record.
    pub(super) scales: usize,
    /// Which chunk of its record it is.
    pub(super) index: usize,
}

/// Where chunk `chunk` of a row of `cols` columns lies.
pub(super) fn place(format: TileFormat, cols: usize, chunk: usize) -> Place {
    let (codes, scales) = sizes(format);
    let (record, index) = (chunk / RECORD_CHUNKS, chunk % RECORD_CHUNKS);
    let held = RECORD_CHUNKS.min(cols.div_ceil(CHUNK) - record * RECORD_CHUNKS);
    let start = record * (RECORD_CHUNKS * codes + scales);
    Place { codes: start + index * codes, scales: start + held * codes, index }
}
