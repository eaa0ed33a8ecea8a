// AdamW whose moments take a byte each. A block of 256 elements keeps, of the first moment and of the root of the second, 256
// codes of a dynamic map and the magnitude that the code of 1 stands for:
//
//   m = absmax level(code)         unpacked, moved as AdamW moves it, and packed again:
//   absmax = max |m|               code = the code of the level nearest to m / absmax
//
// Dettmers et al., "8-bit optimizers via block-wise quantization", 2022. Why the root: crates/ironloom-train/src/optimizer/
// adamw_8bit.rs, whose bits these are.
//
// A warp takes a block of elements, eight a lane: four of its first half and four of its second, so that a warp's accesses are
// whole lines. Bound: 18 bytes a parameter; close behind are four lookups in shared memory and three divisions and a root,
// exactly rounded, for each.

#include "optimizer/adamw.cuh"
#include "optimizer/dynamic_map.cuh"

constexpr int BLOCK = 256, HALF = BLOCK / 2, THREADS = 256;

// Four codes of a word, unpacked.
template <class Map>
__device__ __forceinline__ void unpack_four(float (&to)[4], uint32_t codes, const Map &map, float absmax) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = product(absmax, map.level(codes >> 8 * i & 0xff));
}

// The word of four codes.
template <class Map>
__device__ __forceinline__ uint32_t pack_four(const float (&from)[4], const Map &map, float absmax) {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) codes |= map.code(absmax == 0.0f ? 0.0f : __fdiv_rn(from[i], absmax)) << 8 * i;
    return codes;
}

__device__ __forceinline__ float largest_magnitude(const float (&x)[2][4]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x[i / 4][i % 4]));
    return warp_maximum(largest);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    adamw_8bit(float *__restrict__ weights, const float *gradient, uint32_t *__restrict__ first,
               float *__restrict__ first_absmax, uint32_t *__restrict__ second, float *__restrict__ second_absmax,
               bf16 *__restrict__ rounded, const StepValues *step, AdamWOptions options, size_t blocks) {
    __shared__ dynamic_map::Map<true> signed_map;
    __shared__ dynamic_map::Map<false> unsigned_map;
    let_next_kernel_start();
    dynamic_map::copy_table(signed_map, dynamic_map::SIGNED);
    dynamic_map::copy_table(unsigned_map, dynamic_map::UNSIGNED);
    wait_for_previous_kernel();
    if (step->apply == 0) return;
    __syncthreads();
    const AdamW rule(options, step);
    const int lane = threadIdx.x % WARP;
    const size_t warps = size_t(gridDim.x) * (THREADS / WARP);
    for (size_t block = size_t(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP; block < blocks; block += warps) {
        const size_t element = block * BLOCK + lane * 4, word = element / 4;
        float w[2][4], g[2][4], m[2][4], v[2][4];
        uint32_t first_codes[2], second_codes[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            load_four(w[half], weights + element + half * HALF);
            load_four(g[half], gradient + element + half * HALF);
            first_codes[half] = first[word + half * (HALF / 4)];
            second_codes[half] = second[word + half * (HALF / 4)];
        }
        const float first_before = first_absmax[block], second_before = second_absmax[block];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unpack_four(m[half], first_codes[half], signed_map, first_before);
            unpack_four(v[half], second_codes[half], unsigned_map, second_before);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float square = product(v[half][i], v[half][i]);
                v[half][i] = rule(w[half][i], g[half][i], m[half][i], square);
            }
            store_four(weights + element + half * HALF, w[half]);
            if (rounded != nullptr) round_four(rounded + element + half * HALF, w[half]);
        }
        const float first_after = largest_magnitude(m), second_after = largest_magnitude(v);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            first[word + half * (HALF / 4)] = pack_four(m[half], signed_map, first_after);
            second[word + half * (HALF / 4)] = pack_four(v[half], unsigned_map, second_after);
        }
        if (lane == 0) {
            first_absmax[block] = first_after;
            second_absmax[block] = second_after;
        }
    }
}
