// The gated half of a feed-forward block: out[i, j] = act(gate[i, j]) * up[i, j].
//
// act is SiLU, x / (1 + e^-x), or the tanh form of GELU, written as x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715
// x^3). gate and up [rows, width], F32 or BF16, with their rows `stride` elements apart (the two halves of one product
// of width 2 * width, say); out [rows, width] in F32, BF16 or SPLIT.
//
// Bound: reading gate and up, writing out. 16-byte loads where every row is aligned to them, single elements otherwise.
// The arithmetic is F32 with the accurate exponential and division: the result feeds the widest product of the block. From
// BF16 to BF16 (many rows: prompts, training) they are the fast ones, since the accurate ones took longer than the memory:
// [4096, 1408] 13.3 us for 35 MB, where the way back moves 69 MB in 15.1.

#include "training/gate.cuh"
#include "training/rows.cuh"

__device__ __forceinline__ float gated(float x, float up, int activation) {
    float z = x;
    if (activation == GELU_TANH) z = 2.0f * (0.7978846f * fmaf(x * x * x, 0.044715f, x));
    return x / (1.0f + expf(-z)) * up;
}

// COUNT elements from memory to registers as F32: four of F32 by one 16-byte load, or a single one.
template <Form form, int COUNT>
__device__ __forceinline__ void load_some(float (&to)[COUNT], const void *from, size_t at) {
    if constexpr (COUNT == 1) {
        to[0] = load<form>(from, 0, 0, at);
    } else {
        static_assert(form == F32 && COUNT == 4, "16 bytes");
        const float4 v = *reinterpret_cast<const float4 *>(static_cast<const float *>(from) + at);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
}

template <int COUNT>
__device__ __forceinline__ void store_some(const float (&from)[COUNT], void *out, int form, size_t row, size_t width,
                                           size_t column) {
    if constexpr (COUNT == 1) {
        if (form == F32) store<F32>(out, row, width, column, from[0]);
        if (form == BF16) store<BF16>(out, row, width, column, from[0]);
        if (form == SPLIT) store<SPLIT>(out, row, width, column, from[0]);
    } else if (form == F32) {
        *reinterpret_cast<float4 *>(static_cast<float *>(out) + row * width + column) = {from[0], from[1], from[2], from[3]};
    } else if (form == BF16) {
        *reinterpret_cast<uint2 *>(static_cast<bf16 *>(out) + row * width + column) =
            make_uint2(pack(from[0], from[1]), pack(from[2], from[3]));
    } else {
        const Split a = split(from[0]), b = split(from[1]), c = split(from[2]), d = split(from[3]);
        bf16 *to = static_cast<bf16 *>(out) + row * 2 * width + column;
        *reinterpret_cast<uint2 *>(to) = make_uint2(pack(a.high, b.high), pack(c.high, d.high));
        *reinterpret_cast<uint2 *>(to + width) = make_uint2(pack(a.low, b.low), pack(c.low, d.low));
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
GATED_ACTIVATION(gated_activation_f32_any, F32, 1)
GATED_ACTIVATION(gated_activation_bf16_any, BF16, 1)

// Eight columns at a time, each thread two eights a block's width apart, both on their way at once. Eights are counted
// through all rows, so that no thread is idle where a row is no multiple of a block.
constexpr int THREADS = 256, EACH = 2;

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_activation_bf16(const bf16 *gate, size_t gate_stride, const bf16 *up, size_t up_stride,
                          bf16 *__restrict__ out, int rows, int width, int activation) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const unsigned eights = width / 8, count = rows * eights, first = blockIdx.x * (EACH * THREADS) + threadIdx.x;
    uint4 raw[EACH][2];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const unsigned index = first + i * THREADS;
        if (index >= count) break;
        const size_t row = index / eights, column = (index - unsigned(row) * eights) * 8;
        raw[i][0] = __ldcg(reinterpret_cast<const uint4 *>(gate + row * gate_stride + column));
        raw[i][1] = __ldcg(reinterpret_cast<const uint4 *>(up + row * up_stride + column));
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const unsigned index = first + i * THREADS;
        if (index >= count) break;
        float x[8], factor[8];
        unpack_eight(raw[i][0], x);
        unpack_eight(raw[i][1], factor);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = x[j] * find_gate(x[j], activation).sigmoid * factor[j];
        reinterpret_cast<uint4 *>(out)[index] = pack_eight(x);
    }
}
