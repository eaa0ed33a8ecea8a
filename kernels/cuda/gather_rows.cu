// Picks rows: out[i, :] = x[rows[i], :].
//
// x [x_rows, width] F32, rows [count] i32 on the device, out [count, width] F32. A number outside 0..x_rows gives a row
// of zeros. It takes the last row of each sequence out of a pass before the norm and the product with the vocabulary, and in
// training the rows of each expert together (in BF16, two elements for one).
//
// Bound: the bytes read and written. Where the width is a multiple of four a thread has four vectors of 16 bytes, a block's
// width apart and counted through all rows: a block for a row left three of four threads idle at a width of 256, and
// took 12.4 us for 8,192 such rows.

#include "vocabulary/device.cuh"

constexpr int THREADS = 256, EACH = 4;

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows(const float4 *x, const int *rows, float4 *__restrict__ out, int x_rows, int count, int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const unsigned vectors = width / 4, total = count * vectors, first = blockIdx.x * (EACH * THREADS) + threadIdx.x;
    unsigned column[EACH];
    int row[EACH];
    float4 values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const unsigned index = first + i * THREADS, to = index / vectors;
        column[i] = index - to * vectors;
        row[i] = index < total ? rows[to] : -1;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const bool inside = row[i] >= 0 && row[i] < x_rows;
        values[i] = inside ? x[size_t(row[i]) * vectors + column[i]] : float4{};
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const unsigned index = first + i * THREADS;
        if (index < total) out[index] = values[i];
    }
}

// Any width: blocks along x cover a row, blocks along y take rows in turn.
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows_any(const float *x, const int *rows, float *__restrict__ out, int x_rows, int count, int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    for (size_t i = blockIdx.y; i < count; i += gridDim.y) {
        const int row = rows[i];
        out[i * width + column] = row >= 0 && row < x_rows ? x[size_t(row) * width + column] : 0.0f;
    }
}
