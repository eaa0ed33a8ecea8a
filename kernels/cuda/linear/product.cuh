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
// A gated pair is a team of twice the warps, half of it on each matrix. Several matrices on one input are one list of
// tiles.
#pragma once

#include "../vocabulary/device.cuh"
#include "../vocabulary/tiles.cuh"
#include "finish.cuh"
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

// sum[h] += scale * (the product of rows g + 8 h and one row of x over the blocks of a chunk).
template <class Format>
__device__ __forceinline__ void add_chunk(float (&sum)[2], const uint32_t (&a)[4][4], const Operand &x,
                                          const float2 (&scale)[Format::BLOCKS],
                                          const float2 (&minimum)[Format::BLOCKS]) {
    constexpr int STEPS = 4 / Format::BLOCKS;
#pragma unroll
    for (int block = 0; block < Format::BLOCKS; block++) {
        float d[4];
#pragma unroll
        for (int step = block * STEPS; step < (block + 1) * STEPS; step++) {
            if (step == block * STEPS) {
                multiply(d, a[step], x.words[2 * step], x.words[2 * step + 1]);
            } else {
                multiply_add(d, a[step], x.words[2 * step], x.words[2 * step + 1]);
            }
        }
        sum[0] = fmaf(scale[block].x, d[0] + d[1], sum[0]);
        sum[1] = fmaf(scale[block].y, d[2] + d[3], sum[1]);
        if constexpr (Format::HAS_MINIMUM) {
            // The sum of x over the block, as the product with ones.
            constexpr uint32_t ONES[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
            float total[4];
#pragma unroll
            for (int step = block * STEPS; step < (block + 1) * STEPS; step++) {
                if (step == block * STEPS) {
                    multiply(total, ONES, x.words[2 * step], x.words[2 * step + 1]);
                } else {
                    multiply_add(total, ONES, x.words[2 * step], x.words[2 * step + 1]);
                }
            }
            sum[0] = fmaf(minimum[block].x, total[0] + total[1], sum[0]);
            sum[1] = fmaf(minimum[block].y, total[0] + total[1], sum[1]);
        }
    }
}

// TILES groups of four rows of x. With DOWN the slots of one row of x are summed, each times its weight.
template <class Format, int TILES, bool DOWN>
__device__ __forceinline__ void product(const Product &p, const Routing &routing) {
    constexpr int AHEAD = Format::ahead(TILES), RING = Format::operand_ring(TILES), CHUNKS = tiles::RECORD_CHUNKS;
    constexpr int DEPTH = (AHEAD + CHUNKS - 1) / CHUNKS;
    // With less than a record ahead, the rest of a record is asked for while its first chunks are multiplied.
    constexpr bool WITHIN = AHEAD < CHUNKS;
    // Records whose scales are in registers or on their way: with one set those of the next record could be asked for
    // only when they are needed.
    constexpr int SETS = DEPTH == 2 ? 2 : DOWN ? 1 : Format::scale_sets(TILES);
    // Whether a chunk that the record lacks is multiplied by a scale of zero: a branch around it keeps a record's chunks
    // from overlapping.
    constexpr bool OVERLAP = Format::overlaps(TILES);
    // Whether a place in the ring holds different rows of x in turn: past the last column it must then be zero instead of
    // what it held, since a row that is not finite would spoil the others.
    constexpr bool MIXES = !Format::WHOLE_RECORDS && RING % TILES != 0;
    // Whether lanes without a row of x load the last one again, whose products nobody reads, instead of a condition on
    // each load, which becomes a branch.
    constexpr bool REPEATS = Format::repeats(TILES);
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
    // Without DOWN there are at least as many records as warps that share them.
    walk.first = {int(blockIdx.x) * team.teams + team.index, 0, team.share};
    if constexpr (DOWN) walk.first = {walk.first.task, team.share / records, team.share % records};

    const auto chunks_of = [&](int record) {
        return Format::WHOLE_RECORDS ? CHUNKS : min(CHUNKS, chunks - record * CHUNKS);
    };
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
    typename Format::Scales scales[SETS];
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
            Format::load(scales[depth], record, held, lane);
            if constexpr (!WITHIN) step(ahead, record);
        }
    }
    const typename Format::Decoder decoder(shared, lane);
    wait_for_previous_kernel();

    // The first operands. `x_end` has the columns that are left of a record, as this lane counts them.
    const int x_lane = lane % 4 * Format::Columns::RUN;
    int x_row[TILES];
#pragma unroll
    for (int nth = 0; nth < TILES; nth++) {
        const int row = group + 8 * nth;
        x_row[nth] = (REPEATS ? min(row, 2 * p.n - 1) : row) * p.cols;
    }
    const int rows_left = REPEATS ? 8 * TILES : 2 * p.n - group;
    const auto x_of = [&](const Place &at) {
        return x_lane + (DOWN ? at.slot * 2 * p.cols : 0) + at.record * CHUNKS * tiles::CHUNK;
    };
    const auto x_end_of = [&](const Place &at) {
        // Past the last task the place is still one of x.
        if (Format::WHOLE_RECORDS) return rows_left > 0 ? CHUNKS * tiles::CHUNK : 0;
        const int left = p.cols - at.record * CHUNKS * tiles::CHUNK - lane % 4 * Format::Columns::RUN;
        return at.task < walk.tasks && rows_left > 0 ? left : 0;
    };
    Operand x[RING];
    int x_at = x_of(current);
    int x_end = x_end_of(current);
    const auto load_x = [&](Operand &to, int from, int end, int place) {
        const int chunk = place / TILES, nth = place % TILES;
        if constexpr (MIXES) to.clear();
        if (REPEATS || TILES == 1 || 8 * nth < rows_left) {
            Format::Columns::load(to, p.x + uint32_t(from + x_row[nth]), chunk * tiles::CHUNK, end);
        }
    };
#pragma unroll
    for (int place = 0; place < RING; place++) {
        x[place].clear();
        load_x(x[place], x_at, x_end, place);
    }

    float *exchange = reinterpret_cast<float *>(shared + Format::Decoder::BYTES);
    const int exchange_step = SUMS_TWICE<TILES> ? int(blockDim.x) / WARP * TILES * TILE_OUTPUTS : 0;
    float sum[TILES][2] = {};
    float base = 0.0f;
    if (current.task < walk.tasks) base = base_of<TILES>(p, team, current.task, lane, team.member);
    int parity = 0;
    // Whether there was a record left. Its place in the ring is part of the type: the compiler kept the codes and scales
    // of a loop over it in local memory (a stack frame, no spills), where a load is waited for once it is asked for.
    const auto multiply_record = [&](auto place_in_ring) {
        constexpr int depth = decltype(place_in_ring)::value;
        if (current.task >= walk.tasks) return false;
        const int held = chunks_of(current.record);
        // Chunks of the record at `ahead`: none past the end.
        int held_ahead = ahead.task < walk.tasks ? chunks_of(ahead.record) : 0;
        Place next = current;
        const bool ends_tile = walk.step(next);
        const int x_next = x_of(next);
        const int x_next_end = x_end_of(next);

        if constexpr (SETS > DEPTH && !WITHIN) {
            if (held_ahead > 0) Format::load(scales[1 - depth], record, held_ahead, lane);
        }

        const auto ready = Format::ready(scales[depth]);
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
                Format::scales_of(scale, minimum, ready, chunk, chunk < held);
            }
#pragma unroll
            for (int nth = 0; nth < TILES; nth++) {
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
                if constexpr (SETS > DEPTH) {
                    if (held_ahead > 0) Format::load(scales[1 - depth], record, held_ahead, lane);
                }
            }
        }
        if (held_ahead > 0) {
            if (SETS == DEPTH) Format::load(scales[depth], record, held_ahead, lane);
            if (!WITHIN) step(ahead, record);
        }
        if constexpr (DOWN) {
            const float weight = routing.weights[current.slot];
            sum[0][0] = fmaf(weight, of_record[0][0], sum[0][0]);
            sum[0][1] = fmaf(weight, of_record[0][1], sum[0][1]);
        }

        if (ends_tile && next.task != current.task) {
            finish<TILES>(p, team, current.task, lane, sum, base, exchange + parity * exchange_step);
            parity ^= 1;
            if (next.task < walk.tasks) base = base_of<TILES>(p, team, next.task, lane, team.member);
#pragma unroll
            for (int nth = 0; nth < TILES; nth++) sum[nth][0] = sum[nth][1] = 0.0f;
        }
        current = next;
        x_at = x_next;
        x_end = x_next_end;
        return true;
    };
    if constexpr (SETS == 1) {
        while (multiply_record(std::integral_constant<int, 0>{})) {
        }
    } else {
        while (multiply_record(std::integral_constant<int, 0>{}) && multiply_record(std::integral_constant<int, 1>{})) {
        }
    }
}

// Rows 4 TILES blockIdx.y and on of a dense product.
template <class Format, int TILES> __device__ __forceinline__ void dense(Product p) {
    let_next_kernel_start();
    p.skip_rows(int(blockIdx.y) * TILES * TILE_ROWS_OF_X);
    product<Format, TILES, false>(p, Routing{});
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
    p.out = static_cast<uint8_t *>(p.out) + size_t(slot) * p.out_width * 4;
    p.n = 1;
    product<Format, 1, false>(p, routing);
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
    p.out = static_cast<uint8_t *>(p.out) + size_t(row) * p.out_width * 4;
    p.n = 1;
    product<Format, 1, true>(p, routing);
}

}  // namespace linear

// The kernels of a format. 512 threads at 128 registers fill a multiprocessor, as do two blocks of 256.
#define LINEAR_DENSE(name, Format, rows)                                                                    \
    extern "C" __global__ void __launch_bounds__(512, 1) name##_##rows(const __grid_constant__ linear::Product p) { \
        linear::dense<Format, rows / linear::TILE_ROWS_OF_X>(p);                                            \
    }
#define LINEAR_KERNELS(name, Format)                                                                        \
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
