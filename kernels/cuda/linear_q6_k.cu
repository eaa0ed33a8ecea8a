// Products of few rows with Q6_K weights: linear/product.cuh says how.
#include "linear/decode_kquant.cuh"
#include "linear/product.cuh"

LINEAR_KERNELS(linear_q6_k, linear::Q6_K)
