// The rows of x as the tensor core takes them: a chunk of 64 columns of one high or low part, in the column order of
// tiles.cuh.
//
// Lane 4 g + t holds part g % 2 of row g / 2 of four: row g of x seen as [2 n, cols]. What lies past the last column or
// row is not loaded and keeps what the registers held, which is finite and meets weights that are zero or sums that
// nobody reads.
#pragma once

#include <type_traits>

#include "../vocabulary/device.cuh"

namespace linear {

struct Operand {
    uint32_t words[8];  // step s takes 2 s and 2 s + 1

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 8; i++) words[i] = 0;
    }
};

// d = a b: as multiply_add of device.cuh, from zero.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %10, %10, %10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Loads that read what the kernel before wrote: not through the read-only path, which may be older.
__device__ __forceinline__ void load_written(uint32_t *to, const bf16 *from, bool valid,
                                             std::integral_constant<int, 16>) {
    asm volatile("{.reg .pred valid; setp.ne.u32 valid, %5, 0; @valid ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
                 : "l"(from), "r"(uint32_t(valid)));
}

__device__ __forceinline__ void load_written(uint32_t *to, const bf16 *from, bool valid,
                                             std::integral_constant<int, 8>) {
    asm volatile("{.reg .pred valid; setp.ne.u32 valid, %3, 0; @valid ld.global.v2.u32 {%0, %1}, [%2];}"
                 : "+r"(to[0]), "+r"(to[1])
                 : "l"(from), "r"(uint32_t(valid)));
}

// Two runs of eight columns: 8 t and 32 + 8 t.
struct RunsOfEight {
    static constexpr int RUN = 8;

    // Columns `at`.. of the record at `from`, of which `end` exist from this lane's first on.
    __device__ __forceinline__ static void load(Operand &x, const bf16 *from, int at, int end) {
        load_written(x.words, from + at, at < end, std::integral_constant<int, 16>{});
        load_written(x.words + 4, from + at + 32, at + 32 < end, std::integral_constant<int, 16>{});
    }
};

// Four runs of four columns: 16 s + 4 t.
struct RunsOfFour {
    static constexpr int RUN = 4;

    __device__ __forceinline__ static void load(Operand &x, const bf16 *from, int at, int end) {
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const int column = at + 16 * step;
            load_written(x.words + 2 * step, from + column, column < end, std::integral_constant<int, 8>{});
        }
    }
};

}  // namespace linear
