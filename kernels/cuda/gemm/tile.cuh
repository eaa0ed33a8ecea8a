// One block's tile of a product on the tensor cores: what gemm.cu, routed.cu and routed_training.cu share.
//
//   sums[r, c] = sum over d of x[row(r), d] * W[column(c), d]      ROWS x 128 sums, d in DEPTH-wide steps
//
// x and W are bfloat16. An operand whose rows have the summed dimension along them comes to the tensor cores by plain
// `ldmatrix`; one that has a row for each d (the gradients' products: x^T or W as they lie) by `ldmatrix.trans`. Four
// warps in a 2 x 2 square each hold (ROWS / 2) x 64 sums in registers. Three stages of 64 d of x and W go through
// shared memory by `cp.async`; 16-byte pieces are exchanged within a row (piece ^ row % 8), so neither the copies nor
// `ldmatrix` meet a bank twice. The pieces for the next sixteen d are read while those before are multiplied, across
// the stages too: the one barrier of a stage stands before its last multiplication.
//
// A sum is taken in ascending order of d, sixteen columns a step, whatever ROWS, the place in the tile or the number of
// rows: the same row gives the same bits in any product.
//
// Bound: a k-step of one warp reads 4 KiB of shared memory for 64 x 64 x 16 products, 32 cycles at 128 bytes a cycle,
// and the tensor cores take at least 32. Larger tiles of a warp do not fit in its registers (128 of 255 are sums).
#pragma once

#include "../vocabulary/device.cuh"

// How an operand lies: rows along which the summed dimension runs, or a row for each of its elements.
enum class Depth { ALONG_ROWS, ACROSS_ROWS };

template <int ROWS_, Depth X = Depth::ALONG_ROWS, Depth W = Depth::ALONG_ROWS> struct Tile {
    static constexpr int ROWS = ROWS_, COLUMNS = 128, DEPTH = 64, STAGES = 3, THREADS = 128;
    // A thread copies the same piece of every sixteenth row.
    static constexpr int PIECES = DEPTH / 8, ROWS_A_COPY = THREADS / PIECES;
    static constexpr int X_COPIES = ROWS / ROWS_A_COPY, WEIGHT_COPIES = COLUMNS / ROWS_A_COPY;
    static constexpr int ROW_BYTES = DEPTH * 2, X_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = X_BYTES + COLUMNS * ROW_BYTES;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
    static constexpr int WARP_ROWS = ROWS / 2, WARP_COLUMNS = COLUMNS / 2;
    static constexpr int ROW_BLOCKS = WARP_ROWS / 16, COLUMN_BLOCKS = WARP_COLUMNS / 8, STEPS = DEPTH / 16;
    // Two blocks share a multiprocessor (three of the small ones), so that one multiplies while the other waits.
    static constexpr int BLOCKS = ROWS == 128 ? 2 : 3;

    float sums[ROW_BLOCKS][COLUMN_BLOCKS][4];

    // Row of the tile that this thread copies in its copy `i`.
    static __device__ __forceinline__ int copied_row(int i) { return threadIdx.x / PIECES + i * ROWS_A_COPY; }

    // Computes the sums. `x_offsets[i]` and `weight_offsets[i]` say where the rows `copied_row(i)` start, in pieces of
    // eight elements (32 bits hold 64 GiB so, and registers are what is short here): a valid row for every i, one of
    // them again where the tile is larger than what is left. `weight(i)` gives the matrix of copy i. `depth` is a
    // multiple of eight; what lies behind it counts as zero.
    template <class Weight>
    __device__ __forceinline__ void multiply(const bf16 *x, const uint32_t (&x_offsets)[X_COPIES], Weight weight,
                                             const uint32_t (&weight_offsets)[WEIGHT_COPIES], int depth, char *shared) {
        const auto copy_x = copy_along(shared, [x](int) { return x; }, x_offsets, depth);
        accumulate(copy_x, copy_along(shared + X_BYTES, weight, weight_offsets, depth), depth, shared);
    }

    // The copies of an operand along whose rows the sums run: to `to` in the first stage, see `multiply`.
    template <class Matrix, int COPIES>
    static __device__ __forceinline__ auto copy_along(char *to, Matrix matrix, const uint32_t (&offsets)[COPIES],
                                                      int depth) {
        const int piece = threadIdx.x % PIECES;
        char *const copy_to = to + copied_row(0) * ROW_BYTES + (piece ^ copied_row(0) % PIECES) * 16;
        return [=, &offsets](int tile, int stage) {
            const uint32_t column = tile * PIECES + piece;
            const bool valid = column * 8 < depth;
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                copy_async(copy_to + stage * STAGE_BYTES + i * ROWS_A_COPY * ROW_BYTES,
                           matrix(i) + size_t(offsets[i] + column) * 8, valid);
            }
        };
    }

    // The copies of WIDTH columns, from `column` on, of an operand across whose rows the sums run: of `depth` rows,
    // `stride` elements apart, from `rows` on. What lies behind its last row or at and behind `columns`, a multiple of
    // eight, counts as zero and is not read.
    template <int WIDTH>
    static __device__ __forceinline__ auto copy_across(char *to, const bf16 *rows, int stride, int column, int columns,
                                                       int depth) {
        constexpr int ROW_PIECES = WIDTH / 8, COPIED_ROWS = THREADS / ROW_PIECES;
        static_assert(COPIED_ROWS % 8 == 0, "a thread exchanges its pieces in the same way in every copy");
        const int piece = threadIdx.x % ROW_PIECES, first = threadIdx.x / ROW_PIECES;
        char *const copy_to = to + first * WIDTH * 2 + (piece ^ first % 8) * 16;
        const bool inside = column + piece * 8 < columns;
        const bf16 *const from = rows + (inside ? column + piece * 8 : 0);
        return [=](int tile, int stage) {
#pragma unroll
            for (int i = 0; i < DEPTH / COPIED_ROWS; i++) {
                const int row = tile * DEPTH + first + i * COPIED_ROWS;
                copy_async(copy_to + stage * STAGE_BYTES + i * COPIED_ROWS * WIDTH * 2, from + size_t(row) * stride,
                           inside && row < depth);
            }
        };
    }

    // Computes the sums of what `copy_x(tile, stage)` and `copy_weight(tile, stage)` bring: a tile is DEPTH elements of
    // the summed dimension, which has `depth`, at least one.
    template <class CopyX, class CopyWeight>
    __device__ __forceinline__ void accumulate(const CopyX &copy_x, const CopyWeight &copy_weight, int depth,
                                               char *shared) {
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS; i++)
#pragma unroll
            for (int j = 0; j < COLUMN_BLOCKS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;

        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const int tiles = (depth + DEPTH - 1) / DEPTH;

        // `ldmatrix` takes the address of row lane % 8 of matrix lane / 8. Along rows, of x: rows 0..8, rows 8..16,
        // then the same with the higher eight d; of W: the lower and the higher eight d of rows 0..8, then of rows
        // 8..16. Across rows a matrix is eight d of eight columns, and the four of an operand are the same ones,
        // transposed.
        constexpr bool X_ALONG = X == Depth::ALONG_ROWS, W_ALONG = W == Depth::ALONG_ROWS;
        const int x_first = (warp / 2) * WARP_ROWS, weight_first = (warp % 2) * WARP_COLUMNS;
        const char *const x_rows =
            shared + (X_ALONG ? (x_first + lane % 16) * ROW_BYTES : (lane % 8 + lane / 16 * 8) * ROWS * 2);
        const char *const weight_rows =
            shared + X_BYTES +
            (W_ALONG ? (weight_first + lane % 8 + lane / 16 * 8) * ROW_BYTES : lane % 16 * COLUMNS * 2);
        const int x_half = lane / 16, weight_half = lane / 8 % 2;
        // Across rows: the place of the piece of the first block of columns; that of block i is 2 i pieces on, which
        // changes other bits.
        const int x_place = ((x_first / 8 + lane / 8 % 2) ^ lane % 8) * 16;
        const int weight_place = ((weight_first / 8 + lane / 16) ^ lane % 8) * 16;

        uint32_t x_pieces[2][ROW_BLOCKS][4], weight_pieces[2][COLUMN_BLOCKS / 2][4];
        const auto load_pieces = [&](int buffer, int stage, int step) {
            const int x_piece = ((2 * step + x_half) ^ lane % 8) * 16;
            const int weight_piece = ((2 * step + weight_half) ^ lane % 8) * 16;
#pragma unroll
            for (int i = 0; i < ROW_BLOCKS; i++) {
                if constexpr (X_ALONG) {
                    load_matrices(x_pieces[buffer][i], x_rows + stage * STAGE_BYTES + i * 16 * ROW_BYTES + x_piece);
                } else {
                    load_matrices_transposed(x_pieces[buffer][i],
                                             x_rows + stage * STAGE_BYTES + step * 16 * ROWS * 2 + (x_place ^ i * 32));
                }
            }
#pragma unroll
            for (int j = 0; j < COLUMN_BLOCKS / 2; j++) {
                if constexpr (W_ALONG) {
                    load_matrices(weight_pieces[buffer][j],
                                  weight_rows + stage * STAGE_BYTES + j * 16 * ROW_BYTES + weight_piece);
                } else {
                    load_matrices_transposed(
                        weight_pieces[buffer][j],
                        weight_rows + stage * STAGE_BYTES + step * 16 * COLUMNS * 2 + (weight_place ^ j * 32));
                }
            }
        };

        // One group of copies for every stage, also for the stages behind the last: the count of pending groups stays
        // right.
#pragma unroll
        for (int tile = 0; tile < STAGES - 1; tile++) {
            if (tile < tiles) {
                copy_x(tile, tile);
                copy_weight(tile, tile);
            }
            commit_copies();
        }
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        load_pieces(0, 0, 0);

        int stage = 0, free_stage = STAGES - 1;
        for (int tile = 0; tile < tiles; tile++) {
            const int next_stage = stage + 1 == STAGES ? 0 : stage + 1;
            const bool more = tile + STAGES - 1 < tiles;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                if (step == STEPS - 1) {
                    // The next stage has arrived, and every warp has read the last of this one, which is free from here
                    // on.
                    wait_for_copies<STAGES - 2>();
                    __syncthreads();
                    load_pieces(0, next_stage, 0);
                } else {
                    load_pieces((step + 1) % 2, stage, step + 1);
                }
                if (step == 0 && more) copy_x(tile + STAGES - 1, free_stage);
                if (step == 1) {
                    if (more) copy_weight(tile + STAGES - 1, free_stage);
                    commit_copies();
                }
#pragma unroll
                for (int i = 0; i < ROW_BLOCKS; i++) {
#pragma unroll
                    for (int j = 0; j < COLUMN_BLOCKS; j++) {
                        const uint32_t *b = weight_pieces[step % 2][j / 2] + j % 2 * 2;
                        multiply_add(sums[i][j], x_pieces[step % 2][i], b[0], b[1]);
                    }
                }
            }
            free_stage = stage;
            stage = next_stage;
        }
    }

    // Calls `use(row of the tile, column of the tile, first, second)` for every two neighbouring sums that this thread
    // holds.
    template <class Use> __device__ __forceinline__ void for_pairs(Use use) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const int row = (warp / 2) * WARP_ROWS + lane / 4, column = (warp % 2) * WARP_COLUMNS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < COLUMN_BLOCKS; j++) {
                    use(row + i * 16 + half * 8, column + j * 8, sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
                }
    }

    // The sums as bfloat16, eight of a row at a time: calls `use(row of the tile, column of the tile, eight sums)`.
    // They go through the stages' memory, so that a warp writes whole lines of the result and not the sixteen bytes of
    // a row that its lanes hold between them.
    template <class Use> __device__ __forceinline__ void for_eights(char *shared, Use use) const {
        constexpr int BYTES = WARP_COLUMNS * 2, LANES = WARP_COLUMNS / 8;
        static_assert(LANES == 8, "a piece's place is exchanged among eight");
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        char *const mine = shared + warp * WARP_ROWS * BYTES;
        __syncthreads(); // every warp has read its last stage
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS * 2; i++)
#pragma unroll
            for (int j = 0; j < COLUMN_BLOCKS; j++) {
                const float *pair = sums[i / 2][j] + i % 2 * 2;
                *reinterpret_cast<uint32_t *>(mine + (i * 8 + lane / 4) * BYTES + (j ^ lane / 4) * 16 + lane % 4 * 4) =
                    pack(pair[0], pair[1]);
            }
        __syncwarp();
        const int row = lane / LANES, column = lane % LANES;
#pragma unroll
        for (int i = 0; i < WARP_ROWS * LANES / WARP; i++) {
            const int at = i * (WARP / LANES) + row;
            const char *const piece = mine + at * BYTES + (column ^ at % 8) * 16;
            use((warp / 2) * WARP_ROWS + at, (warp % 2) * WARP_COLUMNS + column * 8,
                *reinterpret_cast<const uint4 *>(piece));
        }
    }

    // Two matrices side by side: of every 64 columns of the tile, 32 belong to the first and 32 to the second, so that
    // a thread holds both sums of a column. Calls `use(row of the tile, column of the matrices (of 64), sums of the
    // first, of the second)` with two neighbouring columns each.
    template <class Use> __device__ __forceinline__ void for_gated_pairs(Use use) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const int row = (warp / 2) * WARP_ROWS + lane / 4, column = (warp % 2) * (WARP_COLUMNS / 2) + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < COLUMN_BLOCKS / 2; j++) {
                    const float *gate = sums[i][j] + half * 2, *up = sums[i][j + COLUMN_BLOCKS / 2] + half * 2;
                    use(row + i * 16 + half * 8, column + j * 8, make_float2(gate[0], gate[1]),
                        make_float2(up[0], up[1]));
                }
    }
    static constexpr int GATED_COLUMNS = COLUMNS / 2;
    // Of the two matrices the one that copy `i` of the weights reads, and the column in it.
    static __device__ __forceinline__ constexpr bool copies_second(int i) { return i * ROWS_A_COPY / 32 % 2 == 1; }
    static __device__ __forceinline__ int gated_column(int i) { return copied_row(i) / 64 * 32 + copied_row(i) % 32; }
};

// Order of the tiles: groups of sixteen row tiles, in each the rows run fastest, so that the blocks that run together
// share their rows and their weights in the second-level cache.
struct TilePosition {
    int row_tile, column_tile;
};

__device__ __forceinline__ TilePosition tile_position(int tile, int row_tiles, int column_tiles) {
    constexpr int GROUP = 16;
    const int group = tile / (GROUP * column_tiles), in_group = tile % (GROUP * column_tiles);
    const int rows = min(GROUP, row_tiles - group * GROUP);
    return {group * GROUP + in_group % rows, in_group / rows};
}

// The activation of a gate: SiLU, x / (1 + e^-x), or the tanh form of GELU written as x / (1 + e^-2u).
enum Activation { SILU = 0, GELU_TANH = 1 };

__device__ __forceinline__ float activate(int activation, float x) {
    const float u = activation == GELU_TANH ? 2.0f * 0.7978845608f * fmaf(0.044715f * x * x, x, x) : x;
    return x / (1.0f + expf(-u));
}

// Stores two neighbouring elements of a row whose length is `columns`; as one word where the row's stride is even.
__device__ __forceinline__ void store_pair(bf16 *row, int column, int columns, bool even, float first, float second) {
    if (even && column + 1 < columns) {
        *reinterpret_cast<uint32_t *>(row + column) = pack(first, second);
        return;
    }
    if (column < columns) row[column] = __float2bfloat16_rn(first);
    if (column + 1 < columns) row[column + 1] = __float2bfloat16_rn(second);
}

__device__ __forceinline__ void store_pair(float *row, int column, int columns, bool even, float first, float second) {
    if (even && column + 1 < columns) {
        *reinterpret_cast<float2 *>(row + column) = make_float2(first, second);
        return;
    }
    if (column < columns) row[column] = first;
    if (column + 1 < columns) row[column + 1] = second;
}
