// Rotary embedding of queries and keys, with an optional RMS-norm of every head before it, and the append of keys and
// values to the cache, for many rows of one sequence: one launch between the q/k/v projections and attention. Few rows, each
// of its own sequence, have it in attention_few.cu.
//
//   x'        = x / sqrt(mean(x^2) + epsilon) * weight        for q and k heads, where weights are given
//   y[i]      = x'[i] cos_i - x'[i + half] sin_i                              i < half
//   y[i+half] = x'[i + half] cos_i + x'[i] sin_i
//   y[i]      = x'[i]                                                         i >= 2 half, and all of a v head
//
// In: qkv [rows, (heads + 2 kv_heads) * head_width], phases [rows, 2 * half] (cosines, then sines, single precision). Out:
// queries [rows, heads * head_width]; keys and values, position-major [position][kv_head][head_width], to consecutive
// positions. All but phases and norms' weights is bfloat16.
//
// Bound: bytes (each element is read and written once). A warp takes a head: the norm is a warp's sum, and a row's bits
// depend on that row alone.
#include "vocabulary/device.cuh"

constexpr int HEADS_A_BLOCK = 4;

struct Shape {
    int heads, kv_heads, head_width, half;
    float epsilon;
};

// Pairs, or single elements, of a lane that are on their way at once: all pairs of a head of width 256.
constexpr int TOGETHER = 4;

// One head of one row, by one warp. `out` is the start of the head in its destination; nothing is written unless
// `active`.
__device__ __forceinline__ void rotate_head(const bf16 *qkv, size_t row, size_t row_width, size_t column,
                                      const float *__restrict__ weight, const float *phases, const Shape &shape,
                                      int half, bf16 *out, bool active) {
    const int lane = threadIdx.x % WARP, width = shape.head_width;
    float factor = 1.0f;
    if (weight != nullptr) {
        float squares = 0.0f;
        for (int first = lane; first < width; first += TOGETHER * WARP) {
            float x[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                const int i = first + j * WARP;
                x[j] = i < width ? load<BF16>(qkv, row, row_width, column + i) : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) squares = fmaf(x[j], x[j], squares);
        }
        factor = 1.0f / sqrtf(warp_sum(squares) / float(width) + shape.epsilon);
    }
    const auto normalized = [&](int i) {
        const float x = load<BF16>(qkv, row, row_width, column + i);
        return weight != nullptr ? x * factor * weight[i] : x;
    };
    const auto put = [&](int i, float x) { out[i] = __float2bfloat16_rn(x); };
    for (int first = lane; first < half; first += TOGETHER * WARP) {
        float low[TOGETHER], high[TOGETHER], cosine[TOGETHER], sine[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            const int i = first + j * WARP;
            if (i >= half) continue;
            low[j] = normalized(i);
            high[j] = normalized(half + i);
            cosine[j] = phases[i];
            sine[j] = phases[half + i];
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            const int i = first + j * WARP;
            if (i >= half || !active) continue;
            put(i, low[j] * cosine[j] - high[j] * sine[j]);
            put(half + i, high[j] * cosine[j] + low[j] * sine[j]);
        }
    }
    for (int first = 2 * half + lane; first < width; first += TOGETHER * WARP) {
        float x[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            if (first + j * WARP < width) x[j] = normalized(first + j * WARP);
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            if (first + j * WARP < width && active) put(first + j * WARP, x[j]);
        }
    }
}

// The head that this warp takes, of one row: queries to `queries`, keys and values to their position in the cache;
// nowhere where the position is negative.
__device__ __forceinline__ void append_row(const bf16 *qkv, const float *__restrict__ q_weight,
                                           const float *__restrict__ k_weight, const float *phases, size_t row,
                                           bf16 *keys, bf16 *values, int64_t position, bf16 *__restrict__ queries,
                                           const Shape &shape) {
    const int head = blockIdx.y * HEADS_A_BLOCK + threadIdx.x / WARP;
    if (head >= shape.heads + 2 * shape.kv_heads) return;
    const int64_t width = shape.head_width;
    const int64_t row_width = (shape.heads + 2 * shape.kv_heads) * width;
    const float *row_phases = phases + row * 2 * shape.half;
    const bool active = position >= 0;
    if (head < shape.heads) {
        rotate_head(qkv, row, row_width, head * width, q_weight, row_phases, shape, shape.half,
                    queries + (int64_t(row) * shape.heads + head) * width, active);
    } else if (head < shape.heads + shape.kv_heads) {
        rotate_head(qkv, row, row_width, head * width, k_weight, row_phases, shape, shape.half,
                    keys + (position * shape.kv_heads + head - shape.heads) * width, active);
    } else {
        rotate_head(qkv, row, row_width, head * width, nullptr, row_phases, shape, 0,
                    values + (position * shape.kv_heads + head - shape.heads - shape.kv_heads) * width, active);
    }
}

// Grid: rows, ceil((heads + 2 kv_heads) / HEADS_A_BLOCK).
extern "C" __global__ void __launch_bounds__(HEADS_A_BLOCK *WARP)
    rope_append_many(const bf16 *qkv, const float *__restrict__ q_weight, const float *__restrict__ k_weight,
                     const float *phases, bf16 *__restrict__ keys, bf16 *__restrict__ values, int64_t first_position,
                     bf16 *__restrict__ queries, int heads, int kv_heads, int head_width, int half, float epsilon) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t row = blockIdx.x;
    append_row(qkv, q_weight, k_weight, phases, row, keys, values, first_position + row, queries,
               Shape{heads, kv_heads, head_width, half, epsilon});
}
