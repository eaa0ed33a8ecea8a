// Attention for training: forward over packed documents, and the gradients of queries, keys and values. The kernels and
// their bounds: attention/training_forward.cuh, attention/flash_backward_dq.cuh, attention/flash_backward_dkv.cuh; the
// masks: attention/training_call.cuh.
//
// The backward pass is two kernels: delta[h, i] = gradient[i, h] . out[i, h], then one grid whose first blocks make the
// gradients of keys and values and whose others those of queries. The two need the same registers and shared memory,
// and together they leave no multiprocessor idle while the last long block of either ends. The scores are computed in
// both (seven products where five would do): adding up the gradients of queries across blocks of keys would need
// atomics, whose order is not the same twice, or memory for every block's part.
//
// Heads of 64 and 128 elements have kernels of their own width; any other multiple of 8 up to 256 takes the next wider,
// with the rest of its columns zero in shared memory. Large tiles read shared memory less often for a product; small
// ones are for grids that would leave multiprocessors without work, and for devices with less shared memory.
#include "attention/flash_backward_dkv.cuh"
#include "attention/flash_backward_dq.cuh"
#include "attention/training_forward.cuh"

#define FORWARD(NAME, WIDTH, ROW_TILES, KEYS)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(const __grid_constant__ TrainingCall call) {        \
        let_next_kernel_start();                                                                                      \
        wait_for_previous_kernel();                                                                                   \
        TrainingForward<WIDTH, ROW_TILES, KEYS>::run(call);                                                           \
    }

FORWARD(attention_training_64_rows_128, 64, 2, 128)
FORWARD(attention_training_64_rows_64, 64, 1, 128)
FORWARD(attention_training_128_rows_128, 128, 2, 64)
FORWARD(attention_training_128_rows_64, 128, 1, 64)
FORWARD(attention_training_256_rows_64, 256, 1, 64)

template <typename Keys, typename Queries> __device__ __forceinline__ void run_backward(const BackwardCall &call) {
    const int block = blockIdx.x;
    if (block < call.key_blocks) {
        Keys::run(call, block);
    } else {
        Queries::run(call, block - call.key_blocks);
    }
}

#define BACKWARD(NAME, ...)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(const __grid_constant__ BackwardCall call) {        \
        let_next_kernel_start();                                                                                      \
        wait_for_previous_kernel();                                                                                   \
        run_backward<__VA_ARGS__>(call);                                                                              \
    }

BACKWARD(attention_training_backward_64_keys_128, BackwardKeys<64, 64, 2, 4, 32, 64>, BackwardQueries<64, 2, 64>)
BACKWARD(attention_training_backward_64_keys_64, BackwardKeys<64, 64, 2, 2, 32, 64>, BackwardQueries<64, 2, 64>)
using Exchanging = BackwardKeys<128, 64, 2, 2, 32, 64, true>;
BACKWARD(attention_training_backward_128_rows_128, Exchanging, BackwardQueries<128, 2, 32>)
BACKWARD(attention_training_backward_128_rows_64, BackwardKeys<128, 128, 1, 4, 32, 32>, BackwardQueries<128, 1, 32>)
BACKWARD(attention_training_backward_256_rows_64, BackwardKeys<256, 128, 1, 2, 16, 32>, BackwardQueries<256, 1, 16>)

// delta[h, i]: `lanes` threads, a power of two that covers the head's pieces of eight elements, for each row and head.
extern "C" __global__ void __launch_bounds__(256) attention_training_delta(const bf16 *out, int64_t out_stride,
                                                                           const bf16 *gradient,
                                                                           int64_t gradient_stride, float *delta,
                                                                           int rows, int heads, int width, int lanes) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int64_t index = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
    const int piece = threadIdx.x % lanes * 8, head = int(index % heads);
    const int64_t row = index / heads;
    float sum = 0.0f;
    if (row < rows && piece < width) {
        const int64_t column = int64_t(head) * width + piece;
        const uint4 a = *reinterpret_cast<const uint4 *>(out + row * out_stride + column);
        const uint4 b = *reinterpret_cast<const uint4 *>(gradient + row * gradient_stride + column);
        const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum = fmaf(low_half(x[i]), low_half(y[i]), sum);
            sum = fmaf(high_half(x[i]), high_half(y[i]), sum);
        }
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    if (piece == 0 && row < rows) delta[head * int64_t(rows) + row] = sum;
}
