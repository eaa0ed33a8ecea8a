// Optimizers whose states are single precision, and the moving average of weights. For weights w, gradients g (times the
// step's gradient_factor as they are read), states m and v, rate the step's learning rate, lambda the weight decay:
//
//   adamw            m += (1 - beta1)(g - m),  v = beta2 v + (1 - beta2) g^2,
//                    w -= rate (m^ / (sqrt(v^) + epsilon) + lambda w),  m^ = m / (1 - beta1^t), v^ = v / (1 - beta2^t)
//   sgd              w -= rate (g + lambda w)
//   sgd_momentum     g += lambda w,  m = mu m + g,  w -= rate m, or with nesterov  w -= rate (g + mu m)
//   lion             c = m + (1 - beta1)(g - m),  w -= rate (sign(c) + lambda w),  m += (1 - beta2)(g - m)
//   weight_average   average += (1 - decay)(w - average)
//
// The parameters lie one after another in arenas with the same offsets, with zeros between them, which stay zeros. Where a
// product takes rounded weights, their bfloat16 copies are written with them. Every operation is the processor's
// (crates/ironloom-train/src/optimizer), rounded where that rounds, so both make the same bits.
//
// Bound: bytes. AdamW reads 16 and writes 14 a parameter; its arithmetic, a square root and a division exactly rounded among
// it, is by a count of instructions a fifth of that time on an H200.

#include "optimizer/adamw.cuh"

extern "C" __global__ void __launch_bounds__(256)
    adamw(float *__restrict__ weights, const float *gradient, float *__restrict__ first, float *__restrict__ second,
          bf16 *__restrict__ rounded, const StepValues *step, AdamWOptions options, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (step->apply == 0) return;
    move_elements<2>(weights, gradient, first, second, rounded, count, AdamW(options, step));
}

extern "C" __global__ void __launch_bounds__(256)
    sgd(float *__restrict__ weights, const float *gradient, bf16 *__restrict__ rounded, const StepValues *step, float decay,
        size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (step->apply == 0) return;
    const float rate = step->learning_rate, factor = step->gradient_factor;
    move_elements<0>(weights, gradient, nullptr, nullptr, rounded, count, [=](float &w, float g, float &, float &) {
        w = difference(w, product(rate, sum(product(g, factor), product(decay, w))));
    });
}

extern "C" __global__ void __launch_bounds__(256)
    sgd_momentum(float *__restrict__ weights, const float *gradient, float *__restrict__ momentum,
                 bf16 *__restrict__ rounded, const StepValues *step, float mu, int nesterov, float decay, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (step->apply == 0) return;
    const float rate = step->learning_rate, factor = step->gradient_factor;
    move_elements<1>(weights, gradient, momentum, nullptr, rounded, count, [=](float &w, float g, float &m, float &) {
        g = sum(product(g, factor), product(decay, w));
        m = sum(product(mu, m), g);
        w = difference(w, product(rate, nesterov ? sum(g, product(mu, m)) : m));
    });
}

extern "C" __global__ void __launch_bounds__(256)
    lion(float *__restrict__ weights, const float *gradient, float *__restrict__ momentum, bf16 *__restrict__ rounded,
         const StepValues *step, float direction_part, float momentum_part, double weight_decay, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (step->apply == 0) return;
    const float rate = step->learning_rate, factor = step->gradient_factor, decay = times_rate(step, weight_decay);
    move_elements<1>(weights, gradient, momentum, nullptr, rounded, count, [=](float &w, float g, float &m, float &) {
        g = product(g, factor);
        const float c = sum(m, product(direction_part, difference(g, m)));
        const float along = c == 0.0f ? 0.0f : copysignf(rate, c);
        w = difference(w, sum(along, product(decay, w)));
        m = sum(m, product(momentum_part, difference(g, m)));
    });
}

extern "C" __global__ void __launch_bounds__(256)
    weight_average(float *__restrict__ average, const float *weights, const StepValues *step, float part, size_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (step->apply == 0) return;
    move_elements<0>(average, weights, nullptr, nullptr, nullptr, count, [=](float &a, float w, float &, float &) {
        a = sum(a, product(part, difference(w, a)));
    });
}
