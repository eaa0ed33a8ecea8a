// What attention for training works on, and what its kernels share: masks by bounds, the order of tiles, rows written.
//
// A mask is two arrays for each side. Query row i sees the keys first_key[i] .. end_key[i], key row s is seen by the
// queries first_query[s] .. end_query[s]; an empty range sees nothing, and every array ascends. So the bounds of a
// tile's first and last row tell which tiles it meets, and which of them need no mask. Causal, windowed and
// bidirectional attention within packed documents, and attention across two texts, are all of this kind.
#pragma once

#include "tile_products.cuh"

struct TrainingCall {
    const bf16 *q, *k, *v;  // rows of heads (kv_heads for k and v) times `width` elements
    bf16 *out;
    float *log_sum_exp;  // [heads, rows], natural
    const int *first_key, *end_key;      // [rows]
    const int *first_query, *end_query;  // [keys]
    int64_t q_stride, k_stride, v_stride, out_stride;  // in elements
    int rows, keys, heads, kv_heads;
    int width;  // of a head, a multiple of 8 up to a kernel's WIDTH; columns behind it count as zero
    float scale;  // times log2(e)
    int by_length;
};

struct BackwardCall {
    TrainingCall forward;
    const bf16 *gradient;  // of out
    float *delta;          // [heads, rows]
    bf16 *dq, *dk, *dv;
    int64_t gradient_stride, dq_stride, dk_stride, dv_stride;  // in elements
    float factor;    // the factor on scores itself
    int key_blocks;  // blocks of the grid that are for keys and values
};

constexpr float LOG2_E = 1.44269504f;

// What the rows from `from` to `to`, both included, see.
struct View {
    int some_first, some_end;  // where any row sees something
    int all_first, all_end;    // where every row sees everything; empty where it ends before it begins

    __device__ __forceinline__ View(const int *first, const int *end, int from, int to)
        : some_first(first[from]), some_end(end[to]), all_first(first[to]), all_end(end[from]) {}

    __device__ __forceinline__ bool sees_some(int column, int columns) const {
        return column < some_end && column + columns > some_first;
    }
    __device__ __forceinline__ bool sees_all(int column, int columns) const {
        return column >= all_first && column + columns <= all_end;
    }
    // Tiles of SIZE columns in which a row sees something.
    template <int SIZE> __device__ __forceinline__ int first_tile() const { return max(some_first, 0) / SIZE; }
    template <int SIZE> __device__ __forceinline__ int end_tile(int columns) const {
        return (min(some_end, columns) + SIZE - 1) / SIZE;
    }
};

// Hides what rows do not see of a tile of columns: their scores become -infinity. `row` is the warp's first row,
// `column` the tile's first column; rows behind `last_row` are treated as that one.
template <int ROW_TILES, int COLUMN_TILES>
__device__ __forceinline__ void hide(const int *first, const int *end, int row, int last_row, int column,
                                     float (&scores)[ROW_TILES][COLUMN_TILES][4]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = min(row + r * 16 + half * 8 + g, last_row), from = first[own];
            // In unsigned numbers one comparison serves both ends.
            const unsigned span = end[own] - from, offset = column + 2 * t - from;
#pragma unroll
            for (int k = 0; k < COLUMN_TILES; k++) {
                if (offset + 8 * k >= span) scores[r][k][2 * half] = -INFINITY;
                if (offset + 8 * k + 1 >= span) scores[r][k][2 * half + 1] = -INFINITY;
            }
        }
    }
}

// The tile and the head of a block.
struct Place {
    int tile, head;
};

// Where there are few blocks, those with most work start first, so that no long one is left for the end: every block
// ranks all tiles by `work(tile)`, and takes the one of its own rank. Where there are many, all tiles of a head follow
// each other, which keeps its keys and values in the second-level cache; `descending`: the last tile first. `scratch`
// is shared memory for as many numbers as tiles, free again on return.
template <typename Work>
__device__ __forceinline__ Place place_of_block(int block, int tiles, int heads, bool by_length, bool descending,
                                                int *scratch, const Work &work) {
    if (!by_length) {
        const int tile = block % tiles;
        return {descending ? tiles - 1 - tile : tile, block / tiles};
    }
    const int rank = block / heads;
    int found = -1;
    for (int tile = threadIdx.x; tile < tiles; tile += THREADS) scratch[tile] = work(tile);
    __syncthreads();
    for (int tile = threadIdx.x; tile < tiles; tile += THREADS) {
        const int own = scratch[tile];
        int before = 0;
        for (int other = 0; other < tiles; other++) {
            const int length = scratch[other];
            before += length > own || (length == own && other < tile);
        }
        if (before == rank) found = tile;
    }
    __syncthreads();
    if (found >= 0) *scratch = found;
    __syncthreads();
    const int tile = *scratch;
    __syncthreads();
    return {tile, block % heads};
}

// Writes a warp's rows, sums times a factor for each, through ROW_TILES * 16 rows of shared memory that are its own:
// the first `rows` of them, and the first `columns` of their COLUMNS elements.
template <int COLUMNS, int PITCH, int ROW_TILES>
__device__ __forceinline__ void store_rows(const float (&sums)[ROW_TILES][COLUMNS / 8][4],
                                           const float (&factor)[ROW_TILES][2], bf16 *staging, bf16 *out,
                                           int64_t stride, int rows, int columns) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bf16 *row = staging + (r * 16 + half * 8 + g) * PITCH + 2 * t;
#pragma unroll
            for (int v = 0; v < COLUMNS / 8; v++) {
                *reinterpret_cast<uint32_t *>(row + v * 8) =
                    pack_pair(sums[r][v][2 * half] * factor[r][half], sums[r][v][2 * half + 1] * factor[r][half]);
            }
        }
    }
    __syncwarp();
    constexpr int CHUNKS = COLUMNS / 8;
#pragma unroll
    for (int i = 0; i < ROW_TILES * 16 * CHUNKS / WARP; i++) {
        const int index = lane + i * WARP, own = index / CHUNKS, column = index % CHUNKS * 8;
        if (own < rows && column < columns) {
            *reinterpret_cast<uint4 *>(out + own * stride + column) =
                *reinterpret_cast<const uint4 *>(staging + own * PITCH + column);
        }
    }
}
