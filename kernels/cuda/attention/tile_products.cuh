// What attention kernels are made of, forward and backward: tiles copied to shared memory, products of two tiles on the
// tensor cores, products of a warp's accumulators with a tile, and rows written back.
//
// A block is four warps. Rows in shared memory are padded by 16 bytes, so that the eight rows of a matrix load lie in
// different banks, read straight or transposed. Accumulators of one product are left operands of the next in place:
// lane 4 g + t holds rows g and g + 8 and columns 2 t, 2 t + 1 of each 8 columns in both.
#pragma once

#include "../vocabulary/device.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int PADDING = 8;  // elements

__device__ __forceinline__ uint32_t pack_pair(float low_half, float high_half) {
    const bf16x2 pair = __floats2bfloat162_rn(low_half, high_half);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// Starts the copy of ROWS rows to shared memory; rows from `valid` on, and columns from `columns` on, become zero. A
// thread takes the same column of every STEP-th row, so that it keeps one address, not one for each copy.
template <int WIDTH, int ROWS>
__device__ __forceinline__ void copy_rows(bf16 *shared, const bf16 *global, int64_t stride, int valid,
                                          int columns = WIDTH) {
    constexpr int CHUNKS = WIDTH / 8, STEP = THREADS % CHUNKS == 0 ? THREADS / CHUNKS : 8;
    static_assert(STEP * CHUNKS <= THREADS && ROWS % STEP == 0, "whole steps cover the rows");
    const int row = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * 8;
    if (STEP * CHUNKS < THREADS && row >= STEP) return;
    if (column >= columns) valid = 0;
    shared += row * (WIDTH + PADDING) + column;
    global += row * stride + column;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        copy_async(shared + i * STEP * (WIDTH + PADDING), global, row + i * STEP < valid);
        global += STEP * stride;
    }
}

// out += a b^T for ROW_TILES * 16 rows of a and COLUMNS rows of b, WIDTH elements each, both in shared memory.
template <int WIDTH, int ROW_TILES, int COLUMNS>
__device__ __forceinline__ void multiply_rows(const bf16 *a_rows, const bf16 *b_rows,
                                              float (&out)[ROW_TILES][COLUMNS / 8][4]) {
    constexpr int PITCH = WIDTH + PADDING;
    const int lane = threadIdx.x % WARP, matrix = lane / 8, line = lane % 8;
    const bf16 *a_row = a_rows + (matrix % 2 * 8 + line) * PITCH + matrix / 2 * 8;
    const bf16 *b_row = b_rows + (matrix / 2 * 8 + line) * PITCH + matrix % 2 * 8;
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
        uint32_t a[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) load_matrices(a[r], a_row + r * 16 * PITCH + step * 16);
#pragma unroll
        for (int pair = 0; pair < COLUMNS / 16; pair++) {
            uint32_t b[4];
            load_matrices(b, b_row + pair * 16 * PITCH + step * 16);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                multiply_add(out[r][2 * pair], a[r], b[0], b[1]);
                multiply_add(out[r][2 * pair + 1], a[r], b[2], b[3]);
            }
        }
    }
}

// Accumulators of ROW_TILES * 16 rows and 16 columns, from column tile `first` on, as a left operand in bfloat16.
template <int ROW_TILES, int COLUMN_TILES>
__device__ __forceinline__ void pack_operand(const float (&p)[ROW_TILES][COLUMN_TILES][4], int first,
                                             uint32_t (&a)[ROW_TILES][4]) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        a[r][0] = pack_pair(p[r][first][0], p[r][first][1]);
        a[r][1] = pack_pair(p[r][first][2], p[r][first][3]);
        a[r][2] = pack_pair(p[r][first + 1][0], p[r][first + 1][1]);
        a[r][3] = pack_pair(p[r][first + 1][2], p[r][first + 1][3]);
    }
}

// Where this lane's row of four transposed 8 x 8 matrices begins, of 16 rows and 16 columns from `rows` on.
template <int PITCH> __device__ __forceinline__ const bf16 *transposed_row(const bf16 *rows) {
    const int lane = threadIdx.x % WARP, matrix = lane / 8, line = lane % 8;
    return rows + (matrix % 2 * 8 + line) * PITCH + matrix / 2 * 8;
}

// sums += a b for a [ROW_TILES * 16, 16] and 16 rows of b of COLUMNS elements, from the `transposed_row` at `b_row`.
template <int COLUMNS, int ROW_TILES>
__device__ __forceinline__ void multiply_operand(const uint32_t (&a)[ROW_TILES][4], const bf16 *b_row,
                                                 float (&sums)[ROW_TILES][COLUMNS / 8][4]) {
#pragma unroll
    for (int pair = 0; pair < COLUMNS / 16; pair++) {
        uint32_t b[4];
        load_matrices_transposed(b, b_row + pair * 16);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            multiply_add(sums[r][2 * pair], a[r], b[0], b[1]);
            multiply_add(sums[r][2 * pair + 1], a[r], b[2], b[3]);
        }
    }
}

// sums += p b for p [ROW_TILES * 16, ROWS], accumulators rounded to bfloat16, and ROWS rows of b of COLUMNS elements
// in shared memory, PITCH elements apart.
template <int COLUMNS, int PITCH, int ROW_TILES, int ROWS>
__device__ __forceinline__ void multiply_accumulators(const float (&p)[ROW_TILES][ROWS / 8][4], const bf16 *b_rows,
                                                      float (&sums)[ROW_TILES][COLUMNS / 8][4]) {
    const bf16 *b_row = transposed_row<PITCH>(b_rows);
#pragma unroll
    for (int step = 0; step < ROWS / 16; step++) {
        uint32_t a[ROW_TILES][4];
        pack_operand(p, 2 * step, a);
        multiply_operand<COLUMNS>(a, b_row + step * 16 * PITCH, sums);
    }
}
