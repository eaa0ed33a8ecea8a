// Products of few rows with Q4_0 weights: linear/product.cuh and linear/paired.cuh say how.
#include "linear/decode_integers.cuh"
#include "linear/paired.cuh"

LINEAR_KERNELS(linear_q4_0, linear::Q4_0)
LINEAR_PAIRED(linear_q4_0, linear::Q4_0)
