// Weights as model files store them, row-major: plain floats, and GGML blocks of 32 or 256 weights.
//
// They serve the types that have no tile form (see tiles.cuh): read eight at a time, for dequantizing, for embeddings and for
// the slow product. Block layouts are those of the GGUF specification, little endian, f16 factors at even offsets:
//
// | type | bytes, in order | weight |
// |---|---|---|
// | Q4_0, Q5_0 | d, (32 fifth bits,) 16 of two nibbles | d (q - 8), d (q - 16) |
// | Q4_1, Q5_1 | d, m, (32 fifth bits,) 16 of two nibbles | d q + m |
// | Q8_0 | d, 32 signed bytes | d q |
// | Q2_K | 16 of (scale low nibble, minimum high), 64 of 2 bits, d, dmin | d sc q - dmin m |
// | Q3_K | 32 of third bits, 64 of 2 bits, 12 of 6-bit scales + 32, d | d sc (q - 4) |
// | Q4_K, Q5_K | d, dmin, 12 of 6-bit scales and minima, (32 of fifth bits,) 128 of nibbles | d sc q - dmin m |
// | Q6_K | 128 of low nibbles, 64 of 2 high bits, 16 signed scales, d | d sc (q - 32) |
//
// Each operation is rounded to f32 in the format's own order, as the host's reader does, so the weights are the same bits.
#pragma once

#include "device.cuh"

namespace blocks {

__device__ __forceinline__ float half_at(const uint8_t *at) { return __half2float(*reinterpret_cast<const __half *>(at)); }

// A word at an even address.
__device__ __forceinline__ uint32_t word_at(const uint8_t *at) {
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(at);
    return halves[0] | uint32_t(halves[1]) << 16;
}

// `eight` of every type gives weights [row, column .. column + 8) of a matrix with `cols` columns: column is a multiple of 8,
// and columns past `cols` read as zero.

// ---- Plain floats -----------------------------------------------------------------------------------------------------

template <class Element> struct Floats {
    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        const Element *from = reinterpret_cast<const Element *>(matrix) + size_t(row) * cols;
#pragma unroll
        for (int k = 0; k < 8; k++) out[k] = column + k < cols ? widen(from[column + k]) : 0.0f;
    }
    __device__ __forceinline__ static float widen(float x) { return x; }
    __device__ __forceinline__ static float widen(__half x) { return __half2float(x); }
    __device__ __forceinline__ static float widen(bf16 x) { return __bfloat162float(x); }
};

using F32 = Floats<float>;
using F16 = Floats<__half>;
using Bf16 = Floats<bf16>;

// ---- Blocks -----------------------------------------------------------------------------------------------------------

// Eight codes of a block and what makes weights of them: scale * code + minimum.
struct Decoded {
    int codes[8];
    float scale, minimum;
};

// A type of blocks: `decode(block, at)` gives the codes at its weights at .. at + 8.
template <class Type, int ELEMENTS, int BYTES> struct Blocks {
    __device__ __forceinline__ static void eight(const uint8_t *matrix, int, int cols, int row, int column,
                                                 float (&out)[8]) {
        if (column >= cols) {
#pragma unroll
            for (int k = 0; k < 8; k++) out[k] = 0.0f;
            return;
        }
        const size_t block = size_t(row) * (cols / ELEMENTS) + column / ELEMENTS;
        const Decoded decoded = Type::decode(matrix + block * BYTES, column % ELEMENTS);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            out[k] = __fadd_rn(__fmul_rn(decoded.scale, float(decoded.codes[k])), decoded.minimum);
        }
    }
};

// The minimum of types without one: adding it keeps every value, the sign of zero included.
constexpr float NO_MINIMUM = -0.0f;

// Nibbles of a block of 32: byte j holds weight j low and weight j + 16 high.
__device__ __forceinline__ int nibble_of_32(const uint8_t *bytes, int at) {
    return bytes[at % 16] >> (at / 16 * 4) & 15;
}

struct Q4_0 : Blocks<Q4_0, 32, 18> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        Decoded out = {{}, half_at(block), NO_MINIMUM};
#pragma unroll
        for (int k = 0; k < 8; k++) out.codes[k] = nibble_of_32(block + 2, at + k) - 8;
        return out;
    }
};

struct Q4_1 : Blocks<Q4_1, 32, 20> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        Decoded out = {{}, half_at(block), half_at(block + 2)};
#pragma unroll
        for (int k = 0; k < 8; k++) out.codes[k] = nibble_of_32(block + 4, at + k);
        return out;
    }
};

struct Q5_0 : Blocks<Q5_0, 32, 22> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        Decoded out = {{}, half_at(block), NO_MINIMUM};
        const uint32_t fifth = word_at(block + 2) >> at;
#pragma unroll
        for (int k = 0; k < 8; k++) out.codes[k] = (nibble_of_32(block + 6, at + k) | int(fifth >> k & 1) << 4) - 16;
        return out;
    }
};

struct Q5_1 : Blocks<Q5_1, 32, 24> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        Decoded out = {{}, half_at(block), half_at(block + 2)};
        const uint32_t fifth = word_at(block + 4) >> at;
#pragma unroll
        for (int k = 0; k < 8; k++) out.codes[k] = nibble_of_32(block + 8, at + k) | int(fifth >> k & 1) << 4;
        return out;
    }
};

struct Q8_0 : Blocks<Q8_0, 32, 34> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        Decoded out = {{}, half_at(block), NO_MINIMUM};
#pragma unroll
        for (int k = 0; k < 8; k++) out.codes[k] = int8_t(block[2 + at + k]);
        return out;
    }
};

// ---- Super-blocks of 256 ----------------------------------------------------------------------------------------------

// Codes of 2 bits: byte i of each 32 holds weights i, i + 32, i + 64 and i + 96 of a half.
__device__ __forceinline__ int two_bits_of_256(const uint8_t *bytes, int at) {
    return bytes[at / 128 * 32 + at % 32] >> (at % 128 / 32 * 2) & 3;
}

// Codes of 4 bits: byte i of each 32 holds weights i and i + 32 of 64.
__device__ __forceinline__ int nibble_of_256(const uint8_t *bytes, int at) {
    return bytes[at / 64 * 32 + at % 32] >> (at % 64 / 32 * 4) & 15;
}

// Scale and minimum of group 0 .. 7, 6 bits each, in 12 bytes: groups 0 .. 3 are the low 6 bits of bytes 0 .. 3 and 4 .. 7;
// groups 4 .. 7 are the nibbles of bytes 8 .. 11 (scale low, minimum high) under the upper 2 bits of bytes 0 .. 3 and 4 .. 7.
__device__ __forceinline__ Decoded six_bit_scales(const uint8_t *block, int group) {
    const uint8_t *packed = block + 4;
    int scale, minimum;
    if (group < 4) {
        scale = packed[group] & 63;
        minimum = packed[group + 4] & 63;
    } else {
        const int both = packed[group + 4];
        scale = (both & 15) | packed[group - 4] >> 6 << 4;
        minimum = both >> 4 | packed[group] >> 6 << 4;
    }
    return {{}, half_at(block) * float(scale), -(half_at(block + 2) * float(minimum))};
}

struct Q2_K : Blocks<Q2_K, 256, 84> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        const int factors = block[at / 16];
        Decoded out = {{}, half_at(block + 80) * float(factors & 15), -(half_at(block + 82) * float(factors >> 4))};
#pragma unroll
        for (int k = 0; k < 8; k++) out.codes[k] = two_bits_of_256(block + 16, at + k);
        return out;
    }
};

struct Q3_K : Blocks<Q3_K, 256, 110> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        const uint8_t *packed = block + 96;
        const int group = at / 16;
        const int low = packed[group % 8] >> (group / 8 * 4) & 15, high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
        Decoded out = {{}, half_at(block + 108) * float((low | high << 4) - 32), NO_MINIMUM};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int third = block[at % 32 + k] >> (at / 32) & 1;
            out.codes[k] = two_bits_of_256(block + 32, at + k) + 4 * third - 4;
        }
        return out;
    }
};

struct Q4_K : Blocks<Q4_K, 256, 144> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        Decoded out = six_bit_scales(block, at / 32);
#pragma unroll
        for (int k = 0; k < 8; k++) out.codes[k] = nibble_of_256(block + 16, at + k);
        return out;
    }
};

struct Q5_K : Blocks<Q5_K, 256, 176> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        Decoded out = six_bit_scales(block, at / 32);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int fifth = block[16 + at % 32 + k] >> (at / 32) & 1;
            out.codes[k] = nibble_of_256(block + 48, at + k) | fifth << 4;
        }
        return out;
    }
};

struct Q6_K : Blocks<Q6_K, 256, 210> {
    __device__ __forceinline__ static Decoded decode(const uint8_t *block, int at) {
        Decoded out = {{}, half_at(block + 208) * float(int8_t(block[192 + at / 16])), NO_MINIMUM};
        // A half of 128 has 64 bytes of low nibbles (weights i and i + 64) and 32 of high bits (i, i + 32, i + 64, i + 96).
        const int half = at / 128, i = at % 128;
        const uint8_t *lows = block + 64 * half + i % 64, *highs = block + 128 + 32 * half + i % 32;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int low = lows[k] >> (i / 64 * 4) & 15, high = highs[k] >> (i / 32 * 2) & 3;
            out.codes[k] = (low | high << 4) - 32;
        }
        return out;
    }
};

}  // namespace blocks
