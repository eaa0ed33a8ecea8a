// Products of few rows with Q4_0 weights: linear/product.cuh says how.
#include "linear/decode_integers.cuh"
#include "linear/product.cuh"

LINEAR_KERNELS(linear_q4_0, linear::Q4_0)
