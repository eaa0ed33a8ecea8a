// Routed experts for many rows, without a word to the host: sort the rows by expert, multiply each expert's rows by its
// matrices, add what comes out to the rows.
//
//   routed_sort      ids [n, k] -> places [n, k], sources [n k], offsets [E + 1]
//                    Slot (i, j) is the j-th expert of row i. Slots lie at places in ascending order of expert, then of
//                    slot: place offsets[e] is the first of expert e, sources[place] the row i, places[i, j] = place.
//                    A slot whose id is no expert's has place -1 and adds nothing.
//                    Bound: latency. Every block reads all ids, from the second-level cache: 65,536 slots are 256 KiB, 64
//                    loads a thread that wait for nothing; a turn over 1,024 slots waits for loads and a barrier, 0.7 us,
//                    and one block had 64 of them an expert.
//   routed_gated     h[place] = act(x[sources[place]] Wg_e^T) * (x[sources[place]] Wu_e^T)     bfloat16 [n k, inner]
//   routed_down      y[place] = h[place] Wd_e^T                                         single precision [n k, width]
//   routed_combine   out[i] += sum over j, ascending, of gates[i, j] * y[places[i, j]]                     [n, width]
//
// The products are those of gemm/tile.cuh. A block finds on the device which expert its tile of rows belongs to, and
// reads the rows of x where they are, so nothing is gathered before. The grid is as large as the tiles can become in
// the worst case; blocks that find none left end at once. A place's sums depend on its row and its expert only.
//
// Bound: with many rows the tensor cores, 6 n k width inner operations; with few, the weights of the experts in use.
#include "gemm/experts.cuh"
#include "gemm/tile.cuh"

namespace {

constexpr int SORT_THREADS = 1024, SORT_WARPS = SORT_THREADS / WARP;
constexpr int COMBINE_THREADS = 128;

// One matrix or two of every expert.
struct Weights {
    const bf16 *first, *second;
    int stride;
    long long expert_stride;
    int columns, depth;
};

// The sums of a tile: of the rows `sources[place]` of x, or `place` where there are no sources, with the expert's
// weights from `column` on.
template <int ROWS, bool GATED>
__device__ __forceinline__ void multiply(Tile<ROWS> &tile, const bf16 *x, int x_stride, const int *sources,
                                         const Weights &weights, const ExpertRows &rows, int column) {
    extern __shared__ __align__(128) char shared[];
    using T = Tile<ROWS>;
    uint32_t x_offsets[T::X_COPIES], weight_offsets[T::WEIGHT_COPIES];
#pragma unroll
    for (int i = 0; i < T::X_COPIES; i++) {
        const int place = min(rows.first + T::copied_row(i), rows.end - 1);
        x_offsets[i] = uint32_t(sources != nullptr ? sources[place] : place) * uint32_t(x_stride / 8);
    }
#pragma unroll
    for (int i = 0; i < T::WEIGHT_COPIES; i++) {
        const int wanted = column + (GATED ? T::gated_column(i) : T::copied_row(i));
        weight_offsets[i] = uint32_t(min(wanted, weights.columns - 1)) * uint32_t(weights.stride / 8);
    }
    const bf16 *first = weights.first + rows.expert * weights.expert_stride;
    const bf16 *second = GATED ? weights.second + rows.expert * weights.expert_stride : first;
    const auto weight = [&](int i) { return GATED && T::copies_second(i) ? second : first; };
    tile.multiply(x, x_offsets, weight, weight_offsets, weights.depth, shared);
}

template <int ROWS>
__device__ __forceinline__ void routed_gated(const bf16 *x, int x_stride, const int *sources, const int *offsets,
                                             const Weights &weights, bf16 *out, int out_stride, int experts,
                                             int row_tiles, int activation) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    using T = Tile<ROWS>;
    const int column_tiles = (weights.columns + T::GATED_COLUMNS - 1) / T::GATED_COLUMNS;
    const TilePosition position = tile_position(blockIdx.x, row_tiles, column_tiles);
    const ExpertRows rows = find_expert_rows<ROWS>({offsets, experts, 0}, position.row_tile);
    if (rows.first == rows.end) return;
    const int first_column = position.column_tile * T::GATED_COLUMNS;
    T tile;
    multiply<ROWS, true>(tile, x, x_stride, sources, weights, rows, first_column);

    const bool even = out_stride % 2 == 0;
    tile.for_gated_pairs([&](int tile_row, int tile_column, float2 gate, float2 up) {
        const int place = rows.first + tile_row, column = first_column + tile_column;
        if (place >= rows.end || column >= weights.columns) return;
        const float first = activate(activation, gate.x) * up.x, second = activate(activation, gate.y) * up.y;
        store_pair(out + size_t(place) * out_stride, column, weights.columns, even, first, second);
    });
}

template <int ROWS>
__device__ __forceinline__ void routed_down(const bf16 *x, int x_stride, const int *offsets,
                                            const Weights &weights, float *out, int out_stride, int experts,
                                            int row_tiles) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    using T = Tile<ROWS>;
    const int column_tiles = (weights.columns + T::COLUMNS - 1) / T::COLUMNS;
    const TilePosition position = tile_position(blockIdx.x, row_tiles, column_tiles);
    const ExpertRows rows = find_expert_rows<ROWS>({offsets, experts, 0}, position.row_tile);
    if (rows.first == rows.end) return;
    const int first_column = position.column_tile * T::COLUMNS;
    T tile;
    multiply<ROWS, false>(tile, x, x_stride, nullptr, weights, rows, first_column);

    const bool even = out_stride % 2 == 0;
    tile.for_pairs([&](int tile_row, int tile_column, float first, float second) {
        const int place = rows.first + tile_row, column = first_column + tile_column;
        if (place >= rows.end || column >= weights.columns) return;
        store_pair(out + size_t(place) * out_stride, column, weights.columns, even, first, second);
    });
}

} // namespace

// A block for each expert and part of the slots. It counts the slots of the experts before it and those of its own before
// its part, which gives its first place, and then goes over its part in order and numbers its own: no block waits for
// another, and nothing depends on their order or on where parts begin.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    routed_sort(const int *ids, int *__restrict__ places, int *__restrict__ sources, int *__restrict__ offsets,
                int slots, int per_row, int experts, int part_slots) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    __shared__ int counts[2][SORT_WARPS];
    const int expert = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int begin = blockIdx.y * part_slots, end = min(begin + part_slots, slots);

    int before = 0, own = 0, earlier_own = 0;
#pragma unroll 8
    for (int slot = threadIdx.x; slot < slots; slot += SORT_THREADS) {
        const int id = ids[slot];
        before += id >= 0 && id < expert;
        own += id == expert;
        earlier_own += id == expert && slot < begin;
    }
    before = __reduce_add_sync(FULL_WARP, before + earlier_own);
    own = __reduce_add_sync(FULL_WARP, own);
    if (lane == 0) counts[0][warp] = before, counts[1][warp] = own;
    __syncthreads();
    before = __reduce_add_sync(FULL_WARP, counts[0][lane]);
    own = __reduce_add_sync(FULL_WARP, counts[1][lane]);
    __syncthreads();
    if (threadIdx.x == 0 && blockIdx.y == 0) {
        offsets[expert] = before;
        if (expert == experts - 1) offsets[experts] = before + own;
    }
    if (own == 0 && expert != 0) return;

    int place = before;
    for (int base = begin, turn = 0; base < end; base += SORT_THREADS, turn ^= 1) {
        const int slot = base + threadIdx.x, id = slot < end ? ids[slot] : experts;
        if (expert == 0 && slot < end && (id < 0 || id >= experts)) places[slot] = -1;
        const bool mine = id == expert;
        const unsigned mask = __ballot_sync(FULL_WARP, mine);
        if (lane == 0) counts[turn][warp] = __popc(mask);
        // The other half of `counts` is written in the next turn, when every thread has passed this barrier again.
        __syncthreads();
        const int count = counts[turn][lane];
        const int earlier = __reduce_add_sync(FULL_WARP, lane < warp ? count : 0);
        if (mine) {
            const int own_place = place + earlier + __popc(mask & ((1u << lane) - 1));
            places[slot] = own_place;
            sources[own_place] = slot / per_row;
        }
        place += __reduce_add_sync(FULL_WARP, count);
    }
}
static_assert(SORT_WARPS == WARP, "a lane for each warp's count");

#define ROUTED(ROWS)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(Tile<ROWS>::THREADS, Tile<ROWS>::BLOCKS) routed_gated_rows##ROWS(     \
        const bf16 *x, const int *sources, const int *offsets,                                                         \
        const bf16 *__restrict__ gate, const bf16 *__restrict__ up, bf16 *__restrict__ out, long long expert_stride,   \
        int x_stride, int weight_stride, int out_stride, int experts, int columns, int depth, int row_tiles,           \
        int activation) {                                                                                              \
        const Weights weights = {gate, up, weight_stride, expert_stride, columns, depth};                              \
        routed_gated<ROWS>(x, x_stride, sources, offsets, weights, out, out_stride, experts, row_tiles, activation);   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Tile<ROWS>::THREADS, Tile<ROWS>::BLOCKS) routed_down_rows##ROWS(      \
        const bf16 *x, const int *offsets, const bf16 *__restrict__ weight,                                            \
        float *__restrict__ out, long long expert_stride, int x_stride, int weight_stride, int out_stride,             \
        int experts, int columns, int depth, int row_tiles) {                                                          \
        const Weights weights = {weight, nullptr, weight_stride, expert_stride, columns, depth};                       \
        routed_down<ROWS>(x, x_stride, offsets, weights, out, out_stride, experts, row_tiles);                         \
    }

ROUTED(128)
ROUTED(64)

// Adds to four columns of a row what its experts give, in ascending order of j.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    routed_combine(const float *y, const int *places, const float *gates, float *__restrict__ out, int per_row,
                   int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x, column = (blockIdx.y * COMBINE_THREADS + threadIdx.x) * 4;
    if (column >= width) return;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int j = 0; j < per_row; j++) {
        const int place = places[size_t(row) * per_row + j];
        if (place < 0) continue;
        const float gate = gates[size_t(row) * per_row + j];
        const float4 value = *reinterpret_cast<const float4 *>(y + size_t(place) * width + column);
        sum.x = fmaf(gate, value.x, sum.x);
        sum.y = fmaf(gate, value.y, sum.y);
        sum.z = fmaf(gate, value.z, sum.z);
        sum.w = fmaf(gate, value.w, sum.w);
    }
    float4 *to = reinterpret_cast<float4 *>(out + size_t(row) * width + column);
    const float4 before = *to;
    *to = {before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w};
}
