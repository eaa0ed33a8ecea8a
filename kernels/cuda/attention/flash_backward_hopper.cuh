// Attention backward with a warpgroup's products (sm_90a), heads of 64 or 128 elements; p, ds and the three gradients
// are those of flash_backward_dq.cuh and flash_backward_dkv.cuh.
//
// An item is BLOCK rows of one head, whose gradients it makes: keys and values of a kv head, from the queries of all
// its heads, or queries. Either way the rows of two tensors stay, and tiles of TILE rows of two others pass by:
//
//            stay         pass by        scores   slopes         sums
//   keys     k, v         q, gradient    k q^T    v gradient^T   dk += ds^T q, dv += p^T gradient
//   queries  q, gradient  k, v           q k^T    gradient v^T   dq += ds k
//
// Scores and slopes are the accumulators of a warpgroup with 64 of the rows, p and ds the left operands in registers of
// the products behind them, and a passing tile is read by rows in the former products and by columns in the latter.
// What stays is held in registers as left operands where they suffice: all but keys and values of heads of 128.
//
// A block is persistent. One warp of the first warpgroup takes items from a counter, starts the copies of what they
// need, a ring of tiles ahead, and writes each query's terms, log-sum-exp times log2 e and delta, beside its tile. The
// two other warpgroups weigh and add up, with all registers that the first can spare. No item depends on who takes it,
// or when.
//
// The tensor cores have the slopes to make while a warpgroup takes exponentials, and the sums of values while it makes
// ds; then, for heads of 64, the next scores before the sums of keys or queries and the next slopes, of which it only
// waits for the scores. (The compiler lets them start no earlier: it makes products wait for each other where registers
// of theirs are read in between.) What is left open, the other warpgroup fills.
//
// Bound: 2 * WIDTH operations a score for each of four products (three for queries) on the tensor cores. Exponentials
// take 0.5 of their cycles for keys and 0.67 for queries at width 64, half of that at 128; reads of shared memory 0.6
// and 0.7 of them at width 64, 0.9 and 0.7 at 128, with the copies; those read 16 and 21 bytes a cycle and
// multiprocessor from the second-level cache, at either width.
#pragma once

#include <type_traits>

#include "../vocabulary/warpgroup.cuh"
#include "exponential.cuh"
#include "training_call.cuh"

enum ItemKind { NO_ITEM = 0, KEYS_ITEM = 1, QUERIES_ITEM = 2 };

struct Item {
    int kind;
    int first_row, head;    // of what stays; a kv head for keys
    int first_tile, tiles;  // of what passes by, for each head
};

// What one kernel prepares for the next: how many items have been taken beside the first of each block, and tiles of
// keys and of queries by falling length, where those are few.
constexpr int ORDERED_TILES = 512;
__device__ int taken_items;
__device__ int tile_order[2][ORDERED_TILES];

template <int WIDTH> struct HopperBackward {
    static constexpr int BLOCK = 128, TILE = 64, STAGES = WIDTH == 64 ? 6 : 4;
    static constexpr int PANELS = WIDTH / PANEL_COLUMNS, CONSUMERS = 2, CONSUMER_WARPS = 4 * CONSUMERS;
    static constexpr int BLOCK_PANEL = BLOCK * PANEL_ROW_BYTES, TILE_PANEL = TILE * PANEL_ROW_BYTES;
    static constexpr int STAY_BYTES = PANELS * BLOCK_PANEL, TILE_BYTES = PANELS * TILE_PANEL;  // of one tensor

    struct Shared {
        unsigned char stays[2][STAY_BYTES];
        unsigned char tiles[STAGES][2][TILE_BYTES];
        float offsets[STAGES][TILE], deltas[STAGES][TILE];  // of passing queries
        int2 bounds[BLOCK];                                 // what the rows that stay see: from, to
        float2 terms[BLOCK];                                // offset and delta of queries that stay
        uint64_t full[STAGES], empty[STAGES], item_full, item_empty;
        Item item;
    };
    static_assert(sizeof(Shared) <= BLOCK * (4 * WIDTH + 16) + STAGES * TILE * (4 * WIDTH + 8) + 256,
                  "what the launcher asks for");

    // A place in the ring of tiles, and the parity of its phase.
    struct Ring {
        int slot = 0, parity = 0;
        __device__ __forceinline__ void advance() {
            if (++slot == STAGES) {
                slot = 0;
                parity ^= 1;
            }
        }
    };

    static __device__ __forceinline__ Shared &shared() {
        extern __shared__ __align__(1024) unsigned char arena[];
        return *reinterpret_cast<Shared *>(arena);
    }

    // The compiler has to know that branches are the same for a warp: else it waits for each product.
    static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(FULL_WARP, x, 0); }
    static __device__ __forceinline__ Item uniform(const Item &item) {
        return {uniform(item.kind), uniform(item.first_row), uniform(item.head), uniform(item.first_tile),
                uniform(item.tiles)};
    }

    // Offset and delta of a query. One that sees nothing, or is none: the exponential of anything finite less infinity
    // is zero.
    static __device__ __forceinline__ float2 terms_of(const BackwardCall &backward, int head, int query) {
        float2 terms = make_float2(INFINITY, 0.0f);
        if (query < backward.forward.rows) {
            const int64_t at = int64_t(head) * backward.forward.rows + query;
            const float log_sum_exp = backward.forward.log_sum_exp[at];
            if (log_sum_exp != -INFINITY) terms.x = log_sum_exp * LOG2_E;
            terms.y = backward.delta[at];
        }
        return terms;
    }

    static __device__ __forceinline__ Item item_at(const BackwardCall &backward, int index) {
        const TrainingCall &call = backward.forward;
        const bool of_keys = index < backward.key_blocks;
        if (!of_keys) index -= backward.key_blocks;
        const int rows = of_keys ? call.keys : call.rows, columns = of_keys ? call.rows : call.keys;
        const int heads = of_keys ? call.kv_heads : call.heads, tiles = (rows + BLOCK - 1) / BLOCK;
        if (index >= tiles * heads) return {NO_ITEM, 0, 0, 0, 0};
        int tile, head;
        if (call.by_length) {
            tile = tile_order[of_keys ? 0 : 1][index / heads];
            head = index % heads;
        } else {
            // All tiles of a head follow each other: what passes by stays in the second-level cache.
            tile = of_keys ? index % tiles : tiles - 1 - index % tiles;
            head = index / tiles;
        }
        const int first_row = tile * BLOCK, last_row = min(first_row + BLOCK, rows) - 1;
        const int some_first = (of_keys ? call.first_query : call.first_key)[first_row];
        const int some_end = (of_keys ? call.end_query : call.end_key)[last_row];
        const int first_tile = max(some_first, 0) / TILE, end_tile = (min(some_end, columns) + TILE - 1) / TILE;
        return {of_keys ? KEYS_ITEM : QUERIES_ITEM, first_row, head, first_tile, max(end_tile - first_tile, 0)};
    }

    // A warp that starts the copies of one item after the other.
    static __device__ __forceinline__ void produce(const BackwardCall &backward, const TensorMap &q, const TensorMap &k,
                                                   const TensorMap &v, const TensorMap &gradient) {
        const TrainingCall &call = backward.forward;
        const int lane = threadIdx.x % WARP, group = call.heads / call.kv_heads;
        const uint32_t base = shared_address(&shared());
        Ring ring;
        int item_parity = 0;
        for (int index = blockIdx.x;; item_parity ^= 1) {
            const Item item = item_at(backward, index);
            const bool of_keys = item.kind == KEYS_ITEM;
            wait_for_phase(base + offsetof(Shared, item_empty), item_parity ^ 1);
            if (item.kind == NO_ITEM) {
                if (lane == 0) {
                    shared().item = item;
                    arrive(base + offsetof(Shared, item_full));
                }
                arrive(base + offsetof(Shared, item_full));
                return;
            }
            if (lane == 0) {
                shared().item = item;
                arrive_expecting(base + offsetof(Shared, item_full), 2 * STAY_BYTES);
                for (int part = 0; part < 2; part++) {
                    const TensorMap &map = of_keys ? (part ? v : k) : (part ? gradient : q);
                    for (int panel = 0; panel < PANELS; panel++) {
#pragma unroll 1
                        for (int half = 0; half < BLOCK / TILE; half++) {
                            copy_box(base + offsetof(Shared, stays) + part * STAY_BYTES + panel * BLOCK_PANEL +
                                         half * TILE_PANEL,
                                     map, item.head * WIDTH + panel * PANEL_COLUMNS, item.first_row + half * TILE, 0,
                                     base + offsetof(Shared, item_full));
                        }
                    }
                }
            }
            const int last_row = (of_keys ? call.keys : call.rows) - 1;
            const int *first = of_keys ? call.first_query : call.first_key;
            const int *end = of_keys ? call.end_query : call.end_key;
#pragma unroll 1
            for (int row = lane; row < BLOCK; row += WARP) {
                const int own = item.first_row + row, seen = min(own, last_row);
                shared().bounds[row] = make_int2(first[seen], end[seen]);
                if (!of_keys) shared().terms[row] = terms_of(backward, item.head, own);
            }
            arrive(base + offsetof(Shared, item_full));
            // Heads and rows of what passes by.
            const int end_head = of_keys ? item.head * group + group : item.head / group + 1;
            const int end_row = (item.first_tile + item.tiles) * TILE;
            for (int head = of_keys ? item.head * group : item.head / group; head < end_head; head++) {
                for (int row = item.first_tile * TILE; row < end_row; row += TILE) {
                    float2 terms[2];
                    if (of_keys) {
                        terms[0] = terms_of(backward, head, row + lane);
                        terms[1] = terms_of(backward, head, row + lane + WARP);
                    }
                    const uint32_t full = base + offsetof(Shared, full) + ring.slot * 8;
                    wait_for_phase(base + offsetof(Shared, empty) + ring.slot * 8, ring.parity ^ 1);
                    if (lane == 0) {
                        arrive_expecting(full, 2 * TILE_BYTES);
                        for (int part = 0; part < 2; part++) {
                            const TensorMap &map = of_keys ? (part ? gradient : q) : (part ? v : k);
                            for (int panel = 0; panel < PANELS; panel++) {
                                copy_box(base + offsetof(Shared, tiles) + (ring.slot * 2 + part) * TILE_BYTES +
                                             panel * TILE_PANEL,
                                         map, head * WIDTH + panel * PANEL_COLUMNS, row, 0, full);
                            }
                        }
                    }
                    if (of_keys) {
                        shared().offsets[ring.slot][lane] = terms[0].x;
                        shared().offsets[ring.slot][lane + WARP] = terms[1].x;
                        shared().deltas[ring.slot][lane] = terms[0].y;
                        shared().deltas[ring.slot][lane + WARP] = terms[1].y;
                    }
                    arrive(full);
                    ring.advance();
                }
            }
            if (lane == 0) index = gridDim.x + atomicAdd(&taken_items, 1);
            index = uniform(index);
        }
    }

    // A tensor's rows that stay, of one warpgroup, as left operands: in registers, or where they lie.
    template <bool IN_REGISTERS> struct Stay {
        uint32_t operands[IN_REGISTERS ? WIDTH / 16 : 1][4];
        uint32_t address;

        __device__ __forceinline__ void load(int part, int first_row) {
            const unsigned char *rows = shared().stays[part];
            address = shared_address(rows) + first_row * PANEL_ROW_BYTES;
            if constexpr (IN_REGISTERS) {
                const int warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP;
                const int row = first_row + warp * 16 + lane % 16;
#pragma unroll
                for (int step = 0; step < WIDTH / 16; step++) {
                    const int piece = step % 4 * 2 + lane / 16;
                    load_matrices(operands[step],
                                  rows + step / 4 * BLOCK_PANEL + row * PANEL_ROW_BYTES + (piece ^ row % 8) * 16);
                }
            }
        }

        // out = rows tile^T.
        __device__ __forceinline__ void multiply(uint32_t tile, float (&out)[TILE / 8][4]) const {
#pragma unroll
            for (int step = 0; step < WIDTH / 16; step++) {
                const uint64_t b = operand_at(tile + step / 4 * TILE_PANEL + step % 4 * 32);
                if constexpr (IN_REGISTERS) {
                    multiply_rows_async(out, operands[step], b, step > 0);
                } else {
                    multiply_rows_async(out, operand_at(address + step / 4 * BLOCK_PANEL + step % 4 * 32), b, step > 0);
                }
            }
        }
    };

    // sums += a tile for a [64, TILE] in registers.
    static __device__ __forceinline__ void add_products(const uint32_t (&a)[TILE / 16][4], uint32_t tile,
                                                        float (&sums)[WIDTH / 8][4]) {
#pragma unroll
        for (int step = 0; step < TILE / 16; step++) {
            multiply_columns_async(sums, a[step], operand_at(tile + step * 16 * PANEL_ROW_BYTES, TILE_PANEL));
        }
    }

    static __device__ __forceinline__ void pack(const float (&p)[TILE / 8][4], uint32_t (&a)[TILE / 16][4]) {
#pragma unroll
        for (int step = 0; step < TILE / 16; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&pair)[4] = p[2 * step + i / 2];
                a[step][i] = pack_pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
            }
        }
    }

    // One item's gradients: 64 rows of it in each warpgroup of consumers.
    template <bool OF_KEYS>
    static __device__ __forceinline__ void consume(const BackwardCall &backward, const Item &item, Ring &ring) {
        constexpr bool IN_REGISTERS = WIDTH == 64 || !OF_KEYS;
        // Heads of 128 need all registers: those of p and ds are free before the next scores take theirs.
        constexpr bool AHEAD = WIDTH == 64;
        const TrainingCall &call = backward.forward;
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        const int first_row = uniform(threadIdx.x / WARPGROUP - 1) * 64;
        const int warp_row = first_row + threadIdx.x / WARP % 4 * 16;
        const int rows = (OF_KEYS ? call.keys : call.rows) - item.first_row;
        const int columns = OF_KEYS ? call.rows : call.keys, heads = OF_KEYS ? call.heads / call.kv_heads : 1;
        const uint32_t base = shared_address(&shared());
        const auto release_item = [&] { arrive(base + offsetof(Shared, item_empty)); };
        const auto release = [&](int slot) { arrive(base + offsetof(Shared, empty) + slot * 8); };
        const auto wait_for_tile = [&] { wait_for_phase(base + offsetof(Shared, full) + ring.slot * 8, ring.parity); };
        const auto skip = [&](int tiles) {
#pragma unroll 1
            for (int i = 0; i < tiles; i++) {
                wait_for_tile();
                release(ring.slot);
                ring.advance();
            }
        };

        // What the warpgroup's rows see: tiles own_first .. own_end, of which those within all_first .. all_end whole.
        const int2 first_bounds = shared().bounds[first_row], last_bounds = shared().bounds[first_row + 63];
        const int all_first = uniform(last_bounds.x), all_end = uniform(first_bounds.y);
        int own_first = uniform(max(first_bounds.x, 0) / TILE);
        int own_end = uniform((min(last_bounds.y, columns) + TILE - 1) / TILE);
        if (first_row >= rows || own_first >= own_end) own_first = own_end = item.first_tile;
        // Tiles of a head before and behind them, which the other warpgroup's rows see.
        const int before = own_first - item.first_tile, behind = item.first_tile + item.tiles - own_end;
        int from[2];
        unsigned span[2];
        float offset[2], delta[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = warp_row + half * 8 + g;
            from[half] = shared().bounds[row].x;
            span[half] = shared().bounds[row].y - from[half];
            if constexpr (!OF_KEYS) {
                offset[half] = shared().terms[row].x;
                delta[half] = shared().terms[row].y;
            }
        }
        Stay<IN_REGISTERS> score_rows, slope_rows;
        score_rows.load(0, first_row);
        slope_rows.load(1, first_row);
        if (IN_REGISTERS || own_first == own_end) release_item();

        float sums[WIDTH / 8][4] = {}, value_sums[OF_KEYS ? WIDTH / 8 : 1][4] = {};
        float scores[TILE / 8][4] = {}, slopes[TILE / 8][4] = {};
        uint32_t p[TILE / 16][4], ds[TILE / 16][4];
        settle(sums);
        settle(value_sums);
        settle(scores);
        settle(slopes);

        // The tile at hand, its slot, how many are to be skipped before the next one, and the slot of the tile before
        // where its products may still run.
        int head = 0, tile = own_first, slot = 0, others = 0, held = -1;
        const auto tile_in = [&](int slot) { return base + offsetof(Shared, tiles) + slot * 2 * TILE_BYTES; };
        const auto start_scores = [&] {
            wait_for_tile();
            begin_products();
            score_rows.multiply(tile_in(ring.slot), scores);
            commit_products();
        };
        const auto start_slopes = [&](int slot) {
            begin_products();
            slope_rows.multiply(tile_in(slot) + TILE_BYTES, slopes);
            commit_products();
        };
        // What a tile adds, whose scores are there and whose slopes are on their way. Where `joined`, the same is true
        // of the next one when this returns.
        const auto take_tile = [&](auto joined, bool is_last) {
            constexpr bool JOINED = decltype(joined)::value;
            if (tile * TILE < all_first || tile * TILE + TILE > all_end) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    // In unsigned numbers one comparison serves both ends.
                    const unsigned place = tile * TILE + 2 * t - from[half];
#pragma unroll
                    for (int i = 0; i < TILE / 8; i++) {
                        if (place + 8 * i >= span[half]) scores[i][2 * half] = -INFINITY;
                        if (place + 8 * i + 1 >= span[half]) scores[i][2 * half + 1] = -INFINITY;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) {
                float2 own;
                if constexpr (OF_KEYS) own = *reinterpret_cast<const float2 *>(&shared().offsets[slot][8 * i + 2 * t]);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float less = OF_KEYS ? (e % 2 ? own.y : own.x) : offset[e / 2];
                    scores[i][e] = exp2_hardware(__fmaf_rn(scores[i][e], call.scale, -less));
                }
            }
            settle(scores);
            compute_before_waiting(call.rows < 0);
            // Slopes, and before them all of the tile before.
            wait_for_products<0>();
            settle(slopes);
            if (held >= 0) release(held);
            if (!IN_REGISTERS && is_last) release_item();
            if constexpr (OF_KEYS) {
                pack(scores, p);
                begin_products();
                add_products(p, tile_in(slot) + TILE_BYTES, value_sums);
                commit_products();
            }
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) {
                float2 own;
                if constexpr (OF_KEYS) own = *reinterpret_cast<const float2 *>(&shared().deltas[slot][8 * i + 2 * t]);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float less = OF_KEYS ? (e % 2 ? own.y : own.x) : delta[e / 2];
                    slopes[i][e] = scores[i][e] * (slopes[i][e] - less);
                }
            }
            pack(slopes, ds);
            const int this_slot = slot;
            if constexpr (JOINED) {
                skip(others);
                start_scores();
                slot = ring.slot;
                ring.advance();
            }
            begin_products();
            add_products(ds, tile_in(this_slot), sums);
            commit_products();
            if constexpr (JOINED) {
                start_slopes(slot);
                held = this_slot;
                wait_for_products<2>();
                settle(scores);
            } else {
                wait_for_products<0>();
                release(this_slot);
                held = -1;
            }
        };
        if (own_first == own_end) {
            skip(heads * item.tiles);
        } else {
            skip(before);
            while (true) {
                start_scores();
                slot = ring.slot;
                ring.advance();
                start_slopes(slot);
                wait_for_products<1>();
                settle(scores);
                while (true) {
                    const bool ends_head = tile + 1 == own_end;
                    others = ends_head ? behind + before : 0;
                    // More tiles than the ring has beside this and the next would never come.
                    if (!AHEAD || (ends_head && head + 1 == heads) || others > STAGES - 2) break;
                    take_tile(std::true_type(), false);
                    tile = ends_head ? own_first : tile + 1;
                    head += ends_head;
                }
                const bool ends_head = tile + 1 == own_end;
                take_tile(std::false_type(), ends_head && head + 1 == heads);
                tile = ends_head ? own_first : tile + 1;
                head += ends_head;
                if (head == heads) break;
                skip(others);
            }
            skip(behind);
        }
        settle(sums);
        settle(value_sums);
        const int row = warp_row + g;
        const int64_t at = item.first_row + row, column = int64_t(item.head) * WIDTH;
        if constexpr (OF_KEYS) {
            bf16 *dk = backward.dk + at * backward.dk_stride + column;
            bf16 *dv = backward.dv + at * backward.dv_stride + column;
            store(sums, backward.factor, dk, backward.dk_stride, rows - row);
            store(value_sums, 1.0f, dv, backward.dv_stride, rows - row);
        } else {
            bf16 *dq = backward.dq + at * backward.dq_stride + column;
            store(sums, backward.factor, dq, backward.dq_stride, rows - row);
        }
    }

    // Writes sums times a factor to the lane's rows, at `out` and eight rows on, where `rows` has them. Four lanes have
    // two columns each of four pieces of eight; they change them about, so that each has a whole piece.
    static __device__ __forceinline__ void store(const float (&sums)[WIDTH / 8][4], float factor, bf16 *out,
                                                 int64_t stride, int rows) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int four = 0; four < WIDTH / 8; four += 4) {
                uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    x[i] = pack_pair(sums[four + i][2 * half] * factor, sums[four + i][2 * half + 1] * factor);
                }
#pragma unroll
                for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (i & bit) continue;
                        const uint32_t other =
                            __shfl_xor_sync(FULL_WARP, t & bit ? x[i] : x[i | bit], bit);
                        (t & bit ? x[i] : x[i | bit]) = other;
                    }
                }
                if (half * 8 < rows) {
                    *reinterpret_cast<uint4 *>(out + half * 8 * stride + four * 8 + t * 8) =
                        make_uint4(x[0], x[1], x[2], x[3]);
                }
            }
        }
    }

    static __device__ __forceinline__ void run(const BackwardCall &backward, const TensorMap &q, const TensorMap &k,
                                               const TensorMap &v, const TensorMap &gradient) {
        const uint32_t base = shared_address(&shared());
        if (threadIdx.x == 0) {
            for (int slot = 0; slot < STAGES; slot++) {
                // Each lane of the producer, and the announcement of bytes.
                initialize_barrier(base + offsetof(Shared, full) + slot * 8, WARP + 1);
                initialize_barrier(base + offsetof(Shared, empty) + slot * 8, CONSUMER_WARPS * WARP);
            }
            initialize_barrier(base + offsetof(Shared, item_full), WARP + 1);
            initialize_barrier(base + offsetof(Shared, item_empty), CONSUMER_WARPS * WARP);
            publish_barriers();
        }
        __syncthreads();
        wait_for_previous_kernel();
        // All have 168 registers at the start, as many as a block of 384 threads can.
        if (threadIdx.x < WARPGROUP) {
            give_registers_back<24>();
            if (threadIdx.x < WARP) produce(backward, q, k, v, gradient);
        } else {
            take_registers<240>();
            Ring ring;
            for (int parity = 0;; parity ^= 1) {
                wait_for_phase(base + offsetof(Shared, item_full), parity);
                const Item item = uniform(shared().item);
                if (item.kind == NO_ITEM) break;
                if (item.kind == KEYS_ITEM) {
                    consume<true>(backward, item, ring);
                } else {
                    consume<false>(backward, item, ring);
                }
            }
        }
    }
};
