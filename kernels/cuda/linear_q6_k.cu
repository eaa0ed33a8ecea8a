// Products of few rows with Q6_K weights: linear/product.cuh and linear/paired.cuh say how.
#include "linear/decode_kquant.cuh"
#include "linear/paired.cuh"

LINEAR_KERNELS(linear_q6_k, linear::Q6_K)
LINEAR_PAIRED(linear_q6_k, linear::Q6_K)
