// Attention forward of heads of 64 and 128 elements for Hopper (sm_90a), for inference and for training: the kernel and
// its bounds are in attention/hopper_forward.cuh. Other devices have attention.cu and attention_training.cu; for them,
// and as PTX, this file is empty.
//
// Registers hold the output, WIDTH / 2 a lane, 64 scores and 32 for 64 probabilities: at width 128 two warpgroups have
// room, at width 64 three.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "attention/hopper_forward.cuh"

#define ATTENTION(NAME, ...)                                                                                          \
    extern "C" __global__ void __launch_bounds__(HopperForward<__VA_ARGS__>::THREADS, 1)                              \
        NAME(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap keys,                       \
             const __grid_constant__ TensorMap values, const __grid_constant__ HopperCall call) {                     \
        let_next_kernel_start();                                                                                      \
        wait_for_previous_kernel();                                                                                   \
        HopperForward<__VA_ARGS__>::run(queries, keys, values, call);                                                 \
    }

ATTENTION(attention_hopper_64, 64, 3, 4)
ATTENTION(attention_hopper_128, 128, 2, 2)
#endif
