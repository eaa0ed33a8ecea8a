//! Lion: steps of one size along the sign of a moving mean.
//!
//! ```text
//! c = β₁ m + (1 - β₁) g
//! w ← w - η ( sign(c) + λ w )          sign(0) = 0
//! m ← β₂ m + (1 - β₂) g
//! ```
//!
//! Chen et al., "Symbolic discovery of optimization algorithms", 2023.

use ironloom_core::Threads;

use super::{LionOptions, Parameter, Step};
use crate::pieces::{PIECE, for_each};

pub(super) fn update(
    options: &LionOptions,
    threads: &Threads,
    step: &Step,
    parameter: &Parameter<'_>,
    momentum: &mut [f32],
    weights: &mut [f32],
    gradient: &[f32],
) {
    let (rate, factor) = (step.learning_rate, step.gradient_factor);
    let (direction_part, momentum_part) = ((1.0 - options.beta1) as f32, (1.0 - options.beta2) as f32);
    let decay = if parameter.decays { (f64::from(rate) * options.weight_decay) as f32 } else { 0.0 };
    let pieces = weights.chunks_mut(PIECE).zip(gradient.chunks(PIECE)).zip(momentum.chunks_mut(PIECE));
    for_each(threads, pieces, |_, ((weights, gradient), momentum)| {
        for ((w, &g), m) in weights.iter_mut().zip(gradient).zip(momentum) {
            let g = g * factor;
            let c = *m + direction_part * (g - *m);
            let step = if c == 0.0 { 0.0 } else { rate.copysign(c) };
            *w -= step + decay * *w;
            *m += momentum_part * (g - *m);
        }
    });
}
