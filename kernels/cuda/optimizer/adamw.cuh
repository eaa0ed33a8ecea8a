// The rule of AdamW, for states in single precision and in eight bits.
#pragma once

#include "elements.cuh"

// What stays from step to step; src/optimizer.rs makes it.
struct AdamWOptions {
    double weight_decay;
    float first_part;    // 1 - beta1
    float second_decay;  // beta2
    float second_part;   // 1 - beta2
    float epsilon;
};

struct AdamW {
    AdamWOptions options;
    float gradient_factor, rate, root_factor, decay;

    __device__ __forceinline__ AdamW(const AdamWOptions &options, const StepValues *step)
        : options(options), gradient_factor(step->gradient_factor), rate(step->adam_rate),
          root_factor(step->adam_root_factor), decay(times_rate(step, options.weight_decay)) {}

    // Moves one element; the root of its new second moment. Decay and step are added before the weight is touched, so that a
    // decay of less than half the weight's spacing is not lost by itself.
    __device__ __forceinline__ float operator()(float &w, float g, float &m, float &v) const {
        g = product(g, gradient_factor);
        m = sum(m, product(options.first_part, difference(g, m)));
        v = sum(product(options.second_decay, v), product(options.second_part, product(g, g)));
        const float root = __fsqrt_rn(v);
        const float direction = __fdiv_rn(m, sum(product(root, root_factor), options.epsilon));
        w = difference(w, sum(product(rate, direction), product(decay, w)));
        return root;
    }
};
