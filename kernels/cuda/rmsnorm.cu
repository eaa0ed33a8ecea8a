// Root-mean-square norm of F32 rows, the same with the result added to the residual stream, and that of a training step.
//
//   out[i, j] = x[i, j] / sqrt(mean_j(x[i, j]^2) + epsilon) * weight[j]              (rmsnorm: F32, BF16 or SPLIT)
//   residual[i, j] += the same                                                        (rmsnorm_add: F32, in place)
//   out as above, of x in F32 or BF16, and copy = x rounded to BF16 where wanted      (rmsnorm_training)
//
// The copy is what a training step keeps of x: the way back makes `out` again from it, and the gradients of x and weight.
//
// x [rows, runs * width] with rows `x_stride` elements apart: each run of `width` (a head of a query, say) has its own
// mean. weight [width] F32; out and residual [rows, runs * width].
//
// Bound: latency. One row of 2,048 is 8 KiB and stands between two products many times a token, so a row is read once,
// in one 16-byte load a thread where it fits, stays in registers, and passes a single barrier; the weights (constant)
// are on their way before the kernel before has ended. Runs of up to 256 take one warp each and no barrier. Widths that
// are not a multiple of 4, or above 16,384, take the plain kernel, which reads the row twice.
//
// A training step has thousands of rows and is bound by their bytes: there runs of up to 1,024 have a warp, so few registers
// that 4,096 rows are all on their way at once, and no barrier; the weights come last, from the first-level cache. A block for
// a row of 768 took 8.6 us for [4096, 768], a quarter of its threads idle. Wider ones have blocks of four vectors a thread: with
// one, [16384, 2048] came at 2.3 TB/s.
//
// The order of sums is a function of the width, and of whether the kernel is that of a training step.

#include "training/rows.cuh"

// What is normed. Its form is known when a kernel is compiled, but for those of a training step.
struct Input {
    const void *x;
    int form;
    size_t stride;
    bf16 *copy;  // [rows, runs * width], or null
};

struct Run {
    const void *x;        // its first element
    bf16 *copy;           // null where none is wanted
    size_t row;           // of the output
    size_t column;        // of its first element in that row
    size_t output_width;  // of a row of the output
};

__device__ __forceinline__ Run find_run(const Input &input, int runs, int width, size_t index) {
    const size_t row = index / runs, run = index % runs;
    return {element(input.x, input.form, row * input.stride + run * width),
            input.copy == nullptr ? nullptr : input.copy + index * width, row, run * width, size_t(runs) * width};
}

__device__ __forceinline__ float sum_of_squares(float4 v) {
    return fmaf(v.x, v.x, v.y * v.y) + fmaf(v.z, v.z, v.w * v.w);
}

__device__ __forceinline__ float4 scaled(float4 v, float factor, float4 w) {
    return {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
}

__device__ __forceinline__ float inverse_root(float sum, int width, float epsilon) {
    return 1.0f / sqrtf(sum / float(width) + epsilon);
}

__device__ __forceinline__ void store_four(void *out, int form, const Run &run, int column, float4 v) {
    const size_t place = run.column + column;
    if (form == F32) {
        *reinterpret_cast<float4 *>(static_cast<float *>(out) + run.row * run.output_width + place) = v;
    } else if (form == BF16) {
        *reinterpret_cast<uint2 *>(static_cast<bf16 *>(out) + run.row * run.output_width + place) =
            make_uint2(pack(v.x, v.y), pack(v.z, v.w));
    } else {
        const Split a = split(v.x), b = split(v.y), c = split(v.z), d = split(v.w);
        bf16 *to = static_cast<bf16 *>(out) + run.row * 2 * run.output_width + place;
        *reinterpret_cast<uint2 *>(to) = make_uint2(pack(a.high, b.high), pack(c.high, d.high));
        *reinterpret_cast<uint2 *>(to + run.output_width) = make_uint2(pack(a.low, b.low), pack(c.low, d.low));
    }
}

// A run for each group of LANES threads (a warp, or the whole block), VECTORS times four elements a thread. Weights are read
// before the run where a thread has few of them.
template <int THREADS, int LANES, int VECTORS, bool ADD>
__device__ __forceinline__ void normalize(const Input &input, const float *__restrict__ weight, void *__restrict__ out,
                                          int form, int rows, int runs, int width, float epsilon) {
    static_assert(LANES == WARP || LANES == THREADS, "a run takes a warp or a block");
    constexpr bool EARLY = LANES > WARP || VECTORS <= 2;
    let_next_kernel_start();
    const int lane = threadIdx.x % LANES, vectors = width / 4;
    const float4 *weights = reinterpret_cast<const float4 *>(weight);
    float4 w[EARLY ? VECTORS : 1], v[VECTORS], before[ADD ? VECTORS : 1];
    if constexpr (EARLY) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int vector = lane + i * LANES;
            w[i] = vector < vectors ? weights[vector] : float4{};
        }
    }
    wait_for_previous_kernel();
    const size_t index = size_t(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    // Whole warps leave where a block holds several runs; a run that takes the block is never past the end.
    if (index >= size_t(rows) * runs) return;
    const Run run = find_run(input, runs, width, index);
    float *residual = static_cast<float *>(out) + run.row * run.output_width + run.column;
    float sum = 0.0f;
    // Loops of loads alone: all are on their way before the first is waited for. Rows in F32 come by plain loads, since a block
    // may have them in its first-level cache.
    if (input.form == F32) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int vector = lane + i * LANES;
            v[i] = vector < vectors ? static_cast<const float4 *>(run.x)[vector] : float4{};
            if constexpr (ADD) before[i] = vector < vectors ? reinterpret_cast<float4 *>(residual)[vector] : float4{};
        }
    } else {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int vector = lane + i * LANES;
            v[i] = vector < vectors ? four(load_four(run.x, BF16, vector), BF16) : float4{};
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) sum += sum_of_squares(v[i]);
    sum = warp_sum(sum);
    if constexpr (LANES > WARP) {
        constexpr int WARPS = THREADS / WARP;
        __shared__ __align__(16) float partial[WARPS];
        if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = sum;
        __syncthreads();
        float4 sums{};
#pragma unroll
        for (int i = 0; i < WARPS / 4; i++) {
            const float4 four = reinterpret_cast<const float4 *>(partial)[i];
            sums = {sums.x + four.x, sums.y + four.y, sums.z + four.z, sums.w + four.w};
        }
        sum = (sums.x + sums.y) + (sums.z + sums.w);
    }
    const float factor = inverse_root(sum, width, epsilon);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int vector = lane + i * LANES;
        if (vector >= vectors) continue;
        float4 factors;
        if constexpr (EARLY) factors = w[i];
        else factors = weights[vector];
        const float4 y = scaled(v[i], factor, factors);
        if constexpr (ADD) {
            const float4 r = before[i];
            reinterpret_cast<float4 *>(residual)[vector] = {r.x + y.x, r.y + y.y, r.z + y.z, r.w + y.w};
        } else {
            store_four(out, form, run, vector * 4, y);
            if (run.copy != nullptr) store_four(run.copy, BF16, vector, v[i]);
        }
    }
}

// Any width: the row is read once for the sum and once for the result.
template <bool ADD>
__device__ __forceinline__ void normalize_any(const Input &input, const float *__restrict__ weight,
                                              void *__restrict__ out, int form, int runs, int width, float epsilon) {
    constexpr int THREADS = 256;
    __shared__ float scratch[THREADS / WARP];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Run run = find_run(input, runs, width, blockIdx.x);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float value = load_one(run.x, input.form, i);
        sum = fmaf(value, value, sum);
    }
    const float factor = inverse_root(block_sum<THREADS / WARP>(sum, scratch), width, epsilon);
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float value = load_one(run.x, input.form, i), y = value * factor * weight[i];
        const size_t column = run.column + i;
        if (run.copy != nullptr) store_one(run.copy, BF16, i, value);
        if constexpr (ADD) {
            static_cast<float *>(out)[run.row * run.output_width + column] += y;
        } else if (form == F32) {
            store<F32>(out, run.row, run.output_width, column, y);
        } else if (form == BF16) {
            store<BF16>(out, run.row, run.output_width, column, y);
        } else {
            store<SPLIT>(out, run.row, run.output_width, column, y);
        }
    }
}

// A kernel's name ends in the largest width it takes.
#define RMSNORM(LARGEST, THREADS, LANES, VECTORS)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        rmsnorm_##LARGEST(const float *x, size_t x_stride, const float *__restrict__ weight, void *__restrict__ out,   \
                          int form, int rows, int runs, int width, float epsilon) {                                    \
        normalize<THREADS, LANES, VECTORS, false>({x, F32, x_stride, nullptr}, weight, out, form, rows, runs, width,   \
                                                  epsilon);                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        rmsnorm_add_##LARGEST(const float *x, size_t x_stride, const float *__restrict__ weight,                       \
                              void *__restrict__ residual, int form, int rows, int runs, int width, float epsilon) {   \
        normalize<THREADS, LANES, VECTORS, true>({x, F32, x_stride, nullptr}, weight, residual, form, rows, runs,      \
                                                 width, epsilon);                                                      \
    }

RMSNORM(256, 128, 32, 2)
RMSNORM(1024, 256, 256, 1)
RMSNORM(2048, 512, 512, 1)
RMSNORM(4096, 512, 512, 2)
RMSNORM(8192, 512, 512, 4)
RMSNORM(16384, 512, 512, 8)

#define RMSNORM_TRAINING(LARGEST, THREADS, LANES, VECTORS, BLOCKS)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        rmsnorm_training_##LARGEST(const void *x, size_t x_stride, const float *__restrict__ weight,                   \
                                   void *__restrict__ out, int form, int rows, int runs, int width, float epsilon,     \
                                   int x_form, bf16 *copy) {                                                           \
        normalize<THREADS, LANES, VECTORS, false>({x, x_form, x_stride, copy}, weight, out, form, rows, runs, width,   \
                                                  epsilon);                                                            \
    }

RMSNORM_TRAINING(256, 256, WARP, 2, 8)
RMSNORM_TRAINING(512, 256, WARP, 4, 4)
RMSNORM_TRAINING(768, 256, WARP, 6, 4)
RMSNORM_TRAINING(1024, 256, WARP, 8, 4)
RMSNORM_TRAINING(2048, 128, 128, 4, 8)
RMSNORM_TRAINING(4096, 256, 256, 4, 4)
RMSNORM_TRAINING(8192, 512, 512, 4, 2)
RMSNORM_TRAINING(16384, 512, 512, 8, 1)

extern "C" __global__ void __launch_bounds__(256)
    rmsnorm_any(const float *x, size_t x_stride, const float *__restrict__ weight, void *__restrict__ out, int form,
                int, int runs, int width, float epsilon) {
    normalize_any<false>({x, F32, x_stride, nullptr}, weight, out, form, runs, width, epsilon);
}

extern "C" __global__ void __launch_bounds__(256)
    rmsnorm_training_any(const void *x, size_t x_stride, const float *__restrict__ weight, void *__restrict__ out,
                         int form, int, int runs, int width, float epsilon, int x_form, bf16 *copy) {
    normalize_any<false>({x, x_form, x_stride, copy}, weight, out, form, runs, width, epsilon);
}

extern "C" __global__ void __launch_bounds__(256)
    rmsnorm_add_any(const float *x, size_t x_stride, const float *__restrict__ weight, void *__restrict__ residual,
                    int form, int, int runs, int width, float epsilon) {
    normalize_any<true>({x, F32, x_stride, nullptr}, weight, residual, form, runs, width, epsilon);
}
