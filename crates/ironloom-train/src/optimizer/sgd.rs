//! Stochastic gradient descent, with momentum `μ` if wanted.
//!
//! ```text
//! g ← g + λ w                      weight decay is a part of the gradient, as in the usual libraries
//! b ← μ b + g
//! w ← w - η b        or, looking ahead (Nesterov),   w ← w - η (g + μ b)
//! ```
//!
//! Robbins and Monro, 1951; the forms with momentum as in Sutskever et al., "On the importance of initialization and momentum in
//! deep learning", 2013.

use ironloom_core::Threads;

use super::{Parameter, SgdOptions, Step};
use crate::pieces::{PIECE, for_each};

pub(super) fn update(
    options: &SgdOptions,
    threads: &Threads,
    step: &Step,
    parameter: &Parameter<'_>,
    momentum: Option<&mut [f32]>,
    weights: &mut [f32],
    gradient: &[f32],
) {
    let (rate, factor, mu) = (step.learning_rate, step.gradient_factor, options.momentum as f32);
    let decay = if parameter.decays { options.weight_decay as f32 } else { 0.0 };
    let pieces = weights.chunks_mut(PIECE).zip(gradient.chunks(PIECE));
    let Some(momentum) = momentum else {
        return for_each(threads, pieces, |_, (weights, gradient)| {
            for (w, &g) in weights.iter_mut().zip(gradient) {
                *w -= rate * (g * factor + decay * *w);
            }
        });
    };
    for_each(threads, pieces.zip(momentum.chunks_mut(PIECE)), |_, ((weights, gradient), momentum)| {
        for ((w, &g), b) in weights.iter_mut().zip(gradient).zip(momentum) {
            let g = g * factor + decay * *w;
            *b = mu * *b + g;
            let direction = if options.nesterov { g + mu * *b } else { *b };
            *w -= rate * direction;
        }
    });
}
