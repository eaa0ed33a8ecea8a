// Sums in double precision, in one order.
#pragma once

#include "../vocabulary/device.cuh"

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

// The sum over a block, in every thread; once in a kernel.
template <int THREADS> __device__ __forceinline__ double block_total(double x) {
    __shared__ double of_warp[THREADS / WARP];
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
    __syncthreads();
    double total = 0.0;
    for (int warp = 0; warp < THREADS / WARP; warp++) total += of_warp[warp];
    return total;
}

// The sum of a vector's pieces, as `sum_of_squares` leaves them, in every thread of a block; once in a kernel.
template <int THREADS> __device__ __forceinline__ double sum_of_pieces(const double *partial, int pieces) {
    double squares = 0.0;
    for (int piece = threadIdx.x; piece < pieces; piece += THREADS) squares += partial[piece];
    return block_total<THREADS>(squares);
}
