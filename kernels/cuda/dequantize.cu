// Dequantize: rows of a weight matrix [rows, cols] in any format as bfloat16 [count, padded_columns(cols)], row-major.
//
// A product of many rows of x reads each weight many times, so it pays to unpack the matrix once into a scratch and to leave
// the product to the bfloat16 kernels. Weights are computed in f32 as the host does and rounded to nearest even; padding is
// zero. A range of rows can be unpacked, so that the scratch may be smaller than the matrix.
//
// Bound: 2 bytes written and 0.5 to 4 read a weight, both once. A warp unpacks one chunk of a tile: codes come as its 512
// consecutive bytes (or 1024), and every store of 16 bytes a lane fills whole 32-byte sectors (64 bytes in a row). Stored
// blocks (blocks.cuh) are at odd places of 18 to 210 bytes, so there a thread reads byte by byte through the first-level
// cache, eight consecutive weights, and a warp writes 512 bytes of a row.
#include "vocabulary/blocks.cuh"
#include "vocabulary/tiles.cuh"

constexpr int WARPS_PER_BLOCK = 8;
constexpr int ROW_THREADS = 128;

// Blocks of 8 warps; warp `item` of the grid has chunk item % chunks of tile first_row / 16 + item / chunks.
template <class Format>
__device__ __forceinline__ void unpack_tiles(bf16 *__restrict__ out, const uint8_t *__restrict__ matrix, int rows, int cols,
                                             int first_row, int count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int padded = tiles::padded_columns(cols), chunks = padded / tiles::CHUNK;
    const int item = blockIdx.x * WARPS_PER_BLOCK + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int tile = first_row / tiles::ROWS + item / chunks;
    if (tile * tiles::ROWS >= first_row + count) return;
    const int column = item % chunks * tiles::CHUNK + lane % 4 * 8;
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        const int row = tile * tiles::ROWS + 8 * upper + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The tile has all of its sixteen rows, so reading needs no guard; that lets both rows share their loads.
            float weights[8];
            Format::eight(matrix, rows, cols, row, column + 32 * half, weights);
            if (row < first_row || row >= first_row + count) continue;
            uint4 packed = {pack(weights[0], weights[1]), pack(weights[2], weights[3]), pack(weights[4], weights[5]),
                            pack(weights[6], weights[7])};
            *reinterpret_cast<uint4 *>(out + size_t(row - first_row) * padded + column + 32 * half) = packed;
        }
    }
}

// Grid (count, eights of columns / 128).
template <class Format>
__device__ __forceinline__ void unpack_rows(bf16 *__restrict__ out, const uint8_t *__restrict__ matrix, int rows, int cols,
                                            int first_row) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int padded = tiles::padded_columns(cols), column = (blockIdx.y * ROW_THREADS + threadIdx.x) * 8;
    if (column >= padded) return;
    float weights[8];
    Format::eight(matrix, rows, cols, first_row + blockIdx.x, column, weights);
    uint4 packed = {pack(weights[0], weights[1]), pack(weights[2], weights[3]), pack(weights[4], weights[5]),
                    pack(weights[6], weights[7])};
    *reinterpret_cast<uint4 *>(out + size_t(blockIdx.x) * padded + column) = packed;
}

#define UNPACK_TILES(name, Format)                                                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS_PER_BLOCK * WARP)                                                     \
        dequantize_tiles_##name(bf16 *__restrict__ out, const uint8_t *__restrict__ matrix, int rows, int cols,              \
                                int first_row, int count) {                                                                  \
        unpack_tiles<tiles::Format>(out, matrix, rows, cols, first_row, count);                                              \
    }

UNPACK_TILES(int8, Int8)
UNPACK_TILES(nf4, Nf4)
UNPACK_TILES(int4, Int4)
UNPACK_TILES(q4_0, Q4_0)
UNPACK_TILES(q4_1, Q4_1)
UNPACK_TILES(q8_0, Q8_0)
UNPACK_TILES(q4_k, Q4_K)
UNPACK_TILES(q6_k, Q6_K)

#define UNPACK_ROWS(name, Format)                                                                                            \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS)                                                                \
        dequantize_##name(bf16 *__restrict__ out, const uint8_t *__restrict__ matrix, int rows, int cols, int first_row) {   \
        unpack_rows<Format>(out, matrix, rows, cols, first_row);                                                             \
    }

UNPACK_ROWS(tiles_bf16, tiles::Bf16)
UNPACK_ROWS(plain_f32, blocks::F32)
UNPACK_ROWS(plain_f16, blocks::F16)
UNPACK_ROWS(plain_bf16, blocks::Bf16)
UNPACK_ROWS(plain_q4_0, blocks::Q4_0)
UNPACK_ROWS(plain_q4_1, blocks::Q4_1)
UNPACK_ROWS(plain_q5_0, blocks::Q5_0)
UNPACK_ROWS(plain_q5_1, blocks::Q5_1)
UNPACK_ROWS(plain_q8_0, blocks::Q8_0)
UNPACK_ROWS(plain_q2_k, blocks::Q2_K)
UNPACK_ROWS(plain_q3_k, blocks::Q3_K)
UNPACK_ROWS(plain_q4_k, blocks::Q4_K)
UNPACK_ROWS(plain_q5_k, blocks::Q5_K)
UNPACK_ROWS(plain_q6_k, blocks::Q6_K)
