// Four-bit integers: Int4 with one scale for 64 columns, Q4_0 and Q4_1 with one for 32, Q4_1 with a minimum besides.
//
// Two codes of a word, 16 bits apart, or'ed into the mantissa of 128 are 128 + q as bfloat16; the subtraction of 128 +
// zero point is exact. For two weights a shift (none for the first of four), one logical operation and one subtraction:
// 1.4 operations a weight.
//
// Where a block has a minimum, the sum of x over it is at hand, and no subtraction is needed: or'ed into the upper bits of
// the mantissa of 1 a code is 1 + q / 16, and d q + m = 16 d (1 + q / 16) + (m - 16 d). With 128 + q the product's sum in
// single precision would be of far larger numbers than the result.
#pragma once

#include "tiled.cuh"

namespace linear {

// Q - ZERO_POINT for codes in the spread order of tiles.cuh.
template <int ZERO_POINT> struct SpreadDecoder : NoTable {
    using NoTable::NoTable;
    static constexpr uint32_t OFFSET = (0x4300u + ZERO_POINT) * 0x10001u;  // 128 + ZERO_POINT, twice

    __device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const uint4 &codes) const {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int step = 0; step < 4; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[step][i] = subtract(masked_or(words[step] >> (4 * i), 0x000f000f, 0x43004300), OFFSET);
            }
        }
    }
};

// 1 + q / 16.
struct SixteenthsDecoder : NoTable {
    using NoTable::NoTable;

    __device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const uint4 &codes) const {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int step = 0; step < 4; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t word = i == 0 ? words[step] << 3 : words[step] >> (4 * i - 3);
                a[step][i] = masked_or(word, 0x00780078, 0x3f803f80);
            }
        }
    }
};

template <class Layout> struct FourBits : Tiled<Layout> {
    using typename Tiled<Layout>::Record;
    using Tiled<Layout>::load;
    using Chunk = uint4;  // a word a step
    __host__ __device__ static constexpr int ahead(int groups) { return groups == 1 ? 8 : 4; }
    __host__ __device__ static constexpr int operand_ring(int groups) { return groups == 4 ? 4 : 2; }
    __host__ __device__ static constexpr int scale_sets(int groups) { return groups == 4 ? 1 : 2; }

    __device__ __forceinline__ static void load(Chunk &to, const Record &record, int chunk) {
        to = load_constant_streaming(record.codes + chunk * Layout::CODE_BYTES);
    }
};

struct Int4 : FourBits<tiles::Int4> {
    static constexpr int BLOCKS = 1;
    using Decoder = SpreadDecoder<8>;
    using Scales = ScaleWords;  // f32 of four chunks
};

struct Q4_0 : FourBits<tiles::Q4_0> {
    static constexpr int BLOCKS = 2;
    using Decoder = SpreadDecoder<8>;
    using Scales = ScaleWords;  // eight FP16
};

struct Q4_1 : FourBits<tiles::Q4_1> {
    static constexpr int BLOCKS = 2;
    __host__ __device__ static constexpr int ahead(int groups) { return groups == 8 ? 2 : 4; }
    __host__ __device__ static constexpr int operand_ring(int) { return 2; }
    __host__ __device__ static constexpr int scale_sets(int groups) { return groups == 1 || groups == 8 ? 2 : 1; }
    __host__ __device__ static constexpr bool overlaps(int groups) { return groups != 4; }
    static constexpr bool HAS_MINIMUM = true;
    static constexpr int PAIRED_AHEAD = 2;
    using Decoder = SixteenthsDecoder;
    using FourBits::load;

    struct Scales {
        uint4 upper[2], lower[2];  // eight pairs (d, m)
    };

    __device__ __forceinline__ static void load(Scales &to, const Record &record, int held, int lane) {
        const uint8_t *scales = record.scales(held, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            to.upper[half] = load_constant(scales + lane / 4 * 32 + half * 16);
            to.lower[half] = load_constant(scales + (lane / 4 + 8) * 32 + half * 16);
        }
    }

    __device__ __forceinline__ static void scales_of(float2 (&scale)[2], float2 (&minimum)[2],
                                                     const Scales &scales, int chunk, bool) {
        const uint4 upper = scales.upper[chunk / 2], lower = scales.lower[chunk / 2];
        const uint32_t of_upper[2] = {chunk % 2 ? upper.z : upper.x, chunk % 2 ? upper.w : upper.y};
        const uint32_t of_lower[2] = {chunk % 2 ? lower.z : lower.x, chunk % 2 ? lower.w : lower.y};
#pragma unroll
        for (int block = 0; block < 2; block++) {
            const float2 above = halves(of_upper[block]), below = halves(of_lower[block]);
            scale[block] = {16.0f * above.x, 16.0f * below.x};
            minimum[block] = {above.y - scale[block].x, below.y - scale[block].y};
        }
    }
};

}  // namespace linear
