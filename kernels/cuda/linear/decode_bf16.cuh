// BF16: rows as they are. A lane's two 16-byte loads of a row are its A registers; nothing is decoded.
//
// Lanes t = 0..3 read 64 bytes of a row at a time, and the other 64 of the line with the next load. Rows past the last
// repeat the last one: nobody reads their sums.
#pragma once

#include "tiled.cuh"

namespace linear {

struct Bf16 {
    static constexpr int BLOCKS = 1;
    __host__ __device__ static constexpr int ahead(int groups) { return groups == 1 ? 4 : 2; }
    __host__ __device__ static constexpr int operand_ring(int groups) { return groups == 2 || groups == 4 ? 4 : 2; }
    // There are none: two places in the loop, as formats with two sets have, spill nothing at 32 rows.
    __host__ __device__ static constexpr int scale_sets(int groups) { return groups == 8 ? 2 : 1; }
    __host__ __device__ static constexpr bool overlaps(int groups) { return groups <= 2; }
    __host__ __device__ static constexpr bool repeats(int groups) { return groups == 2; }
    static constexpr bool HAS_MINIMUM = false, WHOLE_RECORDS = false, IN_PLACE = true;
    static constexpr int PAIRED_AHEAD = 1;
    using Columns = RunsOfEight;
    // Of a row: 256 columns.
    static constexpr int RECORD_BYTES = 512;

    struct Record {
        const uint8_t *upper, *lower;  // rows g and g + 8, from column 8 t on
    };

    struct Chunk {
        uint4 upper[2], lower[2];
    };

    struct Scales {};

    __device__ __forceinline__ static Record open(const uint8_t *matrix, int rows, int cols, int tile, int record,
                                                  int lane) {
        const int row = tile * tiles::ROWS + lane / 4;
        const size_t row_bytes = size_t(tiles::padded_columns(cols)) * 2;
        const uint8_t *first = matrix + lane % 4 * 16 + record * RECORD_BYTES;
        return {first + min(row, rows - 1) * row_bytes, first + min(row + 8, rows - 1) * row_bytes};
    }

    __device__ __forceinline__ static void advance(Record &record, int records) {
        record.upper += records * RECORD_BYTES;
        record.lower += records * RECORD_BYTES;
    }

    __device__ __forceinline__ static void load(Chunk &to, const Record &record, int chunk) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            to.upper[half] = load_constant_streaming(record.upper + chunk * 128 + half * 64);
            to.lower[half] = load_constant_streaming(record.lower + chunk * 128 + half * 64);
        }
    }

    __device__ __forceinline__ static void load(Scales &, const Record &, int, int) {}

    __device__ __forceinline__ static Scales ready(const Scales &scales) { return scales; }

    __device__ __forceinline__ static void scales_of(float2 (&scale)[1], float2 (&)[1],
                                                     const Scales &, int, bool held) {
        scale[0] = held ? make_float2(1.0f, 1.0f) : make_float2(0.0f, 0.0f);
    }

    struct Decoder : NoTable {
        using NoTable::NoTable;

        __device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const Chunk &chunk) const {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 upper = chunk.upper[half], lower = chunk.lower[half];
                uint32_t(&first)[4] = a[2 * half], (&second)[4] = a[2 * half + 1];
                first[0] = upper.x, first[1] = lower.x, first[2] = upper.y, first[3] = lower.y;
                second[0] = upper.z, second[1] = lower.z, second[2] = upper.w, second[3] = lower.w;
            }
        }
    };
};

}  // namespace linear
