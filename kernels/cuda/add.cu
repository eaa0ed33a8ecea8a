// Elementwise sums, factors and conversions that no product's epilogue takes up.
//
//   add                  residual[i] += y[i]                            y F32 or BF16
//   add_gated_rows       residual[i, :] += y[i, :] / (1 + e^-gate[i])   (Qwen2-MoE's shared expert) y F32 or BF16
//   add_bias             x[i, :] += bias[:]                             x F32 or BF16, bias F32 (constant)
//   scale                x[i] *= factor                                 x F32
//   convert              out[i, :] = x[i, :]                            x F32, out BF16 or SPLIT
//
// residual is F32. Bound: the bytes read and written; a thread takes four elements at a time where rows are a multiple
// of four wide, else one. Every sum is one rounded F32 addition, so there is no order to keep.

#include "vocabulary/device.cuh"

template <Form form, int COUNT>
__device__ __forceinline__ void load_some(float (&to)[COUNT], const void *from, size_t at) {
    if constexpr (COUNT == 1) {
        to[0] = load<form>(from, 0, 0, at);
    } else if constexpr (form == F32) {
        const float4 v = *reinterpret_cast<const float4 *>(static_cast<const float *>(from) + at);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else {
        const uint2 v = *reinterpret_cast<const uint2 *>(static_cast<const bf16 *>(from) + at);
        to[0] = low_half(v.x), to[1] = high_half(v.x), to[2] = low_half(v.y), to[3] = high_half(v.y);
    }
}

template <Form form, int COUNT>
__device__ __forceinline__ void store_some(const float (&from)[COUNT], void *to, size_t at) {
    if constexpr (COUNT == 1) {
        store<form>(to, 0, 0, at, from[0]);
    } else if constexpr (form == F32) {
        *reinterpret_cast<float4 *>(static_cast<float *>(to) + at) = {from[0], from[1], from[2], from[3]};
    } else {
        *reinterpret_cast<uint2 *>(static_cast<bf16 *>(to) + at) =
            make_uint2(pack(from[0], from[1]), pack(from[2], from[3]));
    }
}

template <Form form, int COUNT>
__device__ __forceinline__ void add_elements(float *__restrict__ residual, const void *y, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t stride = size_t(gridDim.x) * blockDim.x * COUNT;
    for (size_t at = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * COUNT; at < count; at += stride) {
        float r[COUNT], term[COUNT];
        load_some<F32, COUNT>(r, residual, at);
        load_some<form, COUNT>(term, y, at);
#pragma unroll
        for (int i = 0; i < COUNT; i++) r[i] += term[i];
        store_some<F32, COUNT>(r, residual, at);
    }
}

// In the kernels by rows, blocks along x cover a row and blocks along y take rows in turn.
template <Form form, int COUNT>
__device__ __forceinline__ void add_gated(float *__restrict__ residual, const void *y, const float *gate, int rows,
                                          int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (column >= width) return;
    for (size_t row = blockIdx.y; row < rows; row += gridDim.y) {
        const size_t at = row * width + column;
        float r[COUNT], term[COUNT];
        load_some<F32, COUNT>(r, residual, at);
        load_some<form, COUNT>(term, y, at);
        const float factor = 1.0f / (1.0f + expf(-gate[row]));
        // Two roundings, as the operation is defined: scaled rows, then their sum.
#pragma unroll
        for (int i = 0; i < COUNT; i++) r[i] = __fadd_rn(r[i], __fmul_rn(term[i], factor));
        store_some<F32, COUNT>(r, residual, at);
    }
}

template <Form form, int COUNT>
__device__ __forceinline__ void add_to_rows(void *__restrict__ x, const float *__restrict__ bias, int rows, int width) {
    let_next_kernel_start();
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    float term[COUNT] = {};
    if (column < width) load_some<F32, COUNT>(term, bias, column);
    wait_for_previous_kernel();
    if (column >= width) return;
    for (size_t row = blockIdx.y; row < rows; row += gridDim.y) {
        const size_t at = row * width + column;
        float value[COUNT];
        load_some<form, COUNT>(value, x, at);
#pragma unroll
        for (int i = 0; i < COUNT; i++) value[i] += term[i];
        store_some<form, COUNT>(value, x, at);
    }
}

template <int COUNT> __device__ __forceinline__ void scale_elements(float *__restrict__ x, float factor, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t stride = size_t(gridDim.x) * blockDim.x * COUNT;
    for (size_t at = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * COUNT; at < count; at += stride) {
        float value[COUNT];
        load_some<F32, COUNT>(value, x, at);
#pragma unroll
        for (int i = 0; i < COUNT; i++) value[i] *= factor;
        store_some<F32, COUNT>(value, x, at);
    }
}

template <int COUNT>
__device__ __forceinline__ void convert_rows(const float *x, void *__restrict__ out, int form, int rows, int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
    if (column >= width) return;
    for (size_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float value[COUNT];
        load_some<F32, COUNT>(value, x, row * width + column);
        if (form == BF16) {
            store_some<BF16, COUNT>(value, out, row * width + column);
        } else {
            float rest[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; i++) rest[i] = value[i] - __bfloat162float(__float2bfloat16_rn(value[i]));
            store_some<BF16, COUNT>(value, out, row * 2 * width + column);
            store_some<BF16, COUNT>(rest, out, row * 2 * width + width + column);
        }
    }
}

#define BY_INPUT(SUFFIX, FORM, COUNT)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        add_##SUFFIX(float *__restrict__ residual, const void *y, size_t count) {                                      \
        add_elements<FORM, COUNT>(residual, y, count);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        add_gated_rows_##SUFFIX(float *__restrict__ residual, const void *y, const float *gate, int rows, int width) { \
        add_gated<FORM, COUNT>(residual, y, gate, rows, width);                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        add_bias_##SUFFIX(void *__restrict__ x, const float *__restrict__ bias, int rows, int width) {                 \
        add_to_rows<FORM, COUNT>(x, bias, rows, width);                                                                \
    }

BY_INPUT(f32, F32, 4)
BY_INPUT(bf16, BF16, 4)
BY_INPUT(f32_any, F32, 1)
BY_INPUT(bf16_any, BF16, 1)

extern "C" __global__ void __launch_bounds__(256) scale(float *__restrict__ x, float factor, size_t count) {
    scale_elements<4>(x, factor, count);
}

extern "C" __global__ void __launch_bounds__(256) scale_any(float *__restrict__ x, float factor, size_t count) {
    scale_elements<1>(x, factor, count);
}

extern "C" __global__ void __launch_bounds__(256)
    convert(const float *x, void *__restrict__ out, int form, int rows, int width) {
    convert_rows<4>(x, out, form, rows, width);
}

extern "C" __global__ void __launch_bounds__(256)
    convert_any(const float *x, void *__restrict__ out, int form, int rows, int width) {
    convert_rows<1>(x, out, form, rows, width);
}
