// The cosines and sines of rotary position embedding for the rows of a pass.
//
//   phases[i, j] = factor * cos(positions[i] * inverse_frequencies[j])       j < half
//   phases[i, half + j] = factor * sin(the same)
//
// positions [rows] i32 on the device, -1 for a row that is not in use (its phases are zero); inverse_frequencies [half]
// F32 (constant); phases [rows, 2 * half] F32. The product is rounded to F32, as the reference computes it, and its
// cosine and sine are taken in double precision: the fast ones are off by whole turns at positions in the hundred
// thousands.
//
// Bound: latency. It runs once a pass, and all layers read the result.

#include "vocabulary/device.cuh"

extern "C" __global__ void __launch_bounds__(128)
    rope_phases(const int *positions, const float *__restrict__ inverse_frequencies, float factor,
                float *__restrict__ phases, int rows, int half) {
    let_next_kernel_start();
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    const float frequency = j < half ? inverse_frequencies[j] : 0.0f;
    wait_for_previous_kernel();
    if (j >= half) return;
    for (size_t row = blockIdx.y; row < rows; row += gridDim.y) {
        const int position = positions[row];
        double sine = 0.0, cosine = 0.0;
        if (position >= 0) sincos(double(__fmul_rn(float(position), frequency)), &sine, &cosine);
        phases[row * 2 * half + j] = float(cosine) * factor;
        phases[row * 2 * half + half + j] = float(sine) * factor;
    }
}
