// Products of few rows with Int8 weights: linear/product.cuh and linear/paired.cuh say how.
#include "linear/decode_bytes.cuh"
#include "linear/paired.cuh"

LINEAR_KERNELS(linear_int8, linear::Int8)
LINEAR_PAIRED(linear_int8, linear::Int8)
