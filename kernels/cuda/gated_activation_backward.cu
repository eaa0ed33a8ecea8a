// The gradients of the gated half of a feed-forward block, and on the way its product again.
//
//   y = act(gate) up, act(x) = x s(z), s(z) = 1 / (1 + e^-z)
//     SiLU: z = x;  GELU (tanh): z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
//
//   d_gate = g up (s + x s (1 - s) dz/dx);  d_up = g act(gate);  product = act(gate) up
//
//   dots[row] = sum over the row of g y                                     F32, where they are asked for
//
// gate, up, gradient g, d_gate, d_up and product are BF16 columns [rows, width], each with a stride. d_gate and d_up may be
// the memory of gate and up: a thread reads an element before it writes it, and nothing else reads it. With `product` the
// forward pass need not keep it: the gradient of the projection behind it takes it from here. The dots give the gradient
// of a factor that g has been multiplied by without what the projection made: <dout, W y> = <W^T dout, y>.
//
// Bound: three reads and two or three writes of 2 bytes.

#include "training/gate.cuh"
#include "training/rows.cuh"

struct Call {
    const bf16 *gate, *up, *gradient;
    bf16 *gate_gradient, *up_gradient;
    bf16 *product;  // may be null
    float *dots;    // of gated_activation_backward_dots
    size_t gate_stride, up_stride, gradient_stride, gate_gradient_stride, up_gradient_stride, product_stride;
    int rows, width, activation, unused;
};

// Turns gate and up into their gradients, and the gradient into the product.
__device__ __forceinline__ void turn_back(float &gate, float &up, float &gradient, int activation) {
    const auto [sigmoid, slope] = find_gate(gate, activation);
    const float active = gate * sigmoid, product = active * up;
    gate = gradient * up * fmaf(active * (1.0f - sigmoid), slope, sigmoid);
    up = gradient * active;
    gradient = product;
}

// Eight columns of a row; the sum of their gradient times their product, each before it is rounded.
__device__ __forceinline__ float turn_back_eight(const Call &call, size_t row, int column) {
    const auto read = [&](const bf16 *from, size_t stride) {
        return __ldcg(reinterpret_cast<const uint4 *>(from + row * stride + column));
    };
    const auto write = [&](bf16 *to, size_t stride, const float(&values)[8]) {
        *reinterpret_cast<uint4 *>(to + row * stride + column) = pack_eight(values);
    };
    const uint4 raw[3] = {read(call.gate, call.gate_stride), read(call.up, call.up_stride),
                          read(call.gradient, call.gradient_stride)};
    float gate[8], up[8], gradient[8], dot = 0.0f;
    unpack_eight(raw[0], gate);
    unpack_eight(raw[1], up);
    unpack_eight(raw[2], gradient);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float before = gradient[i];
        turn_back(gate[i], up[i], gradient[i], call.activation);
        dot = fmaf(before, gradient[i], dot);
    }
    write(call.gate_gradient, call.gate_gradient_stride, gate);
    write(call.up_gradient, call.up_gradient_stride, up);
    if (call.product != nullptr) write(call.product, call.product_stride, gradient);
    return dot;
}

// Blocks along x cover a row, blocks along y take rows in turn.
extern "C" __global__ void __launch_bounds__(256) gated_activation_backward(Call call) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (column >= call.width) return;
    for (size_t row = blockIdx.y; row < call.rows; row += gridDim.y) turn_back_eight(call, row, column);
}

// With the dots: a warp a row.
extern "C" __global__ void __launch_bounds__(256) gated_activation_backward_dots(Call call) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % WARP;
    const size_t row = size_t(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= call.rows) return;
    float dot = 0.0f;
#pragma unroll 2
    for (int column = lane * 8; column < call.width; column += WARP * 8) dot += turn_back_eight(call, row, column);
    dot = warp_sum(dot);
    if (lane == 0) call.dots[row] = dot;
}

// Any width and alignment: an element a thread.
extern "C" __global__ void __launch_bounds__(256) gated_activation_backward_any(Call call) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= call.width) return;
    for (size_t row = blockIdx.y; row < call.rows; row += gridDim.y) {
        float gate = __bfloat162float(call.gate[row * call.gate_stride + column]);
        float up = __bfloat162float(call.up[row * call.up_stride + column]);
        float gradient = __bfloat162float(call.gradient[row * call.gradient_stride + column]);
        turn_back(gate, up, gradient, call.activation);
        call.gate_gradient[row * call.gate_gradient_stride + column] = __float2bfloat16_rn(gate);
        call.up_gradient[row * call.up_gradient_stride + column] = __float2bfloat16_rn(up);
        if (call.product == nullptr) continue;
        call.product[row * call.product_stride + column] = __float2bfloat16_rn(gradient);
    }
}
