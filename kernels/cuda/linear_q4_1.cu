// Products of few rows with Q4_1 weights: linear/product.cuh and linear/paired.cuh say how.
#include "linear/decode_integers.cuh"
#include "linear/paired.cuh"

LINEAR_KERNELS(linear_q4_1, linear::Q4_1)
LINEAR_PAIRED(linear_q4_1, linear::Q4_1)
