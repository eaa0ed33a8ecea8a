// The slow product: out [n, rows] (+)= x W^T + bias, for weights W [rows, cols] as the file stores them (blocks.cuh).
//
// It serves the types that have no tile form, so that every model runs; the fast products are those of linear/product.cuh. x
// is a SPLIT operand [n, 2, cols], out and bias are f32.
//
// A warp has one output feature and up to eight rows of x at a time: lane l takes columns 8 (l + 32 k) for k = 0, 1, ..,
// unpacks their weights once for the eight rows, and adds products to one f32 accumulator a row; then the lanes' sums are
// added in the butterfly order of warp_sum. The order is the same for every n and every place of a row, and so are the bits.
//
// Bound: the weights are read n / 8 times (later times mostly from the second-level cache), and unpacking takes 5 to 10
// instructions a weight, so one row runs at a part of the memory's speed. That is accepted: these types are the exception.
//
// Routers are F32 with a few features (8 of 512 columns, say), where two blocks would go through the rows of x one after
// the other, 12 us for 16 rows. So narrow F32 matrices have kernels of their own, in which a warp has one or four rows of
// x, the first weights are asked for before the kernel before is done, and four loads of a row are on their way at once.
// The order of the sum is the same, and so are the bits. Bound: latency, of two loads and the sum over the warp.
#include "vocabulary/blocks.cuh"

constexpr int WARPS_PER_BLOCK = 4;
constexpr int ROWS_AT_ONCE = 8;

// Eight elements of both parts of an operand, added: the numbers that were split, to 16 bits of mantissa. `cols` is a
// multiple of 8.
__device__ __forceinline__ void operand_of_eights(const bf16 *high, int cols, int column, float (&out)[8]) {
    const uint4 highs = *reinterpret_cast<const uint4 *>(high + column);
    const uint4 lows = *reinterpret_cast<const uint4 *>(high + cols + column);
    const uint32_t a[4] = {highs.x, highs.y, highs.z, highs.w}, b[4] = {lows.x, lows.y, lows.z, lows.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        out[2 * k] = low_half(a[k]) + low_half(b[k]);
        out[2 * k + 1] = high_half(a[k]) + high_half(b[k]);
    }
}

// The same for any number of columns.
__device__ __forceinline__ void operand(const bf16 *high, int cols, int column, float (&out)[8]) {
    if (cols % 8 == 0) {
        operand_of_eights(high, cols, column, out);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const bool inside = column + k < cols;
            const float first = inside ? __bfloat162float(high[column + k]) : 0.0f;
            out[k] = first + (inside ? __bfloat162float(high[cols + column + k]) : 0.0f);
        }
    }
}

// Blocks of four warps; `bias` may be null. `add` keeps what `out` holds and adds to it.
template <class Format>
__device__ __forceinline__ void multiply(float *out, const uint8_t *__restrict__ matrix, const bf16 *x,
                                         const float *__restrict__ bias, int n, int rows, int cols, int out_stride,
                                         int add) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * WARPS_PER_BLOCK + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    for (int first = 0; first < n; first += ROWS_AT_ONCE) {
        float sums[ROWS_AT_ONCE] = {};
        for (int column = lane * 8; column < cols; column += WARP * 8) {
            float weights[8];
            Format::eight(matrix, rows, cols, row, column, weights);
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                if (first + i < n) {
                    float values[8];
                    operand(x + size_t(first + i) * 2 * cols, cols, column, values);
#pragma unroll
                    for (int k = 0; k < 8; k++) sums[i] = fmaf(weights[k], values[k], sums[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; i++) {
            const float sum = warp_sum(sums[i]);
            if (lane == i && first + i < n) {
                float *to = out + size_t(first + i) * out_stride + row;
                const float total = bias ? sum + bias[row] : sum;
                *to = add ? *to + total : total;
            }
        }
    }
}

// The same for F32 and ROWS rows of x from ROWS blockIdx.y on; `cols` is a multiple of 8, and the addresses of 16.
template <int ROWS>
__device__ __forceinline__ void multiply_narrow(float *out, const float *__restrict__ matrix, const bf16 *x,
                                                const float *__restrict__ bias, int n, int rows, int cols,
                                                int out_stride, int add) {
    constexpr int STEP = WARP * 8, STEPS = 4;
    let_next_kernel_start();
    const int row = blockIdx.x * WARPS_PER_BLOCK + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first = blockIdx.y * ROWS;
    // Warps past the last row repeat it and store nothing.
    const float *weights_of_row = matrix + size_t(min(row, rows - 1)) * cols;
    float weights[STEPS][8];
    const auto load_weights = [&](int base) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int column = base + step * STEP + lane * 8;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (column < cols) four = *reinterpret_cast<const float4 *>(weights_of_row + column + 4 * half);
                weights[step][4 * half] = four.x;
                weights[step][4 * half + 1] = four.y;
                weights[step][4 * half + 2] = four.z;
                weights[step][4 * half + 3] = four.w;
            }
        }
    };
    load_weights(0);
    wait_for_previous_kernel();
    float sums[ROWS] = {};
    for (int base = 0; base < cols; base += STEPS * STEP) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const bf16 *of_row = x + size_t(min(first + i, n - 1)) * 2 * cols;
            float values[STEPS][8];
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                // Past the last column a zero meets a zero, which changes no sum.
                const int column = base + step * STEP + lane * 8;
                if (column < cols) {
                    operand_of_eights(of_row, cols, column, values[step]);
                } else {
#pragma unroll
                    for (int k = 0; k < 8; k++) values[step][k] = 0.0f;
                }
            }
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int k = 0; k < 8; k++) sums[i] = fmaf(weights[step][k], values[step][k], sums[i]);
            }
        }
        if (base + STEPS * STEP < cols) load_weights(base + STEPS * STEP);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const float sum = warp_sum(sums[i]);
        if (lane == i && row < rows && first + i < n) {
            float *to = out + size_t(first + i) * out_stride + row;
            const float total = bias ? sum + bias[row] : sum;
            *to = add ? *to + total : total;
        }
    }
}

#define LINEAR_PLAIN_NARROW(ROWS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS_PER_BLOCK * WARP, 4)                                                  \
        linear_plain_f32_narrow_##ROWS(float *out, const float *__restrict__ matrix, const bf16 *x,                          \
                                       const float *__restrict__ bias, int n, int rows, int cols, int out_stride, int add) { \
        multiply_narrow<ROWS>(out, matrix, x, bias, n, rows, cols, out_stride, add);                                         \
    }

LINEAR_PLAIN_NARROW(1)
LINEAR_PLAIN_NARROW(4)

#define LINEAR_PLAIN(name, Format)                                                                                           \
    extern "C" __global__ void __launch_bounds__(WARPS_PER_BLOCK * WARP, 4)                                                  \
        linear_plain_##name(float *out, const uint8_t *__restrict__ matrix, const bf16 *x,                                   \
                            const float *__restrict__ bias, int n, int rows, int cols, int out_stride, int add) {            \
        multiply<blocks::Format>(out, matrix, x, bias, n, rows, cols, out_stride, add);                                      \
    }

LINEAR_PLAIN(f32, F32)
LINEAR_PLAIN(f16, F16)
LINEAR_PLAIN(bf16, Bf16)
LINEAR_PLAIN(q4_0, Q4_0)
LINEAR_PLAIN(q4_1, Q4_1)
LINEAR_PLAIN(q5_0, Q5_0)
LINEAR_PLAIN(q5_1, Q5_1)
LINEAR_PLAIN(q8_0, Q8_0)
LINEAR_PLAIN(q2_k, Q2_K)
LINEAR_PLAIN(q3_k, Q3_K)
LINEAR_PLAIN(q4_k, Q4_K)
LINEAR_PLAIN(q5_k, Q5_K)
LINEAR_PLAIN(q6_k, Q6_K)
