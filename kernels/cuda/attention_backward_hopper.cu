// The backward pass of attention for training on Hopper (sm_90a), for heads of 64 and 128 elements: two kernels, as in
// attention_training.cu. The first makes delta[h, i] = gradient[i, h] . out[i, h] and the order of the second's items,
// the second all gradients: attention/flash_backward_hopper.cuh. For other devices, and as PTX, this file is empty.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "attention/flash_backward_hopper.cuh"

#define BACKWARD(NAME, WIDTH)                                                                                          \
    extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1)                                                     \
        NAME(const __grid_constant__ BackwardCall call, const __grid_constant__ TensorMap q,                           \
             const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,                                 \
             const __grid_constant__ TensorMap gradient) {                                                             \
        let_next_kernel_start();                                                                                       \
        HopperBackward<WIDTH>::run(call, q, k, v, gradient);                                                           \
    }

BACKWARD(attention_backward_hopper_64, 64)
BACKWARD(attention_backward_hopper_128, 128)

// Puts tiles of BLOCK rows into the order of falling numbers of columns that they see, for one block.
static __device__ __forceinline__ void order_tiles(const int *first, const int *end, int rows, int *order) {
    constexpr int BLOCK = HopperBackward<64>::BLOCK;
    __shared__ int lengths[ORDERED_TILES];
    const int tiles = (rows + BLOCK - 1) / BLOCK;
    for (int tile = threadIdx.x; tile < tiles; tile += blockDim.x) {
        lengths[tile] = end[min(tile * BLOCK + BLOCK, rows) - 1] - first[tile * BLOCK];
    }
    __syncthreads();
    for (int tile = threadIdx.x; tile < tiles; tile += blockDim.x) {
        const int own = lengths[tile];
        int before = 0;
        for (int other = 0; other < tiles; other++) {
            before += lengths[other] > own || (lengths[other] == own && other < tile);
        }
        order[before] = tile;
    }
}

// Two blocks put tiles in order, where that is wanted; in the others, width / 8 threads make delta of a row and head.
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_hopper_prepare(const __grid_constant__ BackwardCall backward) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const TrainingCall &call = backward.forward;
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) taken_items = 0;
        if (call.by_length) order_tiles(call.first_query, call.end_query, call.keys, tile_order[0]);
        return;
    }
    if (blockIdx.x == 1) {
        if (call.by_length) order_tiles(call.first_key, call.end_key, call.rows, tile_order[1]);
        return;
    }
    const int lanes = call.width / 8, piece = threadIdx.x % lanes * 8;
    const int64_t index = (int64_t(blockIdx.x - 2) * blockDim.x + threadIdx.x) / lanes;
    const int head = int(index % call.heads);
    const int64_t row = index / call.heads;
    float sum = 0.0f;
    if (row < call.rows) {
        const int64_t column = int64_t(head) * call.width + piece;
        const uint4 a = *reinterpret_cast<const uint4 *>(call.out + row * call.out_stride + column);
        const uint4 b = *reinterpret_cast<const uint4 *>(backward.gradient + row * backward.gradient_stride + column);
        const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum = fmaf(low_half(x[i]), low_half(y[i]), sum);
            sum = fmaf(high_half(x[i]), high_half(y[i]), sum);
        }
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    if (piece == 0 && row < call.rows) backward.delta[head * int64_t(call.rows) + row] = sum;
}
#endif
