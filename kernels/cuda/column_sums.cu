// Sums over rows: the gradient of a bias, and the second half of every gradient of a vector that all rows share.
//
//   column_sums     partials[piece, j] = sum of x[i, j] over the piece's rows          x BF16 or F32 [rows, columns]
//   add_partials    out[j] = (out[j] +) sum of partials[piece, j]                      F32
//
// Two stages instead of additions to memory in no order: the same bits every run. The pieces are a function of the
// shape, a piece's rows go to eight warps in turn, and all sums are F32 in a fixed order.
//
// Bound: reading x. A warp reads 256 columns of BF16 (128 of F32) of a row at once where rows are aligned, else 32.

#include "training/rows.cuh"

constexpr int WARPS = 8;          // of a block of column_sums, which take rows in turn
constexpr int PARTIAL_GROUPS = 32; // threads that share a column in add_partials

// COUNT columns a lane: four of either form, or one. Grid: columns / (32 COUNT), pieces.
template <int COUNT>
__device__ __forceinline__ void sum_columns(const void *x, int form, size_t stride, float *partials, int rows,
                                            int columns) {
    __shared__ float parts[WARPS][COUNT * WARP];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first = blockIdx.x * COUNT * WARP, column = first + lane * COUNT;
    const int rows_of_piece = (rows + gridDim.y - 1) / gridDim.y;
    const int start = blockIdx.y * rows_of_piece, end = min(rows, start + rows_of_piece);
    float sums[COUNT] = {};
    if (column < columns) {
#pragma unroll 8
        for (int row = start + warp; row < end; row += WARPS) {
            const void *from = element(x, form, row * stride + column);
            if constexpr (COUNT == 4) {
                const float4 v = four(load_four(from, form, 0), form);
                sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
            } else {
                sums[0] += load_one(from, form, 0);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) parts[warp][lane * COUNT + i] = sums[i];
    __syncthreads();
    const int own = threadIdx.x;
    if (own >= COUNT * WARP || first + own >= columns) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += parts[i][own];
    partials[size_t(blockIdx.y) * columns + first + own] = total;
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP)
    column_sums(const void *x, int form, size_t stride, float *partials, int rows, int columns) {
    if (form == F32) {
        sum_columns<4>(x, F32, stride, partials, rows, columns);
    } else {
        sum_columns<4>(x, BF16, stride, partials, rows, columns);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP)
    column_sums_any(const void *x, int form, size_t stride, float *partials, int rows, int columns) {
    sum_columns<1>(x, form, stride, partials, rows, columns);
}

// A block has 32 columns, each shared by 32 threads that take partials in turn.
extern "C" __global__ void __launch_bounds__(PARTIAL_GROUPS *WARP)
    add_partials(const float *partials, float *out, int pieces, int columns, int add) {
    __shared__ float sums[PARTIAL_GROUPS][WARP];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % WARP, group = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int piece = group; piece < pieces; piece += PARTIAL_GROUPS) {
            sum += __ldcg(partials + size_t(piece) * columns + column);
        }
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group != 0 || column >= columns) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTIAL_GROUPS; i++) total += sums[i][lane];
    out[column] = add ? out[column] + total : total;
}
