// Products of few rows with Q8_0 weights: linear/product.cuh says how.
#include "linear/decode_bytes.cuh"
#include "linear/product.cuh"

LINEAR_KERNELS(linear_q8_0, linear::Q8_0)
