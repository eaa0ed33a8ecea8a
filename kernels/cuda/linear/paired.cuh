// Products of 9 to 16 rows with many row tiles: out as in product.cuh, with two row tiles to a warp.
//
// A chunk of 64 columns of sixteen rows of x is 4 KiB in two parts, eight times the codes of a row tile in 4 bits that it
// meets. So a warp takes two row tiles at a time, in a gated pair one of each matrix, and what it has loaded of x serves both:
// half the reads of x and half the instructions around them. The split of the columns over warps is that of product.cuh,
// each warp adds its chunks in the same order, and a team adds its warps' sums in the same order: the bits are the same.
//
// Registers: a chunk of x (32), sums (16), one tile's A registers (16), and for both tiles codes of PAIRED_AHEAD chunks and
// scales of a record: 168, so twelve warps a multiprocessor, of which NF4 needs but one table, so that more of the
// first-level cache is left for x. The next record's scales are asked for once those of a record's last chunk are taken.
//
// Where there is no second tile the last one is taken again, and nobody reads its sums.
//
// Long rows of few tiles: sixteen warps share a pair of tiles, and half as many blocks of sixteen would leave half of the
// card idle. There a team is a cluster of two blocks of eight warps (sm_90 on), each of which gets the sums of one of
// the two tiles.
#pragma once

#include "../vocabulary/cluster.cuh"
#include "product.cuh"

namespace linear {

// Groups of four rows of x.
constexpr int PAIRED_TILES = 4;

__device__ __forceinline__ int all_tiles(const Product &p) {
    return p.tiles_of(p.rows[0]) + p.tiles_of(p.rows[1]) + p.tiles_of(p.rows[2]);
}

// Row tile `which` of two.
__device__ __forceinline__ Part part_of_pair(const Product &p, int task, int which) {
    return p.gated() ? p.part(task, which) : p.part(min(2 * task + which, all_tiles(p) - 1), 0);
}

// As `finish`: [which][nth][half] of a warp's sums. One place serves all tasks, so a second barrier ends it.
__device__ __forceinline__ void finish_pair(const Product &p, const Team &team, int task, int lane,
                                            const float (&sum)[2][PAIRED_TILES][2], float *exchange) {
    constexpr int SLOTS = 2 * PAIRED_TILES, STEP = 2 * SLOTS * WARP;
    float *of_team = exchange + team.index * team.warps * STEP + lane;
#pragma unroll
    for (int slot = 0; slot < 2 * SLOTS; slot++) {
        of_team[team.member * STEP + slot * WARP] = sum[slot / SLOTS][slot % SLOTS / 2][slot % 2];
    }
    team.wait_or_sync();
    if (p.gated()) {
        const Part part = p.part(task, 0);
        for (int slot = team.member; slot < SLOTS; slot += team.warps) {
            float total = sum_of(of_team + slot * WARP, team.warps, STEP);
            float factor = sum_of(of_team + (SLOTS + slot) * WARP, team.warps, STEP);
            const Output output(part, lane, slot);
            if (!output.exists(p, part)) continue;
            if (p.bias[0]) total += p.bias[0][output.row];
            if (p.bias[1]) factor += p.bias[1][output.row];
            store<SPLIT>(p.out, output.of_x, p.out_width, output.row, activation(total, p.then) * factor);
        }
    } else {
        for (int slot = team.member; slot < 2 * SLOTS; slot += team.warps) {
            const int which = slot / SLOTS;
            if (2 * task + which >= all_tiles(p)) continue;
            const float total = sum_of(of_team + slot * WARP, team.warps, STEP);
            const Part part = part_of_pair(p, task, which);
            const Output output(part, lane, slot % SLOTS);
            if (!output.exists(p, part)) continue;
            const float base = base_of_output(p, part, output);
            static_cast<float *>(p.out)[output.at(p, part)] = base + total;
        }
    }
    team.wait_or_sync();
}

constexpr int CLUSTER = 2, CLUSTER_WARPS = 8;

// What a block of a cluster receives: of every warp of both the sums of its tile, slots in fours.
struct PairSums {
    static constexpr int FOURS = 2 * PAIRED_TILES / 4;
    float4 sums[CLUSTER * CLUSTER_WARPS][FOURS][WARP];
    uint64_t arrivals;
};

// The same for a team of two blocks, once: nothing is received a second time.
__device__ __forceinline__ void finish_in_cluster(const Product &p, int task, int rank, int member, int lane,
                                                  const float (&sum)[2][PAIRED_TILES][2], PairSums &received) {
    static_assert(2 * PAIRED_TILES == CLUSTER_WARPS, "a warp finishes a slot");
    if (threadIdx.x == 0) expect_arrivals(&received.arrivals, sizeof(received.sums));
    wait_until_ready();
#pragma unroll
    for (int four = 0; four < 2 * PairSums::FOURS; four++) {
        const int which = four / PairSums::FOURS, nth = four % PairSums::FOURS;
        const float(&first)[2] = sum[which][2 * nth], (&second)[2] = sum[which][2 * nth + 1];
        send(&received.sums[member][nth][lane], &received.arrivals, which,
             make_float4(first[0], first[1], second[0], second[1]));
    }
    wait_for_arrivals(&received.arrivals, 0);
    const int slot = threadIdx.x / WARP;
    if (2 * task + rank >= all_tiles(p)) return;
    const float *first = reinterpret_cast<const float *>(&received.sums[0][slot / 4][lane]) + slot % 4;
    const float total = sum_of(first, CLUSTER * CLUSTER_WARPS, PairSums::FOURS * WARP * 4);
    const Part part = part_of_pair(p, task, rank);
    const Output output(part, lane, slot);
    if (!output.exists(p, part)) return;
    static_cast<float *>(p.out)[output.at(p, part)] = base_of_output(p, part, output) + total;
}

// A tensor core wants its A registers side by side. Where they are loaded apart, the compiler copies them anew for each of
// the four products that they are in; the result of an operation it keeps. The grid has no z, so nothing changes.
__device__ __forceinline__ void copy_once(uint32_t (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; i++) a[i / 4][i % 4] |= blockIdx.z;
}

// IN_CLUSTER: a cluster for each pair of tiles of a product that is not gated, whose columns sixteen warps share.
template <class Format, int AHEAD, bool IN_CLUSTER> __device__ __forceinline__ void paired(const Product &p) {
    constexpr int TILES = PAIRED_TILES, CHUNKS = tiles::RECORD_CHUNKS;
    extern __shared__ __align__(256) uint8_t shared[];
    let_next_kernel_start();
    const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x) / WARP, 0);
    const int lane = threadIdx.x % WARP, group = lane / 4, rank = blockIdx.x % CLUSTER;
    Team team(p, warp, p.split_log2);
    if constexpr (IN_CLUSTER) team.member = rank * CLUSTER_WARPS + warp;

    const int chunks = tiles::padded_columns(p.cols) / tiles::CHUNK;
    Walk<false> walk;
    walk.tasks = p.gated() ? p.tiles_of(p.rows[0]) : (all_tiles(p) + 1) / 2;
    walk.task_step = IN_CLUSTER ? walk.tasks : gridDim.x * team.teams;
    walk.slots = 1;
    walk.records = (chunks + CHUNKS - 1) / CHUNKS;
    walk.warps = 1 << p.split_log2;
    walk.first = {IN_CLUSTER ? int(blockIdx.x) / CLUSTER : int(blockIdx.x) * team.teams + team.index, 0, team.member};

    const auto chunks_of = [&](int record) { return min(CHUNKS, chunks - record * CHUNKS); };
    typename Format::Record record[2];
    const auto open = [&](const Place &at) {
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const Part part = part_of_pair(p, at.task, which);
            record[which] = Format::open(part.weights, part.rows, p.cols, part.tile, at.record, lane);
        }
    };
    const auto step = [&](Place &at) {
        if (!walk.step(at)) {
#pragma unroll
            for (int which = 0; which < 2; which++) Format::advance(record[which], walk.warps);
        } else if (at.task < walk.tasks) {
            open(at);
        }
    };

    // The first weights. What is never loaded is multiplied by zero and must be finite.
    typename Format::Chunk codes[2][AHEAD] = {};
    typename Format::Scales scales[2];
    Place current = walk.first, ahead = walk.first;
    if (ahead.task < walk.tasks) {
        open(ahead);
        const int held = chunks_of(ahead.record);
#pragma unroll
        for (int which = 0; which < 2; which++) {
#pragma unroll
            for (int chunk = 0; chunk < AHEAD; chunk++) {
                if (chunk < held) Format::load(codes[which][chunk], record[which], chunk);
            }
            Format::load(scales[which], record[which], held, lane);
        }
        if (AHEAD == CHUNKS) step(ahead);
    }
    const typename Format::Decoder decoder(shared, lane);
    float *exchange = reinterpret_cast<float *>(shared + Format::Decoder::BYTES);
    PairSums &received = *reinterpret_cast<PairSums *>(exchange);
    if constexpr (IN_CLUSTER) {
        if (threadIdx.x == 0) prepare_arrivals(&received.arrivals);
        __syncwarp();
        arrive_ready();
    }
    wait_for_previous_kernel();

    // The first chunk of x. Rows past the last repeat it.
    const int x_lane = lane % 4 * Format::Columns::RUN;
    uint32_t x_rows[TILES];
#pragma unroll
    for (int nth = 0; nth < TILES; nth++) {
        x_rows[nth] = min(group + 8 * nth, 2 * p.n - 1) * p.cols + x_lane;
    }
    Operand x[TILES];
    const auto load_x = [&](int nth, int column) {
        const int end = Format::WHOLE_RECORDS ? tiles::CHUNK : p.cols - x_lane - column;
        Format::Columns::load(x[nth], p.x + (x_rows[nth] + column), 0, end);
    };
#pragma unroll
    for (int nth = 0; nth < TILES; nth++) {
        x[nth].clear();
        if (current.task < walk.tasks) load_x(nth, current.record * CHUNKS * tiles::CHUNK);
    }

    float sum[2][TILES][2] = {};
    while (current.task < walk.tasks) {
        const int held = chunks_of(current.record);
        int held_ahead = ahead.task < walk.tasks ? chunks_of(ahead.record) : 0;
        Place next = current;
        walk.step(next);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const int target = (chunk + AHEAD) % CHUNKS;
            // The next chunk of x; after the last task that of a place in x whose products nobody wants.
            const int x_next = chunk + 1 < CHUNKS ? (current.record * CHUNKS + chunk + 1) * tiles::CHUNK
                                                  : next.record * CHUNKS * tiles::CHUNK;
            float2 scale[2][Format::BLOCKS], minimum[2][Format::BLOCKS];
#pragma unroll
            for (int which = 0; which < 2; which++) {
                Format::scales_of(scale[which], minimum[which], Format::ready(scales[which]), chunk, chunk < held);
            }
            if (chunk == CHUNKS - 1 && held_ahead > 0) {
#pragma unroll
                for (int which = 0; which < 2; which++) {
                    Format::load(scales[which], record[which], held_ahead, lane);
                }
            }
#pragma unroll
            for (int which = 0; which < 2; which++) {
                auto &of_chunk = codes[which][chunk % AHEAD];
                uint32_t a[4][4];
                decoder.fragments(a, of_chunk);
                if constexpr (Format::IN_PLACE) copy_once(a);
                if (target < held_ahead) Format::load(of_chunk, record[which], target);
#pragma unroll
                for (int nth = 0; nth < TILES; nth++) {
                    add_chunk<Format>(sum[which][nth], a, x[nth], scale[which], minimum[which]);
                    if (which == 1) load_x(nth, x_next);
                }
            }
            if (target == CHUNKS - 1 && held_ahead > 0) {
                step(ahead);
                held_ahead = ahead.task < walk.tasks ? chunks_of(ahead.record) : 0;
            }
        }
        if (next.task != current.task) {
            if constexpr (IN_CLUSTER) {
                finish_in_cluster(p, current.task, rank, team.member, lane, sum, received);
                return;
            }
            finish_pair(p, team, current.task, lane, sum, exchange);
#pragma unroll
            for (int slot = 0; slot < 4 * TILES; slot++) sum[slot / (2 * TILES)][slot / 2 % TILES][slot % 2] = 0.0f;
        }
        current = next;
    }
}

}  // namespace linear

// One block of twelve warps of 168 registers fills a multiprocessor, or one of eight warps of a cluster.
#define LINEAR_PAIRED(name, Format)                                                                                 \
    extern "C" __global__ void __launch_bounds__(384, 1) name##_16_paired(const __grid_constant__ linear::Product p) { \
        linear::paired<Format, Format::PAIRED_AHEAD, false>(p);                                                     \
    }                                                                                                               \
    extern "C" __global__ void CLUSTER_OF(2) __launch_bounds__(256, 1)                                              \
        name##_16_in_cluster(const __grid_constant__ linear::Product p) {                                           \
        linear::paired<Format, Format::PAIRED_AHEAD < 2 ? 2 : Format::PAIRED_AHEAD, true>(p);                       \
    }
