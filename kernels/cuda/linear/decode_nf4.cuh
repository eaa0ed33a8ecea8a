// NF4: a byte of two codes becomes two bfloat16 levels by a table in shared memory.
//
// The table has an entry of a pair for each of the 256 bytes, once in each of the 32 banks, so that a warp's reads
// never meet. Entries lie 256 bytes apart: byte << 8 | lane << 2 is then ONE byte permutation of the word of codes and
// the lane, and a pair costs that and one read, half an integer operation and half a read a weight. At 4.3 TB/s there
// is time for 1.9 of the one and 1.0 of the other. Entries 128 bytes apart need a shift and a logical operation;
// permutations alone (sixteen levels of two bytes each, looked up in two halves) take 2.6 a weight, more than there is
// time for.
//
// Filling the table is 64 stores of a warp, 0.15 us, while the first codes are on their way and the kernel before ends.
// The levels are those of QLoRA rounded to bfloat16: relative changes of up to 2^-9, a fortieth of NF4's own error.
#pragma once

#include "tiled.cuh"

namespace linear {

struct Nf4 : Tiled<tiles::Nf4> {
    static constexpr int BLOCKS = 1;
    __host__ __device__ static constexpr int ahead(int groups) { return groups == 1 ? 8 : 4; }
    __host__ __device__ static constexpr int operand_ring(int groups) { return groups == 1 || groups == 4 ? 4 : 2; }
    __host__ __device__ static constexpr int scale_sets(int) { return 2; }

    struct Chunk {
        uint4 codes;  // a word a step, a byte a register
    };

    using Tiled::load;
    using Scales = ScaleWords;  // f32 of four chunks

    __device__ __forceinline__ static void load(Chunk &to, const Record &record, int chunk) {
        to.codes = load_constant_streaming(record.codes + chunk * CODE_BYTES);
    }

    struct Decoder {
        static constexpr int ENTRY = 256, BYTES = 256 * ENTRY;
        // Where the shared memory that a kernel asks for begins in the image for sm_90a. There an address in shared memory
        // says the block of a cluster too, in its highest byte, and the compiler adds it to each permutation. The permutation
        // takes that byte along instead, and a constant costs nothing.
        static constexpr uint32_t TABLE_AT = 1024;
        const uint8_t *table;
        uint32_t bank;

        // Every thread of the block calls it.
        __device__ __forceinline__ Decoder(uint8_t *shared, int lane) : table(shared), bank(lane * 4) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
            const uint32_t block = shared_address(shared) - TABLE_AT;
            if ((block & 0xffff) != 0) __trap();
            bank |= block;
#endif
            for (int entry = threadIdx.x; entry < 256; entry += blockDim.x) {
                const uint32_t pair = level(entry & 15) | level(entry >> 4) << 16;
#pragma unroll
                for (int part = 0; part < 8; part++) {
                    // Turned by the lane, so that a quarter of a warp writes to all banks.
                    const int at = entry * ENTRY + (part + lane) % 8 * 16;
                    *reinterpret_cast<uint4 *>(shared + at) = make_uint4(pair, pair, pair, pair);
                }
            }
            __syncthreads();
        }

        // tiles::NF4_LEVELS, four in a constant: reading them from memory would take as long as the first codes.
        __device__ __forceinline__ static uint32_t level(int code) {
            const uint64_t low = code & 4 ? 0x0000bdbabe3dbe92 : 0xbecabf06bf32bf80;
            const uint64_t high = code & 4 ? 0x3f803f393f103ee2 : 0x3ead3e7c3e253da3;
            return uint32_t((code & 8 ? high : low) >> (code % 4 * 16)) & 0xffff;
        }

        __device__ __forceinline__ uint32_t pair(uint32_t word, int byte) const {
            const uint32_t at = __byte_perm(word, bank, 0x7604 | byte << 4);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
            uint32_t value;
            asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(value) : "r"(at), "n"(TABLE_AT));
            return value;
#else
            return *reinterpret_cast<const uint32_t *>(table + at);
#endif
        }

        __device__ __forceinline__ void fragments(uint32_t (&a)[4][4], const Chunk &chunk) const {
            const uint32_t words[4] = {chunk.codes.x, chunk.codes.y, chunk.codes.z, chunk.codes.w};
#pragma unroll
            for (int step = 0; step < 4; step++) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[step][i] = pair(words[step], i);
            }
        }
    };
};

}  // namespace linear
