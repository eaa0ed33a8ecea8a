// Products of few rows with Int8 weights: linear/product.cuh says how.
#include "linear/decode_bytes.cuh"
#include "linear/product.cuh"

LINEAR_KERNELS(linear_int8, linear::Int8)
