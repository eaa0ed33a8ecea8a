// Products of few rows with Bf16 weights: linear/product.cuh says how.
#include "linear/decode_bf16.cuh"
#include "linear/product.cuh"

LINEAR_KERNELS(linear_bf16, linear::Bf16)
