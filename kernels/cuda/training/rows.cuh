// What the row-wise kernels of a training step share: elements by vectors, in whichever form a row has.
//
// What changes in a step (activations, gradients, and weights too) is read by plain loads after the kernel before has
// ended: nothing of a training step is constant. Rows that are read once pass by the first-level cache (`__ldcg`), which
// is left to the weights.
#pragma once

#include "../vocabulary/device.cuh"

// Four elements as they lie: 16 bytes of F32, or 8 of BF16 in x and y. They stay so until all loads are on their way.
__device__ __forceinline__ uint4 load_four(const void *row, int form, int vector) {
    if (form == F32) return __ldcg(static_cast<const uint4 *>(row) + vector);
    const uint2 pairs = __ldcg(static_cast<const uint2 *>(row) + vector);
    return make_uint4(pairs.x, pairs.y, 0, 0);
}

__device__ __forceinline__ float4 four(uint4 raw, int form) {
    if (form == F32) {
        return make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                           __uint_as_float(raw.w));
    }
    return make_float4(low_half(raw.x), high_half(raw.x), low_half(raw.y), high_half(raw.y));
}

__device__ __forceinline__ void store_four(void *row, int form, int vector, float4 v) {
    if (form == F32) {
        static_cast<float4 *>(row)[vector] = v;
    } else {
        static_cast<uint2 *>(row)[vector] = make_uint2(pack(v.x, v.y), pack(v.z, v.w));
    }
}

// A single element of either form.
__device__ __forceinline__ float load_one(const void *row, int form, size_t i) {
    return form == F32 ? static_cast<const float *>(row)[i] : __bfloat162float(static_cast<const bf16 *>(row)[i]);
}

__device__ __forceinline__ void store_one(void *row, int form, size_t i, float x) {
    if (form == F32) {
        static_cast<float *>(row)[i] = x;
    } else {
        static_cast<bf16 *>(row)[i] = __float2bfloat16_rn(x);
    }
}

// Where the element `i` of a buffer of either form lies.
__device__ __forceinline__ const void *element(const void *base, int form, size_t i) {
    return static_cast<const char *>(base) + i * (form == F32 ? 4 : 2);
}
__device__ __forceinline__ void *element(void *base, int form, size_t i) {
    return static_cast<char *>(base) + i * (form == F32 ? 4 : 2);
}

// Eight bfloat16 of 16 bytes.
__device__ __forceinline__ void unpack_eight(uint4 raw, float (&to)[8]) {
    const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) to[2 * i] = low_half(pairs[i]), to[2 * i + 1] = high_half(pairs[i]);
}

__device__ __forceinline__ uint4 pack_eight(const float (&from)[8]) {
    return make_uint4(pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7]));
}
