// Routed experts in training: products of each expert's places with its matrices, their gradients, and what goes
// between rows and places. routed_sort of routed.cu gives the places.
//
//   grouped_product          out[p] = x[sources[p]] W_e^T                     bfloat16 [places, outputs], or x[p]
//   grouped_input_gradient   dx[p] = dy[p] W_e                                bfloat16 or F32 [places, inputs]
//   grouped_weight_gradient  dW_e (+)= sum over p of expert e of dy[p] x[p]^T F32 [experts][outputs, inputs]
//   routed_spread            dy[p] = gates[i, j] dout[i]                                     p = places[i, j]
//   routed_sum               out[i] = before[i] + sum over j, ascending, of gates[i, j] y[places[i, j]]
//
// e is the expert of place p, W_e [outputs, inputs] row-major, all operands bfloat16, sums in F32. The products are
// those of gemm/tile.cuh; that of the inputs' gradient reads W_e and that of the weights' reads both operands across
// their rows. Without offsets every expert has the same number of places: one expert is a plain product, where there is
// no cuBLASLt.
//
// The weights' gradients sum over thousands of places into few tiles. Where there are too few to fill the card, the
// places of an expert are cut into pieces (gemm/experts.cuh); the sums of pieces go to memory of their own, and a
// second kernel adds them in ascending order. An expert in one piece is written at once. No sum depends on which blocks
// run when.
//
// Bound: 2 places outputs inputs operations of `mma.sync` each; the weights' gradient also the F32 it writes.
// routed_spread and routed_sum: the bytes they read and write, sixteen an access.
#include "gemm/experts.cuh"
#include "gemm/tile.cuh"

namespace {

constexpr Depth ALONG = Depth::ALONG_ROWS, ACROSS = Depth::ACROSS_ROWS;

// Stores a tile of rows of a result in bfloat16, `columns` a multiple of eight, or in F32: the sums, or what `before`
// holds in the same layout plus the sums. It may be `out`.
template <class T>
__device__ __forceinline__ void store_tile(const T &tile, char *shared, bf16 *out, const bf16 *before, int out_stride,
                                           int row, int end, int column, int columns) {
    if (before != nullptr) {
        tile.for_pairs([&](int tile_row, int tile_column, float first, float second) {
            if (row + tile_row >= end || column + tile_column >= columns) return;
            const size_t at = size_t(row + tile_row) * out_stride + column + tile_column;
            const uint32_t start = *reinterpret_cast<const uint32_t *>(before + at);
            *reinterpret_cast<uint32_t *>(out + at) = pack(low_half(start) + first, high_half(start) + second);
        });
        return;
    }
    tile.for_eights(shared, [&](int tile_row, int tile_column, uint4 eight) {
        if (row + tile_row >= end || column + tile_column >= columns) return;
        *reinterpret_cast<uint4 *>(out + size_t(row + tile_row) * out_stride + column + tile_column) = eight;
    });
}

template <class T>
__device__ __forceinline__ void store_tile(const T &tile, char *, float *out, const float *before, int out_stride,
                                           int row, int end, int column, int columns) {
    tile.for_pairs([&](int tile_row, int tile_column, float first, float second) {
        if (row + tile_row >= end || column + tile_column >= columns) return;
        const size_t at = size_t(row + tile_row) * out_stride + column + tile_column;
        if (before != nullptr) {
            const float2 start = *reinterpret_cast<const float2 *>(before + at);
            first += start.x, second += start.y;
        }
        *reinterpret_cast<float2 *>(out + at) = make_float2(first, second);
    });
}

// A product of places with the matrix of their expert: W_e^T where the sums run along its rows, else W_e.
template <int ROWS, Depth W, class Out>
__device__ __forceinline__ void multiply_places(const bf16 *x, int x_stride, const int *sources,
                                                const ExpertPlaces &places, const bf16 *weight, int weight_stride,
                                                long long expert_stride, Out *out, const Out *before, int out_stride,
                                                int columns, int depth, int row_tiles) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    extern __shared__ __align__(128) char shared[];
    using T = Tile<ROWS, ALONG, W>;
    const int column_tiles = (columns + T::COLUMNS - 1) / T::COLUMNS;
    const TilePosition position = tile_position(blockIdx.x, row_tiles, column_tiles);
    const ExpertRows rows = find_expert_rows<ROWS>(places, position.row_tile);
    if (rows.first == rows.end) return;
    const int column = position.column_tile * T::COLUMNS;
    weight += rows.expert * expert_stride;

    uint32_t x_offsets[T::X_COPIES];
#pragma unroll
    for (int i = 0; i < T::X_COPIES; i++) {
        const int place = min(rows.first + T::copied_row(i), rows.end - 1);
        x_offsets[i] = uint32_t(sources != nullptr ? sources[place] : place) * uint32_t(x_stride / 8);
    }
    T tile;
    if constexpr (W == ALONG) {
        uint32_t weight_offsets[T::WEIGHT_COPIES];
#pragma unroll
        for (int i = 0; i < T::WEIGHT_COPIES; i++) {
            weight_offsets[i] = uint32_t(min(column + T::copied_row(i), columns - 1)) * uint32_t(weight_stride / 8);
        }
        tile.multiply(x, x_offsets, [weight](int) { return weight; }, weight_offsets, depth, shared);
    } else {
        const auto copy_x = T::copy_along(shared, [x](int) { return x; }, x_offsets, depth);
        const auto copy_weight = T::template copy_across<T::COLUMNS>(shared + T::X_BYTES, weight, weight_stride, column,
                                                                     columns, depth);
        tile.accumulate(copy_x, copy_weight, depth, shared);
    }
    store_tile(tile, shared, out, before, out_stride, rows.first, rows.end, column, columns);
}

} // namespace

#define MULTIPLY_PLACES(NAME, ROWS, W, OUT)                                                                            \
    extern "C" __global__ void __launch_bounds__(Tile<ROWS>::THREADS, Tile<ROWS>::BLOCKS)                              \
        NAME(const bf16 *x, const int *sources, const int *offsets, const bf16 *weight, OUT *out, const OUT *before,   \
             long long expert_stride, int x_stride, int weight_stride, int out_stride, int experts, int places,        \
             int columns, int depth, int row_tiles) {                                                                  \
        multiply_places<ROWS, W>(x, x_stride, sources, {offsets, experts, places}, weight, weight_stride,              \
                                 expert_stride, out, before, out_stride, columns, depth, row_tiles);                   \
    }

MULTIPLY_PLACES(grouped_product_rows128, 128, ALONG, bf16)
MULTIPLY_PLACES(grouped_product_rows64, 64, ALONG, bf16)
MULTIPLY_PLACES(grouped_product_f32_rows128, 128, ALONG, float)
MULTIPLY_PLACES(grouped_product_f32_rows64, 64, ALONG, float)
MULTIPLY_PLACES(grouped_input_gradient_rows128, 128, ACROSS, bf16)
MULTIPLY_PLACES(grouped_input_gradient_rows64, 64, ACROSS, bf16)
MULTIPLY_PLACES(grouped_input_gradient_f32_rows128, 128, ACROSS, float)
MULTIPLY_PLACES(grouped_input_gradient_f32_rows64, 64, ACROSS, float)

// The gradient of a matrix, or a piece of it into `partial` [pieces][rows, columns] where its expert has several. The
// blocks of a piece are neighbours: they share its rows in the second-level cache.
extern "C" __global__ void __launch_bounds__(Tile<128>::THREADS, Tile<128>::BLOCKS)
    grouped_weight_gradient(const bf16 *dy, const bf16 *x, const int *offsets, float *out, const float *before,
                            float *partial, long long expert_stride, int dy_stride, int x_stride, int out_stride,
                            int experts, int places, int rows, int columns, int most_places) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    extern __shared__ __align__(128) char shared[];
    using T = Tile<128, ACROSS, ACROSS>;
    const int row_tiles = (rows + T::ROWS - 1) / T::ROWS, column_tiles = (columns + T::COLUMNS - 1) / T::COLUMNS;
    const int piece = blockIdx.x / (row_tiles * column_tiles), in_piece = blockIdx.x % (row_tiles * column_tiles);
    const ExpertPart part = find_expert_part({offsets, experts, places}, piece,
                                             [=](int count) { return piece_count(count, most_places); });
    if (part.expert < 0) return;
    const ExpertRows summed = piece_places(part);
    const int row = in_piece % row_tiles * T::ROWS, column = in_piece / row_tiles * T::COLUMNS;
    const int depth = summed.end - summed.first;

    T tile;
    dy += size_t(summed.first) * dy_stride;
    x += size_t(summed.first) * x_stride;
    const auto copy_dy = T::copy_across<T::ROWS>(shared, dy, dy_stride, row, rows, depth);
    const auto copy_x = T::copy_across<T::COLUMNS>(shared + T::X_BYTES, x, x_stride, column, columns, depth);
    tile.accumulate(copy_dy, copy_x, depth, shared);
    const bool whole = part.count == 1;
    const long long first = part.expert * expert_stride;
    float *const to = whole ? out + first : partial + size_t(piece) * rows * columns;
    const float *const start = whole && before != nullptr ? before + first : nullptr;
    store_tile(tile, shared, to, start, whole ? out_stride : columns, row, rows, column, columns);
}

constexpr int SUM_THREADS = 256;

// Adds the pieces of a matrix's gradient in ascending order: four elements a thread, an expert for each blockIdx.y.
extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    grouped_weight_gradient_sum(const float *partial, const int *offsets, float *out, const float *before,
                                long long expert_stride, int out_stride, int experts, int places, int rows, int columns,
                                int most_places) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const ExpertPlaces bounds = {offsets, experts, places};
    const int expert = blockIdx.y, lane = threadIdx.x % WARP;
    const int count = piece_count(bounds.first(expert + 1) - bounds.first(expert), most_places);
    if (count == 1) return;
    int earlier = 0; // pieces of the experts before
    for (int other = lane; other < expert; other += WARP) {
        earlier += piece_count(bounds.first(other + 1) - bounds.first(other), most_places);
    }
    earlier = __reduce_add_sync(FULL_WARP, earlier);
    const size_t elements = size_t(rows) * columns, at = (size_t(blockIdx.x) * SUM_THREADS + threadIdx.x) * 4;
    if (at >= elements) return;
    const float *piece = partial + earlier * elements + at;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < count; i++, piece += elements) {
        const float4 value = *reinterpret_cast<const float4 *>(piece);
        sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
    }
    const size_t place = expert * expert_stride + at / columns * out_stride + at % columns;
    if (before != nullptr) {
        const float4 start = *reinterpret_cast<const float4 *>(before + place);
        sum = {start.x + sum.x, start.y + sum.y, start.z + sum.z, start.w + sum.w};
    }
    *reinterpret_cast<float4 *>(out + place) = sum;
}

constexpr int ROW_THREADS = 256;

// What the places get of their rows' gradient: a warp a slot, so that the row that its slots share comes from the
// first-level cache but once.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    routed_spread(const float *dout, const int *places, const float *gates, bf16 *__restrict__ dy, int slots, int per_row,
                  int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int slot = blockIdx.x * (ROW_THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (slot >= slots) return;
    const int place = places[slot];
    if (place < 0) return;
    const float gate = gates[slot];
    const float4 *from = reinterpret_cast<const float4 *>(dout + size_t(slot / per_row) * width);
    uint4 *to = reinterpret_cast<uint4 *>(dy + size_t(place) * width);
#pragma unroll 2
    for (int eight = lane; eight < width / 8; eight += WARP) {
        const float4 a = from[2 * eight], b = from[2 * eight + 1];
        to[eight] = make_uint4(pack(gate * a.x, gate * a.y), pack(gate * a.z, gate * a.w), pack(gate * b.x, gate * b.y),
                               pack(gate * b.z, gate * b.w));
    }
}

namespace {

__device__ __forceinline__ void load_eight(const float *from, float (&to)[8]) {
    const float4 a = reinterpret_cast<const float4 *>(from)[0], b = reinterpret_cast<const float4 *>(from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

__device__ __forceinline__ void load_eight(const bf16 *from, float (&to)[8]) {
    const uint4 value = *reinterpret_cast<const uint4 *>(from);
    to[0] = low_half(value.x), to[1] = high_half(value.x), to[2] = low_half(value.y), to[3] = high_half(value.y);
    to[4] = low_half(value.z), to[5] = high_half(value.z), to[6] = low_half(value.w), to[7] = high_half(value.w);
}

__device__ __forceinline__ void store_eight(float *to, const float (&x)[8]) {
    reinterpret_cast<float4 *>(to)[0] = {x[0], x[1], x[2], x[3]};
    reinterpret_cast<float4 *>(to)[1] = {x[4], x[5], x[6], x[7]};
}

__device__ __forceinline__ void store_eight(bf16 *to, const float (&x)[8]) {
    *reinterpret_cast<uint4 *>(to) = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// Eight columns of a row a thread. `before` may be `out`; without it the sum begins at zero, without gates they are 1.
template <class Out>
__device__ __forceinline__ void sum_places(const bf16 *y, const int *places, const float *gates, const Out *before,
                                           Out *out, int rows, int per_row, int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int eights = width / 8, index = blockIdx.x * ROW_THREADS + threadIdx.x;
    const int row = index / eights, column = index % eights * 8;
    if (row >= rows) return;
    const size_t at = size_t(row) * width + column;
    float sum[8] = {}, value[8];
    if (before != nullptr) load_eight(before + at, sum);
    for (int j = 0; j < per_row; j++) {
        const size_t slot = size_t(row) * per_row + j;
        const int place = places[slot];
        if (place < 0) continue;
        const float gate = gates != nullptr ? gates[slot] : 1.0f;
        load_eight(y + size_t(place) * width + column, value);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = fmaf(gate, value[i], sum[i]);
    }
    store_eight(out + at, sum);
}

} // namespace

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    routed_sum_f32(const bf16 *y, const int *places, const float *gates, const float *before, float *out, int rows,
                   int per_row, int width) {
    sum_places(y, places, gates, before, out, rows, per_row, width);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    routed_sum_bf16(const bf16 *y, const int *places, const float *gates, const bf16 *before, bf16 *out, int rows,
                    int per_row, int width) {
    sum_places(y, places, gates, before, out, rows, per_row, width);
}
