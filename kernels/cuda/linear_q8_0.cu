// Products of few rows with Q8_0 weights: linear/product.cuh and linear/paired.cuh say how.
#include "linear/decode_bytes.cuh"
#include "linear/paired.cuh"

LINEAR_KERNELS(linear_q8_0, linear::Q8_0)
LINEAR_PAIRED(linear_q8_0, linear::Q8_0)
