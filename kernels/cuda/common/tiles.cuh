// The formats that weight matrices are kept in on the device, and the plain way to read them.
//
// A matrix [rows, cols] lies in TILES of 16 rows, made once by the host (`tiles` in ironloom-quant) for m16n8k16 tensor-core
// products: a lane finds the codes of its A registers in one 16-byte load. Columns go in CHUNKS of 64, padded with zero
// weights, and chunks in RECORDS of up to four; a record is the codes of its chunks, then the scales of four:
//
//     [row tile][record] = chunks * CODE_BYTES, SCALE_BYTES
//
// Lane 4 g + t holds rows g and g + 8. For step s of four in a chunk, A register i = 2 j + (row >= 8) and element e, the
// column in the chunk is 32 (s / 2) + 8 t + 4 (s % 2) + 2 j + e, so a lane's operand is two runs of eight columns; Q6_K, whose
// scales change every 16 columns, has 16 s + 4 t + 2 j + e instead, so that a step has one scale.
//
// | format | codes of a chunk | scales of a record (row r of 16, chunk c of 4) | weight |
// |---|---|---|---|
// | Int8 | 1024 | none; f32 [rows padded to 16] after all tiles | s q |
// | Nf4  | 512 paired | f32 absmax [r][c] | absmax * level[q], levels rounded to bfloat16 |
// | Int4 | 512 spread | f32 [r][c] | s (q - 8) |
// | Q4_0 | 512 spread | f16 d [r][8], one for 32 columns | d (q - 8) |
// | Q4_1 | 512 spread | f16 (d, m) [r][8] | d q + m |
// | Q8_0 | 1024 | f16 d [r][8] | d q |
// | Q4_K | 512 spread | f16 (d, dmin) [r]; u8 scale [r][8]; u8 minimum [r][8] | d sc q - dmin m |
// | Q6_K | 512 spread low bits, 256 of high bits | f16 d [r]; i8 scale [r][16] | d sc (q - 32) |
//
// spread: lane's word s has register i's elements at bits 4 i and 16 + 4 i. paired: byte i has element 0 low, element 1 high.
// 1024: two halves of 512 for steps 0..1 and 2..3; lane's 16 bytes are step by step registers 0, 1, 2, 3 of two bytes each,
// a byte being a sign (bit 7) and a magnitude. Q6_K's high bits: lane's 8 bytes at 512 + 8 lane are one word for two steps,
// register i's elements of step s at bits 8 (s % 2) + 2 i and 16 more.
//
// Bf16 is no tile: rows of bfloat16 in order, each padded with zeros to 64 columns.
#pragma once

#include "device.cuh"

namespace tiles {

constexpr int ROWS = 16;          // of a tile
constexpr int CHUNK = 64;         // columns
constexpr int RECORD_CHUNKS = 4;  // of a full record

// Columns with their padding.
__host__ __device__ constexpr int padded_columns(int cols) { return (cols + CHUNK - 1) / CHUNK * CHUNK; }

template <int CODES, int SCALES> struct Layout {
    static constexpr int CODE_BYTES = CODES;
    static constexpr int SCALE_BYTES = SCALES;
    static constexpr int RECORD_BYTES = RECORD_CHUNKS * CODES + SCALES;

    // From one tile of 16 rows to the next.
    __host__ __device__ static constexpr size_t tile_bytes(int cols) {
        const int chunks = padded_columns(cols) / CHUNK, rest = chunks % RECORD_CHUNKS;
        return size_t(chunks / RECORD_CHUNKS) * RECORD_BYTES + (rest ? rest * CODES + SCALES : 0);
    }
};

}  // namespace tiles
