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

__device__ __forceinline__ void load_eight(const float *from, float (&x)[8]) {
    const float4 a = *reinterpret_cast<const float4 *>(from), b = *reinterpret_cast<const float4 *>(from + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// Eight consecutive elements of a head with all that turns them; `half` is a multiple of eight. Loads and arithmetic are
// apart, so that loads can be on their way while their use is far.
struct Piece {
    float x[8], partner[8], cosine[8], sine[8];
    int first, partner_first;

    // `phases`: of the head's row, `half` cosines, then sines.
    __device__ __forceinline__ void load(const float *head, const float *phases, int half, int element) {
        const bool low = element < half, turns = element < 2 * half;
        const int pair = low ? element : element - half;
        first = element;
        partner_first = !turns ? element : low ? element + half : pair;
        load_eight(head + first, x);
        if (turns) {
            load_eight(head + partner_first, partner);
            load_eight(phases + pair, cosine);
            load_eight(phases + half + pair, sine);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (!turns) partner[i] = 0.0f, cosine[i] = 1.0f, sine[i] = 0.0f;
            if (low) sine[i] = -sine[i];
        }
    }

    // `factor` is of the head's norm, `weight` null without one.
    __device__ __forceinline__ void turn(const float *weight, float factor, float (&out)[8]) {
        if (weight != nullptr) {
            float own[8], other[8];
            load_eight(weight + first, own);
            load_eight(weight + partner_first, other);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] = __fmul_rn(__fmul_rn(x[i], factor), own[i]);
                partner[i] = __fmul_rn(__fmul_rn(partner[i], factor), other[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = fmaf(x[i], cosine[i], __fmul_rn(partner[i], sine[i]));
    }
};

// The factor of a head's norm, by four consecutive lanes: each takes the elements 32 s + 8 t .. + 8. The whole warp
// calls it; lanes whose four are not `active` read nothing.
template <int WIDTH>
__device__ __forceinline__ float norm_factor(const float *head, float epsilon, bool active) {
    float squares = 0.0f;
    if (active) {
#pragma unroll
        for (int s = 0; s < WIDTH / 32; s++) {
            float x[8];
            load_eight(head + 32 * s + threadIdx.x % 4 * 8, x);
#pragma unroll
            for (int i = 0; i < 8; i++) squares = fmaf(x[i], x[i], squares);
        }
    }
    squares += __shfl_xor_sync(FULL_WARP, squares, 1);
    squares += __shfl_xor_sync(FULL_WARP, squares, 2);
    return 1.0f / sqrtf(fmaf(squares, 1.0f / WIDTH, epsilon));
}

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
