// A number for what rows hold, by which two results are told apart without being kept or read.
//
//   sum[0] = sum over rows and columns of mix(place, halves)   mod 2^64, of the halves that are not zero
//
// halves [rows, columns] are 16 bits each (a number in F32 is two), rows `stride` halves apart. Zeros count for nothing,
// whatever their sign: rows of zeros have the number 0, and are known by it. The sum is of integers, so its order does not
// matter, and atomic additions give the same number each time.
//
// Bound: reading; it runs a few times for each size of a product.

#include "vocabulary/device.cuh"

constexpr int THREADS = 256;

__device__ __forceinline__ unsigned long long mix(unsigned long long place, unsigned half) {
    unsigned long long z = (place << 16 | half) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 32) * 0xd6e8feb86659fd93ull;
    return z ^ z >> 32;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    fingerprint(const uint16_t *halves, size_t stride, int rows, int columns, unsigned long long *sum) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    unsigned long long own = 0;
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        for (int column = threadIdx.x; column < columns; column += THREADS) {
            const unsigned half = halves[row * stride + column];
            if ((half & 0x7fffu) != 0) own += mix(row * columns + column, half);
        }
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) own += __shfl_xor_sync(FULL_WARP, own, offset);
    if (threadIdx.x % WARP == 0) atomicAdd(sum, own);
}
