// Products of few rows with Q4_K weights: linear/product.cuh and linear/paired.cuh say how.
#include "linear/decode_kquant.cuh"
#include "linear/paired.cuh"

LINEAR_KERNELS(linear_q4_k, linear::Q4_K)
LINEAR_PAIRED(linear_q4_k, linear::Q4_K)
