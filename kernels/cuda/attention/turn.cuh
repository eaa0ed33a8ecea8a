// Queries and keys on their way into attention: an optional RMS-norm of a head, and the rotary embedding.
//
//   x'        = x / sqrt(mean(x^2) + epsilon) * weight        where a weight is given
//   y[i]      = x'[i] cos_i - x'[i + half] sin_i                              i < half
//   y[i+half] = x'[i + half] cos_i + x'[i] sin_i
//   y[i]      = x'[i]                                                         i >= 2 half
//
// A key may be turned by several blocks (those of the rows after it in the same pass), and must have the same bits in
// all: fused and separate products and sums are written out, not left to the compiler.
#pragma once

#include "../vocabulary/device.cuh"

// A head of WIDTH elements by a warp: a lane takes four at a time, from 4 * lane on. `half` is a multiple of four.
// Loads and arithmetic are apart, so that other loads can be asked for in between.
template <int WIDTH> struct WarpHead {
    static constexpr int QUADS = (WIDTH + 4 * WARP - 1) / (4 * WARP);
    float4 x[QUADS], partner[QUADS], cosine[QUADS], sine[QUADS], weight[QUADS], partner_weight[QUADS];

    static __device__ __forceinline__ int element(int quad) { return 4 * (threadIdx.x % WARP) + 4 * WARP * quad; }
    static __device__ __forceinline__ float4 four(const float *from) { return *reinterpret_cast<const float4 *>(from); }

    // `phases`: of the head's row, `half` cosines, then sines. `norm` is null without one.
    __device__ __forceinline__ void load(const float *head, const float *norm, const float *phases, int half) {
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const int first = element(q);
            x[q] = partner[q] = sine[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            cosine[q] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            if (first >= WIDTH) continue;
            x[q] = four(head + first);
            const bool turns = first < 2 * half, low = first < half;
            const int other = !turns ? first : low ? first + half : first - half, pair = low ? first : first - half;
            if (turns) {
                partner[q] = four(head + other);
                cosine[q] = four(phases + pair);
                sine[q] = four(phases + half + pair);
            }
            if (norm != nullptr) {
                weight[q] = four(norm + first);
                partner_weight[q] = four(norm + other);
            }
            if (low) sine[q] = make_float4(-sine[q].x, -sine[q].y, -sine[q].z, -sine[q].w);
        }
    }

    __device__ __forceinline__ void turn(const float *norm, float epsilon, float4 (&out)[QUADS]) {
        if (norm != nullptr) {
            float squares = 0.0f;
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                squares = fmaf(x[q].w, x[q].w,
                               fmaf(x[q].z, x[q].z, fmaf(x[q].y, x[q].y, fmaf(x[q].x, x[q].x, squares))));
            }
            const float factor = 1.0f / sqrtf(fmaf(warp_sum(squares), 1.0f / WIDTH, epsilon));
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                x[q] = product(product(x[q], factor), weight[q]);
                partner[q] = product(product(partner[q], factor), partner_weight[q]);
            }
        }
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            const float4 turned = product(partner[q], sine[q]);
            out[q].x = fmaf(x[q].x, cosine[q].x, turned.x);
            out[q].y = fmaf(x[q].y, cosine[q].y, turned.y);
            out[q].z = fmaf(x[q].z, cosine[q].z, turned.z);
            out[q].w = fmaf(x[q].w, cosine[q].w, turned.w);
        }
    }

    static __device__ __forceinline__ float4 product(float4 a, float4 b) {
        return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
    }
    static __device__ __forceinline__ float4 product(float4 a, float b) { return product(a, make_float4(b, b, b, b)); }
};

// A head of any width by a warp; `put(i, y)` takes each element once.
template <typename Put>
__device__ __forceinline__ void turn_head(const float *head, const float *weight, float epsilon, const float *phases,
                                          int half, int width, const Put &put) {
    const int lane = threadIdx.x % WARP;
    float factor = 1.0f;
    if (weight != nullptr) {
        float squares = 0.0f;
        for (int i = lane; i < width; i += WARP) squares = fmaf(head[i], head[i], squares);
        factor = 1.0f / sqrtf(__fadd_rn(warp_sum(squares) / float(width), epsilon));
    }
    const auto normed = [&](int i) {
        return weight != nullptr ? __fmul_rn(__fmul_rn(head[i], factor), weight[i]) : head[i];
    };
    for (int i = lane; i < width; i += WARP) {
        if (i >= 2 * half) {
            put(i, normed(i));
        } else if (i < half) {
            put(i, fmaf(normed(i), phases[i], -__fmul_rn(normed(i + half), phases[half + i])));
        } else {
            put(i, fmaf(normed(i), phases[i - half], __fmul_rn(normed(i - half), phases[i])));
        }
    }
}
