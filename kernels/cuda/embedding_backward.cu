// The gradient of an embedding table: table[id] += scale * sum of gradient[i] over the rows i with ids[i] = id, in ascending
// order of i and without additions to memory in no order: the same bits every run.
//
//   embedding_sort    ids [rows] -> sorted [count] of (id, row): equal ids side by side, their rows ascending; ids outside
//                     the vocabulary are left out
//   embedding_add     pieces of 32 places: a run of equal ids that lies in one piece is added to its row of the table; what
//                     crosses a border leaves its part in `partials`
//   embedding_join    adds the parts of the runs that cross borders
//
// gradient [rows, width] F32 or BF16; table [vocabulary, width] F32; partials [pieces, 2, width] F32: of the run that came
// over the piece's left border, and of the one that begins in it and leaves over the right.
//
// Bound: reading the gradient, and the table's rows that occur, twice. The sort is two readings of all ids (L2) by each of
// 128 blocks: a block has the ids of one remainder, so that frequent ids, which are neighbours in most vocabularies, go to
// different blocks. Only equal ids have to come together, so remainders follow each other in no other order. A token in
// every row takes no longer than many tokens: its pieces are parts like any.

#include "training/rows.cuh"

constexpr int SORT_THREADS = 256, SORT_WARPS = SORT_THREADS / WARP, SORT_TOGETHER = 8;
constexpr int PIECE = 32, ADD_THREADS = 64, ADD_TOGETHER = 8;
constexpr int JOIN_THREADS = 256, JOIN_GROUPS = JOIN_THREADS / WARP;

struct Call {
    const uint32_t *ids;
    const void *gradient;
    float *table;
    int *count;
    int2 *sorted;  // id, row
    float *partials;
    int rows, vocabulary, width, form;
    int bins_log2;  // ids with the same remainder by 2^bins_log2 are a block's
    float scale;
};

// Each warp has a stretch of rows; `take(row, id, mine)` is called by whole warps, in ascending order.
template <class Take> __device__ __forceinline__ void for_ids(const Call &call, Take take) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int stretch = ((call.rows + SORT_WARPS - 1) / SORT_WARPS + WARP - 1) / WARP * WARP;
    const int start = warp * stretch, end = min(call.rows, start + stretch);
    for (int base = start; base < end; base += SORT_TOGETHER * WARP) {
        uint32_t ids[SORT_TOGETHER];
#pragma unroll
        for (int j = 0; j < SORT_TOGETHER; j++) {
            const int row = base + j * WARP + lane;
            ids[j] = row < end ? __ldcg(call.ids + row) : ~0u;
        }
#pragma unroll
        for (int j = 0; j < SORT_TOGETHER; j++) take(base + j * WARP + lane, ids[j]);
    }
}

// A block for each remainder. Dynamic shared memory: [SORT_WARPS][quotients] counts, then places, of each warp's rows.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) embedding_sort(Call call) {
    extern __shared__ __align__(16) int shared[];
    __shared__ int of_warp[2][SORT_WARPS];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint32_t bins = 1u << call.bins_log2, own_bin = blockIdx.x, vocabulary = call.vocabulary;
    const int quotients = (call.vocabulary + bins - 1) >> call.bins_log2;
    int *own = shared + warp * quotients;
    for (int i = threadIdx.x; i < SORT_WARPS * quotients; i += SORT_THREADS) shared[i] = 0;
    __syncthreads();

    int before = 0;  // places of smaller remainders
    for_ids(call, [&](int, uint32_t id) {
        const uint32_t bin = id & (bins - 1);
        if (id >= vocabulary) return;
        before += bin < own_bin;
        if (bin == own_bin) atomicAdd(own + (id >> call.bins_log2), 1);
    });
    before = __reduce_add_sync(FULL_WARP, before);
    __syncthreads();

    // Counts to places: a thread has a stretch of quotients, each with its warps in order.
    const int stretch = (quotients + SORT_THREADS - 1) / SORT_THREADS;
    const int first = min(quotients, int(threadIdx.x) * stretch), end = min(quotients, first + stretch);
    int total = 0;
    for (int quotient = first; quotient < end; quotient++) {
        for (int i = 0; i < SORT_WARPS; i++) total += shared[i * quotients + quotient];
    }
    int through = total;  // of this warp's threads through this one
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int other = __shfl_up_sync(FULL_WARP, through, distance);
        if (lane >= distance) through += other;
    }
    if (lane == WARP - 1) of_warp[0][warp] = through, of_warp[1][warp] = before;
    __syncthreads();
    int place = through - total, all = 0;
    for (int i = 0; i < SORT_WARPS; i++) {
        all += of_warp[0][i] + of_warp[1][i];
        place += of_warp[1][i] + (i < warp ? of_warp[0][i] : 0);
    }
    for (int quotient = first; quotient < end; quotient++) {
        for (int i = 0; i < SORT_WARPS; i++) {
            const int here = shared[i * quotients + quotient];
            shared[i * quotients + quotient] = place;
            place += here;
        }
    }
    if (own_bin == bins - 1 && threadIdx.x == 0) *call.count = all;
    __syncthreads();

    for_ids(call, [&](int row, uint32_t id) {
        const bool mine = id < vocabulary && (id & (bins - 1)) == own_bin;
        if (__ballot_sync(FULL_WARP, mine) == 0) return;
        const uint32_t quotient = id >> call.bins_log2;
        // Lanes without an id of this block's match nobody.
        const unsigned equal = __match_any_sync(FULL_WARP, mine ? quotient : ~uint32_t(lane));
        const int start = mine ? own[quotient] : 0, earlier = __popc(equal & ((1u << lane) - 1));
        if (mine) call.sorted[start + earlier] = make_int2(id, row);
        __syncwarp();
        if (mine && earlier == 0) own[quotient] = start + __popc(equal);
        __syncwarp();
    });
}

// COUNT columns of F32 or of the gradient's form: four, or one.
template <int COUNT> struct Columns {
    float values[COUNT];
};

template <int COUNT> __device__ __forceinline__ Columns<COUNT> load_columns(const void *from, int form) {
    if constexpr (COUNT == 1) {
        return {load_one(from, form, 0)};
    } else {
        const float4 v = four(load_four(from, form, 0), form);
        return {v.x, v.y, v.z, v.w};
    }
}

template <int COUNT> __device__ __forceinline__ void store_columns(float *to, const Columns<COUNT> &columns) {
    if constexpr (COUNT == 1) {
        *to = columns.values[0];
    } else {
        *reinterpret_cast<float4 *>(to) = {columns.values[0], columns.values[1], columns.values[2], columns.values[3]};
    }
}

template <int COUNT>
__device__ __forceinline__ void add_scaled(Columns<COUNT> &to, const Columns<COUNT> &from, float scale) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) to.values[i] = fmaf(from.values[i], scale, to.values[i]);
}

// Grid: pieces, columns / (ADD_THREADS COUNT).
template <int COUNT, Form form> __device__ __forceinline__ void add_piece(const Call &call) {
    __shared__ int2 entries[PIECE + 2];  // the one before, the piece's, the one behind
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int count = *call.count, first = blockIdx.x * PIECE, places = min(PIECE, count - first);
    if (places <= 0) return;
    for (int i = threadIdx.x; i < PIECE + 2; i += ADD_THREADS) {
        const int place = first + i - 1;
        entries[i] = place >= 0 && place < count ? __ldcg(call.sorted + place) : make_int2(-1, 0);
    }
    __syncthreads();
    const size_t width = call.width;
    const int column = (blockIdx.y * ADD_THREADS + threadIdx.x) * COUNT;
    if (column >= call.width) return;
    float *partial = call.partials + size_t(blockIdx.x) * 2 * width + column;
    bool came_over = entries[0].x == entries[1].x;
    Columns<COUNT> sum{};
    for (int base = 0; base < places; base += ADD_TOGETHER) {
        Columns<COUNT> term[ADD_TOGETHER], held[ADD_TOGETHER];
        int ends = 0;  // bits: the run ends at this place
#pragma unroll
        for (int j = 0; j < ADD_TOGETHER; j++) {
            term[j] = held[j] = {};
            if (base + j >= places) continue;
            const int2 entry = entries[1 + base + j];
            term[j] = load_columns<COUNT>(element(call.gradient, form, size_t(entry.y) * width + column), form);
            if (entry.x == entries[2 + base + j].x) continue;
            ends |= 1 << j;
            held[j] = load_columns<COUNT>(call.table + size_t(entry.x) * width + column, F32);
        }
#pragma unroll
        for (int j = 0; j < ADD_TOGETHER; j++) {
            add_scaled(sum, term[j], 1.0f);
            if ((ends >> j & 1) == 0) continue;
            if (came_over) {
                store_columns(partial, sum);
            } else {
                add_scaled(held[j], sum, call.scale);
                store_columns(call.table + size_t(entries[1 + base + j].x) * width + column, held[j]);
            }
            came_over = false;
            sum = {};
        }
    }
    if (entries[places].x == entries[places + 1].x) store_columns(came_over ? partial : partial + width, sum);
}

// Grid: pieces, columns / (WARP COUNT). A block has the run that begins in its piece and leaves over the right border.
template <int COUNT> __device__ __forceinline__ void join_pieces(const Call &call) {
    __shared__ Columns<COUNT> parts[JOIN_GROUPS][WARP];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int count = *call.count, first = blockIdx.x * PIECE, behind = first + PIECE;
    if (behind >= count) return;
    const int id = call.sorted[behind].x;
    if (call.sorted[behind - 1].x != id) return;
    if (first > 0 && call.sorted[first - 1].x == id) return;
    // Pieces behind that the run comes over into.
    int pieces = 0, found = JOIN_THREADS;
    while (found == JOIN_THREADS) {
        const size_t place = behind + size_t(pieces + threadIdx.x) * PIECE;
        found = __syncthreads_count(place < count && call.sorted[place].x == id);
        pieces += found;
    }
    const size_t width = call.width;
    const int lane = threadIdx.x % WARP, group = threadIdx.x / WARP, column = (blockIdx.y * WARP + lane) * COUNT;
    const bool inside = column < call.width;
    const float *partials = call.partials + size_t(blockIdx.x) * 2 * width + column;
    Columns<COUNT> sum{};
    if (inside) {
#pragma unroll 4
        for (int piece = group; piece < pieces; piece += JOIN_GROUPS) {
            add_scaled(sum, load_columns<COUNT>(partials + size_t(piece + 1) * 2 * width, F32), 1.0f);
        }
    }
    parts[group][lane] = sum;
    __syncthreads();
    if (group != 0 || !inside) return;
    sum = load_columns<COUNT>(partials + width, F32);
    for (int i = 0; i < JOIN_GROUPS; i++) add_scaled(sum, parts[i][lane], 1.0f);
    float *row = call.table + size_t(id) * width + column;
    Columns<COUNT> held = load_columns<COUNT>(row, F32);
    add_scaled(held, sum, call.scale);
    store_columns(row, held);
}

extern "C" __global__ void __launch_bounds__(ADD_THREADS) embedding_add(Call call) {
    if (call.form == F32) {
        add_piece<4, F32>(call);
    } else {
        add_piece<4, BF16>(call);
    }
}
extern "C" __global__ void __launch_bounds__(ADD_THREADS) embedding_add_any(Call call) {
    if (call.form == F32) {
        add_piece<1, F32>(call);
    } else {
        add_piece<1, BF16>(call);
    }
}
extern "C" __global__ void __launch_bounds__(JOIN_THREADS) embedding_join(Call call) { join_pieces<4>(call); }
extern "C" __global__ void __launch_bounds__(JOIN_THREADS) embedding_join_any(Call call) { join_pieces<1>(call); }
