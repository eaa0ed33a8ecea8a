//! AdamW: Adam with decoupled weight decay.
//!
//! With gradient `g` (already clipped), rate `η` and step `t` from 1:
//!
//! ```text
//! m ← m + (1 - β₁)(g - m)                   first moment
//! v ← β₂ v + (1 - β₂) g²                    second moment
//! w ← w - η ( m̂ / (√v̂ + ε) + λ w )         m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ)
//! ```
//!
//! Kingma and Ba, "Adam", 2015; Loshchilov and Hutter, "Decoupled weight decay regularization", 2019. Decay and step are
//! added before the weight is touched, so that a decay of less than half the weight's spacing is not lost by itself.

use ironloom_core::Threads;

use super::{AdamWOptions, Parameter, Step, state::Moments};
use crate::pieces::{PIECE, for_each};

pub(super) fn update(
    options: &AdamWOptions,
    threads: &Threads,
    step: &Step,
    parameter: &Parameter<'_>,
    moments: &mut Moments,
    weights: &mut [f32],
    gradient: &[f32],
) {
    let rule = Rule::new(options, step, parameter);
    let moments = moments.first.chunks_mut(PIECE).zip(moments.second.chunks_mut(PIECE));
    let pieces = weights.chunks_mut(PIECE).zip(gradient.chunks(PIECE)).zip(moments);
    for_each(threads, pieces, |_, ((weights, gradient), (first, second))| {
        rule.apply(weights, gradient, first, second);
    });
}

/// `rate / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)`.
pub(super) fn numbers(options: &AdamWOptions, learning_rate: f32, number: u64) -> (f32, f32) {
    let (rate, t) = (f64::from(learning_rate), number as f64);
    let rate = rate / (1.0 - libm::pow(options.beta1, t));
    (rate as f32, (1.0 / (1.0 - libm::pow(options.beta2, t)).sqrt()) as f32)
}

/// The numbers of a step, made once in double precision.
pub(super) struct Rule {
    gradient_factor: f32,
    first_part: f32,
    second_decay: f32,
    second_part: f32,
    /// `η / (1 - β₁ᵗ)`.
    rate: f32,
    /// `1 / √(1 - β₂ᵗ)`.
    root_factor: f32,
    epsilon: f32,
    /// `η λ`, or 0.
    decay: f32,
}

impl Rule {
    pub(super) fn new(options: &AdamWOptions, step: &Step, parameter: &Parameter<'_>) -> Self {
        let rate = f64::from(step.learning_rate);
        let decay = if parameter.decays { rate * options.weight_decay } else { 0.0 };
        let (rate, root_factor) = numbers(options, step.learning_rate, step.number);
        Self {
            gradient_factor: step.gradient_factor,
            first_part: (1.0 - options.beta1) as f32,
            second_decay: options.beta2 as f32,
            second_part: (1.0 - options.beta2) as f32,
            rate,
            root_factor,
            epsilon: options.epsilon as f32,
            decay: decay as f32,
        }
    }

    /// Moves weights and moments of any number of elements.
    pub(super) fn apply(&self, weights: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32]) {
        for (((w, &g), m), v) in weights.iter_mut().zip(gradient).zip(first).zip(second) {
            let g = g * self.gradient_factor;
            *m += self.first_part * (g - *m);
            *v = self.second_decay * *v + self.second_part * (g * g);
            let direction = *m / (v.sqrt() * self.root_factor + self.epsilon);
            *w -= self.rate * direction + self.decay * *w;
        }
    }
}
