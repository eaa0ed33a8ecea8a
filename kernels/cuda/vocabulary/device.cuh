// The small vocabulary that every kernel shares: numbers in two precisions, sums of a warp and of a block in one order,
// tensor-core products, asynchronous copies, and the overlap of one kernel's start with the end of the one before.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;
using bf16x2 = __nv_bfloat162;

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;

// ---- Overlap of consecutive kernels (programmatic dependent launch, sm_90 on; nothing before it) ----------------------

// Lets the next kernel in the stream start: its blocks take free multiprocessors and stop in `wait_for_previous_kernel`.
// Call it first: it only says that all blocks of this kernel have started.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before is complete and its writes are visible. Every thread of EVERY kernel calls it before it reads
// what another kernel wrote or writes anything at all; only constant data (weights) may be read earlier. A kernel that left
// it out would let the one after run beside the one before.
//
// Its promise is for plain loads. A block may be on its multiprocessor before that data was written, and the read-only path
// (`ld.global.nc`: `__ldg`, and any pointer to const that a kernel takes as `__restrict__`) promises nothing about data that
// change while the kernel runs. So `__restrict__` on what a kernel only reads, and `__ldg`, are for constant data alone:
// weights, biases, inverse frequencies. `__restrict__` on what it writes keeps loads free to pass the stores.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Numbers ----------------------------------------------------------------------------------------------------------

// Two bfloat16 whose sum is `x` to 16 bits of mantissa: what a product of few rows takes as its operand.
struct Split {
    bf16 high, low;
};

__device__ __forceinline__ Split split(float x) {
    const bf16 high = __float2bfloat16_rn(x);
    return {high, __float2bfloat16_rn(x - __bfloat162float(high))};
}

__device__ __forceinline__ uint32_t pack(bf16 low_half, bf16 high_half) {
    return uint32_t(__bfloat16_as_ushort(low_half)) | uint32_t(__bfloat16_as_ushort(high_half)) << 16;
}

__device__ __forceinline__ uint32_t pack(float low_half, float high_half) {
    return pack(__float2bfloat16_rn(low_half), __float2bfloat16_rn(high_half));
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// How an activation is stored. SPLIT is `[rows, 2, width]` of bfloat16: a row's high parts, then its low parts.
enum Form { F32 = 0, BF16 = 1, SPLIT = 2 };

template <Form form> __device__ __forceinline__ void store(void *out, size_t row, size_t width, size_t column, float x) {
    if constexpr (form == F32) {
        static_cast<float *>(out)[row * width + column] = x;
    } else if constexpr (form == BF16) {
        static_cast<bf16 *>(out)[row * width + column] = __float2bfloat16_rn(x);
    } else {
        const Split parts = split(x);
        bf16 *row_start = static_cast<bf16 *>(out) + row * 2 * width + column;
        row_start[0] = parts.high;
        row_start[width] = parts.low;
    }
}

template <Form form> __device__ __forceinline__ float load(const void *in, size_t row, size_t width, size_t column) {
    if constexpr (form == F32) {
        return static_cast<const float *>(in)[row * width + column];
    } else if constexpr (form == BF16) {
        return __bfloat162float(static_cast<const bf16 *>(in)[row * width + column]);
    } else {
        const bf16 *row_start = static_cast<const bf16 *>(in) + row * 2 * width + column;
        return __bfloat162float(row_start[0]) + __bfloat162float(row_start[width]);
    }
}

// ---- Sums: the same order whatever runs beside ------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

__device__ __forceinline__ float warp_maximum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, offset));
    return x;
}

// The sum over a block of `WARPS` warps, in every thread. `scratch` holds WARPS floats and may be used again after the call's
// own barriers.
template <int WARPS> __device__ __forceinline__ float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += scratch[warp];
    return total;
}

// ---- Loads ------------------------------------------------------------------------------------------------------------

// Sixteen bytes that are read once: they leave no trace in the first-level cache. Constant data, through the read-only path.
__device__ __forceinline__ uint4 load_constant_streaming(const void *from) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

// The same of what another kernel wrote.
__device__ __forceinline__ uint4 load_written_streaming(const void *from) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes from global to shared memory; where `valid` is false it writes zeros and reads nothing.
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of the latest groups of copies are still on their way.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- Tensor cores -----------------------------------------------------------------------------------------------------

// d += a b with a [16, 16] row-major, b [16, 8] column-major, d [16, 8] in single precision. Lane l = 4 g + t holds
// a: (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..); b: (2t.., g), (2t + 8.., g); d: (g, 2t..), (g + 8, 2t..).
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements from shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(shared_row)));
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&out)[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(shared_row)));
}
