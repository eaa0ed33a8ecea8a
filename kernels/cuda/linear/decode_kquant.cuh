// The K-quants: Q4_K with scale and minimum for 32 columns, Q6_K with a scale for 16, both as small integers times a
// factor for 256.
//
// Q4_K's codes are decoded as those of Q4_1 in decode_integers.cuh. Q6_K's low and high bits are put together on the way into
// the mantissa of 128: two shifts, two logical operations and a subtraction for two weights, 2 integer operations a
// weight where the memory leaves time for 2.6. Its blocks of 16 columns are one step each, in the column order made for
// that.
#pragma once

#include "decode_integers.cuh"

namespace linear {

struct Q4_K : FourBits<tiles::Q4_K> {
    static constexpr int BLOCKS = 2;
    static constexpr bool HAS_MINIMUM = true, WHOLE_RECORDS = true;
    static constexpr int PAIRED_AHEAD = 2;
    __host__ __device__ static constexpr int ahead(int groups) { return groups == 1 ? 4 : 2; }
    __host__ __device__ static constexpr int operand_ring(int) { return 2; }
    __host__ __device__ static constexpr int scale_sets(int) { return 2; }
    __host__ __device__ static constexpr bool overlaps(int) { return true; }
    __host__ __device__ static constexpr bool repeats(int) { return true; }
    using Decoder = SixteenthsDecoder;
    using FourBits::load;

    struct Scales {
        uint32_t factors[2];         // FP16 (d, dmin) of rows g and g + 8
        uint2 scale[2], minimum[2];  // eight bytes of each row
    };

    __device__ __forceinline__ static void load(Scales &to, const Record &record, int held, int lane) {
        const uint8_t *scales = record.scales(held, lane);
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const int row = lane / 4 + 8 * lower;
            to.factors[lower] = __ldg(reinterpret_cast<const uint32_t *>(scales) + row);
            to.scale[lower] = __ldg(reinterpret_cast<const uint2 *>(scales + tiles::Q4_K::SCALES_AT) + row);
            to.minimum[lower] = __ldg(reinterpret_cast<const uint2 *>(scales + tiles::Q4_K::MINIMA_AT) + row);
        }
    }

    // Scales and minimums are integers below 64. In the mantissa of 1 one is 1 + integer / 128, so factor * integer is
    // 128 factor (1 + integer / 128) - 128 factor: one permutation and one multiply-add, exact.
    struct Ready {
        float scale_factors[2], minimum_factors[2];
        uint2 scale[2], minimum[2];
    };

    __device__ __forceinline__ static Ready ready(const Scales &scales) {
        Ready ready;
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const float2 factors = halves(scales.factors[lower]);
            ready.scale_factors[lower] = 16.0f * 128.0f * factors.x;
            ready.minimum_factors[lower] = -128.0f * factors.y;
            ready.scale[lower] = {scales.scale[lower].x | 0x80808080u, scales.scale[lower].y | 0x80808080u};
            ready.minimum[lower] = {scales.minimum[lower].x | 0x80808080u, scales.minimum[lower].y | 0x80808080u};
        }
        return ready;
    }

    __device__ __forceinline__ static void scales_of(float2 (&scale)[2], float2 (&minimum)[2], const Ready &ready,
                                                     int chunk, bool) {
#pragma unroll
        for (int block = 0; block < 2; block++) {
            const auto times = [&](float factor, const uint2 &integers) {
                const uint32_t word = chunk < 2 ? integers.x : integers.y;
                const int byte = 2 * (chunk % 2) + block;
                return fmaf(factor, __uint_as_float(__byte_perm(word, 0x3f000000, 0x7044 | byte << 8)), -factor);
            };
            scale[block] = {times(ready.scale_factors[0], ready.scale[0]),
                            times(ready.scale_factors[1], ready.scale[1])};
            minimum[block] = {times(ready.minimum_factors[0], ready.minimum[0]) - scale[block].x,
                              times(ready.minimum_factors[1], ready.minimum[1]) - scale[block].y};
        }
    }
};

struct Q6_K : Tiled<tiles::Q6_K> {
    static constexpr int BLOCKS = 4;
    static constexpr bool WHOLE_RECORDS = true;
    static constexpr int PAIRED_AHEAD = 2;
    __host__ __device__ static constexpr int ahead(int groups) { return groups == 8 ? 2 : 4; }
    __host__ __device__ static constexpr int operand_ring(int groups) { return groups == 1 ? 4 : 2; }
    __host__ __device__ static constexpr int scale_sets(int groups) { return groups == 1 || groups == 8 ? 2 : 1; }
    __host__ __device__ static constexpr bool overlaps(int) { return true; }
    __host__ __device__ static constexpr bool repeats(int) { return false; }
    using Columns = RunsOfFour;

    struct Chunk {
        uint4 low;   // a word a step
        uint2 high;  // a word for two steps
    };

    struct Scales {
        uint16_t factors[2];
        uint4 scale[2];  // sixteen signed bytes of rows g and g + 8
    };

    __device__ __forceinline__ static void load(Chunk &to, const Record &record, int chunk) {
        const uint8_t *codes = record.codes + chunk * CODE_BYTES;
        const int lane = threadIdx.x % WARP;
        to.low = load_constant_streaming(codes);
        to.high = __ldg(reinterpret_cast<const uint2 *>(codes + tiles::Q6_K::HIGH_AT - lane * 8));
    }

    __device__ __forceinline__ static void load(Scales &to, const Record &record, int held, int lane) {
        const uint8_t *scales = record.scales(held, lane);
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const int row = lane / 4 + 8 * lower;
            to.factors[lower] = __ldg(reinterpret_cast<const uint16_t *>(scales) + row);
            to.scale[lower] = load_constant(scales + tiles::Q6_K::SCALES_AT + row * 16);
        }
    }

    __device__ __forceinline__ static void scales_of(float2 (&scale)[4], float2 (&)[4],
                                                     const Scales &scales, int chunk, bool) {
        const auto word = [&](const uint4 &of) {
            return chunk == 0 ? of.x : chunk == 1 ? of.y : chunk == 2 ? of.z : of.w;
        };
        const uint32_t above = word(scales.scale[0]) ^ 0x80808080u, below = word(scales.scale[1]) ^ 0x80808080u;
        const float d_above = halves(scales.factors[0]).x, d_below = halves(scales.factors[1]).x;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            scale[step] = {d_above * signed_byte_of(above, step), d_below * signed_byte_of(below, step)};
        }
    }

    struct Decoder : NoTable {
        using NoTable::NoTable;

        __device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const Chunk &chunk) const {
            const uint32_t lows[4] = {chunk.low.x, chunk.low.y, chunk.low.z, chunk.low.w};
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const uint32_t high = step < 2 ? chunk.high.x : chunk.high.y;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int shift = 8 * (step % 2) + 2 * i - 4;  // brings the two bits to bits 4 and 5
                    const uint32_t below = masked_or(lows[step] >> (4 * i), 0x000f000f, 0x43004300);
                    const uint32_t both = masked_or(shift < 0 ? high << -shift : high >> shift, 0x00300030, below);
                    a[step][i] = subtract(both, 0x43204320);  // 128 + 32
                }
            }
        }
    };
};

}  // namespace linear
