// What optimizers share: the values of a step, and the walk over parameters that lie one after another.
#pragma once

#include "../vocabulary/device.cuh"

// What changes from step to step; `StepValues` in src/gradient_norm.rs has the same layout. The host writes the first three
// before a step, `judge_step` the last two.
struct StepValues {
    float learning_rate;     // rate
    float adam_rate;         // rate / (1 - beta1^t)
    float adam_root_factor;  // 1 / sqrt(1 - beta2^t)
    float gradient_factor;   // what gradients are multiplied with as they are read
    uint32_t apply;          // 0: the step leaves every weight and every state as it is
};

// The rate times a number that stays, rounded once, as the processor's optimizers make it.
__device__ __forceinline__ float times_rate(const StepValues *step, double factor) {
    return float(double(step->learning_rate) * factor);
}

// Rules are made of these, each rounded by itself: the compiler would otherwise join a product and a sum, and the bits would
// not be those of the processor.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float difference(float a, float b) { return __fsub_rn(a, b); }

__device__ __forceinline__ void load_four(float (&to)[4], const float *from) {
    const float4 v = *reinterpret_cast<const float4 *>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

__device__ __forceinline__ void store_four(float *to, const float (&from)[4]) {
    *reinterpret_cast<float4 *>(to) = {from[0], from[1], from[2], from[3]};
}

__device__ __forceinline__ void round_four(bf16 *to, const float (&from)[4]) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(pack(from[0], from[1]), pack(from[2], from[3]));
}

// Calls `rule(w, g, m, v)` for each of `count` elements, four of them at a time in a thread, and keeps what it makes of w, of
// the first STATES of m and v, and of the bfloat16 copy of w where there is one. Every pointer at 16 bytes, `rounded` at 8.
template <int STATES, class Rule>
__device__ __forceinline__ void move_elements(float *__restrict__ weights, const float *gradient,
                                              float *__restrict__ first, float *__restrict__ second,
                                              bf16 *__restrict__ rounded, size_t count, const Rule &rule) {
    const size_t thread = size_t(blockIdx.x) * blockDim.x + threadIdx.x, threads = size_t(gridDim.x) * blockDim.x;
    const size_t whole = count - count % 4;
    for (size_t at = thread * 4; at < whole; at += threads * 4) {
        float w[4], g[4], m[4] = {}, v[4] = {};
        load_four(w, weights + at);
        load_four(g, gradient + at);
        if constexpr (STATES > 0) load_four(m, first + at);
        if constexpr (STATES > 1) load_four(v, second + at);
#pragma unroll
        for (int i = 0; i < 4; i++) rule(w[i], g[i], m[i], v[i]);
        store_four(weights + at, w);
        if constexpr (STATES > 0) store_four(first + at, m);
        if constexpr (STATES > 1) store_four(second + at, v);
        if (rounded != nullptr) round_four(rounded + at, w);
    }
    if (thread < count - whole) {
        const size_t at = whole + thread;
        float w = weights[at], m = 0.0f, v = 0.0f;
        if constexpr (STATES > 0) m = first[at];
        if constexpr (STATES > 1) v = second[at];
        rule(w, gradient[at], m, v);
        weights[at] = w;
        if constexpr (STATES > 0) first[at] = m;
        if constexpr (STATES > 1) second[at] = v;
        if (rounded != nullptr) rounded[at] = __float2bfloat16_rn(w);
    }
}
