//! Muon: momentum, orthogonalized. For matrices between hidden activations; AdamW moves the rest.
//!
//! ```text
//! b ← b + (1 - μ)(g - b)
//! u = g + μ (b - g)                     looking ahead (Nesterov); else u = b
//! o = the orthogonal factor of u:       u = U Σ Vᵀ  →  o ≈ U Vᵀ
//! w ← w - η ( 0.2 √max(rows, cols) o + λ w )
//! ```
//!
//! Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. The factor `0.2 √max(rows, cols)` gives a
//! step AdamW's usual size (root mean square 0.2), so that one learning rate and one decay serve both: Liu et al., "Muon is
//! scalable for LLM training", 2025.
//!
//! The orthogonal factor comes from five steps of a Newton–Schulz iteration, after `x ← u / ‖u‖`:
//!
//! ```text
//! a = x xᵀ,   x ← 3.4445 x + (-4.7750 a + 2.0315 a²) x
//! ```
//!
//! Its coefficients are those of Jordan: singular values come to between about 0.7 and 1.2, not exactly to 1, in few steps. The smaller of the
//! two sides is that of `a`. In single precision throughout; products have one order of sums at any number of threads.

use ironloom_core::Threads;
use ironloom_quant::{PackedMatrix, Product, WeightFormat, matmul};

use super::{MuonOptions, Parameter, Step};
use crate::{
    Error, GradientNorm, Result,
    pieces::{PIECE, for_each},
};

const STEPS: usize = 5;
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// Keeps a zero matrix zero.
const EPSILON: f64 = 1e-7;

pub(super) fn update(
    options: &MuonOptions,
    threads: &Threads,
    step: &Step,
    parameter: &Parameter<'_>,
    momentum: &mut [f32],
    weights: &mut [f32],
    gradient: &[f32],
) -> Result<()> {
    let &[.., rows, cols] = parameter.shape else {
        return Err(Error::NotAMatrix { name: parameter.name.to_owned(), shape: parameter.shape.to_vec() });
    };
    let (mu, factor) = (options.momentum as f32, step.gradient_factor);
    let mut direction = vec![0.0; weights.len()];
    let pieces = direction.chunks_mut(PIECE).zip(gradient.chunks(PIECE)).zip(momentum.chunks_mut(PIECE));
    for_each(threads, pieces, |_, ((direction, gradient), momentum)| {
        for ((u, &g), b) in direction.iter_mut().zip(gradient).zip(momentum) {
            let g = g * factor;
            *b += (1.0 - mu) * (g - *b);
            *u = if options.nesterov { g + mu * (*b - g) } else { *b };
        }
    });
    if weights.is_empty() {
        return Ok(());
    }
    for matrix in direction.chunks_mut(rows * cols) {
        orthogonalize(threads, matrix, rows, cols)?;
    }
    let rate = f64::from(step.learning_rate);
    let scale = (rate * 0.2 * (rows.max(cols) as f64).sqrt()) as f32;
    let decay = if parameter.decays { (rate * options.weight_decay) as f32 } else { 0.0 };
    for_each(threads, weights.chunks_mut(PIECE).zip(direction.chunks(PIECE)), |_, (weights, direction)| {
        for (w, &o) in weights.iter_mut().zip(direction) {
            *w -= scale * o + decay * *w;
        }
    });
    Ok(())
}

/// Replaces `matrix` `[rows, cols]` by about its orthogonal factor.
fn orthogonalize(threads: &Threads, matrix: &mut [f32], rows: usize, cols: usize) -> Result<()> {
    let mut norm = GradientNorm::default();
    norm.add(threads, matrix);
    let factor = (1.0 / (norm.norm() + EPSILON)) as f32;
    let tall = rows > cols;
    let (small, large) = (rows.min(cols), rows.max(cols));
    let mut x = if tall { transposed(matrix, rows, cols) } else { matrix.to_vec() };
    x.iter_mut().for_each(|value| *value *= factor);

    let [first, third, fifth] = COEFFICIENTS;
    let (mut gram, mut square, mut change) = (vec![0.0; small * small], vec![0.0; small * small], vec![0.0; x.len()]);
    for _ in 0..STEPS {
        // A product is with rows of its second operand: `x xᵀ` as it is, `a a = a aᵀ` as `a` is symmetric.
        product(threads, &x, &x, [small, large, small], &mut gram)?;
        product(threads, &gram, &gram, [small, small, small], &mut square)?;
        for (square, &gram) in square.iter_mut().zip(&gram) {
            *square = third * gram + fifth * *square;
        }
        product(threads, &square, &transposed(&x, small, large), [small, small, large], &mut change)?;
        for (x, &change) in x.iter_mut().zip(&change) {
            *x = first * *x + change;
        }
    }
    matrix.copy_from_slice(&if tall { transposed(&x, cols, rows) } else { x });
    Ok(())
}

/// `out [m, n] = left [m, k] right [n, k]ᵀ`.
fn product(threads: &Threads, left: &[f32], right: &[f32], [m, k, n]: [usize; 3], out: &mut [f32]) -> Result<()> {
    let right = PackedMatrix::from_f32(right, n, k, WeightFormat::Keep, threads)?;
    Ok(matmul(threads, left, m, &mut [Product { matrix: &right, out }])?)
}

fn transposed(matrix: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(matrix.len());
    for col in 0..cols {
        out.extend((0..rows).map(|row| matrix[row * cols + col]));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use ironloom_core::Philox;

    /// `Q` and eigenvalues of `mᵀ m` are not needed: a polynomial of singular values is the same polynomial of the matrix,
    /// so double precision and plain loops give the expected result.
    fn reference(matrix: &[f32], rows: usize, cols: usize) -> Vec<f64> {
        let mut x: Vec<f64> = matrix.iter().map(|&v| f64::from(v)).collect();
        let norm = x.iter().map(|v| v * v).sum::<f64>().sqrt() + 1e-7;
        x.iter_mut().for_each(|v| *v /= norm);
        for _ in 0..5 {
            // Through the columns' side, whichever is smaller: x (3.4445 I - 4.775 xᵀx + 2.0315 (xᵀx)²).
            let gram = |i: usize, j: usize| (0..rows).map(|r| x[r * cols + i] * x[r * cols + j]).sum::<f64>();
            let gram: Vec<f64> = (0..cols * cols).map(|at| gram(at / cols, at % cols)).collect();
            let square = |i: usize, j: usize| (0..cols).map(|k| gram[i * cols + k] * gram[k * cols + j]).sum::<f64>();
            let factor: Vec<f64> = (0..cols * cols)
                .map(|at| {
                    let (i, j) = (at / cols, at % cols);
                    f64::from(u8::from(i == j)) * 3.4445 - 4.7750 * gram[at] + 2.0315 * square(i, j)
                })
                .collect();
            x = (0..rows * cols)
                .map(|at| (0..cols).map(|k| x[at / cols * cols + k] * factor[k * cols + at % cols]).sum())
                .collect();
        }
        x
    }

    fn draws(seed: u64, count: usize) -> Vec<f32> {
        let mut philox = Philox::new(seed, 0);
        (0..count).map(|_| philox.next_normal()).collect()
    }

    #[test]
    fn the_iteration_is_that_of_plain_loops_in_double_precision() {
        for (rows, cols) in [(1, 1), (1, 7), (5, 3), (8, 8), (17, 33), (33, 17)] {
            let matrix = draws((rows * 100 + cols) as u64, rows * cols);
            let expected = reference(&matrix, rows, cols);
            let mut found = matrix.clone();
            orthogonalize(&Threads::new(2), &mut found, rows, cols).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert!((f64::from(*found) - expected).abs() < 2e-4, "{rows} x {cols}: {found} {expected}");
            }
        }
    }

    #[test]
    fn rows_come_out_nearly_orthonormal_whatever_their_sizes_were() {
        let (rows, cols) = (16, 48);
        let mut matrix = draws(3, rows * cols);
        for (row, values) in matrix.chunks_mut(cols).enumerate() {
            values.iter_mut().for_each(|value| *value *= 1.0 + row as f32);
        }
        orthogonalize(&Threads::new(1), &mut matrix, rows, cols).unwrap();
        for i in 0..rows {
            for j in 0..rows {
                let dot: f32 = (0..cols).map(|k| matrix[i * cols + k] * matrix[j * cols + k]).sum();
                let expected = if i == j { 1.0 } else { 0.0 };
                assert!((dot - expected).abs() < 0.6, "{i} {j}: {dot}");
            }
        }
    }

    #[test]
    fn a_zero_matrix_stays_zero() {
        let mut matrix = [0.0; 12];
        orthogonalize(&Threads::new(1), &mut matrix, 3, 4).unwrap();
        assert_eq!(matrix, [0.0; 12]);
    }
}
