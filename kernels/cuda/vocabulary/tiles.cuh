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

// Where a chunk of a tile lies: its codes, and the scales of its record, of which it is chunk `index`.
struct Chunk {
    const uint8_t *codes, *scales;
    int index;
};

template <class Format> __device__ __forceinline__ Chunk chunk_at(const uint8_t *matrix, int cols, int row, int column) {
    const int chunks = padded_columns(cols) / CHUNK, chunk = column / CHUNK;
    const int record = chunk / RECORD_CHUNKS, index = chunk % RECORD_CHUNKS;
    const int held = min(RECORD_CHUNKS, chunks - record * RECORD_CHUNKS);
    const uint8_t *start =
        matrix + size_t(row / ROWS) * Format::tile_bytes(cols) + size_t(record) * Format::RECORD_BYTES;
    return {start + index * Format::CODE_BYTES, start + held * Format::CODE_BYTES, index};
}

// ---- Codes of one row at eight columns that start at a multiple of eight, in the formats' own lanes -------------------

// Words 2 h and 2 h + 1 of the lane that holds columns 32 h + 8 t .. + 8 of the chunk.
__device__ __forceinline__ uint2 nibble_words(const uint8_t *codes, int row, int column) {
    const int lane = row % 8 * 4 + column % 32 / 8, half = column % CHUNK / 32;
    return *reinterpret_cast<const uint2 *>(codes + lane * 16 + half * 8);
}

__device__ __forceinline__ void spread_codes(const uint8_t *codes, int row, int column, int (&out)[8]) {
    const uint2 words = nibble_words(codes, row, column);
    const int upper = row % ROWS / 8;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        out[k] = (k < 4 ? words.x : words.y) >> (8 * (k % 4 / 2) + 4 * upper + 16 * (k % 2)) & 15;
    }
}

__device__ __forceinline__ void paired_codes(const uint8_t *codes, int row, int column, int (&out)[8]) {
    const uint2 words = nibble_words(codes, row, column);
    const int upper = row % ROWS / 8;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        out[k] = (k < 4 ? words.x : words.y) >> (8 * (2 * (k % 4 / 2) + upper) + 4 * (k % 2)) & 15;
    }
}

__device__ __forceinline__ void byte_codes(const uint8_t *codes, int row, int column, int (&out)[8]) {
    const int lane = row % 8 * 4 + column % 32 / 8, half = column % CHUNK / 32, upper = row % ROWS / 8;
    const uint4 loaded = *reinterpret_cast<const uint4 *>(codes + half * 512 + lane * 16);
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int byte = words[k / 2] >> (16 * upper + 8 * (k % 2)) & 255;
        out[k] = byte & 128 ? -(byte & 127) : byte;
    }
}

// ---- Formats: eight weights of a row, every operation rounded to f32 as the host's reader does ------------------------

// `eight` gives weights [row, column .. column + 8) of a matrix [rows, cols]: column is a multiple of 8 below
// padded_columns(cols), row below rows padded to 16; padding reads as zero.

struct Int8 : Layout<1024, 0> {
    __device__ __forceinline__ static void eight(const uint8_t *matrix, int rows, int cols, int row, int column,
                                                 float (&out)[8]) {
        int codes[8];
        byte_codes(chunk_at<Int8>(matrix, cols, row, column).codes, row, column, codes);
        const size_t tiles_end = size_t((rows + ROWS - 1) / ROWS) * tile_bytes(cols);
        const float scale = reinterpret_cast<const float *>(matrix + tiles_end)[row];
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = scale * float(codes[k]);
    }
};

// QLoRA's sixteen levels, rounded to bfloat16 so that tensor cores take them as they are.
__device__ const uint16_t NF4_LEVELS[16] = {
    0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000,
    0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80};

struct Nf4 : Layout<512, 256> {
    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        const Chunk chunk = chunk_at<Nf4>(matrix, cols, row, column);
        int codes[8];
        paired_codes(chunk.codes, row, column, codes);
        const float absmax = reinterpret_cast<const float *>(chunk.scales)[row % ROWS * 4 + chunk.index];
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = absmax * __uint_as_float(uint32_t(NF4_LEVELS[codes[k]]) << 16);
    }
};

struct Int4 : Layout<512, 256> {
    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        const Chunk chunk = chunk_at<Int4>(matrix, cols, row, column);
        int codes[8];
        spread_codes(chunk.codes, row, column, codes);
        const float scale = reinterpret_cast<const float *>(chunk.scales)[row % ROWS * 4 + chunk.index];
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = scale * float(codes[k] - 8);
    }
};

// The block of 32 columns of a record that holds `column`.
__device__ __forceinline__ int block_of(const Chunk &chunk, int column) { return 2 * chunk.index + column % CHUNK / 32; }

struct Q4_0 : Layout<512, 256> {
    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        const Chunk chunk = chunk_at<Q4_0>(matrix, cols, row, column);
        int codes[8];
        spread_codes(chunk.codes, row, column, codes);
        const __half d = reinterpret_cast<const __half *>(chunk.scales)[row % ROWS * 8 + block_of(chunk, column)];
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = __half2float(d) * float(codes[k] - 8);
    }
};

struct Q4_1 : Layout<512, 512> {
    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        const Chunk chunk = chunk_at<Q4_1>(matrix, cols, row, column);
        int codes[8];
        spread_codes(chunk.codes, row, column, codes);
        const __half2 dm = reinterpret_cast<const __half2 *>(chunk.scales)[row % ROWS * 8 + block_of(chunk, column)];
        const float d = __low2float(dm), m = __high2float(dm);
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = __fadd_rn(__fmul_rn(d, float(codes[k])), m);
    }
};

struct Q8_0 : Layout<1024, 256> {
    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        const Chunk chunk = chunk_at<Q8_0>(matrix, cols, row, column);
        int codes[8];
        byte_codes(chunk.codes, row, column, codes);
        const __half d = reinterpret_cast<const __half *>(chunk.scales)[row % ROWS * 8 + block_of(chunk, column)];
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = __half2float(d) * float(codes[k]);
    }
};

struct Q4_K : Layout<512, 320> {
    // Where a record's scales and minima begin, after the f16 pairs (d, dmin) of sixteen rows.
    static constexpr int SCALES_AT = 64, MINIMA_AT = 192;

    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        const Chunk chunk = chunk_at<Q4_K>(matrix, cols, row, column);
        int codes[8];
        spread_codes(chunk.codes, row, column, codes);
        const int in_tile = row % ROWS, block = in_tile * 8 + block_of(chunk, column);
        const __half2 factors = reinterpret_cast<const __half2 *>(chunk.scales)[in_tile];
        const float scale = __low2float(factors) * float(chunk.scales[SCALES_AT + block]);
        const float minimum = __high2float(factors) * float(chunk.scales[MINIMA_AT + block]);
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = __fsub_rn(__fmul_rn(scale, float(codes[k])), minimum);
    }
};

struct Q6_K : Layout<768, 288> {
    // Where a chunk's high bits and a record's scales (after the f16 d of sixteen rows) begin.
    static constexpr int HIGH_AT = 512, SCALES_AT = 32;

    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        const Chunk chunk = chunk_at<Q6_K>(matrix, cols, row, column);
        const int in_tile = row % ROWS, upper = in_tile / 8, step = column % CHUNK / 16;
        // Eight columns are two lanes of four.
        const int first_lane = row % 8 * 4 + column % 16 / 4;
        const float d = __half2float(reinterpret_cast<const __half *>(chunk.scales)[in_tile]);
        const int8_t sub = int8_t(chunk.scales[SCALES_AT + in_tile * 16 + chunk.index * 4 + step]);
        const float scale = d * float(sub);
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint8_t *at = chunk.codes + (first_lane + pair) * 16 + step * 4;
            const uint32_t low = *reinterpret_cast<const uint32_t *>(at);
            const uint8_t *high_at = chunk.codes + HIGH_AT + (first_lane + pair) * 8 + step / 2 * 4;
            const uint32_t high = *reinterpret_cast<const uint32_t *>(high_at) >> (8 * (step % 2));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int i = 2 * (k / 2) + upper, e = k % 2;
                const int code = (low >> (4 * i + 16 * e) & 15) | (high >> (2 * i + 16 * e) & 3) << 4;
                out[4 * pair + k] = scale * float(code - 32);
            }
        }
    }
};

struct Bf16 {
    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        const size_t at = size_t(row) * padded_columns(cols) + column;
        const uint4 loaded = *reinterpret_cast<const uint4 *>(matrix + 2 * at);
        const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = k % 2 ? high_half(words[k / 2]) : low_half(words[k / 2]);
    }
};

}  // namespace tiles
