// Products of few rows with Nf4 weights: linear/product.cuh says how.
#include "linear/decode_nf4.cuh"
#include "linear/product.cuh"

LINEAR_KERNELS(linear_nf4, linear::Nf4)
