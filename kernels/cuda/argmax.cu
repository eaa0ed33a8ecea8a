// The most likely token of each row: ids[i] = the lowest j at which logits[i, j] is largest.
//
// logits [rows, vocabulary] F32; ids [rows] u32. NaN loses to everything; a row of nothing but NaN gives u32::MAX, so
// that the host can complain. `workspace` is u64 [rows, 1 + blocks of a row]: a row's ticket, which is zero before the
// first call and zero again after each, then the best of each of its blocks.
//
// Bound: reading the logits (608 KB at 152,000, 0.2 us of the card's bandwidth) and the latency of two stages. Blocks
// of 2,048 logits each leave their best as one 64-bit key, whose order is that of the logit, then of the lower id; the
// block that takes a row's last ticket merges the keys. A maximum does not depend on the order it is taken in.

#include "vocabulary/device.cuh"

constexpr int THREADS = 256;
constexpr int PER_THREAD = 8;

// Larger keys for larger logits, then for lower ids; 0 for NaN, which no other logit gives.
__device__ __forceinline__ uint64_t key_of(float logit, uint32_t id) {
    if (isnan(logit)) return 0;
    const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 becomes 0: the two are equal
    const uint32_t ordered = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
    return uint64_t(ordered) << 32 | uint32_t(~id);
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The largest key of a block, in its first thread.
__device__ __forceinline__ uint64_t block_largest(uint64_t key) {
    __shared__ uint64_t of_warp[THREADS / WARP];
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) key = larger(key, __shfl_xor_sync(FULL_WARP, key, offset));
    __syncthreads();
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = key;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int warp = 0; warp < THREADS / WARP; warp++) key = larger(key, of_warp[warp]);
    }
    return key;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    argmax(const float *logits, uint32_t *__restrict__ ids, uint64_t *__restrict__ workspace, int vocabulary,
           int by_vectors) {
    __shared__ bool is_last;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t row = blockIdx.y;
    const uint32_t start = blockIdx.x * (THREADS * PER_THREAD);
    logits += row * vocabulary;
    uint64_t *const best_of_block = workspace + row * (1 + gridDim.x) + 1;
    unsigned *const ticket = reinterpret_cast<unsigned *>(best_of_block - 1);
    uint64_t best = 0;
    if (by_vectors != 0) {
#pragma unroll
        for (int i = 0; i < PER_THREAD / 4; i++) {
            const uint32_t id = start + (i * THREADS + threadIdx.x) * 4;
            if (id >= vocabulary) continue;
            const float4 v = *reinterpret_cast<const float4 *>(logits + id);
            best = larger(best, larger(larger(key_of(v.x, id), key_of(v.y, id + 1)),
                                       larger(key_of(v.z, id + 2), key_of(v.w, id + 3))));
        }
    } else {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const uint32_t id = start + i * THREADS + threadIdx.x;
            if (id < vocabulary) best = larger(best, key_of(logits[id], id));
        }
    }
    best = block_largest(best);
    if (threadIdx.x == 0) {
        best_of_block[blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    best = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += THREADS) best = larger(best, __ldcg(&best_of_block[i]));
    best = block_largest(best);
    if (threadIdx.x == 0) {
        ids[row] = ~uint32_t(best);
        *ticket = 0;
    }
}
