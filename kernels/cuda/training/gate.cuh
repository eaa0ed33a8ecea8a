// The gate of a feed-forward block where its result is rounded to BF16, forward and back alike.
//
//   act(x) = x s(z), s(z) = 1 / (1 + e^-z);  SiLU: z = x;  GELU (tanh): z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
//
// The exponential and the division are the fast ones: their errors of a few units in the last place of F32 are far under the
// rounding to BF16, and the accurate ones take longer than the memory does.
#pragma once

constexpr int GELU_TANH = 1;

struct Gate {
    float sigmoid, slope;  // s(z), and dz/dx
};

__device__ __forceinline__ Gate find_gate(float x, int activation) {
    float z = x, slope = 1.0f;
    if (activation == GELU_TANH) {
        // Where |x| > 16 the sigmoid is 0 or 1, and the powers of x must not overflow.
        const float within = fminf(fmaxf(x, -16.0f), 16.0f);
        z = 1.5957691f * fmaf(within * within * within, 0.044715f, within);
        slope = 1.5957691f * fmaf(within * within, 0.134145f, 1.0f);
    }
    return {__fdividef(1.0f, 1.0f + __expf(-z)), slope};
}
