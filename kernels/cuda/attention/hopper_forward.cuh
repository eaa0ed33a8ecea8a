// Attention forward on Hopper's own instructions, for inference and for training: the same sums as flash_forward.cuh and
// training_forward.cuh, after FlashAttention-3 (arXiv 2407.08608).
//
//   out[b, i, h] = sum_s softmax_s(scale q[b, i, h] . k[b, s, h / group]) v[b, s, h / group]    s in what row i sees
//   log_sum_exp[b, h, i] = log sum_s exp(scale q[b, i, h] . k[b, s, h / group])                where it is asked for
//
// Row i sees the keys first_key[i] .. end_key[i] where these arrays are given (both ascend; training_call.cuh), else,
// at position p = keys - rows + i, max(0, p - window + 1) ..= p where causal, else all. A row that sees nothing has an
// output of zero and a log-sum-exp of -infinity.
//
// A block stays on its multiprocessor and takes one piece of work after the other: 64 * CONSUMERS query rows of one head.
// One thread of its first warpgroup copies queries, keys and values to shared memory, as far ahead as there is room, also
// into the next piece of work. The others take 64 rows each: the scores of one tile of KEYS keys are computed while the
// probabilities of the tile before are multiplied with its values, both without the warps' help, and while another
// warpgroup takes its exponentials: they pass a turn around, so that their products don't come all at once. A row's
// scores, probabilities and output stay in registers.
//
// Tiles of keys start at multiples of KEYS from 0, in ascending order, and a tile in which a row sees nothing leaves it
// as it was, to the bit: its factor is exactly 1 and its probabilities are 0. So a warpgroup leaves out tiles that none
// of its rows sees, and a row's result depends on its own query and keys, not on the rows beside it or on their number.
//
// Bound: at width 128 the tensor cores (4 * WIDTH operations a score), at width 64 as much the exponentials (16 a clock
// of a multiprocessor). Larger blocks of queries would read shared memory less often; registers forbid them.
#pragma once

#include "../vocabulary/warpgroup.cuh"
#include "exponential.cuh"

// Queries, keys and values come as tensor maps.
struct HopperCall {
    bf16 *out;
    float *log_sum_exp;                  // [batch, heads, rows], natural; or null
    const int *first_key, *end_key;      // [rows]; or null
    int64_t out_stride, out_batch_stride;  // in elements
    int rows, keys, heads, kv_heads, batch;
    float scale;  // times log2(e)
    int causal, window;  // where there are no arrays; without a window: the greatest number there is
    int by_length;  // long pieces of work first, of all heads; else all tiles of a head follow each other

    __device__ __forceinline__ int first_of(int row) const {
        return first_key != nullptr ? first_key[row] : max(0, keys - rows + row - window + 1);
    }
    __device__ __forceinline__ int end_of(int row) const {
        return end_key != nullptr ? end_key[row] : causal ? keys - rows + row + 1 : keys;
    }
};

// The next piece of work after those that blocks begin with, and the blocks that found none left; both zero between
// launches.
__device__ int next_work, ended_blocks;

template <int WIDTH, int CONSUMERS, int STAGES> struct HopperForward {
    static constexpr int KEYS = 128, ROWS = CONSUMERS * 64, THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr int KEY_TILES = KEYS / 8, VALUE_TILES = WIDTH / 8, PANELS = WIDTH / PANEL_COLUMNS;
    static constexpr int QUERY_PANEL = ROWS * PANEL_ROW_BYTES, KEY_PANEL = KEYS * PANEL_ROW_BYTES;
    static constexpr int QUERY_BYTES = PANELS * QUERY_PANEL, STAGE_BYTES = PANELS * KEY_PANEL;
    // Row tiles that can be ranked.
    static constexpr int MOST_TILES = 512;

    // What the rows of a warpgroup see.
    struct Sight {
        int some_first, some_end;  // where any row sees something
        int all_first, all_end;    // where every row sees everything; empty where it ends before it begins
    };
    struct Work {
        int tile;  // -1: no work is left
        int head, batch;
        int first_tile, end_tile;  // tiles of keys that some row of the block sees
        Sight sight[CONSUMERS];
    };
    // Behind queries, keys and values in shared memory.
    struct Control {
        // Every thread that multiplies says itself that it has read `work`: racecheck sees an order in that alone.
        uint64_t queries_full, queries_empty;
        uint64_t keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
        Work work;
        int lengths[MOST_TILES];
        uint16_t order[MOST_TILES];
    };
    static_assert(sizeof(Control) <= 4096, "src/attention_hopper.rs counts with 4,096 bytes");
    static_assert((STAGES & (STAGES - 1)) == 0, "a stage is the remainder by a power of two");

    const HopperCall &call;
    Control &control;
    const uint32_t queries, keys, values;  // in shared memory

    static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(FULL_WARP, x, 0); }
    static __device__ __forceinline__ uint32_t stage(int count) { return count % STAGES * STAGE_BYTES; }
    static __device__ __forceinline__ int phase(int count) { return count / STAGES & 1; }
    __device__ __forceinline__ int row_tiles() const { return (call.rows + ROWS - 1) / ROWS; }

    // Where rows from `from` on, `count` of them or as many as there are, see something and everything.
    __device__ __forceinline__ Sight sight_of(int from, int count) const {
        if (from >= call.rows) return {0, 0, 0, 0};
        const int to = min(from + count, call.rows) - 1;
        return {call.first_of(from), call.end_of(to), call.first_of(to), call.end_of(from)};
    }
    __device__ __forceinline__ int first_tile(const Sight &sight) const { return max(sight.some_first, 0) / KEYS; }
    __device__ __forceinline__ int end_tile(const Sight &sight) const {
        return (min(sight.some_end, call.keys) + KEYS - 1) / KEYS;
    }

    // ---- The warpgroup that copies ------------------------------------------------------------------------------------

    // Ranks the tiles of rows by what they see, the longest first. The whole block calls it.
    __device__ __forceinline__ void rank_tiles() const {
        const int tiles = row_tiles();
        for (int tile = threadIdx.x; tile < tiles; tile += THREADS) {
            const Sight sight = sight_of(tile * ROWS, ROWS);
            control.lengths[tile] = sight.some_end - sight.some_first;
        }
        __syncthreads();
        for (int tile = threadIdx.x; tile < tiles; tile += THREADS) {
            const int own = control.lengths[tile];
            int before = 0;
            for (int other = 0; other < tiles; other++) {
                const int length = control.lengths[other];
                before += length > own || (length == own && other < tile);
            }
            control.order[before] = uint16_t(tile);
        }
        __syncthreads();
    }

    __device__ __forceinline__ Work work_at(int index) const {
        const int tiles = row_tiles(), columns = call.heads * call.batch;
        const int column = call.by_length ? index % columns : index / tiles;
        const int rank = call.by_length ? index / columns : index % tiles;
        Work work;
        // Without arrays the last rows see most.
        work.tile = call.by_length && call.first_key != nullptr ? control.order[rank] : tiles - 1 - rank;
        work.head = column % call.heads;
        work.batch = column / call.heads;
        const Sight all = sight_of(work.tile * ROWS, ROWS);
        work.first_tile = first_tile(all);
        work.end_tile = end_tile(all);
#pragma unroll
        for (int i = 0; i < CONSUMERS; i++) work.sight[i] = sight_of(work.tile * ROWS + i * 64, 64);
        return work;
    }

    // Starts the copies of ROWS rows of a head to panels.
    static __device__ __forceinline__ void copy_rows(uint32_t to, int panel_bytes, const TensorMap &map, int head,
                                                     int row, int batch, uint32_t barrier) {
        arrive_expecting(barrier, PANELS * panel_bytes);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            copy_box(to + panel * panel_bytes, map, head * WIDTH + panel * PANEL_COLUMNS, row, batch, barrier);
        }
    }

    __device__ __forceinline__ void copy(const TensorMap &query_map, const TensorMap &key_map,
                                         const TensorMap &value_map) const {
        const int total = row_tiles() * call.heads * call.batch;
        int count = 0, turn = 0;
        // A phase before the first one has ended: the first waits for room pass.
        const auto copy_tile = [&](uint32_t to, const TensorMap &map, uint64_t *full, uint64_t *empty, int number,
                                   const Work &work, int tile) {
            wait_for_phase(shared_address(empty + number % STAGES), phase(number) ^ 1);
            copy_rows(to + stage(number), KEY_PANEL, map, work.head / (call.heads / call.kv_heads), tile * KEYS,
                      work.batch, shared_address(full + number % STAGES));
        };
        for (int index = blockIdx.x; index < total; turn++) {
            const int next = atomicAdd(&next_work, 1) + int(gridDim.x);
            const Work work = work_at(index);
            wait_for_phase(shared_address(&control.queries_empty), turn & 1 ^ 1);
            control.work = work;
            copy_rows(queries, QUERY_PANEL, query_map, work.head, work.tile * ROWS, work.batch,
                      shared_address(&control.queries_full));
            // In the order in which they are needed: a tile's values after the next tile's keys.
            const int tiles = work.end_tile - work.first_tile;
            for (int i = 0; i < tiles; i++) {
                copy_tile(keys, key_map, control.keys_full, control.keys_empty, count + i, work, work.first_tile + i);
                if (i > 0) {
                    copy_tile(values, value_map, control.values_full, control.values_empty, count + i - 1, work,
                              work.first_tile + i - 1);
                }
            }
            if (tiles > 0) {
                copy_tile(values, value_map, control.values_full, control.values_empty, count + tiles - 1, work,
                          work.end_tile - 1);
                count += tiles;
            }
            index = next;
        }
        wait_for_phase(shared_address(&control.queries_empty), turn & 1 ^ 1);
        control.work.tile = -1;
        arrive(shared_address(&control.queries_full));
        __threadfence();
        if (atomicAdd(&ended_blocks, 1) == int(gridDim.x) - 1) {
            next_work = 0;
            ended_blocks = 0;
        }
    }

    // ---- The warpgroups that multiply ---------------------------------------------------------------------------------

    // One warp of a warpgroup will not read it again; four such arrivals a warpgroup make room.
    static __device__ __forceinline__ void release(uint64_t &empty) {
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive(shared_address(&empty));
    }

    // Starts scores = q k^T.
    static __device__ __forceinline__ void multiply_keys(uint32_t q, uint32_t k, float (&scores)[KEY_TILES][4]) {
#pragma unroll
        for (int step = 0; step < WIDTH / 16; step++) {
            const int panel = step / 4, offset = step % 4 * 32;
            multiply_rows_async(scores, operand_at(q + panel * QUERY_PANEL + offset),
                                operand_at(k + panel * KEY_PANEL + offset), step > 0);
        }
    }

    // Starts sums += p v.
    static __device__ __forceinline__ void multiply_values(const uint32_t (&p)[KEYS / 16][4], uint32_t v,
                                                           float (&sums)[VALUE_TILES][4]) {
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            multiply_columns_async(sums, p[step], operand_at(v + step * 16 * PANEL_ROW_BYTES, KEY_PANEL));
        }
    }

    // Hides what rows do not see of the tile at `first_key`; `row` is this lane's first one of two.
    __device__ __forceinline__ void hide(int row, int first_key, float (&scores)[KEY_TILES][4]) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int own = min(row + 8 * half, call.rows - 1), from = call.first_of(own);
            // In unsigned numbers one comparison serves both ends.
            const unsigned span = call.end_of(own) - from, offset = first_key + 2 * t - from;
#pragma unroll
            for (int k = 0; k < KEY_TILES; k++) {
                if (offset + 8 * k >= span) scores[k][2 * half] = -INFINITY;
                if (offset + 8 * k + 1 >= span) scores[k][2 * half + 1] = -INFINITY;
            }
        }
    }

    // Scores become probabilities relative to the running maximum; `factor` rescales to it what was summed before.
    static __device__ __forceinline__ void take_softmax(float scale, float (&scores)[KEY_TILES][4], float (&maximum)[2],
                                                        float (&denominator)[2], float (&factor)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float greatest = maximum[half];
#pragma unroll
            for (int k = 0; k < KEY_TILES; k++) {
                greatest = fmaxf(greatest, fmaxf(scores[k][2 * half], scores[k][2 * half + 1]));
            }
            greatest = fmaxf(greatest, __shfl_xor_sync(FULL_WARP, greatest, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(FULL_WARP, greatest, 2));
            // Nothing seen yet: any finite number keeps the differences from being undefined.
            const float finite = greatest == -INFINITY ? 0.0f : greatest;
            // The difference first: where the maximum stays, the factor is exactly 1.
            factor[half] = exp2_hardware((maximum[half] - finite) * scale);
            const float offset = finite * scale;
            maximum[half] = greatest;
            float total = 0.0f;
#pragma unroll
            for (int k = 0; k < KEY_TILES; k++) {
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    scores[k][e] = exp2_hardware(__fmaf_rn(scores[k][e], scale, -offset));
                    total += scores[k][e];
                }
            }
            denominator[half] = __fmaf_rn(denominator[half], factor[half], total);
        }
    }

    // Probabilities as the left operand of the next product, in place.
    static __device__ __forceinline__ void pack_operand(const float (&scores)[KEY_TILES][4],
                                                        uint32_t (&p)[KEYS / 16][4]) {
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *pair = &scores[2 * step + i / 2][2 * (i % 2)];
                p[step][i] = pack_pair(pair[0], pair[1]);
            }
        }
    }

    static __device__ __forceinline__ uint32_t pack_pair(float low_half, float high_half) {
        const bf16x2 pair = __floats2bfloat162_rn(low_half, high_half);
        return *reinterpret_cast<const uint32_t *>(&pair);
    }

    // Divides by the denominators and writes this lane's rows, `row` and `row + 8`. Four lanes exchange what they have
    // of 32 columns, pairs for runs of eight.
    __device__ __forceinline__ void store(int head, int batch, int row, const float (&sums)[VALUE_TILES][4],
                                          const float (&maximum)[2], const float (&denominator)[2]) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = denominator[half];
            total += __shfl_xor_sync(FULL_WARP, total, 1);
            total += __shfl_xor_sync(FULL_WARP, total, 2);
            const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
            const int own = row + 8 * half;
            if (call.log_sum_exp != nullptr && t == 0 && own < call.rows) {
                constexpr float LN_2 = 0.693147181f;
                call.log_sum_exp[(int64_t(batch) * call.heads + head) * call.rows + own] =
                    (maximum[half] * call.scale + log2f(total)) * LN_2;
            }
            bf16 *to = call.out + batch * call.out_batch_stride + own * call.out_stride + int64_t(head) * WIDTH + 8 * t;
#pragma unroll
            for (int first = 0; first < VALUE_TILES; first += 4) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    words[i] = pack_pair(sums[first + i][2 * half] * inverse, sums[first + i][2 * half + 1] * inverse);
                }
#pragma unroll
                for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (i & bit) continue;
                        const bool upper = t & bit;
                        const uint32_t given = __shfl_xor_sync(FULL_WARP, upper ? words[i] : words[i | bit], bit);
                        if (upper) {
                            words[i] = given;
                        } else {
                            words[i | bit] = given;
                        }
                    }
                }
                if (own < call.rows) {
                    *reinterpret_cast<uint4 *>(to + 8 * first) = make_uint4(words[0], words[1], words[2], words[3]);
                }
            }
        }
    }

    // Passes tiles that this warpgroup does not need, and as many turns.
    __device__ __forceinline__ void pass_tiles(int count, int tiles, int turns, int group) const {
        for (int i = 0; i < tiles; i++) {
            const int at = (count + i) % STAGES;
            wait_for_phase(shared_address(&control.keys_full[at]), phase(count + i));
            release(control.keys_empty[at]);
            wait_for_phase(shared_address(&control.values_full[at]), phase(count + i));
            release(control.values_empty[at]);
            if (i < turns) {
                wait_for_turn(1 + group);
                pass_turn(1 + (group + 1) % CONSUMERS);
            }
        }
    }

    // `group` counts the warpgroups that multiply.
    __device__ __forceinline__ void multiply(int group) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
        const uint32_t own_queries = queries + group * 64 * PANEL_ROW_BYTES;
        // The first turn is the first warpgroup's.
        if (group == CONSUMERS - 1) pass_turn(1);
        for (int count = 0, turn = 0;; turn++) {
            wait_for_phase(shared_address(&control.queries_full), turn & 1);
            const int row_tile = uniform(control.work.tile);
            if (row_tile < 0) break;
            const int head = control.work.head, batch = control.work.batch;
            const int first = uniform(control.work.first_tile), end = uniform(control.work.end_tile);
            const Sight sight = control.work.sight[group];
            const int all_first = uniform(sight.all_first), all_end = uniform(sight.all_end);
            int own_first = uniform(first_tile(sight)), own_end = uniform(end_tile(sight));
            if (own_first >= own_end) own_first = own_end = end;
            const int row = row_tile * ROWS + group * 64 + warp * 16 + lane / 4;

            float sums[VALUE_TILES][4] = {};
            float maximum[2] = {-INFINITY, -INFINITY}, denominator[2] = {0.0f, 0.0f}, factor[2];
            // Every warpgroup takes one turn less than the block has tiles.
            pass_tiles(count, own_first - first, own_first < own_end ? own_first - first : end - first - 1, group);
            if (own_first < own_end) {
                float scores[KEY_TILES][4];
                uint32_t p[KEYS / 16][4];
                const auto take_scores = [&](int tile) {
                    if (tile * KEYS < all_first || tile * KEYS + KEYS > all_end) hide(row, tile * KEYS, scores);
                    take_softmax(call.scale, scores, maximum, denominator, factor);
                };
                int number = count + own_first - first;
                wait_for_phase(shared_address(&control.keys_full[number % STAGES]), phase(number));
                begin_products();
                multiply_keys(own_queries, keys + stage(number), scores);
                commit_products();
                wait_for_products<0>();
                settle(scores);
                release(control.keys_empty[number % STAGES]);
                take_scores(own_first);
                pack_operand(scores, p);
                for (int tile = own_first + 1; tile < own_end; tile++, number++) {
                    const int next = number + 1;
                    wait_for_phase(shared_address(&control.keys_full[next % STAGES]), phase(next));
                    wait_for_turn(1 + group);
                    begin_products();
                    multiply_keys(own_queries, keys + stage(next), scores);
                    commit_products();
                    wait_for_phase(shared_address(&control.values_full[number % STAGES]), phase(number));
                    begin_products();
                    multiply_values(p, values + stage(number), sums);
                    commit_products();
                    pass_turn(1 + (group + 1) % CONSUMERS);
                    wait_for_products<1>();
                    settle(scores);
                    release(control.keys_empty[next % STAGES]);
                    take_scores(tile);
                    wait_for_products<0>();
                    settle(sums);
                    release(control.values_empty[number % STAGES]);
#pragma unroll
                    for (int v = 0; v < VALUE_TILES; v++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) sums[v][e] *= factor[e / 2];
                    }
                    pack_operand(scores, p);
                }
                arrive(shared_address(&control.queries_empty));
                wait_for_phase(shared_address(&control.values_full[number % STAGES]), phase(number));
                begin_products();
                multiply_values(p, values + stage(number), sums);
                commit_products();
                wait_for_products<0>();
                settle(sums);
                release(control.values_empty[number % STAGES]);
                pass_tiles(count + own_end - first, end - own_end, end - own_end, group);
            } else {
                arrive(shared_address(&control.queries_empty));
            }
            store(head, batch, row, sums, maximum, denominator);
            count += end - first;
        }
    }

    // Grid: at most as many blocks as multiprocessors and as pieces of work. Shared memory: 1,024 bytes to align it, the
    // queries, STAGES tiles of keys and of values, 4,096 bytes.
    static __device__ __forceinline__ void run(const TensorMap &query_map, const TensorMap &key_map,
                                               const TensorMap &value_map, const HopperCall &call) {
        extern __shared__ __align__(16) unsigned char arena[];
        unsigned char *aligned = arena + (1024 - shared_address(arena) % 1024) % 1024;
        const uint32_t queries = shared_address(aligned), keys = queries + QUERY_BYTES;
        Control &control = *reinterpret_cast<Control *>(aligned + QUERY_BYTES + 2 * STAGES * STAGE_BYTES);
        const HopperForward state{call, control, queries, keys, keys + STAGES * STAGE_BYTES};
        if (threadIdx.x == 0) {
            initialize_barrier(shared_address(&control.queries_full), 1);
            initialize_barrier(shared_address(&control.queries_empty), WARPGROUP * CONSUMERS);
            for (int i = 0; i < STAGES; i++) {
                initialize_barrier(shared_address(&control.keys_full[i]), 1);
                initialize_barrier(shared_address(&control.values_full[i]), 1);
                initialize_barrier(shared_address(&control.keys_empty[i]), 4 * CONSUMERS);
                initialize_barrier(shared_address(&control.values_empty[i]), 4 * CONSUMERS);
            }
            publish_barriers();
        }
        if (call.by_length && call.first_key != nullptr) state.rank_tiles();
        __syncthreads();
        const int warpgroup = uniform(threadIdx.x / WARPGROUP);
        // What all have at the start is 65,536 / THREADS registers, in steps of 8.
        if (warpgroup == 0) {
            give_registers_back<CONSUMERS == 2 ? 40 : 32>();
            if (threadIdx.x == 0) state.copy(query_map, key_map, value_map);
        } else {
            take_registers<CONSUMERS == 2 ? 232 : 160>();
            state.multiply(warpgroup - 1);
        }
    }
};
