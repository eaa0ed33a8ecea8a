//! The gradient's global norm, and the factor that clips by it.
//!
//! `norm = sqrt(Σ g²)` over every element of every parameter. Pascanu et al., "On the difficulty of training recurrent neural
//! networks", 2013: when the norm is above a limit, the whole gradient is scaled by `limit / norm`. The scaling costs no pass
//! of its own: [`crate::optimizer::Step::gradient_factor`] takes it where the gradient is read.
//!
//! A sum here has one order: 8 lanes of double precision within a piece of 65,536 elements, pieces in order, parameters
//! in the order they are given. Squares of single-precision values neither overflow nor vanish in double precision, so a norm
//! is infinite or not a number only when an element of the gradient is.

use ironloom_core::Threads;

use crate::{
    Error, Result,
    pieces::{PIECE, for_each},
};

/// Sums up the squares of a gradient, parameter by parameter.
///
/// ```
/// use ironloom_train::{GradientNorm, clip_factor};
/// let threads = ironloom_core::Threads::new(2);
/// let mut norm = GradientNorm::default();
/// norm.add(&threads, &[3.0, 0.0]);
/// norm.add(&threads, &[-4.0]);
/// assert_eq!(norm.norm(), 5.0);
/// assert_eq!(clip_factor(norm.norm(), 1.0)?, 0.2);
/// # Ok::<(), ironloom_train::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct GradientNorm {
    squares: f64,
}

impl GradientNorm {
    /// Adds a parameter's gradient. The order of parameters is a part of the result, so keep it the same.
    pub fn add(&mut self, threads: &Threads, gradient: &[f32]) {
        let mut sums = vec![0.0f64; gradient.len().div_ceil(PIECE)];
        for_each(threads, sums.iter_mut().zip(gradient.chunks(PIECE)), |_, (sum, piece)| *sum = sum_of_squares(piece));
        self.squares += sums.iter().sum::<f64>();
    }

    /// The norm of all that was added.
    pub fn norm(&self) -> f64 {
        self.squares.sqrt()
    }
}

fn sum_of_squares(values: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0f64; LANES];
    let (chunks, tail) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(tail) {
        *lane += f64::from(value) * f64::from(value);
    }
    lanes.iter().sum()
}

/// What a gradient of this norm is multiplied with so that its norm is at most `max_norm`: 1 when it already is.
///
/// # Errors
/// The norm is infinite or not a number (there is no direction to step in), or the limit isn't above 0.
pub fn clip_factor(norm: f64, max_norm: f64) -> Result<f32> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::InvalidOption { option: "max_gradient_norm", value: max_norm, limits: "above 0" });
    }
    if !norm.is_finite() {
        return Err(Error::GradientNotFinite { norm });
    }
    Ok(if norm > max_norm { (max_norm / norm) as f32 } else { 1.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironloom_core::Philox;

    fn draws(seed: u64, count: usize) -> Vec<f32> {
        let mut philox = Philox::new(seed, 0);
        (0..count).map(|_| philox.next_normal()).collect()
    }

    #[test]
    fn the_norm_is_that_of_a_plain_sum() {
        for count in [0, 1, 7, 8, 9, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let values = draws(count as u64, count);
            let mut norm = GradientNorm::default();
            norm.add(&Threads::new(1), &values);
            let expected = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
            assert!((norm.norm() - expected).abs() <= 1e-12 * expected, "{count}: {} {expected}", norm.norm());
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let (a, b) = (draws(1, 5 * PIECE + 17), draws(2, 100));
        let norms = [1, 2, 3, 5].map(|count| {
            let (threads, mut norm) = (Threads::new(count), GradientNorm::default());
            norm.add(&threads, &a);
            norm.add(&threads, &b);
            norm.norm().to_bits()
        });
        assert!(norms.iter().all(|&norm| norm == norms[0]), "{norms:?}");
    }

    #[test]
    fn the_largest_and_smallest_values_have_a_norm() {
        let mut norm = GradientNorm::default();
        norm.add(&Threads::new(1), &[f32::MAX, f32::MAX]);
        assert!((norm.norm() / f64::from(f32::MAX) - 2f64.sqrt()).abs() < 1e-12);
        let mut norm = GradientNorm::default();
        norm.add(&Threads::new(1), &[1e-45]);
        assert_eq!(norm.norm(), f64::from(1e-45f32));
    }

    #[test]
    fn clipping_keeps_what_is_within_the_limit() {
        assert_eq!(clip_factor(0.0, 1.0).unwrap(), 1.0);
        assert_eq!(clip_factor(1.0, 1.0).unwrap(), 1.0);
        assert_eq!(clip_factor(4.0, 1.0).unwrap(), 0.25);
        assert!(matches!(clip_factor(f64::NAN, 1.0), Err(Error::GradientNotFinite { .. })));
        assert!(matches!(clip_factor(f64::INFINITY, 1.0), Err(Error::GradientNotFinite { .. })));
        assert!(matches!(clip_factor(1.0, 0.0), Err(Error::InvalidOption { .. })));
        assert!(matches!(clip_factor(1.0, f64::NAN), Err(Error::InvalidOption { .. })));
    }
}
