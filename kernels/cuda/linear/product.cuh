// Products of few rows: out[i][r] = sum_k x[i][k] W[r][k] for n = 1..64 rows of x, straight from the weights as they
// lie.
//
// Bound: the bytes of the weights. One pass over W serves up to 32 rows, through m16n8k16 tensor-core products with W
// as the operand of 16 rows: column 2 r + h of the other operand is part h (high, low) of row r of x, so that one row
// costs no more instructions than four, and the sum of the two accumulators is the product of x to 16 bits of mantissa.
//
// - A warp's unit is a RECORD: 16 rows by 256 columns. The records of a row tile are dealt to a TEAM of 2^split_log2
//   warps in turn; each warp sums its own in order, then the team adds the sums in the order of its warps. The split
//   depends on the matrix alone, so a row has the same bits whatever runs beside it, with any number of rows, on any
//   card.
// - A warp walks its records over all tiles of its team as one stream: while it multiplies a chunk, the codes of one or
//   two whole records after it are on their way in registers (8 KiB a warp for BF16, 4.5 KiB for 4 bits). The
//   multiprocessor needs some 30 KiB in flight to be busy (4.3 TB/s, 0.9 us, 132 of them); 16 warps have two to four
//   times that.
// - Weights are constant: the first records are asked for before the kernel before is done; everything else waits.
// - Sums of a block of columns with one scale start from zero in the tensor core and are scaled as they are added in
//   single precision, so that codes are exact. BF16 does the same per chunk, which breaks a long chain of dependent
//   products.
// - Two accumulators a row tile and four rows of x is all that lasts: registers stay under 128, 16 warps a
//   multiprocessor.
//
// A short product is a chain of waits, not bytes. For one row and [2048, 2048], 128 teams of eight warps with a record
// each, from the end of the kernel before to the last store, in cycles as estimated (1.75 in a nanosecond):
//     the codes, the table of NF4, the bias, the weights of the next norm   0, asked for before
//     x, the residual, the sums of squares: one round to the second-level cache, all asked for together   350
//     the factor of the norm: 4 additions, 5 shuffles, a root, by a warp of the team for a row   170
//     16 tensor-core products in chains of four, sums of four chunks to all lanes   230
//     the warps' sums to shared memory, the team's one barrier   60
//     four loads of 16 bytes, the sums of 8 warps in order, scaled, on the residual, stored   120
//     3 shuffles for the sum of squares of the tile, stored   100
// Addresses are known before the wait, and what outputs need besides lies in shared memory when the sums are there.
// The second record of a warp would wait for memory once more, 600 and on: so a short row has a warp for each record,
// if need be more warps than records, and blocks are small where tasks are few, so that each multiprocessor loads a
// little.
//
// A gated pair is a team of twice the warps, half of it on each matrix. Several matrices on one input are one list of
// tiles.
#pragma once

#include "../vocabulary/device.cuh"
#include "../vocabulary/tiles.cuh"
#include "finish.cuh"
#include "multiply.cuh"
#include "norm.cuh"
#include "operand.cuh"

namespace linear {

// The experts of each row, each a slot; used by routed products alone. `Routing` in linear.rs is the same.
struct Routing {
    const int *experts;     // [n, slots]: each row's in ascending order; -1 in rows to skip
    const float *weights;   // [n, slots]
    uint64_t expert_bytes;  // from one expert's matrix to the next
    int slots;              // of a row
    int padding;
};

// A warp's place in its stream of records.
struct Place {
    int task, slot, record;
};

// How a warp walks: the records of a task in steps of `warps`; with DOWN, the records of a row's slots one after the
// other.
template <bool DOWN> struct Walk {
    Place first;
    int tasks, task_step, slots, records, warps;

    // Whether the next record is of another matrix tile.
    __device__ __forceinline__ bool step(Place &at) const {
        at.record += warps;
        if (at.record < records) return false;
        if constexpr (DOWN) {
            do {
                at.record -= records;
                at.slot++;
            } while (at.record >= records);
            if (at.slot < slots) return true;
        }
        at = {at.task + task_step, first.slot, first.record};
        return true;
    }
};

// TILES groups of four rows of x, or with ONE a single row. With DOWN the slots of one row of x are summed, each times
// its weight.
template <class Format, int TILES, bool ONE, bool DOWN>
__device__ __forceinline__ void product(const Product &p, const Routing &routing) {
    static_assert(!ONE || TILES == 1, "a single row");
    constexpr int AHEAD = Format::ahead(TILES), CHUNKS = tiles::RECORD_CHUNKS;
    // Operands on their way: with ONE those of this record and the next, each with all its chunks.
    constexpr int RING = ONE ? 2 : Format::operand_ring(TILES);
    constexpr int DEPTH = (AHEAD + CHUNKS - 1) / CHUNKS;
    static_assert(DEPTH <= 2, "records on their way");
    // With less than a record ahead, the rest of a record is asked for while its first chunks are multiplied.
    constexpr bool WITHIN = AHEAD < CHUNKS;
    // Whether a chunk that the record lacks is multiplied by a scale of zero: a branch around it would keep a record's
    // chunks from overlapping. More rows or more scales have work enough in one chunk, and no registers for two.
    constexpr bool OVERLAP = TILES == 1 && Format::BLOCKS == 1;
    extern __shared__ __align__(256) uint8_t shared[];
    // Taken from lane 0, so that the compiler knows it for the whole warp.
    const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x) / WARP, 0);
    const int lane = threadIdx.x % WARP, group = lane / 4;
    const Team team(p, warp);

    const int chunks = tiles::padded_columns(p.cols) / tiles::CHUNK;
    const int records = (chunks + CHUNKS - 1) / CHUNKS;
    Walk<DOWN> walk;
    walk.tasks = p.tasks();
    walk.task_step = gridDim.x * team.teams;
    walk.slots = DOWN ? routing.slots : 1;
    walk.records = records;
    walk.warps = 1 << p.split_log2;
    // Without DOWN a warp's first record may be past the last: it has no chunks, and the warp adds zeros.
    walk.first = {int(blockIdx.x) * team.teams + team.index, 0, team.share};
    if constexpr (DOWN) walk.first = {walk.first.task, team.share / records, team.share % records};

    const auto chunks_of = [&](int record) { return min(CHUNKS, chunks - record * CHUNKS); };
    // Where the codes of the record at a place are.
    const auto open = [&](const Place &at) {
        const Part part = p.part(at.task, team.half);
        const uint8_t *matrix = part.weights;
        if constexpr (DOWN) matrix += size_t(routing.experts[at.slot]) * routing.expert_bytes;
        return Format::open(matrix, part.rows, p.cols, part.tile, at.record, lane);
    };
    // One record on; `record` follows where there is one.
    const auto step = [&](Place &at, typename Format::Record &record) {
        if (!walk.step(at)) {
            Format::advance(record, walk.warps);
        } else if (at.task < walk.tasks) {
            record = open(at);
        }
    };

    // The first weights: `ahead` is the place of the next chunk to ask for, and `record` where its codes are.
    typename Format::Chunk codes[AHEAD];
    if constexpr (OVERLAP) {
        // What is never loaded is multiplied by zero and must be finite.
#pragma unroll
        for (int i = 0; i < AHEAD; i++) codes[i] = {};
    }
    typename Format::Scales scales[DEPTH] = {};
    Place current = walk.first, ahead = walk.first;
    typename Format::Record record;
    if (ahead.task < walk.tasks) record = open(ahead);
#pragma unroll
    for (int depth = 0; depth < DEPTH; depth++) {
        if (ahead.task < walk.tasks) {
            const int held = chunks_of(ahead.record);
#pragma unroll
            for (int chunk = 0; chunk < (WITHIN ? AHEAD : CHUNKS); chunk++) {
                if (chunk < held) Format::load(codes[depth * CHUNKS + chunk], record, chunk);
            }
            if (held > 0) Format::load(scales[depth], record, held, lane);
            if constexpr (!WITHIN) step(ahead, record);
        }
    }
    const typename Format::Decoder decoder(shared, lane);

    // What outputs need besides the sums, as far as it is constant.
    const Workspace<typename Format::Decoder, TILES> workspace(shared, team, lane, 0);
    const bool has_factors = !DOWN && p.factor_squares, has_outputs = team.member < TILES && current.task < walk.tasks;
    const float *residual = nullptr;
    Outputs outputs = {};
    if (has_outputs) {
        outputs = ask_for_constants(workspace.words, workspace.WORD_STEP, p, current.task, lane, team.member);
        residual = Start::residual_at(p, outputs);
    }

    // The first operands. `x_end` has the columns that are left of a record, as this lane counts them.
    const int x_step = 8 * p.cols, x_column = lane % 4 * Format::Columns::RUN + (ONE ? group / 2 * tiles::CHUNK : 0);
    const int x_lane = (ONE ? group % 2 : group) * p.cols + x_column;
    const int rows_left = ONE ? 1 : 2 * p.n - group;
    const auto x_of = [&](const Place &at) {
        return x_lane + (DOWN ? at.slot * 2 * p.cols : 0) + at.record * CHUNKS * tiles::CHUNK;
    };
    const auto x_end_of = [&](const Place &at) {
        const int left = p.cols - at.record * CHUNKS * tiles::CHUNK - x_column;
        return at.task < walk.tasks && rows_left > 0 ? left : 0;
    };
    Operand x[RING];
    int x_at = x_of(current);
    int x_end = x_end_of(current);
    const auto load_x = [&](Operand &to, int from, int end, int place) {
        const int chunk = place / TILES, nth = place % TILES;
        if (TILES == 1 || 8 * nth < rows_left) {
            Format::Columns::load(to, p.x + uint32_t(from + nth * x_step), chunk * tiles::CHUNK, end);
        }
    };
    const auto load_first = [&](const bf16 *from, int end) {
#pragma unroll
        for (int place = 0; place < RING; place++) {
            x[place].clear();
            if (ONE && place > 0) break;
            const int chunk = place / TILES, nth = place % TILES;
            if (TILES == 1 || 8 * nth < rows_left) {
                Format::Columns::load(x[place], from + uint32_t(nth * x_step), chunk * tiles::CHUNK, end);
            }
        }
    };
    // All addresses before the wait, which is then followed by loads alone.
    const bf16 *x_first = p.x + uint32_t(x_at);
    asm volatile("" : "+l"(x_first), "+r"(x_end), "+l"(residual));
    wait_for_previous_kernel();
    load_first(x_first, x_end);
    if (has_outputs) ask_for_residual(workspace.words, workspace.WORD_STEP, p, residual, outputs);
    if (has_factors) find_factors(workspace.factors, p, team, TILES * TILE_ROWS_OF_X, lane);

    float sum[TILES][2] = {};
    int turn = 0;
    // The record at `current`, whose codes are the `depth`th of those on their way; false when there is none left.
    const auto multiply_record = [&](auto depth_constant) {
        constexpr int depth = decltype(depth_constant)::value;
        if (current.task >= walk.tasks) return false;
        const int held = chunks_of(current.record);
        // Chunks of the record at `ahead`: none past the end.
        int held_ahead = ahead.task < walk.tasks ? chunks_of(ahead.record) : 0;
        Place next = current;
        walk.step(next);
        const bool ends_task = next.task != current.task;
        const int x_next = x_of(next);
        // Unless they are few, the operands of the next task are asked for once this one is done: their registers
        // serve to finish it.
        const int x_next_end = ends_task && !ONE ? 0 : x_end_of(next);
        [[maybe_unused]] float totals[Format::BLOCKS] = {};
        if constexpr (ONE) {
            load_x(x[1], x_next, x_next_end, 0);
            if constexpr (Format::HAS_MINIMUM) {
#pragma unroll
                for (int block = 0; block < Format::BLOCKS; block++) {
                    totals[block] = total_of<4 / Format::BLOCKS>(x[0], block);
                }
            }
        }

        float of_record[TILES][2] = {};
        auto &into = DOWN ? of_record : sum;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            uint32_t a[4][4];
            float2 scale[Format::BLOCKS], minimum[Format::BLOCKS];
            auto &of_chunk = codes[(depth * CHUNKS + chunk) % AHEAD];
            const bool here = OVERLAP || chunk < held;
            if (here) {
                decoder.fragments(a, of_chunk);
                Format::scales_of(scale, minimum, scales[depth], chunk, chunk < held);
            }
            if constexpr (ONE) {
                if (here) add_chunk_of_one<Format>(into[0], a, x[0], scale, minimum, totals, chunk);
            }
#pragma unroll
            for (int nth = 0; nth < TILES && !ONE; nth++) {
                const int place = chunk * TILES + nth;
                if (here) add_chunk<Format>(into[nth], a, x[place % RING], scale, minimum);
                if (place + RING < CHUNKS * TILES) {
                    load_x(x[place % RING], x_at, x_end, place + RING);
                } else {
                    load_x(x[place % RING], x_next, x_next_end, place + RING - CHUNKS * TILES);
                }
            }
            const int target = (chunk + AHEAD) % CHUNKS;
            if (target < held_ahead) Format::load(of_chunk, record, target);
            if (WITHIN && target == CHUNKS - 1 && held_ahead > 0) {
                step(ahead, record);
                held_ahead = ahead.task < walk.tasks ? chunks_of(ahead.record) : 0;
            }
        }
        if (held_ahead > 0) {
            Format::load(scales[depth], record, held_ahead, lane);
            if (!WITHIN) step(ahead, record);
        }
        if constexpr (DOWN) {
            const float weight = routing.weights[current.slot];
            sum[0][0] = fmaf(weight, of_record[0][0], sum[0][0]);
            sum[0][1] = fmaf(weight, of_record[0][1], sum[0][1]);
        }

        if (ends_task) {
            finish<typename Format::Decoder, TILES>(p, shared, turn, current.task, next.task, sum, has_factors);
            turn ^= 1;
#pragma unroll
            for (int nth = 0; nth < TILES; nth++) sum[nth][0] = sum[nth][1] = 0.0f;
        }
        current = next;
        x_at = x_next;
        x_end = x_end_of(next);
        if constexpr (ONE) {
            x[0] = x[1];
        } else if (ends_task) {
            load_first(p.x + uint32_t(x_at), x_end);
        }
        return true;
    };
    // Each place in the registers by its number: a loop that the compiler leaves standing would put them in memory.
    if constexpr (DEPTH == 1) {
        while (multiply_record(std::integral_constant<int, 0>{})) {}
    } else {
        while (multiply_record(std::integral_constant<int, 0>{}) &&
               multiply_record(std::integral_constant<int, 1>{})) {}
    }
}

// Rows 4 TILES blockIdx.y and on of a dense product.
template <class Format, int TILES> __device__ __forceinline__ void dense(Product p) {
    let_next_kernel_start();
    p.skip_rows(int(blockIdx.y) * TILES * TILE_ROWS_OF_X);
    product<Format, TILES, false, false>(p, Routing{});
}

template <class Format> __device__ __forceinline__ void dense_of_one(const Product &p) {
    let_next_kernel_start();
    product<Format, 1, true, false>(p, Routing{});
}

// out[slot] = act(gate x) * (up x) with the matrices of the expert of slot blockIdx.y.
template <class Format> __device__ __forceinline__ void routed_gated(Product p, const Routing &routing) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int slot = blockIdx.y, row = slot / routing.slots;
    const int expert = routing.experts[slot];
    if (expert < 0) return;
    const size_t from = size_t(expert) * routing.expert_bytes;
    p.weights[0] += from;
    p.weights[1] += from;
    p.x += size_t(row) * 2 * p.cols;
    if (p.factor_squares) p.factor_squares += size_t(row) * Product::tiles_of(p.factor_width);
    p.out = static_cast<uint8_t *>(p.out) + size_t(slot) * p.out_width * 4;
    p.n = 1;
    product<Format, 1, true, false>(p, routing);
}

// out[row] = (what it holds, or nothing) + sum over slots of weight * (down y[slot]) for row blockIdx.y.
template <class Format> __device__ __forceinline__ void routed_down(Product p, Routing routing) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.y;
    routing.experts += size_t(row) * routing.slots;
    if (routing.experts[0] < 0) return;
    routing.weights += size_t(row) * routing.slots;
    p.x += size_t(row) * routing.slots * 2 * p.cols;
    p.skip_outputs(row);
    p.n = 1;
    product<Format, 1, true, true>(p, routing);
}

}  // namespace linear

// The kernels of a format. 512 threads at 128 registers fill a multiprocessor, as do two blocks of 256.
#define LINEAR_DENSE(name, Format, rows)                                                                    \
    extern "C" __global__ void __launch_bounds__(512, 1) name##_##rows(const __grid_constant__ linear::Product p) { \
        linear::dense<Format, rows / linear::TILE_ROWS_OF_X>(p);                                            \
    }
#define LINEAR_KERNELS(name, Format)                                                                        \
    extern "C" __global__ void __launch_bounds__(512, 1) name##_1(const __grid_constant__ linear::Product p) { \
        linear::dense_of_one<Format>(p);                                                                    \
    }                                                                                                       \
    LINEAR_DENSE(name, Format, 4)                                                                           \
    LINEAR_DENSE(name, Format, 8)                                                                           \
    LINEAR_DENSE(name, Format, 16)                                                                          \
    LINEAR_DENSE(name, Format, 32)                                                                          \
    extern "C" __global__ void __launch_bounds__(512, 1) name##_routed_gated(                               \
        const __grid_constant__ linear::Product p, const __grid_constant__ linear::Routing routing) {      \
        linear::routed_gated<Format>(p, routing);                                                           \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(512, 1) name##_routed_down(                                \
        const __grid_constant__ linear::Product p, const __grid_constant__ linear::Routing routing) {      \
        linear::routed_down<Format>(p, routing);                                                            \
    }
