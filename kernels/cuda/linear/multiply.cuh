// A chunk of sixteen rows of weights times rows of x: 64 columns, in blocks with one scale each.
//
// The product of a block starts from zero in the tensor core, and is scaled and added in single precision. Lane 4 g + t
// has rows g and g + 8, and columns 2 t and 2 t + 1 of the other operand: the high and the low part of a row of x, whose
// products it adds.
#pragma once

#include "../vocabulary/device.cuh"
#include "operand.cuh"

namespace linear {

// The sum of x over a block, as the product with ones.
template <int STEPS> __device__ __forceinline__ float total_of(const Operand &x, int block) {
    constexpr uint32_t ONES[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    float total[4];
#pragma unroll
    for (int step = block * STEPS; step < (block + 1) * STEPS; step++) {
        if (step == block * STEPS) {
            multiply(total, ONES, x.words[2 * step], x.words[2 * step + 1]);
        } else {
            multiply_add(total, ONES, x.words[2 * step], x.words[2 * step + 1]);
        }
    }
    return total[0] + total[1];
}

// sum[h] += scale * (the product of rows g + 8 h and one row of x over the blocks of a chunk).
template <class Format>
__device__ __forceinline__ void add_chunk(float (&sum)[2], const uint32_t (&a)[4][4], const Operand &x,
                                          const float2 (&scale)[Format::BLOCKS],
                                          const float2 (&minimum)[Format::BLOCKS]) {
    constexpr int STEPS = 4 / Format::BLOCKS;
#pragma unroll
    for (int block = 0; block < Format::BLOCKS; block++) {
        float d[4];
#pragma unroll
        for (int step = block * STEPS; step < (block + 1) * STEPS; step++) {
            if (step == block * STEPS) {
                multiply(d, a[step], x.words[2 * step], x.words[2 * step + 1]);
            } else {
                multiply_add(d, a[step], x.words[2 * step], x.words[2 * step + 1]);
            }
        }
        sum[0] = fmaf(scale[block].x, d[0] + d[1], sum[0]);
        sum[1] = fmaf(scale[block].y, d[2] + d[3], sum[1]);
        if constexpr (Format::HAS_MINIMUM) {
            const float total = total_of<STEPS>(x, block);
            sum[0] = fmaf(minimum[block].x, total, sum[0]);
            sum[1] = fmaf(minimum[block].y, total, sum[1]);
        }
    }
}

// The same for a single row of x, whose columns 2 c and 2 c + 1 are the parts of chunk c: lanes 4 g + c have the
// product with chunk c, which all lanes of their four then add, in the order of the chunks and with the bits of many
// rows. So a lane has the operand of a record in two loads and eight registers, instead of eight and 32.
// `totals` are sums of x over the blocks, of chunk lane % 4.
template <class Format>
__device__ __forceinline__ void add_chunk_of_one(float (&sum)[2], const uint32_t (&a)[4][4], const Operand &x,
                                                 const float2 (&scale)[Format::BLOCKS],
                                                 const float2 (&minimum)[Format::BLOCKS],
                                                 const float (&totals)[Format::BLOCKS], int chunk) {
    constexpr int STEPS = 4 / Format::BLOCKS;
    const auto of_chunk = [&](float value) { return __shfl_sync(FULL_WARP, value, chunk, 4); };
#pragma unroll
    for (int block = 0; block < Format::BLOCKS; block++) {
        float d[4];
#pragma unroll
        for (int step = block * STEPS; step < (block + 1) * STEPS; step++) {
            if (step == block * STEPS) {
                multiply(d, a[step], x.words[2 * step], x.words[2 * step + 1]);
            } else {
                multiply_add(d, a[step], x.words[2 * step], x.words[2 * step + 1]);
            }
        }
        sum[0] = fmaf(scale[block].x, of_chunk(d[0] + d[1]), sum[0]);
        sum[1] = fmaf(scale[block].y, of_chunk(d[2] + d[3]), sum[1]);
        if constexpr (Format::HAS_MINIMUM) {
            const float total = of_chunk(totals[block]);
            sum[0] = fmaf(minimum[block].x, total, sum[0]);
            sum[1] = fmaf(minimum[block].y, total, sum[1]);
        }
    }
}

}  // namespace linear
