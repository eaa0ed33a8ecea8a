// Attention of many query rows over one history, on tensor cores with the softmax taken along the way
// (FlashAttention-2, arXiv 2307.08691): scores never leave the registers.
//
//   out[i, h] = sum_s softmax_s(scale q[i, h] . k_s[h / group]) v_s[h / group]
//
// The m query rows are the last m of `length` positions: row i is at position p = length - m + i and sees s in max(0,
// p - window + 1) ..= p where causal, else all positions. q bfloat16 with a row stride, keys and values bfloat16,
// position-major, out bfloat16 [m, heads * WIDTH]; log_sum_exp [heads, m] (natural, of the scaled scores) where it is
// asked for. A batch of equal sequences lies at fixed strides.
//
// A block takes 4 * 16 * ROW_TILES query rows of one head; a warp its own rows, whose scores with a tile of KEYS
// positions, and whose output, are accumulators of `multiply_add`. Probabilities go from score accumulators to left
// operands in place. Keys and values have one buffer each: values arrive while scores are computed, the next keys
// while values are summed, and a second block on the multiprocessor fills the gaps. Rows are padded by 16 bytes, so
// that the eight rows of a matrix load lie in different banks. Two row tiles a warp, where the registers suffice,
// halve the shared-memory reads per product, which otherwise bound it.
//
// Tiles of keys start at multiples of KEYS from position 0, in ascending order. A tile in which a row sees nothing
// leaves the row's maximum, denominator and sums as they were, to the bit: its factor is exactly 1 and its
// probabilities are 0. So a row's result depends on its own range of positions, not on the rows beside it, on m, or on
// ROW_TILES.
//
// Bound: 4 * WIDTH operations a score on tensor cores, and one exponential a score: at width 64 both weigh alike.
#pragma once

#include "exponential.cuh"
#include "tile_products.cuh"

struct Call {
    const bf16 *queries;
    const bf16 *keys;
    const bf16 *values;
    bf16 *__restrict__ out;
    float *__restrict__ log_sum_exp;  // or null
    int64_t query_stride, query_batch_stride, kv_stride, kv_batch_stride;  // in elements
    int rows, length, heads, kv_heads;
    float scale;  // times log2(e)
    int causal, window;  // without a window: the greatest number there is
};

template <int WIDTH, int ROW_TILES, int KEYS> struct FlashForward {
    static constexpr int ROWS = WARPS * ROW_TILES * 16;
    static constexpr int PITCH = WIDTH + PADDING;
    static constexpr int KEY_TILES = KEYS / 8, VALUE_TILES = WIDTH / 8;

    float sums[ROW_TILES][VALUE_TILES][4];
    float maximum[ROW_TILES][2], denominator[ROW_TILES][2];  // of rows g and g + 8; the denominator is this lane's part

    // Hides what a row does not see of the tile at `first_key`: rows see from `position - window + 1`, or from 0, to
    // `position`, or to the last one. `position` is that of the warp's first row.
    static __device__ __forceinline__ void mask(const Call &call, int position, int first_key,
                                                float (&scores)[ROW_TILES][KEY_TILES][4]) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int own = min(position + r * 16 + half * 8 + g, call.length - 1);
                const int last = call.causal ? own : call.length - 1;
                const int first = max(0, own - call.window + 1);
                // In unsigned numbers one comparison serves both ends.
                const unsigned span = last - first, offset = first_key + 2 * t - first;
#pragma unroll
                for (int k = 0; k < KEY_TILES; k++) {
                    if (offset + 8 * k > span) scores[r][k][2 * half] = -INFINITY;
                    if (offset + 8 * k + 1 > span) scores[r][k][2 * half + 1] = -INFINITY;
                }
            }
        }
    }

    // Scores become probabilities relative to the running maximum, and what was summed before is rescaled to it.
    __device__ __forceinline__ void take_softmax(float scale, float (&scores)[ROW_TILES][KEY_TILES][4]) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float greatest = maximum[r][half];
#pragma unroll
                for (int k = 0; k < KEY_TILES; k++) {
                    greatest = fmaxf(greatest, fmaxf(scores[r][k][2 * half], scores[r][k][2 * half + 1]));
                }
                greatest = fmaxf(greatest, __shfl_xor_sync(FULL_WARP, greatest, 1));
                greatest = fmaxf(greatest, __shfl_xor_sync(FULL_WARP, greatest, 2));
                // Nothing seen yet (a window's first tile): any finite number keeps the differences from being
                // undefined.
                const float finite = greatest == -INFINITY ? 0.0f : greatest;
                // The difference first: where the maximum stays, the factor is exactly 1.
                const float factor = exp2_hardware((maximum[r][half] - finite) * scale);
                const float offset = finite * scale;
                maximum[r][half] = greatest;
                float total = 0.0f;
#pragma unroll
                for (int k = 0; k < KEY_TILES; k++) {
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        scores[r][k][e] = exp2_hardware(__fmaf_rn(scores[r][k][e], scale, -offset));
                        total += scores[r][k][e];
                    }
                }
                denominator[r][half] = __fmaf_rn(denominator[r][half], factor, total);
#pragma unroll
                for (int v = 0; v < VALUE_TILES; v++) {
                    sums[r][v][2 * half] *= factor;
                    sums[r][v][2 * half + 1] *= factor;
                }
            }
        }
    }

    // Divides by the denominators and writes the warp's rows, through its own rows of the queries' shared memory.
    __device__ __forceinline__ void store(const Call &call, int batch, int head, int first_row, bf16 *staging) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float total = denominator[r][half];
                total += __shfl_xor_sync(FULL_WARP, total, 1);
                total += __shfl_xor_sync(FULL_WARP, total, 2);
                const float inverse = 1.0f / total;
                const int own = r * 16 + half * 8 + g, row = first_row + own;
#pragma unroll
                for (int v = 0; v < VALUE_TILES; v++) {
                    *reinterpret_cast<uint32_t *>(staging + own * PITCH + v * 8 + 2 * t) =
                        pack_pair(sums[r][v][2 * half] * inverse, sums[r][v][2 * half + 1] * inverse);
                }
                if (call.log_sum_exp != nullptr && t == 0 && row < call.rows) {
                    constexpr float LN_2 = 0.693147181f;
                    call.log_sum_exp[(int64_t(batch) * call.heads + head) * call.rows + row] =
                        (maximum[r][half] * call.scale + log2f(total)) * LN_2;
                }
            }
        }
        __syncwarp();
        constexpr int CHUNKS = WIDTH / 8;
#pragma unroll
        for (int i = 0; i < ROW_TILES * 16 * CHUNKS / WARP; i++) {
            const int index = lane + i * WARP, own = index / CHUNKS, column = index % CHUNKS * 8;
            if (first_row + own < call.rows) {
                const int64_t row = int64_t(batch) * call.rows + first_row + own;
                *reinterpret_cast<uint4 *>(call.out + (row * call.heads + head) * WIDTH + column) =
                    *reinterpret_cast<const uint4 *>(staging + own * PITCH + column);
            }
        }
    }

    // Grid: tiles of ROWS query rows, heads, batch. Shared memory: ROWS + 2 * KEYS padded rows.
    static __device__ __forceinline__ void run(const Call &call) {
        extern __shared__ __align__(16) unsigned char arena[];
        bf16 *queries = reinterpret_cast<bf16 *>(arena), *keys = queries + ROWS * PITCH, *values = keys + KEYS * PITCH;
        // The last rows see most: they start first, so that the short ones fill the end.
        const int block_row = (gridDim.x - 1 - blockIdx.x) * ROWS;
        const int head = blockIdx.y, batch = blockIdx.z, kv_head = head / (call.heads / call.kv_heads);
        const bf16 *all_keys = call.keys + batch * call.kv_batch_stride + int64_t(kv_head) * WIDTH;
        const bf16 *all_values = call.values + batch * call.kv_batch_stride + int64_t(kv_head) * WIDTH;

        const int first_position = call.length - call.rows + block_row;
        const int last_position = call.length - call.rows + min(block_row + ROWS, call.rows) - 1;
        const int first_tile = max(0, first_position - call.window + 1) / KEYS;
        const int end_tile = (call.causal ? last_position : call.length - 1) / KEYS + 1;
        const int warp_row = threadIdx.x / WARP * ROW_TILES * 16;
        bf16 *warp_queries = queries + warp_row * PITCH;

        copy_rows<WIDTH, ROWS>(queries, call.queries + batch * call.query_batch_stride + block_row * call.query_stride +
                                            int64_t(head) * WIDTH, call.query_stride, call.rows - block_row);
        copy_rows<WIDTH, KEYS>(keys, all_keys + int64_t(first_tile) * KEYS * call.kv_stride, call.kv_stride,
                               call.length - first_tile * KEYS);
        commit_copies();

        FlashForward state;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                state.maximum[r][half] = -INFINITY;
                state.denominator[r][half] = 0.0f;
            }
#pragma unroll
            for (int v = 0; v < VALUE_TILES; v++) {
#pragma unroll
                for (int e = 0; e < 4; e++) state.sums[r][v][e] = 0.0f;
            }
        }
        for (int tile = first_tile; tile < end_tile; tile++) {
            const int first_key = tile * KEYS;
            wait_for_copies<0>();
            __syncthreads();
            copy_rows<WIDTH, KEYS>(values, all_values + first_key * call.kv_stride, call.kv_stride,
                                   call.length - first_key);
            commit_copies();
            float scores[ROW_TILES][KEY_TILES][4] = {};
            multiply_rows<WIDTH, ROW_TILES, KEYS>(warp_queries, keys, scores);
            wait_for_copies<0>();
            __syncthreads();
            if (tile + 1 < end_tile) {
                copy_rows<WIDTH, KEYS>(keys, all_keys + (first_key + KEYS) * call.kv_stride, call.kv_stride,
                                       call.length - first_key - KEYS);
                commit_copies();
            }
            const bool ends_here = first_key + KEYS > (call.causal ? first_position + 1 : call.length);
            const bool begins_here = first_key < last_position - call.window + 1;
            if (ends_here || begins_here) mask(call, first_position + warp_row, first_key, scores);
            state.take_softmax(call.scale, scores);
            multiply_accumulators<WIDTH, PITCH, ROW_TILES, KEYS>(scores, values, state.sums);
        }
        state.store(call, batch, head, block_row + warp_row, warp_queries);
    }
};
