// What the sampling kernels share: options, the workspace, keys that order logits, weights, buckets, random numbers.
#pragma once

#include "../vocabulary/device.cuh"

constexpr int GROUP = 64;           // ids of which the largest logit, and the sum of weights, is kept
constexpr int PER_BLOCK = 2048;     // ids of a block of sample_scan and sample_weigh
constexpr int SCAN_THREADS = 256;
constexpr int DRAW_THREADS = 1024;
constexpr int MOST_FEW = 1024;      // tokens kept, up to which every sum is the host's
constexpr int BUCKETS = 512;        // of weights: eight for each factor of two; the last has all below 2^-64
constexpr int MOST_GROUPS_EACH = 8; // groups of a thread of sample_draw

// A row's options. The launcher has the same struct.
struct SampleOptions {
    uint64_t history;         // address of its ids so far (u32); 0: no penalties
    uint64_t seed;
    uint32_t penalty_window;  // u32::MAX: all ids
    uint32_t top_k;
    float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
};
static_assert(sizeof(SampleOptions) == 48, "the launcher's struct");

// What a row still needs: nothing, a draw from few tokens, or one from many.
enum Stage : uint32_t { DONE = 0, FEW = 1, MANY = 2 };

struct RowState {
    uint32_t ticket;  // zero before and after each call
    Stage stage;
    float largest;    // of the row's logits
    uint32_t unused;
    uint64_t threshold;  // the lowest key that top-k keeps, where it keeps many
};
constexpr int STATE_BYTES = 32;

// A row's part of the workspace.
struct RowParts {
    RowState *state;
    uint64_t *best_of_block;  // [blocks]
    uint64_t *bucket_masses;  // [BUCKETS, 2]: see mass_of
    double *group_sums;       // [groups]
    uint32_t *group_largest;  // [groups], ordered
};

__device__ __forceinline__ int groups_of(int vocabulary) { return (vocabulary + GROUP - 1) / GROUP; }

__device__ __forceinline__ RowParts parts_of_row(char *workspace, size_t row_bytes, size_t row, int vocabulary) {
    char *start = workspace + row * row_bytes;
    uint64_t *best = reinterpret_cast<uint64_t *>(start + STATE_BYTES);
    uint64_t *masses = best + (vocabulary + PER_BLOCK - 1) / PER_BLOCK;
    double *sums = reinterpret_cast<double *>(masses + 2 * BUCKETS);
    uint32_t *largest = reinterpret_cast<uint32_t *>(sums + groups_of(vocabulary));
    return {reinterpret_cast<RowState *>(start), best, masses, sums, largest};
}

__device__ __forceinline__ int kept_by_top_k(const SampleOptions &options, int vocabulary) {
    return options.top_k == 0 || options.top_k >= uint32_t(vocabulary) ? vocabulary : int(options.top_k);
}

// ---- Keys
// -------------------------------------------------------------------------------------------------------------

// The bits of a number in an order of unsigned integers: the total order of IEEE 754.
__device__ __forceinline__ uint32_t ordered(float logit) {
    const uint32_t bits = __float_as_uint(logit);
    return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// Larger for larger logits, then for lower ids.
__device__ __forceinline__ uint64_t key_of(float logit, uint32_t id) {
    return uint64_t(ordered(logit)) << 32 | uint32_t(~id);
}

__device__ __forceinline__ uint32_t id_of(uint64_t key) { return ~uint32_t(key); }

__device__ __forceinline__ float logit_of(uint64_t key) {
    const uint32_t bits = uint32_t(key >> 32);
    return __uint_as_float(bits ^ ((bits >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// Four logits from `id` on; negative infinity past the vocabulary.
__device__ __forceinline__ void load_four(float (&to)[4], const float *logits, uint32_t id, int vocabulary,
                                          bool by_vectors) {
    if (by_vectors && id < vocabulary) {
        const float4 v = *reinterpret_cast<const float4 *>(logits + id);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++) to[e] = id + e < vocabulary ? logits[id + e] : -INFINITY;
    }
}

// The `count`-th largest key of a row, in every thread: eight bits at a time, each by a pass over the whole row. The
// slow way, for rows that no shorter one serves.
template <int THREADS>
__device__ __noinline__ uint64_t exact_threshold(const float *logits, int vocabulary, int count) {
    __shared__ uint32_t counts[256];
    __shared__ uint32_t found[2];
    uint64_t prefix = 0;
    uint32_t wanted = count;
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += THREADS) counts[i] = 0;
        __syncthreads();
        for (uint32_t id = threadIdx.x; id < vocabulary; id += THREADS) {
            const uint64_t key = key_of(__ldcg(&logits[id]), id);
            if (shift == 56 || (key ^ prefix) >> (shift + 8) == 0) atomicAdd(&counts[key >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            uint32_t left = wanted;
            while (digit > 0 && counts[digit] < left) left -= counts[digit--];
            found[0] = digit, found[1] = left;
        }
        __syncthreads();
        prefix |= uint64_t(found[0]) << shift;
        wanted = found[1];
    }
    return prefix;
}

// ---- Weights
// ----------------------------------------------------------------------------------------------------------

// exp(x) for x <= 0 in operations rounded one by one: 2^n exp(r), n = round(x / ln 2), exp(r) by its series to the 13th
// power. The host's sampler has the same, and the same bits.
__device__ __forceinline__ double exponential(double x) {
    constexpr double ROUND = 6755399441055744.0, LOWEST = -708.0, LOG2_E = 1.44269504088896340736;
    const double ln_2_high = __longlong_as_double(0x3fe62e42fee00000ll);
    const double ln_2_low = __longlong_as_double(0x3dea39ef35793c76ll);
    constexpr double SERIES[12] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                   1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                   1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        1.0 / 2.0};
    const double bounded = x < LOWEST ? LOWEST : x;
    const double shifted = __dadd_rn(__dmul_rn(bounded, LOG2_E), ROUND);
    const double n = __dsub_rn(shifted, ROUND);
    const double r = __dsub_rn(__dsub_rn(bounded, __dmul_rn(n, ln_2_high)), __dmul_rn(n, ln_2_low));
    double sum = SERIES[0];
#pragma unroll
    for (int i = 1; i < 12; i++) sum = __dadd_rn(__dmul_rn(sum, r), SERIES[i]);
    const double exp_r = __dadd_rn(__dmul_rn(__dadd_rn(__dmul_rn(sum, r), 1.0), r), 1.0);
    const double power = __longlong_as_double(static_cast<long long>(
        (static_cast<unsigned long long>(__double_as_longlong(shifted)) + 1023ull) << 52));
    return x < LOWEST ? 0.0 : __dmul_rn(exp_r, power);
}

// Which tokens have which weight: relative to the likeliest, 0 for those that a cut has taken away.
struct Rule {
    double largest, sharpness;  // weight = exp((logit - largest) * sharpness)
    uint64_t threshold;         // the lowest key that stays
    double lightest;            // the lowest weight that stays (min-p)
    uint64_t cut;               // bits of the lowest weight that stays (top-p),
    uint32_t cut_id;            // and the highest id with that weight that does
};

__device__ __forceinline__ Rule rule_of(const SampleOptions &options, const RowState &state) {
    return {double(state.largest), __ddiv_rn(1.0, double(options.temperature)), state.threshold,
            double(options.min_p), 0, UINT32_MAX};
}

__device__ __forceinline__ double plain_weight(const Rule &rule, float logit) {
    return exponential(__dmul_rn(__dsub_rn(double(logit), rule.largest), rule.sharpness));
}

__device__ __forceinline__ double weight_under(const Rule &rule, float logit, uint32_t id) {
    if (key_of(logit, id) < rule.threshold) return 0.0;
    const double weight = plain_weight(rule, logit);
    const uint64_t bits = __double_as_longlong(weight);
    const bool stays = weight >= rule.lightest && (bits > rule.cut || (bits == rule.cut && id <= rule.cut_id));
    return stays ? weight : 0.0;
}

// ---- Buckets
// ----------------------------------------------------------------------------------------------------------

constexpr uint64_t ONE = 0x3ff0000000000000;  // the bits of weight 1
constexpr int BUCKET_SHIFT = 49;              // a bucket is 2^49 steps of a weight's bits

// How many steps of its bits a weight is below 1.
__device__ __forceinline__ uint64_t depth_of(double weight) {
    const uint64_t bits = __double_as_longlong(weight);
    return bits < ONE ? ONE - bits : 0;
}

__device__ __forceinline__ int bucket_of(double weight) {
    const uint64_t bucket = depth_of(weight) >> BUCKET_SHIFT;
    return bucket < BUCKETS ? int(bucket) : BUCKETS - 1;
}

__device__ __forceinline__ double power_of_two(int exponent) {
    return __longlong_as_double(static_cast<long long>(1023 + exponent) << 52);
}

// A weight as a whole number of steps of its bucket, at most 2^53. Only in the last bucket something is cut off.
__device__ __forceinline__ uint64_t whole_of(double weight, int bucket) {
    return __double2ull_rz(weight * power_of_two(53 + bucket / 8));
}

// The weight in a bucket, from the sums of the low 36 bits and of the high bits of its whole numbers.
__device__ __forceinline__ double mass_of(uint64_t low, uint64_t high, int bucket) {
    const double whole = __dadd_rn(__ull2double_rn(low), __dmul_rn(__ull2double_rn(high), power_of_two(36)));
    return __dmul_rn(whole, power_of_two(-53 - bucket / 8));
}

__device__ __forceinline__ void add_exactly(uint64_t *sum, uint64_t term) {
    atomicAdd(reinterpret_cast<unsigned long long *>(sum), static_cast<unsigned long long>(term));
}

// ---- Random numbers
// ---------------------------------------------------------------------------------------------------

// Uniform in [0, 1) with 53 bits: the two numbers at 2 `index` of the sampling stream of Philox 4x32-10.
__device__ __forceinline__ double uniform(uint64_t seed, uint64_t index) {
    constexpr uint64_t STREAM = 0x73616d706c65;
    const uint64_t counter = index / 2;
    uint32_t x[4] = {uint32_t(counter), uint32_t(counter >> 32), uint32_t(STREAM), uint32_t(STREAM >> 32)};
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t(0xD2511F53u) * x[0], b = uint64_t(0xCD9E8D57u) * x[2];
        const uint32_t next[4] = {uint32_t(b >> 32) ^ x[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ x[3] ^ key[1],
                                  uint32_t(a)};
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = next[i];
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    const bool second = index % 2 == 1;
    const uint64_t high = uint64_t(second ? x[2] : x[0]) << 21, low = (second ? x[3] : x[1]) >> 11;
    return __dmul_rn(__ull2double_rn(high | low), power_of_two(-53));
}
