// Embedding: out[i, :] = table[ids[i], :] * scale, f32 [n, width], from a table [rows, width] in any weight format.
//
// Weights are computed in f32 as the host does, then multiplied. A row whose id is out of range becomes NaN: the host checks
// the ids it knows, and one that a faulty kernel made shows itself.
//
// Bound: n rows read and written once, next to nothing beside a pass of the model; a thread has eight columns. A packed row
// lies scattered over its tiles (16 bytes in 256), so up to sixteen times its bytes are fetched, for a few rows.
#include "vocabulary/blocks.cuh"
#include "vocabulary/tiles.cuh"

constexpr int THREADS = 128;

// Grid (n, eights of columns / 128).
template <class Format>
__device__ __forceinline__ void gather(float *__restrict__ out, const uint8_t *__restrict__ table, const uint32_t *ids,
                                       int rows, int width, float scale) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int column = (blockIdx.y * THREADS + threadIdx.x) * 8;
    if (column >= width) return;
    const uint32_t id = ids[blockIdx.x];
    float weights[8];
    if (id < uint32_t(rows)) {
        Format::eight(table, rows, width, int(id), column, weights);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) weights[k] = __int_as_float(0x7fffffff);
    }
    float *to = out + size_t(blockIdx.x) * width + column;
    if (width % 8 == 0) {
        float4 *quads = reinterpret_cast<float4 *>(to);
        quads[0] = {weights[0] * scale, weights[1] * scale, weights[2] * scale, weights[3] * scale};
        quads[1] = {weights[4] * scale, weights[5] * scale, weights[6] * scale, weights[7] * scale};
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (column + k < width) to[k] = weights[k] * scale;
        }
    }
}

#define EMBEDDING(name, Format)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                    \
        embedding_##name(float *__restrict__ out, const uint8_t *__restrict__ table, const uint32_t *ids, int rows,          \
                         int width, float scale) {                                                                           \
        gather<Format>(out, table, ids, rows, width, scale);                                                                 \
    }

EMBEDDING(tiles_bf16, tiles::Bf16)
EMBEDDING(tiles_int8, tiles::Int8)
EMBEDDING(tiles_nf4, tiles::Nf4)
EMBEDDING(tiles_int4, tiles::Int4)
EMBEDDING(tiles_q4_0, tiles::Q4_0)
EMBEDDING(tiles_q4_1, tiles::Q4_1)
EMBEDDING(tiles_q8_0, tiles::Q8_0)
EMBEDDING(tiles_q4_k, tiles::Q4_K)
EMBEDDING(tiles_q6_k, tiles::Q6_K)
EMBEDDING(plain_f32, blocks::F32)
EMBEDDING(plain_f16, blocks::F16)
EMBEDDING(plain_bf16, blocks::Bf16)
EMBEDDING(plain_q4_0, blocks::Q4_0)
EMBEDDING(plain_q4_1, blocks::Q4_1)
EMBEDDING(plain_q5_0, blocks::Q5_0)
EMBEDDING(plain_q5_1, blocks::Q5_1)
EMBEDDING(plain_q8_0, blocks::Q8_0)
EMBEDDING(plain_q2_k, blocks::Q2_K)
EMBEDDING(plain_q3_k, blocks::Q3_K)
EMBEDDING(plain_q4_k, blocks::Q4_K)
EMBEDDING(plain_q5_k, blocks::Q5_K)
EMBEDDING(plain_q6_k, blocks::Q6_K)
