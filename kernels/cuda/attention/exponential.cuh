// The exponential of both attentions.
#pragma once

// 2^x by the hardware's own approximation: two units in the last place, exact at 0; 0 at -infinity, and where the
// result is under 2^-126.
__device__ __forceinline__ float exp2_hardware(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
