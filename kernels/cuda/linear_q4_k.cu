// Products of few rows with Q4_K weights: linear/product.cuh says how.
#include "linear/decode_kquant.cuh"
#include "linear/product.cuh"

LINEAR_KERNELS(linear_q4_k, linear::Q4_K)
