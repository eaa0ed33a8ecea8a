// From logits to one token for each row of a pass, on the device: penalties, temperature, top-k, top-p, min-p, a seeded
// draw.
//
// The steps, their order and their arithmetic are those of the host's sampler (crate ironloom-decode), and the ids are
// equal: F32 and F64 operations rounded one by one, never fused; the same series for the exponential; the same Philox
// numbers, by seed and by the index the token will have in its sequence.
//
//   logits [rows, vocabulary] F32: logits of penalized tokens are CHANGED IN PLACE; options [rows];
//   positions [rows] i32, of the tokens that made the logits: a row's history has positions[i] + 1 ids; -1 is a row not
//   in use (id 0); ids [rows] u32, u32::MAX where a logit is NaN or positive infinity or all are negative infinity.
//
// Three kernels, each over all rows; a row whose answer is known leaves the rest at once:
//
//   sample_scan   blocks of 2,048 logits: penalties, the largest logit of each 64, of the row; greedy rows end here
//   sample_weigh  rows that keep more than 1,024 tokens: sums of weights by 64 tokens, or by bucket for top-p
//   sample_draw   a block a row: few.cuh where at most 1,024 tokens are kept, many.cuh else
//
// Where the sums of the host are kept: at most 1,024 tokens (top-k, or a small vocabulary): all of them, bit by bit.
// Above: buckets of top-p are summed exactly, in integers, and running sums go by 64 tokens in a fixed order; so an id
// can differ from the host's where a cut or the draw falls within about 1e-13 of a token's edge.
//
// Bound: latency; the logits are read once (608 KB at 152,000) and then in the groups of 64 that can matter.

#include "sample/few.cuh"
#include "sample/many.cuh"

// Adds up in `counts` how often each id of this block's is among the row's last ones. False where there is no penalty.
__device__ __forceinline__ bool count_recent(const SampleOptions &options, int length, uint32_t start,
                                             uint32_t *counts) {
    const bool neutral = options.repetition_penalty == 1.0f && options.presence_penalty == 0.0f &&
                         options.frequency_penalty == 0.0f;
    const uint32_t window = min(options.penalty_window, uint32_t(length));
    if (neutral || window == 0 || options.history == 0) return false;
    for (int i = threadIdx.x; i < PER_BLOCK; i += SCAN_THREADS) counts[i] = 0;
    __syncthreads();
    const uint32_t *recent = reinterpret_cast<const uint32_t *>(options.history) + (length - window);
    for (uint32_t i = threadIdx.x; i < window; i += SCAN_THREADS) {
        const uint32_t place = recent[i] - start;
        if (place < PER_BLOCK) atomicAdd(&counts[place], 1u);
    }
    __syncthreads();
    return true;
}

__device__ __forceinline__ float penalized(const SampleOptions &options, float logit, uint32_t count) {
    const float repeated = logit > 0.0f ? __fdiv_rn(logit, options.repetition_penalty)
                                        : __fmul_rn(logit, options.repetition_penalty);
    const float subtracted = __fmul_rn(float(count), options.frequency_penalty);
    return __fsub_rn(repeated, __fadd_rn(options.presence_penalty, subtracted));
}

// The largest key of a block, in every thread.
__device__ __forceinline__ uint64_t block_largest(uint64_t key) {
    __shared__ uint64_t of_warp[SCAN_THREADS / WARP];
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const uint64_t other = __shfl_xor_sync(FULL_WARP, key, offset);
        key = other > key ? other : key;
    }
    __syncthreads();
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = key;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < SCAN_THREADS / WARP; warp++) key = of_warp[warp] > key ? of_warp[warp] : key;
    return key;
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
    sample_scan(float *logits, const SampleOptions *options, const int *positions, uint32_t *__restrict__ ids,
                char *__restrict__ workspace, size_t row_bytes, int vocabulary, int by_vectors) {
    __shared__ uint32_t counts[PER_BLOCK];
    __shared__ bool is_last;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t row = blockIdx.y;
    const RowParts parts = parts_of_row(workspace, row_bytes, row, vocabulary);
    const int position = positions[row];
    if (position < 0) {
        if (blockIdx.x == 0 && threadIdx.x == 0) parts.state->stage = DONE, ids[row] = 0;
        return;
    }
    const SampleOptions choice = options[row];
    logits += row * vocabulary;
    const uint32_t start = blockIdx.x * PER_BLOCK;
    const bool penalizes = count_recent(choice, position + 1, start, counts);
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < PER_BLOCK / (4 * SCAN_THREADS); i++) {
        const uint32_t id = start + (i * SCAN_THREADS + threadIdx.x) * 4;
        float four[4];
        load_four(four, logits, id, vocabulary, by_vectors != 0);
        uint32_t largest = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (id + e >= vocabulary) continue;
            const uint32_t count = penalizes ? counts[id + e - start] : 0;
            if (count > 0) logits[id + e] = four[e] = penalized(choice, four[e], count);
            // A logit that cannot be compared beats all others; -0 equals 0.
            const bool wrong = isnan(four[e]) || four[e] == INFINITY;
            const uint64_t key = wrong ? UINT64_MAX : key_of(four[e] + 0.0f, id + e);
            best = key > best ? key : best;
            largest = max(largest, ordered(four[e]));
        }
        // The 16 threads of a group.
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) {
            largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
        }
        if (threadIdx.x % 16 == 0 && id < vocabulary) parts.group_largest[id / GROUP] = largest;
    }
    best = block_largest(best);
    if (threadIdx.x == 0) {
        parts.best_of_block[blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(&parts.state->ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    best = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += SCAN_THREADS) {
        const uint64_t key = __ldcg(&parts.best_of_block[i]);
        best = key > best ? key : best;
    }
    best = block_largest(best);
    const float largest = logit_of(best);
    const bool wrong = best == UINT64_MAX || largest == -INFINITY;
    const bool greedy = choice.temperature == 0.0f;
    const int kept = kept_by_top_k(choice, vocabulary);
    const Stage stage = wrong || greedy ? DONE : kept <= MOST_FEW ? FEW : MANY;
    uint64_t threshold = 0;
    if (stage == MANY) {
        for (int i = threadIdx.x; i < 2 * BUCKETS; i += SCAN_THREADS) parts.bucket_masses[i] = 0;
        if (kept < vocabulary) threshold = exact_threshold<SCAN_THREADS>(logits, vocabulary, kept);
    }
    if (threadIdx.x == 0) {
        if (stage == DONE) ids[row] = wrong ? UINT32_MAX : id_of(best);
        *parts.state = {0, stage, largest, 0, threshold};
    }
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
    sample_weigh(const float *logits, const SampleOptions *options, char *__restrict__ workspace, size_t row_bytes,
                 int vocabulary, int by_vectors) {
    __shared__ uint32_t masses[3 * BUCKETS];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t row = blockIdx.y;
    const RowParts parts = parts_of_row(workspace, row_bytes, row, vocabulary);
    const RowState state = *parts.state;
    if (state.stage != MANY) return;
    const SampleOptions choice = options[row];
    const bool cuts = choice.top_p < 1.0f;
    logits += row * vocabulary;
    Rule rule = rule_of(choice, state);
    if (cuts) {
        // Min-p comes after top-p.
        rule.lightest = 0.0;
        for (int i = threadIdx.x; i < 3 * BUCKETS; i += SCAN_THREADS) masses[i] = 0;
        __syncthreads();
    }
#pragma unroll 1
    for (int i = 0; i < PER_BLOCK / (4 * SCAN_THREADS); i++) {
        const uint32_t id = blockIdx.x * PER_BLOCK + (i * SCAN_THREADS + threadIdx.x) * 4;
        float four[4];
        double weights[4];
        load_four(four, logits, id, vocabulary, by_vectors != 0);
#pragma unroll
        for (int e = 0; e < 4; e++) weights[e] = weight_under(rule, four[e], id + e);
        if (cuts) {
            // 2,048 parts of 18 bits fit into 32: the sum is exact, in whatever order.
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (weights[e] == 0.0) continue;
                const int bucket = bucket_of(weights[e]);
                const uint64_t whole = whole_of(weights[e], bucket);
                atomicAdd(&masses[bucket], uint32_t(whole) & 0x3ffff);
                atomicAdd(&masses[BUCKETS + bucket], uint32_t(whole >> 18) & 0x3ffff);
                atomicAdd(&masses[2 * BUCKETS + bucket], uint32_t(whole >> 36));
            }
        } else {
            double sum = __dadd_rn(__dadd_rn(weights[0], weights[1]), __dadd_rn(weights[2], weights[3]));
#pragma unroll
            for (int offset = 8; offset > 0; offset /= 2) {
                sum = __dadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, offset));
            }
            if (threadIdx.x % 16 == 0 && id < vocabulary) parts.group_sums[id / GROUP] = sum;
        }
    }
    if (!cuts) return;
    __syncthreads();
    for (int bucket = threadIdx.x; bucket < BUCKETS; bucket += SCAN_THREADS) {
        const uint64_t low = masses[bucket] + (uint64_t(masses[BUCKETS + bucket]) << 18);
        const uint64_t high = masses[2 * BUCKETS + bucket];
        if (low != 0) add_exactly(&parts.bucket_masses[2 * bucket], low);
        if (high != 0) add_exactly(&parts.bucket_masses[2 * bucket + 1], high);
    }
}

extern "C" __global__ void __launch_bounds__(DRAW_THREADS)
    sample_draw(const float *logits, const SampleOptions *options, const int *positions, uint32_t *__restrict__ ids,
                char *__restrict__ workspace, size_t row_bytes, int vocabulary) {
    __shared__ union {
        FewMemory few;
        ManyMemory many;
    } memory;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t row = blockIdx.x;
    const RowParts parts = parts_of_row(workspace, row_bytes, row, vocabulary);
    const RowState state = *parts.state;
    if (state.stage == DONE) return;
    const SampleOptions choice = options[row];
    const double u = uniform(choice.seed, uint64_t(positions[row]) + 1);
    logits += row * vocabulary;
    const uint32_t id = state.stage == FEW ? draw_of_few(memory.few, choice, state, parts, logits, vocabulary, u)
                                           : draw_of_many(memory.many, choice, state, parts, logits, vocabulary, u);
    if (threadIdx.x == 0) ids[row] = id;
}
