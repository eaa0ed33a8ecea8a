// Attention backward, the gradient of queries (FlashAttention-2, arXiv 2307.08691, algorithm 2, by rows of queries):
//
//   p[i, s]  = exp(scale q_i . k_s - log_sum_exp_i)            s in first_key[i] .. end_key[i], of one head
//   ds[i, s] = p[i, s] (gradient_i . v_s - delta_i)            delta_i = gradient_i . out_i
//   dq_i     = scale sum_s ds[i, s] k_s
//
// A block takes 4 * 16 * ROW_TILES query rows of one head and walks the tiles of KEYS keys that one of them sees; the
// next tile arrives while this one is multiplied. A warp has its own rows: the accumulators of scores and of slopes,
// which begin at -delta, become ds in place, the left operand of the product with keys.
//
// Bound: 6 * WIDTH operations a score on tensor cores, and the reads of shared memory beside them: 1.3 of its cycles a
// product of 16 x 8 x 16 at width 64, where the tensor cores take 1.6.
#pragma once

#include "exponential.cuh"
#include "training_call.cuh"

template <int WIDTH, int ROW_TILES, int KEYS> struct BackwardQueries {
    static constexpr int ROWS = WARPS * ROW_TILES * 16, PITCH = WIDTH + PADDING;

    // `block` counts tiles of ROWS query rows times heads. Shared memory: 2 * ROWS + 4 * KEYS padded rows.
    static __device__ __forceinline__ void run(const BackwardCall &backward, int block) {
        extern __shared__ __align__(16) unsigned char arena[];
        const TrainingCall &call = backward.forward;
        bf16 *queries = reinterpret_cast<bf16 *>(arena), *gradients = queries + ROWS * PITCH;
        bf16 *stages = gradients + ROWS * PITCH;
        const auto view_of = [&](int tile) {
            return View(call.first_key, call.end_key, tile * ROWS, min(tile * ROWS + ROWS, call.rows) - 1);
        };
        const Place place = place_of_block(block, (call.rows + ROWS - 1) / ROWS, call.heads, call.by_length, true,
                                           reinterpret_cast<int *>(arena), [&](int tile) {
                                               const View view = view_of(tile);
                                               return view.some_end - view.some_first;
                                           });
        const int first_row = place.tile * ROWS, last_row = min(first_row + ROWS, call.rows) - 1;
        const int head = place.head, kv_head = head / (call.heads / call.kv_heads), width = call.width;
        const bf16 *all_keys = call.k + int64_t(kv_head) * width, *all_values = call.v + int64_t(kv_head) * width;
        const View block_view = view_of(place.tile);
        const int first_tile = block_view.template first_tile<KEYS>();
        const int end_tile = block_view.template end_tile<KEYS>(call.keys);
        const auto copy_tile = [&](int tile, bf16 *stage) {
            const int first_key = tile * KEYS;
            copy_rows<WIDTH, KEYS>(stage, all_keys + first_key * call.k_stride, call.k_stride, call.keys - first_key,
                                   width);
            copy_rows<WIDTH, KEYS>(stage + KEYS * PITCH, all_values + first_key * call.v_stride, call.v_stride,
                                   call.keys - first_key, width);
        };
        copy_rows<WIDTH, ROWS>(queries, call.q + first_row * call.q_stride + int64_t(head) * width, call.q_stride,
                               call.rows - first_row, width);
        copy_rows<WIDTH, ROWS>(gradients,
                               backward.gradient + first_row * backward.gradient_stride + int64_t(head) * width,
                               backward.gradient_stride, call.rows - first_row, width);
        if (first_tile < end_tile) copy_tile(first_tile, stages);
        commit_copies();

        const int lane = threadIdx.x % WARP, g = lane / 4;
        const int warp_row = threadIdx.x / WARP * ROW_TILES * 16, row = first_row + warp_row;
        const View view(call.first_key, call.end_key, min(row, last_row), min(row + ROW_TILES * 16 - 1, last_row));
        bf16 *warp_queries = queries + warp_row * PITCH;
        const bf16 *warp_gradients = gradients + warp_row * PITCH;
        float offset[ROW_TILES][2], delta[ROW_TILES][2], factor[ROW_TILES][2], sums[ROW_TILES][WIDTH / 8][4] = {};
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int own = row + r * 16 + half * 8 + g;
                const int64_t at = int64_t(head) * call.rows + min(own, last_row);
                const float log_sum_exp = own <= last_row ? call.log_sum_exp[at] : -INFINITY;
                // A row that sees nothing: the exponential of anything finite less infinity is zero.
                offset[r][half] = log_sum_exp == -INFINITY ? INFINITY : log_sum_exp * LOG2_E;
                delta[r][half] = own <= last_row ? backward.delta[at] : 0.0f;
                factor[r][half] = backward.factor;
            }
        }
        for (int tile = first_tile; tile < end_tile; tile++) {
            const int first_key = tile * KEYS;
            const bf16 *keys = stages + (tile - first_tile) % 2 * 2 * KEYS * PITCH, *values = keys + KEYS * PITCH;
            wait_for_copies<0>();
            __syncthreads();
            if (tile + 1 < end_tile) copy_tile(tile + 1, stages + (tile + 1 - first_tile) % 2 * 2 * KEYS * PITCH);
            commit_copies();
            if (!view.sees_some(first_key, KEYS)) continue;
            float scores[ROW_TILES][KEYS / 8][4] = {}, slopes[ROW_TILES][KEYS / 8][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
                for (int k = 0; k < KEYS / 8; k++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) slopes[r][k][e] = -delta[r][e / 2];
                }
            }
            multiply_rows<WIDTH, ROW_TILES, KEYS>(warp_queries, keys, scores);
            multiply_rows<WIDTH, ROW_TILES, KEYS>(warp_gradients, values, slopes);
            if (!view.sees_all(first_key, KEYS)) {
                hide<ROW_TILES, KEYS / 8>(call.first_key, call.end_key, row, last_row, first_key, scores);
            }
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
                for (int k = 0; k < KEYS / 8; k++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        slopes[r][k][e] *= exp2_hardware(__fmaf_rn(scores[r][k][e], call.scale, -offset[r][e / 2]));
                    }
                }
            }
            multiply_accumulators<WIDTH, PITCH, ROW_TILES, KEYS>(slopes, keys, sums);
        }
        // Without a tile the copies are still on their way to where the rows are staged.
        wait_for_copies<0>();
        __syncthreads();
        store_rows<WIDTH, PITCH, ROW_TILES>(sums, factor, warp_queries,
                                            backward.dq + row * backward.dq_stride + int64_t(head) * width,
                                            backward.dq_stride, call.rows - row, width);
    }
};
