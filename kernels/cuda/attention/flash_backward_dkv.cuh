// Attention backward, the gradients of keys and values (FlashAttention-2, arXiv 2307.08691, algorithm 2, by rows of
// keys), with p and ds as in flash_backward_dq.cuh:
//
//   dv_s = sum_h sum_i p[h, i, s] gradient[i, h]               i in first_query[s] .. end_query[s],
//   dk_s = scale sum_h sum_i ds[h, i, s] q[i, h]               h over the query heads of the kv head
//
// A block takes KEY_WARPS * 16 * ROW_TILES keys of one kv head and walks, for each head of its group, the tiles of TILE
// queries that see one of them: all sums of a key are one block's, without atomics. It multiplies the transposes, k q^T
// and v gradient^T, whose accumulators are then the left operands p^T and ds^T in place. A warp takes SUB queries of a
// tile at a time: what is in registers beside the sums. Where KEY_WARPS is 2, two warps share the keys and halve the
// queries, and add their sums at the end: twice as many blocks for small grids, at the same reads for each product.
//
// Sums of two row tiles at width 128 do not fit into a warp's registers, and one row tile reads shared memory half as
// often again. So two warps with the same keys there halve the queries when they weigh and the columns when they add
// up (EXCHANGES): p and ds of the other's queries come through shared memory, as operands, lane by lane.
//
// At width 256 not even one row tile's sums do: a block makes OUT_WIDTH columns of both gradients, and another one
// weighs the same queries again for the rest.
//
// The log-sum-exp (times log2 e) and -delta of a query lie in the padding of its row in shared memory.
//
// Bound: 8 * WIDTH operations a score on tensor cores, and reads of shared memory: 1.5 of its cycles a product of
// 16 x 8 x 16 with two row tiles, where the tensor cores take 1.6; 1.75 with an exchange; 2.25 with one row tile.
#pragma once

#include "exponential.cuh"
#include "training_call.cuh"

template <int WIDTH, int OUT_WIDTH, int ROW_TILES, int KEY_WARPS, int SUB, int TILE, bool EXCHANGES = false>
struct BackwardKeys {
    static constexpr int PARTS = EXCHANGES ? 1 : WIDTH / OUT_WIDTH, QUERY_WARPS = WARPS / KEY_WARPS;
    static constexpr int KEYS = KEY_WARPS * ROW_TILES * 16, PITCH = WIDTH + PADDING;
    static constexpr int SUMS = ROW_TILES * OUT_WIDTH / 8;  // groups of four sums of a lane, of one gradient
    static_assert(TILE % (SUB * QUERY_WARPS) == 0 && TILE <= THREADS && QUERY_WARPS <= 2, "warps share a tile");
    static_assert(!EXCHANGES || (QUERY_WARPS == 2 && TILE == 2 * SUB && WIDTH == 2 * OUT_WIDTH), "two halves");

    float key_sums[ROW_TILES][OUT_WIDTH / 8][4], value_sums[ROW_TILES][OUT_WIDTH / 8][4];

    // What a query row carries in its padding.
    static __device__ __forceinline__ float *row_terms(bf16 *row) { return reinterpret_cast<float *>(row + WIDTH); }

    // p and ds of the warp's rows and SUB queries of one head.
    static __device__ __forceinline__ void weigh(const TrainingCall &call, const View &view, int key, int query,
                                                 const bf16 *keys, const bf16 *values, bf16 *queries,
                                                 const bf16 *gradients, float (&scores)[ROW_TILES][SUB / 8][4],
                                                 float (&slopes)[ROW_TILES][SUB / 8][4]) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < SUB / 8; i++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float minus_delta = row_terms(queries + (i * 8 + 2 * t + e) * PITCH)[1];
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) slopes[r][i][e] = slopes[r][i][e + 2] = minus_delta;
            }
        }
        multiply_rows<WIDTH, ROW_TILES, SUB>(keys, queries, scores);
        multiply_rows<WIDTH, ROW_TILES, SUB>(values, gradients, slopes);
        if (!view.sees_all(query, SUB)) {
            hide<ROW_TILES, SUB / 8>(call.first_query, call.end_query, key, call.keys - 1, query, scores);
        }
#pragma unroll
        for (int i = 0; i < SUB / 8; i++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float offset = row_terms(queries + (i * 8 + 2 * t + e) * PITCH)[0];
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float &p = scores[r][i][e + 2 * half];
                        p = exp2_hardware(__fmaf_rn(p, call.scale, -offset));
                        slopes[r][i][e + 2 * half] *= p;
                    }
                }
            }
        }
    }

    // Adds what the warp's rows gain from SUB queries of one head; `queries` and `gradients` are those rows.
    __device__ __forceinline__ void take(const TrainingCall &call, const View &view, int key, int query, int part,
                                         const bf16 *keys, const bf16 *values, bf16 *queries, const bf16 *gradients) {
        float scores[ROW_TILES][SUB / 8][4] = {}, slopes[ROW_TILES][SUB / 8][4];
        weigh(call, view, key, query, keys, values, queries, gradients, scores, slopes);
        multiply_accumulators<OUT_WIDTH, PITCH, ROW_TILES, SUB>(scores, gradients + part * OUT_WIDTH, value_sums);
        multiply_accumulators<OUT_WIDTH, PITCH, ROW_TILES, SUB>(slopes, queries + part * OUT_WIDTH, key_sums);
    }

    // The same of 2 * SUB queries by two warps with the same rows: each weighs SUB queries and hands p and ds to the
    // other, then adds up its own part of the columns for all of them.
    __device__ __forceinline__ void take_exchanging(const TrainingCall &call, const View &view, int key, int query,
                                                    int half, const bf16 *keys, const bf16 *values, bf16 *queries,
                                                    const bf16 *gradients, uint4 *exchange) {
        float scores[ROW_TILES][SUB / 8][4] = {}, slopes[ROW_TILES][SUB / 8][4];
        const int own = half * SUB, other = SUB - own;
        weigh(call, view, key, query + own, keys, values, queries + own * PITCH, gradients + own * PITCH, scores,
              slopes);
        multiply_exchanging(scores, exchange, gradients + own * PITCH + half * OUT_WIDTH,
                            gradients + other * PITCH + half * OUT_WIDTH, value_sums);
        pair_barrier();
        multiply_exchanging(slopes, exchange, queries + own * PITCH + half * OUT_WIDTH,
                            queries + other * PITCH + half * OUT_WIDTH, key_sums);
    }

    static __device__ __forceinline__ void pair_barrier() {
        asm volatile("bar.sync %0, %1;" ::"r"(int(threadIdx.x / WARP % KEY_WARPS) + 1), "n"(2 * WARP) : "memory");
    }

    // sums += p b for the queries of both warps: `exchange` takes the operands of all warps.
    static __device__ __forceinline__ void multiply_exchanging(const float (&p)[ROW_TILES][SUB / 8][4], uint4 *exchange,
                                                               const bf16 *own_rows, const bf16 *other_rows,
                                                               float (&sums)[ROW_TILES][OUT_WIDTH / 8][4]) {
        constexpr int STEPS = SUB / 16, OPERANDS = STEPS * ROW_TILES;
        const int warp = threadIdx.x / WARP, other_warp = (warp + KEY_WARPS) % WARPS, lane = threadIdx.x % WARP;
        uint32_t own[STEPS][ROW_TILES][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            pack_operand(p, 2 * step, own[step]);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                exchange[(warp * OPERANDS + step * ROW_TILES + r) * WARP + lane] =
                    make_uint4(own[step][r][0], own[step][r][1], own[step][r][2], own[step][r][3]);
            }
        }
        pair_barrier();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            multiply_operand<OUT_WIDTH>(own[step], transposed_row<PITCH>(own_rows) + step * 16 * PITCH, sums);
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t a[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const uint4 other = exchange[(other_warp * OPERANDS + step * ROW_TILES + r) * WARP + lane];
                a[r][0] = other.x;
                a[r][1] = other.y;
                a[r][2] = other.z;
                a[r][3] = other.w;
            }
            multiply_operand<OUT_WIDTH>(a, transposed_row<PITCH>(other_rows) + step * 16 * PITCH, sums);
        }
    }

    // `block` counts tiles of KEYS keys times kv heads times PARTS. Shared memory: 2 * KEYS + 4 * TILE padded rows;
    // where warps exchange, also an operand of 512 bytes for each warp, row tile and 16 of its queries.
    static __device__ __forceinline__ void run(const BackwardCall &backward, int block) {
        extern __shared__ __align__(16) unsigned char arena[];
        const TrainingCall &call = backward.forward;
        bf16 *keys = reinterpret_cast<bf16 *>(arena), *values = keys + KEYS * PITCH, *stages = values + KEYS * PITCH;
        uint4 *exchange = reinterpret_cast<uint4 *>(stages + 4 * TILE * PITCH);
        const auto view_of = [&](int tile) {
            return View(call.first_query, call.end_query, tile * KEYS, min(tile * KEYS + KEYS, call.keys) - 1);
        };
        const Place place = place_of_block(block, (call.keys + KEYS - 1) / KEYS, call.kv_heads * PARTS, call.by_length,
                                           false, reinterpret_cast<int *>(arena), [&](int tile) {
                                               const View view = view_of(tile);
                                               return view.some_end - view.some_first;
                                           });
        const int first_key = place.tile * KEYS, last_key = min(first_key + KEYS, call.keys) - 1;
        const int kv_head = place.head / PARTS, block_part = place.head % PARTS, width = call.width;
        const int group = call.heads / call.kv_heads;
        const View block_view = view_of(place.tile);
        const int first_tile = block_view.template first_tile<TILE>();
        const int tiles = max(block_view.template end_tile<TILE>(call.rows) - first_tile, 0);

        // A tile of queries of a head, to a stage; and the terms of the thread's row of it, which it writes later.
        const auto copy_tile = [&](int tile, int head, bf16 *stage) {
            const int query = tile * TILE;
            copy_rows<WIDTH, TILE>(stage, call.q + query * call.q_stride + int64_t(head) * width, call.q_stride,
                                   call.rows - query, width);
            copy_rows<WIDTH, TILE>(stage + TILE * PITCH,
                                   backward.gradient + query * backward.gradient_stride + int64_t(head) * width,
                                   backward.gradient_stride, call.rows - query, width);
        };
        const auto load_terms = [&](int tile, int head) {
            // A row that sees nothing, or is none: the exponential of anything finite less infinity is zero.
            float2 terms = make_float2(INFINITY, 0.0f);
            const int query = tile * TILE + int(threadIdx.x);
            if (threadIdx.x < TILE && query < call.rows) {
                const int64_t at = int64_t(head) * call.rows + query;
                const float log_sum_exp = call.log_sum_exp[at];
                if (log_sum_exp != -INFINITY) terms.x = log_sum_exp * LOG2_E;
                terms.y = -backward.delta[at];
            }
            return terms;
        };
        const auto store_terms = [&](float2 terms, bf16 *stage) {
            if (threadIdx.x < TILE) *reinterpret_cast<float2 *>(row_terms(stage + threadIdx.x * PITCH)) = terms;
        };

        copy_rows<WIDTH, KEYS>(keys, call.k + first_key * call.k_stride + int64_t(kv_head) * width, call.k_stride,
                               call.keys - first_key, width);
        copy_rows<WIDTH, KEYS>(values, call.v + first_key * call.v_stride + int64_t(kv_head) * width, call.v_stride,
                               call.keys - first_key, width);
        int tile = first_tile, head = kv_head * group;
        if (tiles > 0) {
            copy_tile(tile, head, stages);
            store_terms(load_terms(tile, head), stages);
        }
        commit_copies();

        const int warp = threadIdx.x / WARP, key_warp = warp % KEY_WARPS, query_warp = warp / KEY_WARPS;
        const int warp_row = key_warp * ROW_TILES * 16, key = first_key + warp_row;
        const int part = EXCHANGES ? query_warp : block_part;
        const View view(call.first_query, call.end_query, min(key, last_key), min(key + ROW_TILES * 16 - 1, last_key));
        const bf16 *warp_keys = keys + warp_row * PITCH, *warp_values = values + warp_row * PITCH;
        BackwardKeys state;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int v = 0; v < OUT_WIDTH / 8; v++) {
#pragma unroll
                for (int e = 0; e < 4; e++) state.key_sums[r][v][e] = state.value_sums[r][v][e] = 0.0f;
            }
        }
        for (int step = 0; step < tiles * group; step++) {
            bf16 *stage = stages + step % 2 * 2 * TILE * PITCH;
            bf16 *next_stage = stages + (step + 1) % 2 * 2 * TILE * PITCH;
            const bool more = step + 1 < tiles * group;
            const int query = tile * TILE;
            float2 next_terms;
            wait_for_copies<0>();
            __syncthreads();
            if (++tile == first_tile + tiles) {
                tile = first_tile;
                head++;
            }
            if (more) {
                copy_tile(tile, head, next_stage);
                next_terms = load_terms(tile, head);
            }
            commit_copies();
            if constexpr (EXCHANGES) {
                // Also a tile that only the other pair's keys are seen in: warps that skipped barriers would be behind those
                // that did not, which a checker of races takes for one.
                state.take_exchanging(call, view, key, query, query_warp, warp_keys, warp_values, stage,
                                      stage + TILE * PITCH, exchange);
            } else {
#pragma unroll 1
                for (int sub = query_warp * SUB; sub < TILE; sub += QUERY_WARPS * SUB) {
                    if (!view.sees_some(query + sub, SUB)) continue;
                    state.take(call, view, key, query + sub, part, warp_keys, warp_values, stage + sub * PITCH,
                               stage + (TILE + sub) * PITCH);
                }
            }
            if (more) store_terms(next_terms, next_stage);
        }
        // From here on shared memory is free for the sums.
        wait_for_copies<0>();
        __syncthreads();
        if constexpr (QUERY_WARPS == 2 && !EXCHANGES) {
            state.add_second_half(reinterpret_cast<float4 *>(arena) + key_warp * 2 * SUMS * WARP, query_warp);
            if (query_warp > 0) return;
        }
        bf16 *staging = reinterpret_cast<bf16 *>(arena) + (EXCHANGES ? warp * ROW_TILES * 16 : warp_row) * PITCH;
        const int rows = call.keys - key, columns = width - part * OUT_WIDTH;
        const int64_t column = int64_t(kv_head) * width + part * OUT_WIDTH;
        float factor[ROW_TILES][2];
        const auto set_factor = [&](float value) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) factor[r][0] = factor[r][1] = value;
        };
        set_factor(backward.factor);
        store_rows<OUT_WIDTH, PITCH, ROW_TILES>(state.key_sums, factor, staging,
                                                backward.dk + key * backward.dk_stride + column, backward.dk_stride,
                                                rows, columns);
        __syncwarp();
        set_factor(1.0f);
        store_rows<OUT_WIDTH, PITCH, ROW_TILES>(state.value_sums, factor, staging,
                                                backward.dv + key * backward.dv_stride + column, backward.dv_stride,
                                                rows, columns);
    }

    // The sums of the second warp of the same keys, added to those of the first. `exchange` holds 2 * SUMS * WARP.
    __device__ __forceinline__ void add_second_half(float4 *exchange, int query_warp) {
        const int lane = threadIdx.x % WARP;
        const auto for_groups = [&](const auto &use) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
                for (int v = 0; v < OUT_WIDTH / 8; v++) {
                    const int group = 2 * (r * OUT_WIDTH / 8 + v);
                    use(key_sums[r][v], exchange[group * WARP + lane]);
                    use(value_sums[r][v], exchange[(group + 1) * WARP + lane]);
                }
            }
        };
        if (query_warp == 1) {
            for_groups([](const float (&sums)[4], float4 &place) {
                place = make_float4(sums[0], sums[1], sums[2], sums[3]);
            });
        }
        __syncthreads();
        if (query_warp == 0) {
            for_groups([](float (&sums)[4], const float4 &place) {
                sums[0] += place.x;
                sums[1] += place.y;
                sums[2] += place.z;
                sums[3] += place.w;
            });
        }
        __syncthreads();
    }
};
