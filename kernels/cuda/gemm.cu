// Products of many rows on the tensor cores, where cuBLASLt is absent.
//
//   out[n, M] = x[n, K] W[M, K]^T (+ bias[M])                      out single precision or bfloat16
//   out[n, M] += x[n, K] W[M, K]^T (+ bias[M])                     out single precision: the residual stream
//
// x and W bfloat16, sums in single precision; row strides are multiples of eight elements, out's stride is any. K is a
// multiple of eight. A tile is 128 or 64 rows by 128 columns: see gemm/tile.cuh. The launcher takes the smaller one where
// the larger would leave multiprocessors idle; both give the same bits.
//
// Bound: 2 n M K operations on the tensor cores. `mma.sync` reaches about 62% of what Hopper's `wgmma` does; cuBLASLt
// uses the latter, which is why it goes first where it is there.
#include "gemm/tile.cuh"

namespace {

struct Product {
    const bf16 *x, *weight;
    void *out;
    const void *bias;
    int x_stride, weight_stride, out_stride, rows, columns, depth;
};

template <int ROWS>
__device__ __forceinline__ void multiply(Tile<ROWS> &tile, const Product &p, int row, int column) {
    extern __shared__ __align__(128) char shared[];
    using T = Tile<ROWS>;
    uint32_t x_offsets[T::X_COPIES], weight_offsets[T::WEIGHT_COPIES];
#pragma unroll
    for (int i = 0; i < T::X_COPIES; i++) {
        x_offsets[i] = uint32_t(min(row + T::copied_row(i), p.rows - 1)) * uint32_t(p.x_stride / 8);
    }
#pragma unroll
    for (int i = 0; i < T::WEIGHT_COPIES; i++) {
        weight_offsets[i] = uint32_t(min(column + T::copied_row(i), p.columns - 1)) * uint32_t(p.weight_stride / 8);
    }
    const auto weight = [&](int) { return p.weight; };
    tile.multiply(p.x, x_offsets, weight, weight_offsets, p.depth, shared);
}

template <int ROWS, class Out, bool ADD> __device__ __forceinline__ void product(const Product &p) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    using T = Tile<ROWS>;
    const int row_tiles = (p.rows + ROWS - 1) / ROWS, column_tiles = (p.columns + T::COLUMNS - 1) / T::COLUMNS;
    const TilePosition position = tile_position(blockIdx.x, row_tiles, column_tiles);
    const int first_row = position.row_tile * ROWS, first_column = position.column_tile * T::COLUMNS;
    T tile;
    multiply(tile, p, first_row, first_column);

    const Out *bias = static_cast<const Out *>(p.bias);
    const bool even = p.out_stride % 2 == 0;
    tile.for_pairs([&](int tile_row, int tile_column, float first, float second) {
        const int row = first_row + tile_row, column = first_column + tile_column;
        if (row >= p.rows || column >= p.columns) return;
        Out *out = static_cast<Out *>(p.out) + size_t(row) * p.out_stride;
        const bool both = column + 1 < p.columns;
        if (bias) {
            first += float(bias[column]);
            if (both) second += float(bias[column + 1]);
        }
        if constexpr (ADD) {
            first += out[column];
            if (both) second += out[column + 1];
        }
        store_pair(out, column, p.columns, even, first, second);
    });
}

} // namespace

#define GEMM(NAME, ROWS, OUT, ADD)                                                                                     \
    extern "C" __global__ void __launch_bounds__(Tile<ROWS>::THREADS, Tile<ROWS>::BLOCKS)                              \
        NAME(const bf16 *x, const bf16 *__restrict__ weight, const OUT *__restrict__ bias, OUT *__restrict__ out,      \
             int x_stride, int weight_stride, int out_stride, int rows, int columns, int depth) {                      \
        product<ROWS, OUT, ADD>({x, weight, out, bias, x_stride, weight_stride, out_stride, rows, columns, depth});    \
    }

GEMM(gemm_f32_rows128, 128, float, false)
GEMM(gemm_f32_rows64, 64, float, false)
GEMM(gemm_bf16_rows128, 128, bf16, false)
GEMM(gemm_bf16_rows64, 64, bf16, false)
GEMM(gemm_add_rows128, 128, float, true)
GEMM(gemm_add_rows64, 64, float, true)
