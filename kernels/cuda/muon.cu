// The elementwise parts of Muon for a matrix; its products of matrices are those of training (src/muon.rs puts them together):
//
//   muon_momentum     b += (1 - mu)(g - b),  u = g + mu (b - g), or without nesterov  u = b
//   muon_operand      x = u / (|u| + 1e-7) at first;  rounded = x in bfloat16;  x = first x, to which a product adds the rest
//   muon_polynomial   out = third a + fifth a^2              a = x x^T in bfloat16, a^2 its square in F32, out bfloat16
//   muon_update       w -= rate (0.2 sqrt(max(rows, cols)) x + lambda w)
//
// x stays in single precision, and only what goes through the tensor cores is rounded. With x in bfloat16 the directions that
// rounding puts into it grow by 3.4 an iteration like any small singular value: of a matrix of 8 strong directions and others
// 300 times weaker the result was 29% off, and is 0.5% so. Bound: bytes, mostly in the second-level cache.

#include "optimizer/elements.cuh"
#include "optimizer/squares.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    muon_momentum(const float *gradient, float *__restrict__ momentum, float *__restrict__ direction,
                  const StepValues *step, float mu, int nesterov, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (step->apply == 0) return;
    const float factor = step->gradient_factor, part = difference(1.0f, mu);
    move_elements<1>(direction, gradient, momentum, nullptr, nullptr, count, [=](float &u, float g, float &b, float &) {
        g = product(g, factor);
        b = sum(b, product(part, difference(g, b)));
        u = nesterov ? sum(g, product(mu, difference(b, g))) : b;
    });
}

// `partial` is null but at first. Four elements at a time: `count` is a multiple.
extern "C" __global__ void __launch_bounds__(THREADS)
    muon_operand(float *__restrict__ x, bf16 *__restrict__ rounded, const double *partial, int pieces, float first,
                 size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    float factor = 1.0f;
    // The same in every thread of every block.
    if (partial != nullptr) factor = float(1.0 / (sqrt(sum_of_pieces<THREADS>(partial, pieces)) + 1e-7));
    const size_t stride = size_t(gridDim.x) * THREADS * 4;
    for (size_t at = (size_t(blockIdx.x) * THREADS + threadIdx.x) * 4; at < count; at += stride) {
        float value[4];
        load_four(value, x + at);
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] = product(value[i], factor);
        round_four(rounded + at, value);
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] = product(value[i], first);
        store_four(x + at, value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    muon_polynomial(const bf16 *gram, const float *square, bf16 *__restrict__ out, float third, float fifth, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const size_t stride = size_t(gridDim.x) * THREADS * 4;
    for (size_t at = (size_t(blockIdx.x) * THREADS + threadIdx.x) * 4; at < count; at += stride) {
        float value[4];
        load_four(value, square + at);
        const uint2 a = *reinterpret_cast<const uint2 *>(gram + at);
        const float terms[4] = {low_half(a.x), high_half(a.x), low_half(a.y), high_half(a.y)};
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] = sum(product(third, terms[i]), product(fifth, value[i]));
        round_four(out + at, value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    muon_update(float *__restrict__ weights, const float *direction, bf16 *__restrict__ rounded, const StepValues *step,
                double root_of_side, double weight_decay, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (step->apply == 0) return;
    const float scale = float(double(step->learning_rate) * 0.2 * root_of_side), decay = times_rate(step, weight_decay);
    move_elements<0>(weights, direction, nullptr, nullptr, rounded, count, [=](float &w, float x, float &, float &) {
        w = difference(w, sum(product(scale, x), product(decay, w)));
    });
}
