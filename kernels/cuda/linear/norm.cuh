// A root-mean-square norm between two products, without a kernel of its own: with s = 1 / sqrt(mean(x^2) + epsilon),
//   norm(x) W^T = s * ((x * weight) W^T).
//
// The product that ends with x, a sum on a residual, owns every element of it once: it stores x * weight as an operand,
// and for each 16 elements the sum of their squares (finish.cuh). The product that takes the operand adds those sums, a
// sixteenth of x, while its first operands are on their way, and multiplies its own results by s.
#pragma once

#include "finish.cuh"

namespace linear {

// Sums of squares of a row, over the tiles of a lane, then over lanes: the order depends on the width alone.
__device__ __forceinline__ float sum_of_squares(const float *squares, int tiles, int lane) {
    float total = 0.0f;
    if (tiles % 4 == 0) {
        const float4 *from = reinterpret_cast<const float4 *>(squares);
        float4 sum = {};
        // Two loads at once: 4,096 elements of x.
#pragma unroll 1
        for (int at = lane; at < tiles / 4; at += 2 * WARP) {
            const float4 a = from[at], b = at + WARP < tiles / 4 ? from[at + WARP] : float4{};
            sum = {sum.x + a.x + b.x, sum.y + a.y + b.y, sum.z + a.z + b.z, sum.w + a.w + b.w};
        }
        total = (sum.x + sum.y) + (sum.z + sum.w);
    } else {
#pragma unroll 1
        for (int tile = lane; tile < tiles; tile += WARP) total += squares[tile];
    }
    return warp_sum(total);
}

// What the results of each row of x are multiplied by, into shared memory: a row a warp of the team, read after the
// team's next barrier.
__device__ __forceinline__ void find_factors(float *factors, const Product &p, const Team &team, int rows, int lane) {
    const int tiles = Product::tiles_of(p.factor_width);
#pragma unroll 1
    for (int of_x = team.member; of_x < min(rows, p.n); of_x += team.warps) {
        const float sum = sum_of_squares(p.factor_squares + size_t(of_x) * tiles, tiles, lane);
        if (lane == 0) factors[of_x] = rsqrtf(fmaf(sum, p.inverse_width, p.epsilon));
    }
}

}  // namespace linear
