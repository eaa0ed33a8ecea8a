// Attention forward for training: the products and the softmax of flash_forward.cuh under a mask by bounds, with the
// log-sum-exp that the backward pass rebuilds probabilities from.
//
//   out[i, h] = sum_s softmax_s(scale q[i, h] . k_s[h / group]) v_s[h / group]        s in first_key[i] .. end_key[i]
//   log_sum_exp[h, i] = log sum_s exp(scale q[i, h] . k_s[h / group])
//
// A row that sees nothing has an output of zero and a log-sum-exp of -infinity.
#pragma once

#include "flash_forward.cuh"
#include "training_call.cuh"

template <int WIDTH, int ROW_TILES, int KEYS> struct TrainingForward {
    using Flash = FlashForward<WIDTH, ROW_TILES, KEYS>;
    static constexpr int ROWS = Flash::ROWS, PITCH = Flash::PITCH;

    // Grid: tiles of ROWS query rows times heads. Shared memory: ROWS + 2 * KEYS padded rows.
    static __device__ __forceinline__ void run(const TrainingCall &call) {
        extern __shared__ __align__(16) unsigned char arena[];
        bf16 *queries = reinterpret_cast<bf16 *>(arena), *keys = queries + ROWS * PITCH, *values = keys + KEYS * PITCH;
        const auto view_of = [&](int tile) {
            return View(call.first_key, call.end_key, tile * ROWS, min(tile * ROWS + ROWS, call.rows) - 1);
        };
        const Place place = place_of_block(blockIdx.x, (call.rows + ROWS - 1) / ROWS, call.heads, call.by_length, true,
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

        const int warp_row = threadIdx.x / WARP * ROW_TILES * 16, row = first_row + warp_row;
        const View view(call.first_key, call.end_key, min(row, last_row), min(row + ROW_TILES * 16 - 1, last_row));
        bf16 *warp_queries = queries + warp_row * PITCH;

        copy_rows<WIDTH, ROWS>(queries, call.q + first_row * call.q_stride + int64_t(head) * width, call.q_stride,
                               call.rows - first_row, width);
        copy_rows<WIDTH, KEYS>(keys, all_keys + int64_t(first_tile) * KEYS * call.k_stride, call.k_stride,
                               first_tile < end_tile ? call.keys - first_tile * KEYS : 0, width);
        commit_copies();

        Flash state;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                state.maximum[r][half] = -INFINITY;
                state.denominator[r][half] = 0.0f;
            }
#pragma unroll
            for (int v = 0; v < WIDTH / 8; v++) {
#pragma unroll
                for (int e = 0; e < 4; e++) state.sums[r][v][e] = 0.0f;
            }
        }
        for (int tile = first_tile; tile < end_tile; tile++) {
            const int first_key = tile * KEYS;
            wait_for_copies<0>();
            __syncthreads();
            copy_rows<WIDTH, KEYS>(values, all_values + first_key * call.v_stride, call.v_stride,
                                   call.keys - first_key, width);
            commit_copies();
            float scores[ROW_TILES][KEYS / 8][4] = {};
            multiply_rows<WIDTH, ROW_TILES, KEYS>(warp_queries, keys, scores);
            wait_for_copies<0>();
            __syncthreads();
            if (tile + 1 < end_tile) {
                copy_rows<WIDTH, KEYS>(keys, all_keys + (first_key + KEYS) * call.k_stride, call.k_stride,
                                       call.keys - first_key - KEYS, width);
                commit_copies();
            }
            if (!view.sees_all(first_key, KEYS)) {
                hide<ROW_TILES, KEYS / 8>(call.first_key, call.end_key, row, last_row, first_key, scores);
            }
            state.take_softmax(call.scale, scores);
            multiply_accumulators<WIDTH, PITCH, ROW_TILES, KEYS>(scores, values, state.sums);
        }
        // Without a tile the copies are still on their way to where the rows are staged.
        wait_for_copies<0>();
        __syncthreads();
        store(call, state, head, row, warp_queries);
    }

    static __device__ __forceinline__ void store(const TrainingCall &call, const Flash &state, int head, int first_row,
                                                 bf16 *staging) {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        float inverse[ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float total = state.denominator[r][half];
                total += __shfl_xor_sync(FULL_WARP, total, 1);
                total += __shfl_xor_sync(FULL_WARP, total, 2);
                inverse[r][half] = total > 0.0f ? 1.0f / total : 0.0f;
                const int row = first_row + r * 16 + half * 8 + g;
                if (t == 0 && row < call.rows) {
                    constexpr float LN_2 = 0.693147181f;
                    call.log_sum_exp[int64_t(head) * call.rows + row] =
                        (state.maximum[r][half] * call.scale + log2f(total)) * LN_2;
                }
            }
        }
        store_rows<WIDTH, PITCH, ROW_TILES>(state.sums, inverse, staging,
                                            call.out + first_row * call.out_stride + int64_t(head) * call.width,
                                            call.out_stride, call.rows - first_row, call.width);
    }
};
