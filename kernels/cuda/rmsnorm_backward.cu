// The gradients of a root-mean-square norm, with the sum into the residual stream's gradient.
//
// For y = h w, h = x r, r = 1 / sqrt(mean(x^2) + epsilon) over each run of `width` elements, and the gradient g of y:
//
//   dx = r (g w - h mean(g w h)) = r (g w - x r^2 sum(g w x) / width)
//   dw = sum over runs of g h                                     F32 [width], from partials of each block
//   out = dx (+ residual);  operand = the same, rounded to BF16
//
// x [rows, runs * width] F32 or BF16 with rows `x_stride` apart, gradient likewise; out F32 or BF16 with rows `out_stride`
// apart, which may be the memory of `gradient` or of `residual`: a thread reads an element before it writes it, and
// nothing else reads it. residual F32 and operand BF16 are [rows, runs * width].
//
// Bound: reading x, gradient and residual, writing out and operand: 14 bytes an element with x in BF16. Both sums of a run
// come from one reading, and a run stays in registers. A run of up to 1,024 has a warp and passes no barrier; wider ones have
// a block and pass one. Blocks are few (a function of the shape) and go over many runs each, with the sums of dw in
// registers; `add_partials` (column_sums.cu) adds what the blocks leave. Other widths take the plain kernel.
//
// A warp that waits for its run and then writes it leaves the memory idle between: 17.3 us for [4096, 768] with x in F32. So
// where x and gradient are BF16 the next run is on its way to shared memory meanwhile (`turn_back_ahead`, the same bits).

#include "training/rows.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;

struct Call {
    const void *x, *gradient;
    const float *weight, *residual;  // residual may be null
    void *out;
    bf16 *operand;    // may be null
    float *partials;  // [blocks, width]; null where dw is not wanted
    size_t x_stride, gradient_stride, out_stride;
    int x_form, gradient_form, out_form;
    int count, runs, width;  // count = rows * runs
    float epsilon;
    int unused;
};

// The places of one run.
struct Run {
    const void *x, *gradient;
    const float *residual;
    void *out;
    bf16 *operand;
};

template <Form gradient_form> __device__ __forceinline__ Run find_run(const Call &call, int index) {
    const size_t row = unsigned(index) / unsigned(call.runs), run = index - row * call.runs;
    const size_t column = run * call.width, dense = size_t(index) * call.width;
    return {element(call.x, call.x_form, row * call.x_stride + column),
            element(call.gradient, gradient_form, row * call.gradient_stride + column),
            call.residual == nullptr ? nullptr : call.residual + dense,
            element(call.out, call.out_form, row * call.out_stride + column),
            call.operand == nullptr ? nullptr : call.operand + dense};
}

__device__ __forceinline__ float4 operator*(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
__device__ __forceinline__ float4 operator*(float4 a, float b) { return {a.x * b, a.y * b, a.z * b, a.w * b}; }
__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ __forceinline__ float4 operator-(float4 a, float4 b) { return {a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w}; }
__device__ __forceinline__ float dot(float4 a, float4 b) {
    return fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w);
}

// The sums over a run's LANES threads, in each of them. `turn` alternates from run to run.
template <int LANES> __device__ __forceinline__ float2 run_sums(float2 sums, int turn) {
    sums = {warp_sum(sums.x), warp_sum(sums.y)};
    if constexpr (LANES > WARP) {
        // A thread writes half `turn` again two runs later, after a barrier that all pass only when they have read it.
        __shared__ float2 parts[2][WARPS];
        if (threadIdx.x % WARP == 0) parts[turn][threadIdx.x / WARP] = sums;
        __syncthreads();
        sums = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < WARPS; i++) sums = {sums.x + parts[turn][i].x, sums.y + parts[turn][i].y};
    }
    return sums;
}

// Turns the gradient of a run back: LANES threads (a warp, or the whole block), VECTORS times four elements a thread.
template <Form gradient_form, int LANES, int VECTORS>
__device__ __forceinline__ void turn_run(const Call &call, const Run &run, int x_form, const uint4 (&x)[VECTORS],
                                         const uint4 (&g)[VECTORS], const float4 (&before)[VECTORS],
                                         float4 (&weight_sums)[VECTORS], int turn) {
    const int lane = threadIdx.x % LANES, vectors = call.width / 4;
    const float4 *weight = reinterpret_cast<const float4 *>(call.weight);
    float2 sums = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (lane + i * LANES >= vectors) continue;
        const float4 value = four(x[i], x_form);
        sums.x += dot(value, value);
        sums.y += dot(four(g[i], gradient_form) * weight[lane + i * LANES], value);
    }
    sums = run_sums<LANES>(sums, turn);
    const float r = 1.0f / sqrtf(sums.x / float(call.width) + call.epsilon);
    const float slope = r * r * (sums.y / float(call.width));
    // The weights are read again, from the first-level cache: registers for them would halve the runs on their way.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int vector = lane + i * LANES;
        if (vector >= vectors) continue;
        const float4 value = four(x[i], x_form), gradient = four(g[i], gradient_form);
        const float4 dx = (gradient * weight[vector] - value * slope) * r + before[i];
        store_four(run.out, call.out_form, vector, dx);
        if (run.operand != nullptr) store_four(run.operand, BF16, vector, dx);
        weight_sums[i] = weight_sums[i] + gradient * (value * r);
    }
}

// Leaves the block's sums of dw. Where a warp has a run, `parts` is shared memory for 2 * WARPS * WARP vectors.
template <int LANES, int VECTORS>
__device__ __forceinline__ void leave_sums(const Call &call, const float4 (&weight_sums)[VECTORS], float4 *parts) {
    constexpr int RUNS = THREADS / LANES;
    if (call.partials == nullptr) return;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, vectors = call.width / 4;
    float *partial = call.partials + size_t(blockIdx.x) * call.width;
    if constexpr (LANES == THREADS) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (lane + i * LANES < vectors) reinterpret_cast<float4 *>(partial)[lane + i * LANES] = weight_sums[i];
        }
    } else {
        // A thread for each of the 128 columns that a vector of every lane makes.
        const float *columns = reinterpret_cast<const float *>(parts);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            parts[(i % 2 * RUNS + group) * WARP + lane] = weight_sums[i];
            __syncthreads();
            const int column = threadIdx.x;
            if (column < 4 * WARP && i * 4 * WARP + column < call.width) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < RUNS; j++) sum += columns[(i % 2 * RUNS + j) * 4 * WARP + column];
                partial[i * 4 * WARP + column] = sum;
            }
        }
    }
}

// A run for each LANES threads, which come to registers.
template <Form gradient_form, int LANES, int VECTORS> __device__ __forceinline__ void turn_back(const Call &call) {
    static_assert(LANES == WARP || LANES == THREADS, "a run takes a warp or a block");
    constexpr int RUNS = THREADS / LANES;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, vectors = call.width / 4;
    float4 weight_sums[VECTORS] = {};
    int turn = 0;
    for (int index = blockIdx.x * RUNS + group; index < call.count; index += gridDim.x * RUNS, turn ^= 1) {
        const Run run = find_run<gradient_form>(call, index);
        uint4 x[VECTORS] = {}, g[VECTORS] = {};
        float4 before[VECTORS] = {};
        // Loops of loads alone: all are on their way before the first is waited for.
        if (call.x_form == F32) {
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                if (lane + i * LANES < vectors) x[i] = load_four(run.x, F32, lane + i * LANES);
            }
        } else {
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                if (lane + i * LANES < vectors) x[i] = load_four(run.x, BF16, lane + i * LANES);
            }
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (lane + i * LANES < vectors) g[i] = load_four(run.gradient, gradient_form, lane + i * LANES);
        }
        if (run.residual != nullptr) {
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                if (lane + i * LANES < vectors) {
                    before[i] = __ldcg(reinterpret_cast<const float4 *>(run.residual) + lane + i * LANES);
                }
            }
        }
        turn_run<gradient_form, LANES, VECTORS>(call, run, call.x_form, x, g, before, weight_sums, turn);
    }
    if constexpr (LANES == WARP) {
        __shared__ float4 parts[2 * WARPS * WARP];
        leave_sums<LANES, VECTORS>(call, weight_sums, parts);
    } else {
        leave_sums<LANES, VECTORS>(call, weight_sums, nullptr);
    }
}

// A run for each warp, x and gradient in BF16, the width a multiple of 8 and all rows aligned to 16 bytes. Shared memory has
// two runs of each warp: [WARPS][2][8 * width bytes], of a run the residual, x and the gradient.
template <int VECTORS> __device__ __forceinline__ void turn_back_ahead(const Call &call) {
    extern __shared__ __align__(16) char shared[];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % WARP, group = threadIdx.x / WARP, vectors = call.width / 4;
    const int first = blockIdx.x * WARPS + group, step = gridDim.x * WARPS, bytes = 8 * call.width;
    char *own = shared + group * 2 * bytes;
    // Lanes copy sixteen bytes each, which another lane may read.
    const auto fetch = [&](int index, char *to) {
        if (index < call.count) {
            const Run run = find_run<BF16>(call, index);
            const auto copy = [&](char *place, const void *row, int piece) {
                copy_async(place + 16 * piece, static_cast<const char *>(row) + 16 * piece);
            };
#pragma unroll
            for (int i = 0; i < (VECTORS + 1) / 2; i++) {
                const int piece = lane + i * WARP;
                if (2 * piece >= vectors) continue;
                copy(to + 4 * call.width, run.x, piece);
                copy(to + 6 * call.width, run.gradient, piece);
            }
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                const int piece = lane + i * WARP;
                if (run.residual != nullptr && piece < vectors) copy(to, run.residual, piece);
            }
        }
        commit_copies();  // an empty group where no run is left
    };
    fetch(first, own);
    fetch(first + step, own + bytes);
    float4 weight_sums[VECTORS] = {};
    int turn = 0;
    for (int index = first; index < call.count; index += step, turn ^= 1) {
        char *from = own + turn * bytes;
        wait_for_copies<1>();
        __syncwarp();
        const Run run = find_run<BF16>(call, index);
        uint4 x[VECTORS] = {}, g[VECTORS] = {};
        float4 before[VECTORS] = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const int vector = lane + i * WARP;
            if (vector >= vectors) continue;
            const uint2 of_x = reinterpret_cast<const uint2 *>(from + 4 * call.width)[vector];
            const uint2 of_gradient = reinterpret_cast<const uint2 *>(from + 6 * call.width)[vector];
            x[i] = make_uint4(of_x.x, of_x.y, 0, 0);
            g[i] = make_uint4(of_gradient.x, of_gradient.y, 0, 0);
            if (run.residual != nullptr) before[i] = reinterpret_cast<const float4 *>(from)[vector];
        }
        turn_run<BF16, WARP, VECTORS>(call, run, BF16, x, g, before, weight_sums, turn);
        __syncwarp();
        fetch(index + 2 * step, from);
    }
    __syncthreads();  // no warp reads its runs any more
    leave_sums<WARP, VECTORS>(call, weight_sums, reinterpret_cast<float4 *>(shared));
}

// Any width and alignment: a block reads a run twice, and each thread adds its columns of dw up in the partials.
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_backward_any(Call call) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    float *partial = call.partials == nullptr ? nullptr : call.partials + size_t(blockIdx.x) * call.width;
    int turn = 0;
    for (int index = blockIdx.x; index < call.count; index += gridDim.x, turn ^= 1) {
        const Run run = call.gradient_form == F32 ? find_run<F32>(call, index) : find_run<BF16>(call, index);
        float2 sums = {0.0f, 0.0f};
        for (int i = threadIdx.x; i < call.width; i += THREADS) {
            const float value = load_one(run.x, call.x_form, i);
            sums.x = fmaf(value, value, sums.x);
            sums.y = fmaf(load_one(run.gradient, call.gradient_form, i) * call.weight[i], value, sums.y);
        }
        sums = run_sums<THREADS>(sums, turn);
        const float r = 1.0f / sqrtf(sums.x / float(call.width) + call.epsilon);
        const float slope = r * r * (sums.y / float(call.width));
        for (int i = threadIdx.x; i < call.width; i += THREADS) {
            const float value = load_one(run.x, call.x_form, i), gradient = load_one(run.gradient, call.gradient_form, i);
            float dx = (gradient * call.weight[i] - value * slope) * r;
            if (run.residual != nullptr) dx += run.residual[i];
            store_one(run.out, call.out_form, i, dx);
            if (run.operand != nullptr) store_one(run.operand, BF16, i, dx);
            if (partial != nullptr) {
                const float term = gradient * (value * r);
                partial[i] = index == blockIdx.x ? term : partial[i] + term;
            }
        }
    }
}

// A kernel's name ends in the largest width it takes; BLOCKS of it fit a multiprocessor.
#define RMSNORM_BACKWARD(LARGEST, LANES, VECTORS, BLOCKS)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rmsnorm_backward_bf16_##LARGEST(Call call) {         \
        turn_back<BF16, LANES, VECTORS>(call);                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rmsnorm_backward_f32_##LARGEST(Call call) {          \
        turn_back<F32, LANES, VECTORS>(call);                                                                          \
    }

RMSNORM_BACKWARD(256, WARP, 2, 2)
RMSNORM_BACKWARD(512, WARP, 4, 2)
RMSNORM_BACKWARD(768, WARP, 6, 2)
RMSNORM_BACKWARD(1024, WARP, 8, 1)
RMSNORM_BACKWARD(2048, THREADS, 2, 4)
RMSNORM_BACKWARD(4096, THREADS, 4, 2)
RMSNORM_BACKWARD(8192, THREADS, 8, 1)

#define RMSNORM_BACKWARD_AHEAD(LARGEST, VECTORS, BLOCKS)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rmsnorm_backward_ahead_##LARGEST(Call call) {        \
        turn_back_ahead<VECTORS>(call);                                                                                \
    }

RMSNORM_BACKWARD_AHEAD(512, 4, 2)
RMSNORM_BACKWARD_AHEAD(768, 6, 2)
RMSNORM_BACKWARD_AHEAD(1024, 8, 1)
