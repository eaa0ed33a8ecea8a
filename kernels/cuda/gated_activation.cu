// The gated half of a feed-forward block: out[i, j] = act(gate[i, j]) * up[i, j].
//
// act is SiLU, x / (1 + e^-x), or the tanh form of GELU, written as x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715
// x^3). gate and up [rows, width], F32 or BF16, with their rows `stride` elements apart (the two halves of one product
// of width 2 * width, say); out [rows, width] in F32, BF16 or SPLIT.
//
// Bound: reading gate and up, writing out. 16-byte loads where every row is aligned to them, single elements otherwise.
// The arithmetic is F32 with the accurate exponential and division: the result feeds the widest product of the block.

#include "vocabulary/device.cuh"

constexpr int GELU_TANH = 1;

__device__ __forceinline__ float gated(float x, float up, int activation) {
    float z = x;
    if (activation == GELU_TANH) z = 2.0f * (0.7978846f * fmaf(x * x * x, 0.044715f, x));
    return x / (1.0f + expf(-z)) * up;
}

// COUNT elements from memory to registers as F32: four of F32 or eight of BF16 by one 16-byte load, or a single one.
template <Form form, int COUNT>
__device__ __forceinline__ void load_some(float (&to)[COUNT], const void *from, size_t at) {
    if constexpr (COUNT == 1) {
        to[0] = load<form>(from, 0, 0, at);
    } else if constexpr (form == F32) {
        static_assert(COUNT == 4, "16 bytes");
        const float4 v = *reinterpret_cast<const float4 *>(static_cast<const float *>(from) + at);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
        static_assert(COUNT == 8, "16 bytes");
        const uint4 v = *reinterpret_cast<const uint4 *>(static_cast<const bf16 *>(from) + at);
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) to[2 * i] = low_half(pairs[i]), to[2 * i + 1] = high_half(pairs[i]);
    }
}

template <int COUNT>
__device__ __forceinline__ void store_some(const float (&from)[COUNT], void *out, int form, size_t row, size_t width,
                                           size_t column) {
    if constexpr (COUNT == 1) {
        if (form == F32) store<F32>(out, row, width, column, from[0]);
        if (form == BF16) store<BF16>(out, row, width, column, from[0]);
        if (form == SPLIT) store<SPLIT>(out, row, width, column, from[0]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            if (form == F32) {
                *reinterpret_cast<float4 *>(static_cast<float *>(out) + row * width + column + i) = {
                    from[i], from[i + 1], from[i + 2], from[i + 3]};
            } else if (form == BF16) {
                *reinterpret_cast<uint2 *>(static_cast<bf16 *>(out) + row * width + column + i) =
                    make_uint2(pack(from[i], from[i + 1]), pack(from[i + 2], from[i + 3]));
            } else {
                const Split a = split(from[i]), b = split(from[i + 1]), c = split(from[i + 2]), d = split(from[i + 3]);
                bf16 *to = static_cast<bf16 *>(out) + row * 2 * width + column + i;
                *reinterpret_cast<uint2 *>(to) = make_uint2(pack(a.high, b.high), pack(c.high, d.high));
                *reinterpret_cast<uint2 *>(to + width) = make_uint2(pack(a.low, b.low), pack(c.low, d.low));
            }
        }
    }
}

// Blocks along x cover a row, blocks along y take rows in turn.
template <Form input, int COUNT>
__device__ __forceinline__ void activate(const void *gate, size_t gate_stride, const void *up, size_t up_stride,
                                         void *__restrict__ out, int form, int rows, int width, int activation) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (column >= width) return;
    for (size_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float x[COUNT], factor[COUNT];
        load_some<input, COUNT>(x, gate, row * gate_stride + column);
        load_some<input, COUNT>(factor, up, row * up_stride + column);
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] = gated(x[i], factor[i], activation);
        store_some<COUNT>(x, out, form, row, width, column);
    }
}

#define GATED_ACTIVATION(NAME, INPUT, COUNT)                                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        NAME(const void *gate, size_t gate_stride, const void *up, size_t up_stride, void *__restrict__ out, int form, \
             int rows, int width, int activation) {                                                                    \
        activate<INPUT, COUNT>(gate, gate_stride, up, up_stride, out, form, rows, width, activation);                  \
    }

GATED_ACTIVATION(gated_activation_f32, F32, 4)
GATED_ACTIVATION(gated_activation_bf16, BF16, 8)
GATED_ACTIVATION(gated_activation_f32_any, F32, 1)
GATED_ACTIVATION(gated_activation_bf16_any, BF16, 1)
