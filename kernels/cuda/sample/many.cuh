// A draw from more than 1,024 tokens, by one block, from the sums that sample_weigh has left.
//
// Top-p: the exact masses of 512 buckets say in which one the sum crosses; its members are sorted, or, where they are
// more than 1,024 (a flat distribution), divided by the next nine bits of their weights until they are few or all
// equal. The draw goes by the sums of chunks of groups, of groups of 64 tokens, and of tokens, each from the lowest id
// up.
#pragma once

#include "weights.cuh"

constexpr int MEMBERS = 1024;

struct ManyMemory {
    double masses[BUCKETS];
    uint64_t whole[BUCKETS][2];
    double weights[MEMBERS];
    uint32_t ids[MEMBERS];
    uint16_t order[MEMBERS];
    double of_warp[DRAW_THREADS / WARP];
    double wanted, sum, before;
    uint64_t prefix, cut;
    uint32_t cut_id, count;
    int crossing, first, last, group;
};

// Calls `visit(weight, id)` for every token that has a weight, except those of groups whose likeliest is below the
// bucket after `lowest`: a bucket to spare, because the exponential may be a last bit out of order.
template <typename Visit>
__device__ __forceinline__ void for_weights(const Rule &rule, const RowParts &parts, const float *logits,
                                            int vocabulary, int lowest, Visit visit) {
    const int groups = groups_of(vocabulary), lane = threadIdx.x % WARP;
    for (int group = threadIdx.x / WARP; group < groups; group += DRAW_THREADS / WARP) {
        const float largest = logit_of(uint64_t(parts.group_largest[group]) << 32);
        if (bucket_of(plain_weight(rule, largest)) > lowest + 1) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t id = group * GROUP + half * WARP + lane;
            const double weight = id < vocabulary ? weight_under(rule, logits[id], id) : 0.0;
            if (weight > 0.0) visit(weight, id);
        }
    }
}

// Thread 0: the first of `masses` with which the sum reaches what is wanted, -1 for none; the sum before it goes to
// `sum`.
__device__ __forceinline__ int find_crossing(ManyMemory &memory, int count) {
    double sum = memory.sum;
    for (int b = 0; b < count; b++) {
        const double with = __dadd_rn(sum, memory.masses[b]);
        if (with >= memory.wanted) {
            memory.sum = sum;
            return b;
        }
        sum = with;
    }
    return -1;
}

// Sorts the members, heaviest first, of equal ones the lower id first, and cuts after the one that reaches what is
// wanted.
__device__ __forceinline__ void cut_members(ManyMemory &memory) {
    const int thread = threadIdx.x, members = memory.count;
    if (thread < members) {
        const double weight = memory.weights[thread];
        const uint32_t id = memory.ids[thread];
        int rank = 0;
        for (int i = 0; i < members; i++) {
            const double other = memory.weights[i];
            rank += other > weight || (other == weight && memory.ids[i] < id);
        }
        memory.order[rank] = thread;
    }
    __syncthreads();
    if (thread == 0) {
        double sum = memory.sum;
        int last = 0;
        for (int i = 0; i < members; i++) {
            last = memory.order[i];
            sum = __dadd_rn(sum, memory.weights[last]);
            if (sum >= memory.wanted) break;
        }
        memory.cut = __double_as_longlong(memory.weights[last]);
        memory.cut_id = memory.ids[last];
    }
    __syncthreads();
}

// More members than can be sorted, all of one weight: cuts after as many, from the lowest id up, as reach what is
// wanted.
__device__ __noinline__ void cut_equal_members(ManyMemory &memory, const Rule &rule, const RowParts &parts,
                                               const float *logits, int vocabulary, int crossing) {
    const double equal = __longlong_as_double(ONE - memory.prefix);
    const double needed = ceil((memory.wanted - memory.sum) / equal);
    const uint32_t wanted = uint32_t(fmin(fmax(needed, 1.0), double(memory.count)));
    uint32_t low = 0, high = vocabulary - 1;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        __syncthreads();
        if (threadIdx.x == 0) memory.count = 0;
        __syncthreads();
        for_weights(rule, parts, logits, vocabulary, crossing, [&](double weight, uint32_t id) {
            if (weight == equal && id <= middle) atomicAdd(&memory.count, 1u);
        });
        __syncthreads();
        if (memory.count >= wanted) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) memory.cut = __double_as_longlong(equal), memory.cut_id = low;
    __syncthreads();
}

// Sets `cut` and `cut_id` so that the fewest heaviest tokens stay that together have `top_p` of the weight.
__device__ __forceinline__ void cut_top_p(ManyMemory &memory, const Rule &rule, const RowParts &parts,
                                          const float *logits, int vocabulary, double top_p) {
    const int thread = threadIdx.x;
    if (thread < BUCKETS) {
        memory.masses[thread] = mass_of(parts.bucket_masses[2 * thread], parts.bucket_masses[2 * thread + 1], thread);
    }
    __syncthreads();
    if (thread == 0) {
        double total = 0.0;
        for (int b = 0; b < BUCKETS; b++) total = __dadd_rn(total, memory.masses[b]);
        memory.wanted = __dmul_rn(top_p, total), memory.sum = 0.0;
        const int crossing = find_crossing(memory, BUCKETS);
        memory.crossing = crossing, memory.prefix = crossing;
        memory.cut = 0, memory.cut_id = UINT32_MAX, memory.count = 0;
    }
    __syncthreads();
    const int crossing = memory.crossing;
    // All that is left in the last bucket is less than the rounding of the total: it stays.
    if (crossing < 0 || crossing == BUCKETS - 1) return;
    for (int shift = BUCKET_SHIFT;;) {
        const uint64_t prefix = memory.prefix;
        for_weights(rule, parts, logits, vocabulary, crossing, [&](double weight, uint32_t id) {
            if (depth_of(weight) >> shift != prefix) return;
            const uint32_t place = atomicAdd(&memory.count, 1u);
            if (place < MEMBERS) memory.weights[place] = weight, memory.ids[place] = id;
        });
        __syncthreads();
        if (memory.count <= MEMBERS) return cut_members(memory);
        if (shift == 0) return cut_equal_members(memory, rule, parts, logits, vocabulary, crossing);
        const int next = max(shift - 9, 0), parts_of_bucket = 1 << (shift - next);
        if (thread < BUCKETS) memory.whole[thread][0] = memory.whole[thread][1] = 0;
        __syncthreads();
        for_weights(rule, parts, logits, vocabulary, crossing, [&](double weight, uint32_t) {
            const uint64_t depth = depth_of(weight);
            if (depth >> shift != prefix) return;
            const uint64_t whole = whole_of(weight, crossing);
            uint64_t *sums = memory.whole[depth >> next & (parts_of_bucket - 1)];
            add_exactly(&sums[0], whole & 0xfffffffff);
            add_exactly(&sums[1], whole >> 36);
        });
        __syncthreads();
        if (thread < BUCKETS) {
            memory.masses[thread] = mass_of(memory.whole[thread][0], memory.whole[thread][1], crossing);
        }
        __syncthreads();
        if (thread == 0) {
            int part = find_crossing(memory, parts_of_bucket);
            if (part < 0) {
                // Sums in another order ended a rounding short: the sum crosses in the last part that has any weight.
                for (part = parts_of_bucket - 1; part > 0 && memory.masses[part] == 0.0;) part--;
                for (int b = 0; b < part; b++) memory.sum = __dadd_rn(memory.sum, memory.masses[b]);
            }
            memory.prefix = prefix << (shift - next) | uint64_t(part);
            memory.count = 0;
        }
        __syncthreads();
        shift = next;
    }
}

// The weight of each group of tokens that stay.
__device__ __forceinline__ void sum_groups(const Rule &rule, const RowParts &parts, const float *logits,
                                           int vocabulary) {
    const int groups = groups_of(vocabulary), lane = threadIdx.x % WARP;
    const int lowest = bucket_of(__longlong_as_double(rule.cut));
    for (int group = threadIdx.x / WARP; group < groups; group += DRAW_THREADS / WARP) {
        const float largest = logit_of(uint64_t(parts.group_largest[group]) << 32);
        double sum = 0.0;
        if (bucket_of(plain_weight(rule, largest)) <= lowest + 1) {
            const uint32_t id = group * GROUP + lane;
            const double first = id < vocabulary ? weight_under(rule, logits[id], id) : 0.0;
            const double second = id + WARP < vocabulary ? weight_under(rule, logits[id + WARP], id + WARP) : 0.0;
            sum = __dadd_rn(first, second);
#pragma unroll
            for (int offset = WARP / 2; offset > 0; offset /= 2) {
                sum = __dadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, offset));
            }
        }
        if (lane == 0) parts.group_sums[group] = sum;
    }
    __syncthreads();
}

// The group in which the running sum passes `u` times the total, and the sum before it, in memory.
__device__ __forceinline__ void find_group(ManyMemory &memory, const RowParts &parts, int vocabulary, double u) {
    const int groups = groups_of(vocabulary), thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    const int each = (groups + DRAW_THREADS - 1) / DRAW_THREADS;
    const int start = min(thread * each, groups), end = min(start + each, groups);
    double chunk = 0.0;
    for (int group = start; group < end; group++) chunk = __dadd_rn(chunk, parts.group_sums[group]);
    double running = chunk;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const double before = __shfl_up_sync(FULL_WARP, running, offset);
        if (lane >= offset) running = __dadd_rn(before, running);
    }
    if (lane == WARP - 1) memory.of_warp[warp] = running;
    if (thread == 0) memory.first = DRAW_THREADS, memory.last = 0;
    __syncthreads();
    double before_warp = 0.0, total = 0.0;
    for (int i = 0; i < DRAW_THREADS / WARP; i++) {
        if (i == warp) before_warp = total;
        total = __dadd_rn(total, memory.of_warp[i]);
    }
    const double target = __dmul_rn(u, total);
    double before = __shfl_up_sync(FULL_WARP, running, 1);
    before = lane == 0 ? before_warp : __dadd_rn(before_warp, before);
    running = __dadd_rn(before_warp, running);
    if (chunk > 0.0) {
        atomicMax(&memory.last, thread);
        if (running > target) atomicMin(&memory.first, thread);
    }
    __syncthreads();
    if (thread == (memory.first < DRAW_THREADS ? memory.first : memory.last)) {
        memory.group = start, memory.before = before, memory.wanted = target;
        for (int group = start; group < end; group++) {
            const double sum = parts.group_sums[group];
            if (sum == 0.0) continue;
            memory.group = group, memory.before = before;
            before = __dadd_rn(before, sum);
            if (before > target) break;
        }
    }
    __syncthreads();
}

// The id, for thread 0.
__device__ __forceinline__ uint32_t draw_of_many(ManyMemory &memory, const SampleOptions &options,
                                                 const RowState &state, const RowParts &parts, const float *logits,
                                                 int vocabulary, double u) {
    Rule rule = rule_of(options, state);
    if (options.top_p < 1.0f) {
        Rule before_min_p = rule;
        before_min_p.lightest = 0.0;
        cut_top_p(memory, before_min_p, parts, logits, vocabulary, double(options.top_p));
        rule.cut = memory.cut, rule.cut_id = memory.cut_id;
        sum_groups(rule, parts, logits, vocabulary);
    }
    find_group(memory, parts, vocabulary, u);
    const uint32_t start = memory.group * GROUP;
    if (threadIdx.x < GROUP) {
        const uint32_t id = start + threadIdx.x;
        memory.weights[threadIdx.x] = id < vocabulary ? weight_under(rule, logits[id], id) : 0.0;
    }
    __syncthreads();
    if (threadIdx.x != 0) return 0;
    uint32_t last = 0;
    double sum = memory.before;
    for (int i = 0; i < GROUP; i++) {
        if (memory.weights[i] == 0.0) continue;
        last = i;
        sum = __dadd_rn(sum, memory.weights[i]);
        if (sum > memory.wanted) break;
    }
    return start + last;
}
