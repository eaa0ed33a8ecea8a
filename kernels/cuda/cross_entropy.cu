// The loss of a row of logits against its target, and the logits' gradient in their place.
//
//   lse = log sum_j exp(x_j);  nll = lse - x_t
//   x_j <- scale (p_j (1 + 2 z_loss lse) - [j = t]), p_j = exp(x_j - lse)                           where slopes are wanted
//   figures[row] = nll, lse^2, 1, whether x_t is the largest logit and the first of equal ones      F32
//   totals[0..4] += sums of the figures over the rows, in a fixed order                             F64
//
// logits [rows, vocabulary] BF16 with a stride; targets [rows] i32 and scale [1] F32 are on the device, so that a captured
// graph follows them. A target outside the vocabulary (negative, by custom) does not count: figures of zeros, a row of
// zeros. Columns from the vocabulary to the stride become zero too: products of whole tiles may read them.
//
// Bound: reading and writing the logits (4,096 x 32,000: 0.12 ms at 4.3 TB/s); the exponentials, two of each logit, take
// half of that. So a row is read once: a block has it, eight logits to a register quad, up to HELD quads a thread in
// registers and the rest in shared memory; what fits neither is read again. A thread's sums are relative to its own largest
// logit, so a row passes one barrier. Two blocks a multiprocessor, where their rows fit, fill each other's gaps. That left
// the memory idle while both computed: 92 us for [2048, 32000], whose bytes take 65. So for vocabularies of that size a block
// goes over several rows, and the next two are on their way to shared memory meanwhile (`cross_entropy_ahead_32768`).

#include "attention/exponential.cuh"
#include "training/rows.cuh"

constexpr float LOG2_E = 1.44269504f;
constexpr float LOWEST = -1e30f;  // a finite start for maxima: infinity minus infinity is no number

struct Call {
    bf16 *logits;
    const int *targets;
    const float *scale;
    float4 *figures;
    size_t stride;
    int vocabulary;
    int in_shared;  // quads of a thread in shared memory
    float z_loss;
    int slopes;
    int rows, unused;
};

// e^(x - largest); of negative infinity 0.
__device__ __forceinline__ float exponential(float x, float largest) {
    return exp2_hardware(fmaf(x, LOG2_E, -largest * LOG2_E));
}

// The same of two maxima. Their difference comes first: where both are LOWEST, the fused form would leave the rounding
// error of a huge product.
__device__ __forceinline__ float ratio(float part, float largest) {
    return exp2_hardware((part - largest) * LOG2_E);
}

__device__ __forceinline__ float largest_of(uint4 quad) {
    float x[8];
    unpack_eight(quad, x);
    return fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
}

__device__ __forceinline__ float sum_of_exponentials(uint4 quad, float largest) {
    float x[8];
    unpack_eight(quad, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = exponential(x[i], largest);
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// Keeps the compiler from holding the eight unpacked numbers of a quad from one use to the next: they would take twice the
// registers, and there are none.
__device__ __forceinline__ void pack_again(uint4 &quad) {
    asm volatile("" : "+r"(quad.x), "+r"(quad.y), "+r"(quad.z), "+r"(quad.w));
}

// What a row's logits make together.
struct Sum {
    float largest, total;  // total of e^(x - largest)
};

template <int WARPS> __device__ __forceinline__ Sum block_total(Sum own, Sum *parts) {
    const auto of_warp = [](Sum part) {
        const float largest = warp_maximum(part.largest);
        return Sum{largest, warp_sum(part.total * ratio(part.largest, largest))};
    };
    own = of_warp(own);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = own;
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    return of_warp(lane < WARPS ? parts[lane] : Sum{LOWEST, 0.0f});
}

struct Row {
    float log_sum_exp, nll, factor;  // factor of the probabilities in the gradient
};

__device__ __forceinline__ Row finish(const Call &call, Sum sum, float wanted) {
    const float log_total = logf(sum.total), log_sum_exp = sum.largest + log_total;
    return {log_sum_exp, log_total + (sum.largest - wanted), *call.scale * fmaf(2.0f * call.z_loss, log_sum_exp, 1.0f)};
}

__device__ __forceinline__ void note(const Call &call, size_t row, const Row &result, bool correct) {
    if (threadIdx.x != 0) return;
    call.figures[row] = {result.nll, result.log_sum_exp * result.log_sum_exp, 1.0f, correct ? 1.0f : 0.0f};
}

// Eight logits of which the first `held` are in the vocabulary: what lies behind counts as negative infinity, whose
// exponential is 0.
__device__ __forceinline__ uint4 counted(uint4 raw, int held) {
    constexpr uint32_t NONE = 0xff80ff80u;
    if (held >= 8) return raw;
    uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (held <= 2 * i) pairs[i] = NONE;
        if (held == 2 * i + 1) pairs[i] = (pairs[i] & 0xffffu) | (NONE & 0xffff0000u);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Whether one of eight logits, the first of which is `first`, is `wanted` and comes before the target.
__device__ __forceinline__ bool comes_before(uint4 quad, float wanted, int first, int target) {
    if (first >= target) return false;
    float x[8];
    unpack_eight(quad, x);
    bool before = false;
#pragma unroll
    for (int i = 0; i < 8; i++) before |= x[i] == wanted && first + i < target;
    return before;
}

__device__ __forceinline__ uint4 slopes(uint4 quad, const Row &result) {
    float x[8];
    unpack_eight(quad, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = exponential(x[i], result.log_sum_exp) * result.factor;
    return pack_eight(x);
}

__device__ __forceinline__ bf16 slope_of_target(const Call &call, float wanted, const Row &result) {
    return __float2bfloat16_rn(exponential(wanted, result.log_sum_exp) * result.factor - *call.scale);
}

// A block has a row; the stride is a multiple of eight. Quad k of a thread has columns 8 (k THREADS + thread) on.
template <int THREADS, int HELD> __device__ __forceinline__ void lose(const Call &call) {
    extern __shared__ __align__(16) uint4 shared[];  // [in_shared][THREADS]
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int target = call.targets[blockIdx.x], thread = threadIdx.x, quads = call.stride / 8;
    bf16 *logits = call.logits + blockIdx.x * call.stride;
    uint4 *row = reinterpret_cast<uint4 *>(logits);
    if (target < 0 || target >= call.vocabulary) {
        if (thread == 0) call.figures[blockIdx.x] = float4{};
        for (int quad = thread; call.slopes && quad < quads; quad += THREADS) row[quad] = uint4{};
        return;
    }
    const float wanted = __bfloat162float(logits[target]);
    const auto load = [&](int k) {
        const int quad = k * THREADS + thread, held = call.vocabulary - quad * 8;
        return counted(held > 0 ? __ldcg(row + quad) : uint4{}, held);
    };
    uint4 held[HELD];
    uint4 *own = shared + thread;
    const int of_thread = (quads - thread + THREADS - 1) / THREADS, kept = HELD + call.in_shared;
    const int in_shared = min(of_thread, kept) - HELD;
    // Calls `take(k, quad k)` for the quads that are at hand, and for those that are not.
    const auto for_kept = [&](auto take) {
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            pack_again(held[k]);
            take(k, held[k]);
        }
#pragma unroll 1
        for (int k = 0; k < in_shared; k++) take(HELD + k, own[k * THREADS]);
    };
    const auto for_others = [&](auto take) {
#pragma unroll 1
        for (int k = kept; k < of_thread; k++) take(k, load(k));
    };
#pragma unroll
    for (int k = 0; k < HELD; k++) held[k] = load(k);
#pragma unroll 4
    for (int k = 0; k < in_shared; k++) own[k * THREADS] = load(HELD + k);

    Sum sum{LOWEST, 0.0f};
    for_kept([&](int, uint4 quad) { sum.largest = fmaxf(sum.largest, largest_of(quad)); });
    for_kept([&](int, uint4 quad) { sum.total += sum_of_exponentials(quad, sum.largest); });
    for_others([&](int, uint4 quad) {
        const float largest = fmaxf(sum.largest, largest_of(quad));
        sum.total = sum.total * ratio(sum.largest, largest) + sum_of_exponentials(quad, largest);
        sum.largest = largest;
    });
    __shared__ Sum parts[THREADS / WARP];
    sum = block_total<THREADS / WARP>(sum, parts);
    const Row result = finish(call, sum, wanted);

    bool correct = wanted == sum.largest;
    if (correct) {  // for all threads or for none: an equal logit before the target's comes first
        bool before = false;
        const auto look = [&](int k, uint4 quad) {
            before |= comes_before(quad, wanted, (k * THREADS + thread) * 8, target);
        };
        for_kept(look);
        for_others(look);
        correct = !__syncthreads_or(before);
    }
    note(call, blockIdx.x, result, correct);
    if (!call.slopes) return;

    const auto turn = [&](int k, uint4 quad) {
        if (k < of_thread) row[k * THREADS + thread] = slopes(quad, result);
    };
    for_kept(turn);
    for_others(turn);
    // The thread that wrote the target's logit writes it once more.
    if (target / 8 % THREADS == thread) logits[target] = slope_of_target(call, wanted, result);
}

// The same for rows that registers hold, where a block takes every so many: the next two are on their way to shared memory,
// [2][HELD][THREADS] quads, from when a row's logits are in registers. A thread copies the quads that it takes itself.
template <int THREADS, int HELD> __device__ __forceinline__ void lose_ahead(const Call &call) {
    extern __shared__ __align__(16) uint4 shared[];
    __shared__ Sum parts[2][THREADS / WARP];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int thread = threadIdx.x, quads = call.stride / 8, step = gridDim.x;
    uint4 *own = shared + thread;
    const auto fetch = [&](int row, int stage) {
        const uint4 *from = reinterpret_cast<const uint4 *>(call.logits + size_t(row) * call.stride);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const int quad = k * THREADS + thread;
            if (row < call.rows && quad < quads) copy_async(own + (stage * HELD + k) * THREADS, from + quad);
        }
        commit_copies();  // an empty group where no row is left
    };
    fetch(blockIdx.x, 0);
    fetch(blockIdx.x + step, 1);
    int next_target = call.targets[blockIdx.x], stage = 0, turn = 0;
    for (int index = blockIdx.x; index < call.rows; index += step, stage ^= 1) {
        bf16 *logits = call.logits + size_t(index) * call.stride;
        uint4 *row = reinterpret_cast<uint4 *>(logits);
        const int target = next_target;
        const bool counts = target >= 0 && target < call.vocabulary;
        const float wanted = counts ? __bfloat162float(logits[target]) : 0.0f;
        wait_for_copies<1>();
        uint4 held[HELD];
        float largest = LOWEST;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const int rest = call.vocabulary - (k * THREADS + thread) * 8;
            held[k] = counted(rest > 0 ? own[(stage * HELD + k) * THREADS] : uint4{}, rest);
            largest = fmaxf(largest, largest_of(held[k]));
            pack_again(held[k]);
        }
        __syncwarp();  // the quads are in registers before others come in their place
        fetch(index + 2 * step, stage);
        if (index + step < call.rows) next_target = call.targets[index + step];
        if (!counts) {
            if (thread == 0) call.figures[index] = float4{};
            for (int quad = thread; call.slopes && quad < quads; quad += THREADS) row[quad] = uint4{};
            continue;
        }
        Sum sum{largest, 0.0f};
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            pack_again(held[k]);
            sum.total += sum_of_exponentials(held[k], largest);
        }
        // A warp writes a half again two counted rows later, after a barrier that all pass only when they have read it.
        sum = block_total<THREADS / WARP>(sum, parts[turn]);
        turn ^= 1;
        const Row result = finish(call, sum, wanted);
        bool correct = wanted == sum.largest;
        if (correct) {
            bool before = false;
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                pack_again(held[k]);
                before |= comes_before(held[k], wanted, (k * THREADS + thread) * 8, target);
            }
            correct = !__syncthreads_or(before);
        }
        note(call, index, result, correct);
        if (!call.slopes) continue;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            pack_again(held[k]);
            const int quad = k * THREADS + thread;
            if (quad < quads) row[quad] = slopes(held[k], result);
        }
        if (target / 8 % THREADS == thread) logits[target] = slope_of_target(call, wanted, result);
    }
}

// A kernel's name ends in the columns that registers hold.
extern "C" __global__ void __launch_bounds__(256, 4) cross_entropy_8192(Call call) { lose<256, 4>(call); }
extern "C" __global__ void __launch_bounds__(512, 2) cross_entropy_32768(Call call) { lose<512, 8>(call); }
extern "C" __global__ void __launch_bounds__(1024, 1) cross_entropy_ahead_32768(Call call) { lose_ahead<1024, 4>(call); }
extern "C" __global__ void __launch_bounds__(1024, 1) cross_entropy_65536(Call call) { lose<1024, 8>(call); }

// Any stride and alignment: three times over the row, an element a thread.
extern "C" __global__ void __launch_bounds__(256) cross_entropy_any(Call call) {
    constexpr int THREADS = 256;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int target = call.targets[blockIdx.x], vocabulary = call.vocabulary;
    bf16 *logits = call.logits + blockIdx.x * call.stride;
    const bool counts = target >= 0 && target < vocabulary;
    if (!counts && threadIdx.x == 0) call.figures[blockIdx.x] = float4{};
    float wanted = 0.0f;
    Row result{};
    if (counts) {
        wanted = __bfloat162float(logits[target]);
        Sum sum{LOWEST, 0.0f};
        for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
            sum.largest = fmaxf(sum.largest, __bfloat162float(logits[i]));
        }
        for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
            sum.total += exponential(__bfloat162float(logits[i]), sum.largest);
        }
        __shared__ Sum parts[THREADS / WARP];
        sum = block_total<THREADS / WARP>(sum, parts);
        result = finish(call, sum, wanted);
        bool before = false;
        for (int i = threadIdx.x; i < target; i += THREADS) before |= __bfloat162float(logits[i]) == sum.largest;
        note(call, blockIdx.x, result, !__syncthreads_or(before) && wanted == sum.largest);
    }
    if (!call.slopes) return;
    for (int i = threadIdx.x; i < call.stride; i += THREADS) {
        float x = 0.0f;
        if (counts && i < vocabulary) {
            x = exponential(__bfloat162float(logits[i]), result.log_sum_exp) * result.factor;
            if (i == target) x -= *call.scale;
        }
        logits[i] = __float2bfloat16_rn(x);
    }
}

extern "C" __global__ void __launch_bounds__(1024) add_figures(const float4 *figures, double *totals, int rows) {
    __shared__ double parts[WARP][4];
    let_next_kernel_start();
    wait_for_previous_kernel();
    double sums[4] = {};
#pragma unroll 4
    for (int row = threadIdx.x; row < rows; row += 1024) {
        const float4 of_row = __ldcg(figures + row);
        sums[0] += of_row.x, sums[1] += of_row.y, sums[2] += of_row.z, sums[3] += of_row.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        for (int offset = WARP / 2; offset > 0; offset /= 2) sums[i] += __shfl_xor_sync(FULL_WARP, sums[i], offset);
        if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP][i] = sums[i];
    }
    __syncthreads();
    if (threadIdx.x >= 4) return;
    double total = 0.0;
    for (int i = 0; i < WARP; i++) total += parts[i][threadIdx.x];
    totals[threadIdx.x] += total;
}
