// How decoding attention splits a row's history over blocks, and how the blocks' results become one.
//
// A row at position p sees `length` positions. They are cut in chunks of 64 positions, or of the next power of two
// with which `most_chunks` chunks suffice; `most_chunks` depends on the model's shape alone. So the cut, and with it
// every order of summation, depends on the model and on the row's own length, never on the rows beside it or on the
// card.
//
// A block leaves, for each of its query heads, the sums of its chunk relative to the chunk's own greatest score: a
// record of `group * width` sums, then `group` maxima, then `group` denominators. The last block to arrive (an integer
// ticket) merges the records in the order of chunks, whichever block it is, so the bits are always the same. Up to
// FAN_IN chunks are merged at once; more are merged in two levels, each leaf by its own last block, so that a long
// history's merge is not one multiprocessor's work. Tickets are zero before and after each launch: a captured graph
// needs no clearing between replays.
#pragma once

#include "../vocabulary/device.cuh"
#include "exponential.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int HEADS = 8;  // query heads of one block
constexpr int CHUNK = 64;
constexpr int FAN_IN = 16;
constexpr int MOST_LEAVES = 8;
constexpr int TICKETS = 1 + MOST_LEAVES;
static_assert(FAN_IN * HEADS == THREADS, "a thread reads one maximum and one denominator of a merge");

// What one block works on.
struct Job {
    int row, kv_head, first_head, group;  // query heads first_head .. first_head + group
    int chunk, chunks;
    int begin, end;  // positions
    size_t slot;     // of (row, kv head, block of heads)
    const bf16 *keys, *values;  // the kv head at position 0
};

struct Call {
    const float *queries;      // [rows, heads * width]
    const uint64_t *kv_table;  // [rows, 2]
    const int *positions;      // [rows]
    bf16 *__restrict__ out;    // [rows, 2, heads * width]
    float *__restrict__ partials;
    unsigned *__restrict__ tickets;
    float scale;  // times log2(e)
    int window, heads, kv_heads, width, head_blocks, most_chunks;
};

// The block's job, or false where it has none. Grid: chunks, kv_heads * head_blocks, rows.
__device__ __forceinline__ bool find_job(const Call &call, Job &job) {
    job.row = blockIdx.z;
    job.chunk = blockIdx.x;
    job.kv_head = blockIdx.y / call.head_blocks;
    const int block = blockIdx.y % call.head_blocks;
    const int whole_group = call.heads / call.kv_heads;
    job.first_head = job.kv_head * whole_group + block * HEADS;
    job.group = min(HEADS, whole_group - block * HEADS);
    job.slot = size_t(blockIdx.z) * gridDim.y + blockIdx.y;

    // All three loads on their way at once.
    const int position = call.positions[job.row];
    job.keys = reinterpret_cast<const bf16 *>(call.kv_table[2 * job.row]) + size_t(job.kv_head) * call.width;
    job.values = reinterpret_cast<const bf16 *>(call.kv_table[2 * job.row + 1]) + size_t(job.kv_head) * call.width;
    if (position < 0) {
        // Padding: its output is read by the next product, so it is made zero.
        if (job.chunk == 0) {
            const int width = job.group * call.width;
            const size_t row_width = size_t(call.heads) * call.width;
            for (int i = threadIdx.x; i < width; i += THREADS) {
                store<SPLIT>(call.out, job.row, row_width, size_t(job.first_head) * call.width + i, 0.0f);
            }
        }
        return false;
    }
    const int start = call.window > 0 ? max(0, position - call.window + 1) : 0;
    const int length = position + 1 - start;
    int chunk_length = CHUNK;
    while (int64_t(chunk_length) * call.most_chunks < length) chunk_length *= 2;
    job.chunks = (length + chunk_length - 1) / chunk_length;
    if (job.chunk >= job.chunks) return false;
    job.begin = start + job.chunk * chunk_length;
    job.end = min(job.begin + chunk_length, position + 1);
    return true;
}

// A block's result: each thread holds elements `threadIdx.x + i * THREADS` of the sums [group, width], not yet divided;
// each head's maximum (of scores times log2(e)) and denominator are in shared memory.
struct HeadSums {
    float maximum[HEADS];
    float denominator[HEADS];
};

// True in every thread of the last of `count` blocks that come to `ticket`, which it leaves at zero. What the other
// blocks wrote before is then visible to it.
__device__ __forceinline__ bool is_last_to_arrive(unsigned *ticket, int count) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1u) == unsigned(count - 1);
        if (last) *ticket = 0;
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

template <int ELEMENTS>
__device__ __forceinline__ void store_record(float *record, const float (&sums)[ELEMENTS], const HeadSums &heads,
                                             int group, int width) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const int element = threadIdx.x + i * THREADS;
        if (element < group * width) record[element] = sums[i];
    }
    if (threadIdx.x < group) {
        record[group * width + threadIdx.x] = heads.maximum[threadIdx.x];
        record[group * width + group + threadIdx.x] = heads.denominator[threadIdx.x];
    }
}

// The sum of `count` records, `stride` floats apart, in their order.
template <int ELEMENTS>
__device__ __forceinline__ void merge(const float *records, size_t stride, int count, float (&sums)[ELEMENTS],
                                      HeadSums &heads, int group, int width) {
    __shared__ float maxima[FAN_IN][HEADS], denominators[FAN_IN][HEADS];
    const int head = threadIdx.x % HEADS, record = threadIdx.x / HEADS;
    const bool mine = record < count && head < group;
    const float *ends = records + record * stride + group * width;
    const float maximum = mine ? __ldcg(ends + head) : 0.0f;
    const float denominator = mine ? __ldcg(ends + group + head) : 0.0f;
    maxima[record][head] = maximum;
    __syncthreads();
    float greatest = maxima[0][head];
    for (int i = 1; i < count; i++) greatest = fmaxf(greatest, maxima[i][head]);
    const float factor = exp2_hardware(maximum - greatest);
    __syncthreads();
    // From here on `maxima` holds the records' factors.
    maxima[record][head] = factor;
    denominators[record][head] = denominator * factor;
    __syncthreads();
    if (threadIdx.x < HEADS) {
        float total = 0.0f;
        for (int i = 0; i < count; i++) total += denominators[i][head];
        heads.maximum[head] = greatest;
        heads.denominator[head] = total;
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) sums[i] = 0.0f;
#pragma unroll(ELEMENTS > 8 ? 2 : 4)
    for (int r = 0; r < count; r++) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            const int element = threadIdx.x + i * THREADS;
            if (element < group * width) {
                sums[i] = fmaf(maxima[r][element / width], __ldcg(records + r * stride + element), sums[i]);
            }
        }
    }
    __syncthreads();
}

template <int ELEMENTS>
__device__ __forceinline__ void store_out(const Call &call, const Job &job, const float (&sums)[ELEMENTS],
                                          const HeadSums &heads, int width) {
    const size_t row_width = size_t(call.heads) * width;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const int element = threadIdx.x + i * THREADS;
        if (element < job.group * width) {
            store<SPLIT>(call.out, job.row, row_width, size_t(job.first_head) * width + element,
                         sums[i] / heads.denominator[element / width]);
        }
    }
}

// From this chunk's result to the row's: writes it out where it is the only one, else leaves a record, and merges
// where this block is the last. `heads` is shared memory that the whole block has written and synchronized. `width` is
// call.width, passed apart because most callers know it when they are compiled.
template <int ELEMENTS>
__device__ __forceinline__ void finish(const Call &call, const Job &job, float (&sums)[ELEMENTS], HeadSums &heads,
                                       int width) {
    if (job.chunks == 1) {
        store_out(call, job, sums, heads, width);
        return;
    }
    const size_t stride = size_t(job.group) * (width + 2);
    // Blocks of heads of one kv head may differ in group: slots are spaced for the greatest.
    const size_t slot_stride = size_t(min(HEADS, call.heads / call.kv_heads)) * (width + 2) * gridDim.x;
    float *records = call.partials + job.slot * slot_stride;
    unsigned *tickets = call.tickets + job.slot * TICKETS;
    store_record(records + job.chunk * stride, sums, heads, job.group, width);

    const int leaf = job.chunk / FAN_IN, leaves = (job.chunks + FAN_IN - 1) / FAN_IN;
    const int leaf_chunks = min(FAN_IN, job.chunks - leaf * FAN_IN);
    float *leaf_records = records + size_t(leaf) * FAN_IN * stride;
    if (!is_last_to_arrive(tickets + 1 + leaf, leaf_chunks)) return;
    merge(leaf_records, stride, leaf_chunks, sums, heads, job.group, width);
    if (leaves > 1) {
        store_record(leaf_records, sums, heads, job.group, width);
        if (!is_last_to_arrive(tickets, leaves)) return;
        merge(records, FAN_IN * stride, leaves, sums, heads, job.group, width);
    }
    store_out(call, job, sums, heads, width);
}
