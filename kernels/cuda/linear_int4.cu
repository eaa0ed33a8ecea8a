// Products of few rows with Int4 weights: linear/product.cuh and linear/paired.cuh say how.
#include "linear/decode_integers.cuh"
#include "linear/paired.cuh"

LINEAR_KERNELS(linear_int4, linear::Int4)
LINEAR_PAIRED(linear_int4, linear::Int4)
