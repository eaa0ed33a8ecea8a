// The way back through rows that were weighted by a sigmoid and added: the gate of a shared expert.
//
//   out[i, j] = residual[i, j] + s_i y[i, j],  s_i = 1 / (1 + e^-gate[i])
//   y_gradient[i, j] = s_i g[i, j]             gate_gradient[i] = s_i (1 - s_i) sum_j g[i, j] y[i, j]
//
// g and y [rows, width] F32; y_gradient [rows, width] BF16; gate_gradient [rows, 8] BF16, of which the first column is the
// gradient and the others are zeros, as products read eight at a time.
//
// Bound: bytes, 10 an element. A warp takes a row; the order of its sum is a function of the width alone.

#include "vocabulary/device.cuh"

constexpr int WARPS = 8, GATE_COLUMNS = 8;

extern "C" __global__ void __launch_bounds__(WARPS *WARP)
    gated_rows_backward(const float *g, const float *y, const float *gate, bf16 *__restrict__ y_gradient,
                        bf16 *__restrict__ gate_gradient, int rows, int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const size_t start = size_t(row) * width;
    const float s = 1.0f / (1.0f + __expf(-gate[row]));
    float sum = 0.0f;
    for (int vector = lane; vector < width / 4; vector += WARP) {
        const float4 a = reinterpret_cast<const float4 *>(g + start)[vector];
        const float4 b = reinterpret_cast<const float4 *>(y + start)[vector];
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
        reinterpret_cast<uint2 *>(y_gradient + start)[vector] = make_uint2(pack(s * a.x, s * a.y), pack(s * a.z, s * a.w));
    }
    sum = warp_sum(sum) * s * (1.0f - s);
    if (lane < GATE_COLUMNS) gate_gradient[size_t(row) * GATE_COLUMNS + lane] = __float2bfloat16_rn(lane == 0 ? sum : 0.0f);
}
