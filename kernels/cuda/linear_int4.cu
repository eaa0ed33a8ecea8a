// Products of few rows with Int4 weights: linear/product.cuh says how.
#include "linear/decode_integers.cuh"
#include "linear/product.cuh"

LINEAR_KERNELS(linear_int4, linear::Int4)
