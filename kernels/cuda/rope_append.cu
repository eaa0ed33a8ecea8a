// Rotary embedding of queries and keys, with an optional RMS-norm of every head before it, and the append of keys and values
// to the caches: one launch between the q/k/v projections and attention.
//
//   x'        = x / sqrt(mean(x^2) + epsilon) * weight                        for q and k heads, where weights are given
//   y[i]      = x'[i] cos_i - x'[i + half] sin_i                              i < half
//   y[i+half] = x'[i + half] cos_i + x'[i] sin_i
//   y[i]      = x'[i]                                                         i >= 2 half, and all of a v head
//
// In: qkv [rows, (heads + 2 kv_heads) * head_width], phases [rows, 2 * half] (cosines, then sines, single precision).
// Out: queries [rows, heads * head_width]; keys and values as bfloat16, position-major [position][kv_head][head_width].
// FEW: every row is its own sequence's token; tables on the device say where its cache is and which position it takes, so
// that a captured graph follows them. MANY: the rows are consecutive positions of one sequence.
//
// Bound: bytes (each element is read and written once), and for few rows the latency of one dependent load. A warp takes a
// head: the norm is a warp's sum, and a row's bits depend on that row alone.
#include "common/device.cuh"

constexpr int HEADS_A_BLOCK = 4;

struct Shape {
    int heads, kv_heads, head_width, half;
    float epsilon;
};

// One head of one row, by one warp. `out` is the start of the head in its destination.
template <Form form, typename Out>
__device__ __forceinline__ void rotate_head(const void *__restrict__ qkv, size_t row, size_t row_width, size_t column,
                                            const float *__restrict__ weight, const float *__restrict__ phases,
                                            const Shape &shape, int half, Out *__restrict__ out) {
    const int lane = threadIdx.x % WARP;
    float factor = 1.0f;
    if (weight != nullptr) {
        float squares = 0.0f;
        for (int i = lane; i < shape.head_width; i += WARP) {
            const float x = load<form>(qkv, row, row_width, column + i);
            squares += x * x;
        }
        factor = 1.0f / sqrtf(warp_sum(squares) / float(shape.head_width) + shape.epsilon);
    }
    const auto normalized = [&](int i) {
        const float x = load<form>(qkv, row, row_width, column + i);
        return weight != nullptr ? x * factor * weight[i] : x;
    };
    const auto put = [&](int i, float x) {
        if constexpr (sizeof(Out) == sizeof(float)) {
            out[i] = x;
        } else {
            out[i] = __float2bfloat16_rn(x);
        }
    };
    for (int i = lane; i < half; i += WARP) {
        const float cosine = phases[i], sine = phases[half + i];
        const float low = normalized(i), high = normalized(half + i);
        put(i, low * cosine - high * sine);
        put(half + i, high * cosine + low * sine);
    }
    for (int i = 2 * half + lane; i < shape.head_width; i += WARP) put(i, normalized(i));
}

// The head that this warp takes, of one row: queries to `queries`, keys and values to their position in a cache.
template <Form form, typename Query>
__device__ __forceinline__ void append_row(const void *__restrict__ qkv, const float *__restrict__ q_weight,
                                           const float *__restrict__ k_weight, const float *__restrict__ phases, size_t row,
                                           bf16 *__restrict__ keys, bf16 *__restrict__ values, size_t position,
                                           Query *__restrict__ queries, const Shape &shape) {
    const int head = blockIdx.y * HEADS_A_BLOCK + threadIdx.x / WARP;
    if (head >= shape.heads + 2 * shape.kv_heads) return;
    const size_t width = shape.head_width;
    const size_t row_width = (shape.heads + 2 * shape.kv_heads) * width;
    const float *row_phases = phases + row * 2 * shape.half;
    if (head < shape.heads) {
        rotate_head<form>(qkv, row, row_width, head * width, q_weight, row_phases, shape, shape.half,
                          queries + (row * shape.heads + head) * width);
    } else if (head < shape.heads + shape.kv_heads) {
        rotate_head<form>(qkv, row, row_width, head * width, k_weight, row_phases, shape, shape.half,
                          keys + (position * shape.kv_heads + head - shape.heads) * width);
    } else {
        rotate_head<form>(qkv, row, row_width, head * width, nullptr, row_phases, shape, 0,
                          values + (position * shape.kv_heads + head - shape.heads - shape.kv_heads) * width);
    }
}

// Grid: rows, ceil((heads + 2 kv_heads) / HEADS_A_BLOCK). A row whose position is negative is padding: nothing is read or
// written for it.
extern "C" __global__ void __launch_bounds__(HEADS_A_BLOCK *WARP)
    rope_append_few(const float *__restrict__ qkv, const float *__restrict__ q_weight, const float *__restrict__ k_weight,
                    const float *__restrict__ phases, const uint64_t *__restrict__ kv_table,
                    const int *__restrict__ positions, float *__restrict__ queries, int heads, int kv_heads,
                    int head_width, int half, float epsilon) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t row = blockIdx.x;
    const int position = positions[row];
    if (position < 0) return;
    append_row<F32>(qkv, q_weight, k_weight, phases, row, reinterpret_cast<bf16 *>(kv_table[2 * row]),
                    reinterpret_cast<bf16 *>(kv_table[2 * row + 1]), position, queries,
                    Shape{heads, kv_heads, head_width, half, epsilon});
}

extern "C" __global__ void __launch_bounds__(HEADS_A_BLOCK *WARP)
    rope_append_many(const bf16 *__restrict__ qkv, const float *__restrict__ q_weight, const float *__restrict__ k_weight,
                     const float *__restrict__ phases, bf16 *__restrict__ keys, bf16 *__restrict__ values,
                     uint64_t first_position, bf16 *__restrict__ queries, int heads, int kv_heads, int head_width, int half,
                     float epsilon) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t row = blockIdx.x;
    append_row<BF16>(qkv, q_weight, k_weight, phases, row, keys, values, first_position + row, queries,
                     Shape{heads, kv_heads, head_width, half, epsilon});
}
