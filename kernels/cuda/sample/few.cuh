// A draw from at most 1,024 tokens, by one block: every sum is taken in the order of the host's sampler.
//
// The top k are found by the largest logits of groups of 64 ids: at least k logits are as large as the k-th largest of
// those (a coarse bar from below does), so only groups above the bar are read again, about k of them. Where too many
// logits are above the bar (ties), the k-th largest is found exactly by passes over the row.
#pragma once

#include "weights.cuh"

constexpr int CANDIDATES = 2048;  // logits above the bar

struct FewMemory {
    uint64_t keys[CANDIDATES];
    union {
        uint64_t best[MOST_FEW];  // the keys that stay, largest first
        struct {
            double masses[BUCKETS];
            uint16_t bucket[MOST_FEW], order[MOST_FEW];
        };
    };
    uint32_t ids[MOST_FEW];  // ascending
    double weights[MOST_FEW];
    double lanes[8];
    double wanted, sum;
    uint32_t above[WARP];  // how many groups are above the bar of each bit
    int count, crossing, last, lowest_bucket;
    int of_warp[DRAW_THREADS / WARP];
};

__device__ __forceinline__ void add_candidate(FewMemory &memory, float logit, uint32_t id) {
    const int place = atomicAdd(&memory.count, 1);
    if (place < CANDIDATES) memory.keys[place] = key_of(logit, id);
}

// Fills `keys` with the `kept` largest logits' keys and some more, in any order. Masked tokens are no candidates.
__device__ __forceinline__ void find_candidates(FewMemory &memory, const RowParts &parts, const float *logits,
                                                int vocabulary, int kept) {
    const int groups = groups_of(vocabulary), lane = threadIdx.x % WARP;
    uint32_t largest[MOST_GROUPS_EACH];
#pragma unroll
    for (int j = 0; j < MOST_GROUPS_EACH; j++) {
        const int group = j * DRAW_THREADS + threadIdx.x;
        largest[j] = group < groups ? parts.group_largest[group] : 0;
    }
    if (threadIdx.x < WARP) memory.above[threadIdx.x] = 0;
    if (threadIdx.x == 0) memory.count = 0;
    __syncthreads();
    // The highest bar with at least `kept` groups above it, to its upper 24 bits: from below is enough.
    uint32_t bar = 0;
    for (int bit = 31; bit >= 8 && groups >= kept; bit--) {
        const uint32_t trial = bar | 1u << bit;
        uint32_t count = 0;
#pragma unroll
        for (int j = 0; j < MOST_GROUPS_EACH; j++) count += largest[j] >= trial;
        count = __reduce_add_sync(FULL_WARP, count);
        if (lane == 0) atomicAdd(&memory.above[bit], count);
        __syncthreads();
        if (memory.above[bit] >= uint32_t(kept)) bar = trial;
    }
#pragma unroll
    for (int j = 0; j < MOST_GROUPS_EACH; j++) {
        const int first = j * DRAW_THREADS + (threadIdx.x - lane);
        unsigned found = __ballot_sync(FULL_WARP, first + lane < groups && largest[j] >= bar);
        for (; found != 0; found &= found - 1) {
            const uint32_t group = first + __ffs(found) - 1;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t id = group * GROUP + half * WARP + lane;
                const float logit = id < vocabulary ? logits[id] : -INFINITY;
                if (logit > -INFINITY && ordered(logit) >= bar) add_candidate(memory, logit, id);
            }
        }
    }
    __syncthreads();
    if (memory.count <= CANDIDATES) return;
    const uint64_t threshold = exact_threshold<DRAW_THREADS>(logits, vocabulary, kept);
    if (threadIdx.x == 0) memory.count = 0;
    __syncthreads();
    for (uint32_t id = threadIdx.x; id < vocabulary; id += DRAW_THREADS) {
        const float logit = logits[id];
        if (logit > -INFINITY && key_of(logit, id) >= threshold) add_candidate(memory, logit, id);
    }
    __syncthreads();
}

// Fills `ids` and `weights` with the tokens that top-k keeps, and returns their number.
__device__ __forceinline__ int gather(FewMemory &memory, const SampleOptions &options, const Rule &rule,
                                      const RowParts &parts, const float *logits, int vocabulary) {
    const int thread = threadIdx.x, wanted = kept_by_top_k(options, vocabulary);
    if (wanted == vocabulary) {
        if (thread < vocabulary) {
            memory.ids[thread] = thread;
            memory.weights[thread] = plain_weight(rule, logits[thread]);
        }
        __syncthreads();
        return vocabulary;
    }
    find_candidates(memory, parts, logits, vocabulary, wanted);
    const int candidates = memory.count, kept = min(candidates, wanted);
    for (int i = thread; i < candidates; i += DRAW_THREADS) {
        const uint64_t key = memory.keys[i];
        int rank = 0;
        for (int j = 0; j < candidates; j++) rank += memory.keys[j] > key;
        if (rank < kept) memory.best[rank] = key;
    }
    __syncthreads();
    if (thread < kept) {
        const uint64_t key = memory.best[thread];
        int place = 0;
        for (int j = 0; j < kept; j++) place += id_of(memory.best[j]) < id_of(key);
        memory.ids[place] = id_of(key);
        memory.weights[place] = plain_weight(rule, logit_of(key));
    }
    __syncthreads();
    return kept;
}

// Whether this thread's token is one of the fewest heaviest that together have `top_p` of the weight.
__device__ __forceinline__ bool is_in_top_p(FewMemory &memory, int count, double top_p) {
    const int thread = threadIdx.x;
    const bool exists = thread < count;
    const double weight = exists ? memory.weights[thread] : 0.0;
    const int bucket = bucket_of(weight);
    if (exists) memory.bucket[thread] = bucket;
    if (thread == 0) memory.lowest_bucket = 0;
    __syncthreads();
    if (weight > 0.0) atomicMax(&memory.lowest_bucket, bucket);
    // Two sums a bucket, of tokens at even and at odd places, as the host has them.
    double mass = 0.0;
    for (int i = thread % 2; i < count; i += 2) {
        if (memory.bucket[i] == thread / 2) mass = __dadd_rn(mass, memory.weights[i]);
    }
    const double odd = __shfl_down_sync(FULL_WARP, mass, 1);
    if (thread % 2 == 0) memory.masses[thread / 2] = __dadd_rn(mass, odd);
    __syncthreads();
    if (thread == 0) {
        double total = 0.0, sum = 0.0;
        for (int b = 0; b <= memory.lowest_bucket; b++) total = __dadd_rn(total, memory.masses[b]);
        const double wanted = __dmul_rn(top_p, total);
        memory.crossing = -1;
        for (int b = 0; b <= memory.lowest_bucket; b++) {
            const double with = __dadd_rn(sum, memory.masses[b]);
            if (with >= wanted) {
                memory.crossing = b;
                break;
            }
            sum = with;
        }
        memory.wanted = wanted, memory.sum = sum;
    }
    __syncthreads();
    const int crossing = memory.crossing;
    if (crossing < 0) return exists;
    // The tokens of the bucket in which the sum crosses, heaviest first, of equal ones the lower id first.
    const bool member = exists && bucket == crossing;
    if (member) {
        int rank = 0;
        for (int i = 0; i < count; i++) {
            const double other = memory.weights[i];
            rank += memory.bucket[i] == crossing && (other > weight || (other == weight && i < thread));
        }
        memory.order[rank] = thread;
    }
    const int members = __syncthreads_count(member);
    if (thread == 0) {
        double sum = memory.sum;
        memory.last = -1;
        for (int i = 0; i < members; i++) {
            sum = __dadd_rn(sum, memory.weights[memory.order[i]]);
            if (sum >= memory.wanted) {
                memory.last = memory.order[i];
                break;
            }
        }
    }
    __syncthreads();
    const int last = memory.last;
    if (!exists || bucket > crossing) return false;
    if (last < 0) return true;
    const double lightest = memory.weights[last];
    return weight > lightest || (weight == lightest && thread <= last);
}

// Closes the gaps that tokens leave which do not stay, and returns how many do.
__device__ __forceinline__ int keep(FewMemory &memory, bool stays) {
    const int thread = threadIdx.x, lane = thread % WARP;
    const unsigned lanes = __ballot_sync(FULL_WARP, stays);
    const uint32_t id = memory.ids[thread];
    const double weight = memory.weights[thread];
    if (lane == 0) memory.of_warp[thread / WARP] = __popc(lanes);
    __syncthreads();
    int place = __popc(lanes & ((1u << lane) - 1)), total = 0;
#pragma unroll
    for (int warp = 0; warp < DRAW_THREADS / WARP; warp++) {
        if (warp < thread / WARP) place += memory.of_warp[warp];
        total += memory.of_warp[warp];
    }
    if (stays) memory.ids[place] = id, memory.weights[place] = weight;
    __syncthreads();
    return total;
}

// The place at which the running sum of weights passes `u` times the total, for thread 0.
__device__ __forceinline__ int place_of_draw(FewMemory &memory, int count, double u) {
    if (threadIdx.x < 8) {
        double sum = 0.0;
        for (int i = threadIdx.x; i < count; i += 8) sum = __dadd_rn(sum, memory.weights[i]);
        memory.lanes[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return 0;
    double total = 0.0;
#pragma unroll
    for (int lane = 0; lane < 8; lane++) total = __dadd_rn(total, memory.lanes[lane]);
    const double target = __dmul_rn(u, total);
    double sum = 0.0;
    for (int start = 0; start < count; start += 8) {
        // Eight loads at once; the additions wait for each other.
        double next[8];
#pragma unroll
        for (int i = 0; i < 8; i++) next[i] = start + i < count ? memory.weights[start + i] : 0.0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum = __dadd_rn(sum, next[i]);
            if (sum > target) return start + i;
        }
    }
    // Rounding kept the sum from passing: the last token that has a weight.
    int last = count - 1;
    while (last > 0 && memory.weights[last] == 0.0) last--;
    return last;
}

// The id, for thread 0.
__device__ __forceinline__ uint32_t draw_of_few(FewMemory &memory, const SampleOptions &options, const RowState &state,
                                                const RowParts &parts, const float *logits, int vocabulary, double u) {
    int count = gather(memory, options, rule_of(options, state), parts, logits, vocabulary);
    bool stays = threadIdx.x < count;
    if (options.top_p < 1.0f) stays = is_in_top_p(memory, count, double(options.top_p));
    if (stays && options.min_p > 0.0f) stays = memory.weights[threadIdx.x] >= double(options.min_p);
    count = keep(memory, stays);
    return memory.ids[place_of_draw(memory, count, u)];
}
