// Products of few rows with Bf16 weights: linear/product.cuh and linear/paired.cuh say how.
#include "linear/decode_bf16.cuh"
#include "linear/paired.cuh"

LINEAR_KERNELS(linear_bf16, linear::Bf16)
LINEAR_PAIRED(linear_bf16, linear::Bf16)
