// How decoding attention splits a row's history over blocks, and how the blocks' results become one.
//
// A row at position p sees `length` positions. Up to ONE_LEAF of them are cut in at most LEAF chunks, of at least 64
// positions; more in chunks of a multiple of 128 positions, so many that `most_chunks` chunks suffice. `most_chunks`
// depends on the model's shape alone. So the cut, and with it every order of summation, depends on the model and on the
// row's own length, never on the rows beside it or on the card.
//
// A chunk is a block's work. Its result is, for each query head, the sums relative to the chunk's own greatest score,
// that score, and the denominator. LEAF consecutive chunks are merged in their order to a leaf, and the leaves in
// theirs to the row's result. Blocks go through a row's leaves in steps of the grid: which block does what changes no
// bit.
//
// With clusters, the blocks of a leaf are one cluster: each of them receives its part of every head of every chunk in
// its shared memory, merges it, and writes it out, or, with several leaves, leaves it in global memory to the last to
// arrive of the same rank (an integer ticket): some 400 cycles, where a ticket with its fences and reads takes 2,000.
// Without clusters, both levels go by tickets. Tickets are zero before and after each launch: a captured graph needs no
// clearing between replays.
//
// A cluster lies within one group of 16 or 18 multiprocessors, so of clusters of 8 blocks, two blocks a multiprocessor,
// only 30 run at a time on an H200: where there are more leaves than that, one round with tickets is faster than two of
// clusters.
//
// The rows of a pass may belong to one sequence (a prompt, a verify pass): then they stand side by side in the order of
// their positions. Keys and values of the pass are not read from the caches, which other blocks are only now
// writing, but made anew from the projections, rounded as in the caches: the same bits.
#pragma once

#include <type_traits>

#include "../vocabulary/cluster.cuh"
#include "../vocabulary/device.cuh"
#include "exponential.cuh"

constexpr int HEADS = 8;  // query heads of one block
constexpr int LEAF = 8;   // chunks of a leaf
constexpr int MOST_LEAVES = 16;
constexpr int TILE = 16;  // positions
constexpr int SHORTEST_CHUNK = 64;
constexpr int ONE_LEAF = 2048;
constexpr int CHUNK_STEP = 128;

struct Call {
    const float *qkv;     // [rows, (heads + 2 kv_heads) * width]
    const float *q_norm;  // [width], or null
    const float *k_norm;
    const float *phases;       // [rows, 2 * half]
    const uint64_t *kv_table;  // [rows, 2]
    const int *positions;      // [rows]
    bf16 *__restrict__ out;    // [rows, 2, heads * width]
    float *__restrict__ partials;
    unsigned *__restrict__ tickets;
    float epsilon;
    float scale;  // times log2(e)
    int half, window, heads, kv_heads, group;  // group: query heads of a kv head
    int width, head_blocks, most_chunks, most_leaves;
};

// What the blocks of one row, kv head and block of heads work on.
struct Job {
    int row, kv_head, first_head, group;  // query heads first_head .. first_head + group
    int rank;                             // of the block among those of its leaf
    int position, first_new;              // positions from `first_new` on are of this pass
    int start, chunk_length;
    bool appends;  // writes the row's key and value to the cache
    size_t slot;
    bf16 *keys, *values;  // the kv head at position 0

    // Chunks are counted over the whole row. The block's first one of a leaf:
    __device__ __forceinline__ int first_chunk(int leaf) const { return leaf * LEAF + rank; }
    __device__ __forceinline__ int begin(int chunk) const { return start + chunk * chunk_length; }
    __device__ __forceinline__ int end(int chunk) const { return min(begin(chunk) + chunk_length, position + 1); }
    // Most questions need no division, which would come before the first keys are asked for.
    __device__ __forceinline__ bool has_chunk(int chunk) const { return begin(chunk) <= position; }
    __device__ __forceinline__ bool has_leaf(int leaf) const { return has_chunk(leaf * LEAF); }
    __device__ __forceinline__ bool one_chunk() const { return start + chunk_length > position; }
    __device__ __forceinline__ bool one_leaf() const { return !has_leaf(1); }
    __device__ __forceinline__ int chunks() const { return (position - start) / chunk_length + 1; }
    __device__ __forceinline__ int leaves() const { return (chunks() - 1) / LEAF + 1; }
    __device__ __forceinline__ int leaf_chunks(int leaf) const { return min(LEAF, chunks() - leaf * LEAF); }
};

// The head `head` of the projections (queries, keys, values) of the row whose position is `position`.
__device__ __forceinline__ const float *projection(const Call &call, const Job &job, int position, int head,
                                                   int width) {
    const int64_t row = job.row - (job.position - position);
    return call.qkv + (row * (call.heads + 2 * call.kv_heads) + head) * width;
}

__device__ __forceinline__ const float *row_phases(const Call &call, const Job &job, int position) {
    return call.phases + int64_t(job.row - (job.position - position)) * 2 * call.half;
}

// Grid: LEAF * kv_heads * head_blocks, rows, leaves at a time: the blocks that most rows need come first. Reads nothing
// that another kernel wrote.
__device__ __forceinline__ void find_heads(const Call &call, Job &job) {
    job.row = blockIdx.y;
    job.rank = blockIdx.x % LEAF;
    const int place = blockIdx.x / LEAF;
    job.kv_head = call.head_blocks == 1 ? place : place / call.head_blocks;
    const int block = place - job.kv_head * call.head_blocks;
    job.first_head = job.kv_head * call.group + block * HEADS;
    job.group = min(HEADS, call.group - block * HEADS);
    job.appends = block == 0;
    job.slot = size_t(job.row) * (gridDim.x / LEAF) + place;
}

// The rest of the job, found by each warp for itself; false where this block's whole leaf has none. `find_heads` was
// before.
__device__ __forceinline__ bool find_history(const Call &call, Job &job, int width) {
    // All loads on their way at once: of the rows before, which may be of the same sequence, and the row's own.
    const int lane = threadIdx.x % WARP;
    int new_rows = 1, before = -1;
    uint64_t keys_before = 0;
    const auto look_back = [&] {
        const int row = job.row - new_rows - lane;
        before = -1;
        if (row < 0) return;
        before = call.positions[row];
        keys_before = call.kv_table[2 * row];
    };
    look_back();
    job.position = call.positions[job.row];
    const uint64_t keys = call.kv_table[2 * job.row], values = call.kv_table[2 * job.row + 1];
    for (;;) {
        const bool is_same = before >= 0 && keys_before == keys && before == job.position - new_rows - lane;
        const unsigned same = __ballot_sync(FULL_WARP, is_same);
        if (same != FULL_WARP) {
            new_rows += __ffs(~same) - 1;
            break;
        }
        new_rows += WARP;
        look_back();
    }
    if (job.position < 0) {
        // Padding: its output is read by the next product, so it is made zero.
        if (job.rank == 0 && blockIdx.z == 0) {
            const size_t row_width = size_t(call.heads) * width;
#pragma unroll 1
            for (int i = threadIdx.x; i < job.group * width; i += blockDim.x) {
                store<SPLIT>(call.out, job.row, row_width, size_t(job.first_head) * width + i, 0.0f);
            }
        }
        return false;
    }
    job.first_new = job.position - new_rows + 1;
    job.keys = reinterpret_cast<bf16 *>(keys) + size_t(job.kv_head) * width;
    job.values = reinterpret_cast<bf16 *>(values) + size_t(job.kv_head) * width;
    job.start = call.window > 0 ? max(0, job.position - call.window + 1) : 0;
    const int length = job.position + 1 - job.start;
    job.chunk_length = length <= ONE_LEAF ? max(SHORTEST_CHUNK, ((length - 1) / (LEAF * TILE) + 1) * TILE)
                                          : ((length - 1) / call.most_chunks / CHUNK_STEP + 1) * CHUNK_STEP;
    return job.has_leaf(blockIdx.z);
}

// Maxima (of scores times log2(e)) and denominators of a block's heads.
struct alignas(16) HeadSums {
    float maximum[HEADS];
    float denominator[HEADS];
};

// One element or four of a head.
template <typename Sum> struct Merged {
    Sum sum;
    float maximum, denominator;
};

__device__ __forceinline__ float add_scaled(float a, float factor, float b) { return fmaf(a, factor, b); }
__device__ __forceinline__ float4 add_scaled(float4 a, float factor, float4 b) {
    return make_float4(fmaf(a.x, factor, b.x), fmaf(a.y, factor, b.y), fmaf(a.z, factor, b.z), fmaf(a.w, factor, b.w));
}

// Of `count` results, in their order; all their loads are on their way together.
template <int MOST, typename Sum, typename Value, typename Maximum, typename Denominator>
__device__ __forceinline__ Merged<Sum> merge(int count, const Value &value, const Maximum &maximum,
                                             const Denominator &denominator) {
    Sum values[MOST];
    float maxima[MOST], denominators[MOST];
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        values[i] = i < count ? value(i) : Sum{};
        maxima[i] = i < count ? maximum(i) : -INFINITY;
        denominators[i] = i < count ? denominator(i) : 0.0f;
    }
    Merged<Sum> merged{Sum{}, maxima[0], 0.0f};
#pragma unroll
    for (int i = 1; i < MOST; i++) merged.maximum = fmaxf(merged.maximum, maxima[i]);
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        const float factor = exp2_hardware(maxima[i] - merged.maximum);
        merged.sum = add_scaled(values[i], factor, merged.sum);
        merged.denominator = fmaf(denominators[i], factor, merged.denominator);
    }
    return merged;
}

// A result in global memory: sums [group, width], maxima [group], denominators [group].
struct Records {
    float *first;
    int group, width;

    __device__ __forceinline__ float *at(int i) const { return first + size_t(i) * group * (width + 2); }
    template <typename Sum> __device__ __forceinline__ void put(int i, int element, const Merged<Sum> &x) const {
        if constexpr (std::is_same_v<Sum, float>) {
            at(i)[element] = x.sum;
        } else {
            // A record begins at a multiple of 8 bytes where the width is even.
            float2 *to = reinterpret_cast<float2 *>(at(i) + element);
            to[0] = make_float2(x.sum.x, x.sum.y), to[1] = make_float2(x.sum.z, x.sum.w);
        }
        if (element % width == 0) {
            at(i)[group * width + element / width] = x.maximum;
            at(i)[group * width + group + element / width] = x.denominator;
        }
    }
    template <int MOST, typename Sum>
    __device__ __forceinline__ Merged<Sum> merge_elements(int from, int count, int element) const {
        const float *values = at(from) + element, *ends = at(from) + group * width + element / width;
        const size_t stride = size_t(group) * (width + 2);
        const auto value = [&](int i) {
            if constexpr (std::is_same_v<Sum, float>) {
                return __ldcg(values + i * stride);
            } else {
                const float2 *from = reinterpret_cast<const float2 *>(values + i * stride);
                const float2 a = __ldcg(from), b = __ldcg(from + 1);
                return make_float4(a.x, a.y, b.x, b.y);
            }
        };
        return merge<MOST, Sum>(
            count, value, [&](int i) { return __ldcg(ends + i * stride); },
            [&](int i) { return __ldcg(ends + i * stride + group); });
    }
};

// The memory of a slot: records of chunks (read only without clusters), then of leaves, of which each rank of a cluster
// has its own part: the more ranks, the more memory. Blocks of heads of one kv head may differ in group: slots are
// spaced for the greatest.
__device__ __forceinline__ Records slot_records(const Call &call, const Job &job, int width) {
    const size_t group = min(HEADS, call.group);
    const size_t leaf = group * (LEAF * (width + 2) + width + 2 * LEAF);
    return {call.partials + job.slot * leaf * call.most_leaves, job.group, width};
}

__device__ __forceinline__ Records leaf_records(const Call &call, const Job &job, int width, int part_width, int rank) {
    const size_t group = min(HEADS, call.group);
    float *leaves = slot_records(call, job, width).first + call.most_leaves * group * (LEAF * (width + 2));
    return {leaves + size_t(rank) * call.most_leaves * job.group * (part_width + 2), job.group, part_width};
}

// Orders this thread's writes, and those it has seen, for the device; `__threadfence` is of the dearer, sequential
// kind.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// True in every thread of the last of `count` blocks that come to `ticket`, which it leaves at zero. What the other
// blocks wrote before is then visible to it. `last` is shared memory.
__device__ __forceinline__ bool is_last_to_arrive(unsigned *ticket, int count, bool &last) {
    __syncthreads();
    if (threadIdx.x == 0) {
        fence_device();
        last = atomicAdd(ticket, 1u) == unsigned(count - 1);
        if (last) *ticket = 0;
        fence_device();
    }
    __syncthreads();
    return last;
}

// The parts of two numbers, packed: high parts and low parts.
struct SplitPair {
    uint32_t high, low;
};

__device__ __forceinline__ SplitPair split_pair(float a, float b) {
    const Split first = split(a), second = split(b);
    return {pack(first.high, second.high), pack(first.low, second.low)};
}

// `element` is of the sums [group, width], the first of four where there are four.
template <typename Sum>
__device__ __forceinline__ void store_out(const Call &call, const Job &job, int element, int width,
                                          const Merged<Sum> &x) {
    const size_t row_width = size_t(call.heads) * width, column = size_t(job.first_head) * width + element;
    if constexpr (std::is_same_v<Sum, float>) {
        store<SPLIT>(call.out, job.row, row_width, column, x.sum / x.denominator);
    } else {
        const SplitPair first = split_pair(x.sum.x / x.denominator, x.sum.y / x.denominator);
        const SplitPair second = split_pair(x.sum.z / x.denominator, x.sum.w / x.denominator);
        bf16 *to = call.out + job.row * 2 * row_width + column;
        *reinterpret_cast<uint2 *>(to) = make_uint2(first.high, second.high);
        *reinterpret_cast<uint2 *>(to + row_width) = make_uint2(first.low, second.low);
    }
}

// A chunk's result to the row's, through global memory. `each` calls what it is given for every element of the sums
// [group, width] (or for the first of every four), the same ones for a thread each time; `block_sum(element)` gives a sum
// of the block (or four). The shared memory it reads and `heads` have been written and synchronized. Tickets of a slot:
// the row's, then its leaves'. `ONLY_CHUNK`: it is called for rows with one chunk alone.
template <bool ONLY_CHUNK, typename Sum, typename Each, typename BlockSum>
__device__ __forceinline__ void finish_by_tickets(const Call &call, const Job &job, int chunk, const Each &each,
                                                  const BlockSum &block_sum, const HeadSums &heads, int width,
                                                  bool &last) {
    const auto own = [&](int element) {
        const int head = element / width;
        return Merged<Sum>{block_sum(element), heads.maximum[head], heads.denominator[head]};
    };
    if (ONLY_CHUNK || job.one_chunk()) {
        each([&](int element) { store_out(call, job, element, width, own(element)); });
        return;
    }
    const int leaf = chunk / LEAF, leaf_chunks = job.leaf_chunks(leaf);
    const Records chunks = slot_records(call, job, width), leaves = leaf_records(call, job, width, width, 0);
    unsigned *tickets = call.tickets + job.slot * max(LEAF, 1 + call.most_leaves);
    each([&](int element) { chunks.put(chunk, element, own(element)); });
    if (!is_last_to_arrive(tickets + 1 + leaf, leaf_chunks, last)) return;
    const auto of_leaf = [&](int element) {
        return chunks.merge_elements<LEAF, Sum>(leaf * LEAF, leaf_chunks, element);
    };
    if (job.one_leaf()) {
        each([&](int element) { store_out(call, job, element, width, of_leaf(element)); });
        return;
    }
    each([&](int element) { leaves.put(leaf, element, of_leaf(element)); });
    const int row_leaves = job.leaves();
    if (!is_last_to_arrive(tickets, row_leaves, last)) return;
    each([&](int element) {
        store_out(call, job, element, width, leaves.merge_elements<MOST_LEAVES, Sum>(0, row_leaves, element));
    });
}

// What a block of a cluster receives: its part of each head of each chunk of the leaf.
template <int WIDTH> struct Received {
    static constexpr int PART = WIDTH / LEAF;
    static_assert(PART % 4 == 0, "four elements are of one head");
    float4 sums[LEAF][HEADS * PART / 4];
    float4 heads[LEAF][sizeof(HeadSums) / sizeof(float4)];
    uint64_t arrivals;
};

// The same through the shared memory of a cluster, in three steps for each leaf, after an `arrive_ready`. All blocks of
// the leaf take the first, after which they may send, and the last, also those without a chunk.
template <int WIDTH>
__device__ __forceinline__ void begin_leaf(const Job &job, int leaf, Received<WIDTH> &received) {
    constexpr int SENT = Received<WIDTH>::PART * int(sizeof(float));
    if (threadIdx.x == 0) {
        expect_arrivals(&received.arrivals, job.leaf_chunks(leaf) * (job.group * SENT + int(sizeof(HeadSums))));
    }
    wait_until_ready();
}

// Sends the block's result for a chunk, each block its part. `block_sums(head, element)` gives four sums of the block.
template <int THREADS, int WIDTH, typename BlockSums>
__device__ __forceinline__ void send_chunk(const Job &job, int chunk, const BlockSums &block_sums,
                                           const HeadSums &heads, Received<WIDTH> &received) {
    constexpr int PART = Received<WIDTH>::PART, WARPS = THREADS / WARP;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, place = chunk % LEAF;
#pragma unroll 1
    for (int rank = warp; rank < LEAF; rank += WARPS) {
#pragma unroll
        for (int i = lane; i < HEADS * PART / 4; i += WARP) {
            const int head = 4 * i / PART;
            if (head >= job.group) break;
            send(&received.sums[place][i], &received.arrivals, rank, block_sums(head, rank * PART + 4 * i % PART));
        }
        if (lane < sizeof(HeadSums) / sizeof(float4)) {
            send(&received.heads[place][lane], &received.arrivals, rank,
                 reinterpret_cast<const float4 *>(&heads)[lane]);
        }
    }
}

// Merges what came; it is the `time`-th leaf of the block.
template <int THREADS, int WIDTH>
__device__ __forceinline__ void merge_leaf(const Call &call, const Job &job, int leaf, int time,
                                           Received<WIDTH> &received, bool &last) {
    constexpr int PART = Received<WIDTH>::PART;
    const int elements = job.group * PART, leaf_chunks = job.leaf_chunks(leaf);
    wait_for_arrivals(&received.arrivals, time);
    const bool one_leaf = job.one_leaf();
    const Records leaves = leaf_records(call, job, WIDTH, PART, job.rank);
    const auto out_element = [&](int i) { return i / PART * WIDTH + job.rank * PART + i % PART; };
#pragma unroll 1
    for (int i = threadIdx.x; i < elements; i += THREADS) {
        const int head = i / PART;
        const auto heads_of = [&](int c) { return reinterpret_cast<const HeadSums *>(received.heads[c]); };
        const Merged<float> merged = merge<LEAF, float>(
            leaf_chunks, [&](int c) { return reinterpret_cast<const float *>(received.sums[c])[i]; },
            [&](int c) { return heads_of(c)->maximum[head]; }, [&](int c) { return heads_of(c)->denominator[head]; });
        if (one_leaf) {
            store_out(call, job, out_element(i), WIDTH, merged);
        } else {
            leaves.put(leaf, i, merged);
        }
    }
    if (one_leaf) return;
    const int row_leaves = job.leaves();
    unsigned *ticket = call.tickets + job.slot * max(LEAF, 1 + call.most_leaves) + job.rank;
    if (!is_last_to_arrive(ticket, row_leaves, last)) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < elements; i += THREADS) {
        store_out(call, job, out_element(i), WIDTH, leaves.merge_elements<MOST_LEAVES, float>(0, row_leaves, i));
    }
}
