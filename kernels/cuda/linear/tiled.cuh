// What the formats in tiles have in common: where a record's codes and scales lie.
//
// A format of product.cuh is
//   ahead, operand_ring      chunks of codes (2, or whole records) and of x (of four rows each) that are on their way
//                            at once, by groups of four rows of x: what 128 registers hold
//   scale_sets               records whose scales are in registers, those on their way among them; two records of codes
//                            always have both
//   overlaps, repeats        OVERLAP and REPEATS of product.cuh by the same groups: what registers allow and what was faster
//   BLOCKS, HAS_MINIMUM      scales of a chunk; whether a block has a minimum besides
//   WHOLE_RECORDS            whether there are always multiples of 256 columns
//   PAIRED_AHEAD, IN_PLACE   as `ahead`, for the kernel of paired.cuh (1, 2 or 4); whether codes are A registers as they
//                            are
//   Columns                  the order of columns (operand.cuh)
//   Record, open, advance    a record of a row tile as a lane sees it, and the one some records on in the tile
//   Chunk, Scales, load      the registers that a chunk's codes and a record's scales come in, and their loads
//   scales_of                the scales (and minimums) of rows g and g + 8 for the blocks of a chunk; zero for one that
//                            the record does not hold, as a record's own scales are
//   Decoder                  codes to the A registers of four steps; it may fill BYTES of shared memory at the start
#pragma once

#include "../vocabulary/device.cuh"
#include "../vocabulary/tiles.cuh"
#include "operand.cuh"

namespace linear {

// Sixteen bytes of constant data that neighbours read too.
__device__ __forceinline__ uint4 load_constant(const void *from) { return __ldg(static_cast<const uint4 *>(from)); }

// The two FP16 numbers of a word in single precision.
__device__ __forceinline__ float2 halves(uint32_t word) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&word));
}

// A record's scales of rows g and g + 8, a word a chunk: one F32, or two FP16.
struct ScaleWords {
    uint4 upper, lower;

    __device__ __forceinline__ uint2 of(int chunk) const {
        const uint32_t above[4] = {upper.x, upper.y, upper.z, upper.w}, below[4] = {lower.x, lower.y, lower.z, lower.w};
        return {above[chunk], below[chunk]};
    }
};

template <class Layout> struct Tiled : Layout {
    static constexpr bool HAS_MINIMUM = false, WHOLE_RECORDS = false, IN_PLACE = false;
    static constexpr int PAIRED_AHEAD = 4;
    __host__ __device__ static constexpr bool overlaps(int groups) { return groups <= 2; }
    __host__ __device__ static constexpr bool repeats(int groups) { return groups > 1; }
    using Columns = RunsOfEight;

    // What a record's scales are to be before those of its chunks are taken.
    template <class Scales> __device__ __forceinline__ static const Scales &ready(const Scales &scales) {
        return scales;
    }

    struct Record {
        const uint8_t *codes;  // the lane's own sixteen bytes, so that those of a chunk are one load at a fixed distance

        // Behind the chunks that it holds.
        __device__ __forceinline__ const uint8_t *scales(int held, int lane) const {
            return codes + (held * Layout::CODE_BYTES - lane * 16);
        }
    };

    __device__ __forceinline__ static Record open(const uint8_t *matrix, int, int cols, int tile, int record, int lane) {
        return {matrix + size_t(tile) * Layout::tile_bytes(cols) + size_t(record) * Layout::RECORD_BYTES + lane * 16};
    }

    __device__ __forceinline__ static void advance(Record &record, int records) {
        record.codes += records * Layout::RECORD_BYTES;
    }

    __device__ __forceinline__ static void load(ScaleWords &to, const Record &record, int held, int lane) {
        const uint8_t *scales = record.scales(held, lane) + lane / 4 * 16;
        to = {load_constant(scales), load_constant(scales + 8 * 16)};
    }

    __device__ __forceinline__ static void scales_of(float2 (&scale)[1], float2 (&)[1],
                                                     const ScaleWords &scales, int chunk, bool) {
        const uint2 words = scales.of(chunk);
        scale[0] = {__uint_as_float(words.x), __uint_as_float(words.y)};
    }

    __device__ __forceinline__ static void scales_of(float2 (&scale)[2], float2 (&)[2],
                                                     const ScaleWords &scales, int chunk, bool) {
        const uint2 words = scales.of(chunk);
        const float2 upper = halves(words.x), lower = halves(words.y);
        scale[0] = {upper.x, lower.x};
        scale[1] = {upper.y, lower.y};
    }
};

// Decoders that need no memory.
struct NoTable {
    static constexpr int BYTES = 0;
    __device__ __forceinline__ NoTable(uint8_t *, int) {}
};

// Byte `index` of a word with its sign bit turned, in single precision. 2^23 + byte is exact: one permutation and one
// addition instead of a conversion, which is four times slower.
__device__ __forceinline__ float signed_byte_of(uint32_t word, int index) {
    return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 | index)) - (8388608.0f + 128.0f);
}

// (a & mask) | bits in one instruction, which the compiler makes two of where both are constants.
__device__ __forceinline__ uint32_t masked_or(uint32_t a, uint32_t mask, uint32_t bits) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
    return result;
}

// a - b of two bfloat16 each: exact for the small integers here.
__device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b) {
    const bf16x2 difference = __hsub2(*reinterpret_cast<const bf16x2 *>(&a), *reinterpret_cast<const bf16x2 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&difference);
}

}  // namespace linear
