// Signed bytes: Int8 with one scale a row, Q8_0 with one for 32 columns.
//
// A byte is a sign and a magnitude m. Twice in a half word, b b & 0x807f | 0x4300 is +-(128 + m) as bfloat16 and b b &
// 0x8000 | 0x4300 is +-128: their difference is exact. For two weights one permutation, two logical operations and one
// subtraction: 1.5 integer operations a weight where the memory leaves time for 3.2.
#pragma once

#include "tiled.cuh"

namespace linear {

template <class Layout> struct Bytes : Tiled<Layout> {
    __host__ __device__ static constexpr int ahead(int groups) { return groups == 1 ? 4 : 2; }
    __host__ __device__ static constexpr int operand_ring(int groups) { return groups == 8 ? 2 : 4; }
    __host__ __device__ static constexpr int scale_sets(int groups) { return groups == 4 ? 1 : 2; }

    static constexpr int PAIRED_AHEAD = 2;

    struct Chunk {
        uint4 half[2];  // two steps each
    };

    __device__ __forceinline__ static void load_codes(Chunk &to, const uint8_t *codes, int chunk) {
        to.half[0] = load_constant_streaming(codes + chunk * Layout::CODE_BYTES);
        to.half[1] = load_constant_streaming(codes + chunk * Layout::CODE_BYTES + 512);
    }

    struct Decoder : NoTable {
        using NoTable::NoTable;

        // Bytes 0 and 1 of a word, or 2 and 3.
        __device__ __forceinline__ static uint32_t pair(uint32_t word, int first) {
            const uint32_t twice = __byte_perm(word, 0, first == 0 ? 0x1100 : 0x3322);
            return subtract(masked_or(twice, 0x807f807f, 0x43004300), masked_or(twice, 0x80008000, 0x43004300));
        }

        __device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const Chunk &chunk) const {
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const uint4 half = chunk.half[step / 2];
                const uint32_t first = step % 2 == 0 ? half.x : half.z, second = step % 2 == 0 ? half.y : half.w;
                a[step][0] = pair(first, 0);
                a[step][1] = pair(first, 2);
                a[step][2] = pair(second, 0);
                a[step][3] = pair(second, 2);
            }
        }
    };
};

struct Int8 : Bytes<tiles::Int8> {
    static constexpr int BLOCKS = 1;

    struct Record {
        const uint8_t *codes;  // of the lane
        const float *scales;  // of the rows, behind all tiles
    };

    struct Scales {
        float upper, lower;
    };

    __device__ __forceinline__ static Record open(const uint8_t *matrix, int rows, int cols, int tile, int record,
                                                  int lane) {
        const size_t tile_bytes = tiles::Int8::tile_bytes(cols);
        const size_t tiles_end = size_t((rows + tiles::ROWS - 1) / tiles::ROWS) * tile_bytes;
        return {matrix + tile * tile_bytes + size_t(record) * RECORD_BYTES + lane * 16,
                reinterpret_cast<const float *>(matrix + tiles_end) + tile * tiles::ROWS};
    }

    __device__ __forceinline__ static void advance(Record &record, int records) {
        record.codes += records * RECORD_BYTES;
    }

    __device__ __forceinline__ static void load(Chunk &to, const Record &record, int chunk) {
        load_codes(to, record.codes, chunk);
    }

    __device__ __forceinline__ static void load(Scales &to, const Record &record, int, int lane) {
        to = {__ldg(record.scales + lane / 4), __ldg(record.scales + lane / 4 + 8)};
    }

    __device__ __forceinline__ static void scales_of(float2 (&scale)[1], float2 (&)[1],
                                                     const Scales &scales, int, bool held) {
        scale[0] = held ? make_float2(scales.upper, scales.lower) : make_float2(0.0f, 0.0f);
    }
};

struct Q8_0 : Bytes<tiles::Q8_0> {
    static constexpr int BLOCKS = 2;
    __host__ __device__ static constexpr bool overlaps(int groups) { return groups <= 4; }
    using Bytes::load;
    using Scales = ScaleWords;  // eight FP16

    __device__ __forceinline__ static void load(Chunk &to, const Record &record, int chunk) {
        load_codes(to, record.codes, chunk);
    }
};

}  // namespace linear
