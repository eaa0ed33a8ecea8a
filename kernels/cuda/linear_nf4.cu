// Products of few rows with Nf4 weights: linear/product.cuh and linear/paired.cuh say how.
#include "linear/decode_nf4.cuh"
#include "linear/paired.cuh"

LINEAR_KERNELS(linear_nf4, linear::Nf4)
LINEAR_PAIRED(linear_nf4, linear::Nf4)
