// The 256 numbers that a byte stands for in an 8-bit optimizer state, the same as those of the processor
// (crates/ironloom-train/src/optimizer/dynamic_map.rs, where they are explained). In decade d of seven, with n bins:
//
//   level(d, k) = 10^(d-6) (0.1 + 0.9 (k + 1/2) / n)    0 <= k < n,  n = 2^d with a sign, 2^(d+1) without;  0 and 1 beside them
//
// The tables are made by the compiler, in double precision, and lie in the device's memory; a block copies them to its shared
// memory, since lanes look them up at different places.
#pragma once

#include "../vocabulary/device.cuh"

namespace dynamic_map {

constexpr int DECADES = 7;
// A cell is the magnitudes that share an exponent and 7 bits of mantissa; it holds at most one boundary between two codes.
constexpr int CELL_SHIFT = 16;
// Everything below 2^-24 is nearer to 0 than to the smallest level.
constexpr int FIRST_CELL = 0x33800000 >> CELL_SHIFT;
// The last cell begins at 1.
constexpr int LAST_CELL = (0x3f800000 >> CELL_SHIFT) - FIRST_CELL;
// With room up to whole 16 bytes.
constexpr int CELLS = (LAST_CELL + 16) / 16 * 16;

// The smallest magnitude of a cell, but of the first.
constexpr double cell_start(int cell) {
    const int bits = cell + FIRST_CELL;
    double value = 1.0 + (bits & 127) / 128.0;
    for (int exponent = bits >> 7; exponent < 127; exponent++) value /= 2.0;
    return value;
}

template <bool HAS_SIGN> struct alignas(16) Map {
    // What a code stands for, ascending.
    float levels[256];
    // Between level i and level i + 1; above the last level, infinity.
    float middles[256];
    // The lowest code of each cell, of positive values and then of negative ones.
    uint8_t lowest[HAS_SIGN ? 2 * CELLS : CELLS];

    __device__ __forceinline__ float level(uint32_t code) const { return levels[code]; }

    // The code of the level nearest to a value in [-1, 1], the lower one of two as near.
    __device__ __forceinline__ uint32_t code(float value) const {
        const uint32_t bits = __float_as_uint(value);
        const int distance = int((bits & 0x7fffffffu) >> CELL_SHIFT) - FIRST_CELL;
        int cell = min(max(distance, 0), LAST_CELL);
        // Without a branch: signs are as good as random.
        if (HAS_SIGN) cell += CELLS * int(bits >> 31);
        const uint32_t low = lowest[cell];
        return low + (value > middles[low] ? 1 : 0);
    }
};

template <bool HAS_SIGN> constexpr Map<HAS_SIGN> make_map() {
    constexpr int ZERO = HAS_SIGN ? 127 : 0;
    Map<HAS_SIGN> map{};
    int code = ZERO;
    for (int decade = 0; decade < DECADES; decade++) {
        const int bins = 1 << (decade + (HAS_SIGN ? 0 : 1));
        double scale = 1.0;
        for (int i = decade; i < DECADES - 1; i++) scale /= 10.0;
        for (int bin = 0; bin < bins; bin++) {
            const float level = float(scale * (0.1 + 0.9 * (bin + 0.5) / bins));
            map.levels[++code] = level;
            if (HAS_SIGN) map.levels[2 * ZERO - code] = -level;
        }
    }
    map.levels[255] = 1.0f;
    for (int i = 0; i < 255; i++) map.middles[i] = (map.levels[i] + map.levels[i + 1]) / 2.0f;
    map.middles[255] = __builtin_huge_valf();
    // The code of the value nearest to zero in a cell of positive values, and of the farthest in one of negative values.
    int positive = ZERO, negative = ZERO;
    for (int cell = 0; cell <= LAST_CELL; cell++) {
        while (cell > 0 && map.middles[positive] < cell_start(cell)) positive++;
        map.lowest[cell] = uint8_t(positive);
        if (HAS_SIGN) {
            const bool last = cell == LAST_CELL;
            while (negative > 0 && (last || -map.middles[negative - 1] < cell_start(cell + 1))) negative--;
            map.lowest[CELLS + cell] = uint8_t(negative);
        }
    }
    return map;
}

// Of first moments, and of the roots of second moments.
__device__ constexpr Map<true> SIGNED = make_map<true>();
__device__ constexpr Map<false> UNSIGNED = make_map<false>();

// Copies a table to shared memory, with all threads of the block.
template <class Table> __device__ __forceinline__ void copy_table(Table &to, const Table &from) {
    static_assert(sizeof(Table) % 16 == 0, "tables are whole 16 bytes");
    for (int i = threadIdx.x; i < int(sizeof(Table) / 16); i += blockDim.x) {
        reinterpret_cast<uint4 *>(&to)[i] = reinterpret_cast<const uint4 *>(&from)[i];
    }
}

}  // namespace dynamic_map
