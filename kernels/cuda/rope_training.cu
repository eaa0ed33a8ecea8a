// Rotary embedding of heads in training, with an optional RMS-norm of each head before it, and both gradients.
//
//   x'        = x / sqrt(mean(x^2) + epsilon) * weight        where there is a norm
//   y[i]      = x'[i] cos_i - x'[i + half] sin_i                                           i < half
//   y[i+half] = x'[i + half] cos_i + x'[i] sin_i
//   y[i]      = x'[i]                                                                      i >= 2 half
//
// The gradient g of y is turned back, by the negative angle, to that of x'; the norm's is as in rmsnorm_backward.cu:
//   dx = r (g' w - x r^2 sum(g' w x) / head_width);   dw = sum over rows and heads of g' x r
//
// x, y and gradients are BF16 columns: [rows, heads * head_width] with a stride. phases [rows, 2 * half] F32, cosines then
// sines. The output may be the memory of the input: a thread reads an element before it writes it, nothing else does.
//
// Bound: the bytes of the rows. A warp has a row: LANES threads have a head, sixteen elements each (eight and those that
// they are turned with), so that a row's phases are read once for 32 / LANES heads at a time. The first heads are on their
// way before the phases are waited for, and a plain rotation takes so few registers that 4,096 rows are all on the card at
// once (132 multiprocessors of 32 warps): with four heads a thread on their way, of 72 registers, the last tenth of the rows
// came in a second wave, and [4096, 1280] took 13.6 us. For dw few blocks go over many rows with the sums in registers, and
// `add_partials` (column_sums.cu) adds what they leave.

#include "training/rows.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;

struct Call {
    const bf16 *x;        // forward: the input; backward: the gradient of y
    const bf16 *input;    // backward of a norm: what was normed; otherwise null
    const float *weight;  // null without a norm
    const float *phases;
    bf16 *out;
    float *partials;  // [blocks, head_width]; null where dw is not wanted
    size_t x_stride, input_stride, out_stride;
    int rows, heads, head_width, half;
    float epsilon;
    float direction;  // 1, or -1 to turn back
};

enum Task { ROTATE, NORM_AND_ROTATE, BACKWARD_OF_NORM };

// A thread's sixteen elements of a head: `first..first + 8` and `second..second + 8`.
struct Unit {
    int first, second;
    bool turns;
};

__device__ __forceinline__ Unit find_unit(int unit, int half) {
    const int turning = half / 8, rest = 2 * half + 16 * (unit - turning);
    return unit < turning ? Unit{8 * unit, half + 8 * unit, true} : Unit{rest, rest + 8, false};
}

__device__ __forceinline__ void load_eight(const float *from, float (&to)[8]) {
    const float4 a = reinterpret_cast<const float4 *>(from)[0], b = reinterpret_cast<const float4 *>(from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

template <int LANES> __device__ __forceinline__ float head_sum(float x) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

// What a thread keeps of a row: its cosines and sines; of the norm: its weights and the sums of their gradients.
template <Task task> struct State {
    static constexpr int NORMED = task == ROTATE ? 1 : 8;
    float cosine[8], sine[8];
    float weight[2][NORMED], sums[2][task == BACKWARD_OF_NORM ? 8 : 1];

    __device__ __forceinline__ void turn(float (&a)[8], float (&b)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float low = a[i], high = b[i];
            a[i] = low * cosine[i] - high * sine[i];
            b[i] = high * cosine[i] + low * sine[i];
        }
    }

    // Turns `a` and `b` into the result; `x` is what was normed (BACKWARD_OF_NORM).
    template <int LANES>
    __device__ __forceinline__ void apply(float (&a)[8], float (&b)[8], const uint4 (&input)[2], const Call &call) {
        if constexpr (task == ROTATE) {
            turn(a, b);
        } else if constexpr (task == NORM_AND_ROTATE) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) squares = fmaf(a[i], a[i], fmaf(b[i], b[i], squares));
            const float r = 1.0f / sqrtf(head_sum<LANES>(squares) / float(call.head_width) + call.epsilon);
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] *= r * weight[0][i], b[i] *= r * weight[1][i];
            turn(a, b);
        } else {
            turn(a, b);
            float x[2][8], squares = 0.0f, products = 0.0f;
            unpack_eight(input[0], x[0]);
            unpack_eight(input[1], x[1]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                squares = fmaf(x[0][i], x[0][i], fmaf(x[1][i], x[1][i], squares));
                products = fmaf(a[i] * weight[0][i], x[0][i], fmaf(b[i] * weight[1][i], x[1][i], products));
            }
            squares = head_sum<LANES>(squares);
            products = head_sum<LANES>(products);
            const float r = 1.0f / sqrtf(squares / float(call.head_width) + call.epsilon);
            const float slope = r * r * (products / float(call.head_width));
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sums[0][i] = fmaf(a[i], x[0][i] * r, sums[0][i]);
                sums[1][i] = fmaf(b[i], x[1][i] * r, sums[1][i]);
                a[i] = r * (a[i] * weight[0][i] - x[0][i] * slope);
                b[i] = r * (b[i] * weight[1][i] - x[1][i] * slope);
            }
        }
    }
};

template <int LANES, Task task> __device__ __forceinline__ void rotate(const Call &call) {
    // Heads of a thread that are on their way at once.
    constexpr int TOGETHER = 2, HEADS = WARP / LANES, STEP = TOGETHER * HEADS;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / LANES;
    const Unit unit = find_unit(lane % LANES, call.half);
    const bool holds = unit.first < call.head_width;
    State<task> state{};
    if constexpr (task != ROTATE) {
        if (holds) {
            load_eight(call.weight + unit.first, state.weight[0]);
            load_eight(call.weight + unit.second, state.weight[1]);
        }
    }
    for (size_t row = blockIdx.x * WARPS + warp; row < call.rows; row += gridDim.x * WARPS) {
        uint4 raw[TOGETHER][2] = {}, input[task == BACKWARD_OF_NORM ? TOGETHER : 1][2] = {};
        const auto fetch = [&](int base) {
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                const int head = base + j * HEADS + group;
                raw[j][0] = raw[j][1] = {};  // what no head has adds nothing to dw
                if (!holds || head >= call.heads) continue;
                const bf16 *from = call.x + row * call.x_stride + head * call.head_width;
                raw[j][0] = __ldcg(reinterpret_cast<const uint4 *>(from + unit.first));
                raw[j][1] = __ldcg(reinterpret_cast<const uint4 *>(from + unit.second));
                if constexpr (task == BACKWARD_OF_NORM) {
                    from = call.input + row * call.input_stride + head * call.head_width;
                    input[j][0] = __ldcg(reinterpret_cast<const uint4 *>(from + unit.first));
                    input[j][1] = __ldcg(reinterpret_cast<const uint4 *>(from + unit.second));
                }
            }
        };
        fetch(0);
#pragma unroll
        for (int i = 0; i < 8; i++) state.cosine[i] = 1.0f, state.sine[i] = 0.0f;
        if (unit.turns) {
            const float *phases = call.phases + row * 2 * call.half;
            load_eight(phases + unit.first, state.cosine);
            load_eight(phases + unit.second, state.sine);
#pragma unroll
            for (int i = 0; i < 8; i++) state.sine[i] *= call.direction;
        }
        // All lanes stay in the loop to its end: sums of a head are taken by the whole warp.
        for (int base = 0; base < call.heads; base += STEP) {
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                const int head = base + j * HEADS + group;
                float a[8], b[8];
                unpack_eight(raw[j][0], a);
                unpack_eight(raw[j][1], b);
                state.template apply<LANES>(a, b, input[task == BACKWARD_OF_NORM ? j : 0], call);
                if (!holds || head >= call.heads) continue;
                bf16 *to = call.out + row * call.out_stride + head * call.head_width;
                *reinterpret_cast<uint4 *>(to + unit.first) = pack_eight(a);
                *reinterpret_cast<uint4 *>(to + unit.second) = pack_eight(b);
            }
            fetch(base + STEP);
        }
    }
    if constexpr (task == BACKWARD_OF_NORM) {
        if (call.partials == nullptr) return;
        __shared__ float parts[WARPS][LANES][17];  // an odd pitch: lanes write to different banks
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum = state.sums[i / 8][i % 8];
#pragma unroll
            for (int offset = LANES; offset < WARP; offset *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
            if (lane < LANES) parts[warp][lane][i] = sum;
        }
        __syncthreads();
        for (int place = threadIdx.x; place < 16 * LANES; place += THREADS) {
            const Unit own = find_unit(place / 16, call.half);
            if (own.first >= call.head_width) continue;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += parts[i][place / 16][place % 16];
            const int column = (place % 16 < 8 ? own.first : own.second) + place % 8;
            call.partials[size_t(blockIdx.x) * call.head_width + column] = sum;
        }
    }
}

// Any width and alignment, all three tasks: a block is a warp and has a head at a time; a lane has the same columns in
// each, so it adds its part of dw up in the partials.
extern "C" __global__ void __launch_bounds__(WARP) rope_training_any(Call call) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int width = call.head_width, half = call.half;
    const bool normed = call.weight != nullptr, backward = call.input != nullptr;
    const size_t count = size_t(call.rows) * call.heads;
    float *partial = call.partials == nullptr ? nullptr : call.partials + size_t(blockIdx.x) * width;
    for (size_t index = blockIdx.x; index < count; index += gridDim.x) {
        const size_t row = index / call.heads, head = index % call.heads;
        const bf16 *x = call.x + row * call.x_stride + head * width;
        const bf16 *input = backward ? call.input + row * call.input_stride + head * width : x;
        bf16 *out = call.out + row * call.out_stride + head * width;
        const float *phases = call.phases + row * 2 * half;
        const auto at = [](const bf16 *from, int i) { return __bfloat162float(from[i]); };
        // Calls `take(i, element i turned)` for this lane's elements, where `read(i)` is element i before.
        const auto turned = [&](auto read, auto take) {
            for (int i = threadIdx.x; i < half; i += WARP) {
                const float cosine = phases[i], sine = phases[half + i] * call.direction;
                const float low = read(i), high = read(half + i);
                take(i, low * cosine - high * sine);
                take(half + i, high * cosine + low * sine);
            }
            for (int i = 2 * half + threadIdx.x; i < width; i += WARP) take(i, read(i));
        };
        const auto plain = [&](int i) { return at(x, i); };
        float r = 1.0f, slope = 0.0f;
        if (normed) {
            float squares = 0.0f, products = 0.0f;
            for (int i = threadIdx.x; i < width; i += WARP) squares = fmaf(at(input, i), at(input, i), squares);
            r = 1.0f / sqrtf(warp_sum(squares) / float(width) + call.epsilon);
            if (backward) {
                turned(plain, [&](int i, float g) { products = fmaf(g * call.weight[i], at(input, i), products); });
                slope = r * r * (warp_sum(products) / float(width));
            }
        }
        if (backward) {
            turned(plain, [&](int i, float g) {
                const float value = at(input, i), term = g * (value * r);
                out[i] = __float2bfloat16_rn(r * (g * call.weight[i] - value * slope));
                if (partial != nullptr) partial[i] = index == blockIdx.x ? term : partial[i] + term;
            });
        } else {
            turned([&](int i) { return normed ? at(x, i) * (r * call.weight[i]) : at(x, i); },
                   [&](int i, float y) { out[i] = __float2bfloat16_rn(y); });
        }
    }
}

// A kernel's name ends in the widest head it takes.
#define ROPE_TRAINING(LARGEST, LANES)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 8) rope_training_##LARGEST(Call call) {                      \
        rotate<LANES, ROTATE>(call);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_training_norm_##LARGEST(Call call) {                    \
        rotate<LANES, NORM_AND_ROTATE>(call);                                                                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_training_backward_##LARGEST(Call call) {                \
        rotate<LANES, BACKWARD_OF_NORM>(call);                                                                         \
    }

ROPE_TRAINING(64, 4)
ROPE_TRAINING(128, 8)
ROPE_TRAINING(256, 16)
