// Picks rows: out[i, :] = x[rows[i], :].
//
// x [x_rows, width] F32, rows [count] i32 on the device, out [count, width] F32. A number outside 0..x_rows gives a row
// of zeros. It takes the last row of each sequence out of a pass before the norm and the product with the vocabulary.
//
// Bound: the bytes read and written, by 16 where the width is a multiple of four.

#include "vocabulary/device.cuh"

template <typename Element>
__device__ __forceinline__ void gather(const Element *x, const int *rows, Element *__restrict__ out, int x_rows,
                                       int count, int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    for (size_t i = blockIdx.y; i < count; i += gridDim.y) {
        const int row = rows[i];
        out[i * width + column] = row >= 0 && row < x_rows ? x[size_t(row) * width + column] : Element{};
    }
}

extern "C" __global__ void __launch_bounds__(256)
    gather_rows(const float *x, const int *rows, float *__restrict__ out, int x_rows, int count, int width) {
    gather(reinterpret_cast<const float4 *>(x), rows, reinterpret_cast<float4 *>(out), x_rows, count, width / 4);
}

extern "C" __global__ void __launch_bounds__(256)
    gather_rows_any(const float *x, const int *rows, float *__restrict__ out, int x_rows, int count, int width) {
    gather(x, rows, out, x_rows, count, width);
}
