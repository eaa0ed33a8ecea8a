// Dropout, forward and back alike: out_i = x_i / (1 - p) with probability 1 - p, else 0.
//
// Element i of the rows, counted without gaps, is kept when number i of a Philox 4x32-10 stream is at least p 2^32 (Salmon
// et al., SC 2011): the numbers and the rule of the processor's dropout, so the mask is never kept, and both devices drop
// the same elements. The seed is on the device, so that a captured graph draws a new mask each time; the stream is the
// place in the model.
//
// x and out [rows, width] F32 or BF16, each with a stride; out may be x. Bound: the bytes, and about 25 operations an
// element for the numbers, four of which come from one block of the stream.

#include "training/rows.cuh"

struct Call {
    const void *x;
    void *out;
    const uint64_t *seed;
    size_t x_stride, out_stride;
    uint64_t stream;
    int rows, width, form;
    uint32_t threshold;
    float scale;
    int unused;
};

struct Four {
    uint32_t numbers[4];
};

// Block `counter` of a stream.
__device__ __forceinline__ Four random_block(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint32_t x[4] = {uint32_t(counter), uint32_t(counter >> 32), uint32_t(stream), uint32_t(stream >> 32)};
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t(0xd2511f53u) * x[0], b = uint64_t(0xcd9e8d57u) * x[2];
        const uint32_t next[4] = {uint32_t(b >> 32) ^ x[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ x[3] ^ key[1],
                                  uint32_t(a)};
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = next[i];
        key[0] += 0x9e3779b9u, key[1] += 0xbb67ae85u;
    }
    return {{x[0], x[1], x[2], x[3]}};
}

__device__ __forceinline__ float masked(const Call &call, float x, uint32_t number) {
    return number >= call.threshold ? x * call.scale : 0.0f;
}

// Widths that are multiples of four: a thread takes one block of the stream. Blocks along x cover a row, blocks along y take
// rows in turn.
extern "C" __global__ void __launch_bounds__(256) dropout(Call call) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int vector = blockIdx.x * blockDim.x + threadIdx.x, vectors = call.width / 4;
    if (vector >= vectors) return;
    const uint64_t seed = *call.seed;
    for (size_t row = blockIdx.y; row < call.rows; row += gridDim.y) {
        const uint4 raw = load_four(element(call.x, call.form, row * call.x_stride), call.form, vector);
        const Four random = random_block(seed, call.stream, row * vectors + vector);
        float4 v = four(raw, call.form);
        v = {masked(call, v.x, random.numbers[0]), masked(call, v.y, random.numbers[1]),
             masked(call, v.z, random.numbers[2]), masked(call, v.w, random.numbers[3])};
        store_four(element(call.out, call.form, row * call.out_stride), call.form, vector, v);
    }
}

// Any width and alignment: an element a thread.
extern "C" __global__ void __launch_bounds__(256) dropout_any(Call call) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= call.width) return;
    const uint64_t seed = *call.seed;
    for (size_t row = blockIdx.y; row < call.rows; row += gridDim.y) {
        const size_t place = row * call.width + column;
        const Four random = random_block(seed, call.stream, place / 4);
        const float x = load_one(call.x, call.form, row * call.x_stride + column);
        uint32_t number = random.numbers[0];
#pragma unroll
        for (int i = 1; i < 4; i++) number = place % 4 == i ? random.numbers[i] : number;
        store_one(call.out, call.form, row * call.out_stride + column, masked(call, x, number));
    }
}
