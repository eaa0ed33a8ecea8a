//! Searches for the scale (and minimum) of a group of weights that lose least.
//!
//! Given weights x and codes q in a range of integers, they minimise the squared error `Σ (x - scale * q - min)²`. For a fixed
//! scale and minimum the best codes are the nearest ones; for fixed codes the best scale and minimum solve a least-squares
//! problem of one or two unknowns. Alternating the two descends to a local optimum, so it is started from several scales:
//! the one that puts the weight of largest magnitude on the outermost code, and others around it that clip it or leave room.
//! The scale is rounded to its stored form before each trial: what is compared is the error that a reader will see.
//!
//! Sums run in eight fixed lanes without fused operations: the same bytes on every machine.

/// The integers a code may take.
#[derive(Clone, Copy)]
pub(super) struct CodeRange {
    pub(super) lowest: f32,
    pub(super) highest: f32,
}

impl CodeRange {
    /// The code nearest to `position`, as a float.
    fn nearest(self, position: f32) -> f32 {
        // Adding 1.5 * 2^23 leaves no bit for fractions: rounds to even without the library call that baseline x86-64 needs.
        const ROUNDER: f32 = 12_582_912.0;
        (position.max(self.lowest).min(self.highest) + ROUNDER) - ROUNDER
    }
}

/// A scale and a minimum with the squared error they leave.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    pub(super) scale: f32,
    pub(super) min: f32,
    pub(super) error: f32,
}

/// Where the weight of largest magnitude is put at the start of a descent, as a share of the outermost code.
const STARTS: [f32; 9] = [1.0, 0.94, 0.88, 0.82, 0.76, 0.7, 1.06, 1.12, 1.2];
/// The most alternations of one descent; nearly all settle in fewer.
const ALTERNATIONS: usize = 6;

/// The best `scale` for `x ≈ scale * q`; `min` of the result is 0.
///
/// `stored` rounds a scale to what will be stored. A multiple of eight weights, all finite.
pub(super) fn fit_scale(values: &[f32], range: CodeRange, stored: impl Fn(f32) -> f32) -> Fit {
    let peak = values.iter().fold(0.0f32, |peak, &value| if value.abs() > peak.abs() { value } else { peak });
    let mut best = Fit { scale: 0.0, min: 0.0, error: squares(values) };
    for start in STARTS {
        for outermost in [range.lowest, range.highest] {
            let mut scale = stored(peak / (outermost * start));
            for _ in 0..ALTERNATIONS {
                let trial = Trial::of(values, scale, 0.0, range);
                if trial.error < best.error {
                    best = Fit { scale, min: 0.0, error: trial.error };
                }
                let next = stored(trial.best_scale());
                if next == scale {
                    break;
                }
                scale = next;
            }
        }
    }
    best
}

/// The best `scale >= 0` and `min` for `x ≈ scale * q + min`, codes from 0.
///
/// `stored_scale` and `stored_min` round them to what will be stored; `stored_min` may also bound the minimum, and the scale is
/// then the best beside the bound. A multiple of eight weights, all finite.
pub(super) fn fit_scale_and_min(
    values: &[f32],
    range: CodeRange,
    stored_scale: impl Fn(f32) -> f32,
    stored_min: impl Fn(f32) -> f32,
) -> Fit {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut best = Trial::of(values, 0.0, stored_min(sum(values) / values.len() as f32), range).fit();
    for start in STARTS {
        let shrunk = (high - low) * (1.0 / start);
        let middle = 0.5 * (low + high);
        let mut min = stored_min(middle - 0.5 * shrunk);
        let mut scale = stored_scale((middle + 0.5 * shrunk - min) / range.highest);
        for _ in 0..ALTERNATIONS {
            let trial = Trial::of(values, scale, min, range);
            if trial.error < best.error {
                best = trial.fit();
            }
            let (next_scale, next_min) = trial.best_scale_and_min(&stored_min);
            let next_scale = stored_scale(next_scale);
            if (next_scale, next_min) == (scale, min) {
                break;
            }
            (scale, min) = (next_scale, next_min);
        }
    }
    best
}

/// Writes the nearest codes, offset so that the lowest is 0.
pub(super) fn nearest_codes(values: &[f32], scale: f32, min: f32, range: CodeRange, codes: &mut [u8]) {
    let inverse = reciprocal(scale);
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = (range.nearest((value - min) * inverse) - range.lowest) as u8;
    }
}

/// The squared error that nearest codes leave, with the sums that a least-squares fit to those codes needs.
pub(super) struct Trial {
    scale: f32,
    min: f32,
    pub(super) error: f32,
    count: f32,
    /// `Σ q`
    pub(super) q: f32,
    /// `Σ q²`
    pub(super) qq: f32,
    /// `Σ x`
    pub(super) x: f32,
    /// `Σ x q`
    pub(super) xq: f32,
}

impl Trial {
    /// Codes `values` with that scale and minimum. A multiple of eight weights.
    pub(super) fn of(values: &[f32], scale: f32, min: f32, range: CodeRange) -> Self {
        let inverse = reciprocal(scale);
        let [mut error, mut q_sum, mut qq, mut x, mut xq] = [[0.0f32; LANES]; 5];
        for values in values.as_chunks::<LANES>().0 {
            for lane in 0..LANES {
                let value = values[lane];
                let q = range.nearest((value - min) * inverse);
                let residual = value - (scale * q + min);
                error[lane] += residual * residual;
                q_sum[lane] += q;
                qq[lane] += q * q;
                x[lane] += value;
                xq[lane] += value * q;
            }
        }
        let [error, q, qq, x, xq] = [error, q_sum, qq, x, xq].map(total);
        Self { scale, min, error, count: values.len() as f32, q, qq, x, xq }
    }

    fn fit(&self) -> Fit {
        Fit { scale: self.scale, min: self.min, error: self.error }
    }

    /// The scale that fits these codes best beside no minimum.
    fn best_scale(&self) -> f32 {
        if self.qq > 0.0 { self.xq / self.qq } else { 0.0 }
    }

    /// The scale and stored minimum that fit these codes best.
    fn best_scale_and_min(&self, stored_min: impl Fn(f32) -> f32) -> (f32, f32) {
        if self.qq <= 0.0 {
            return (0.0, stored_min(self.x / self.count));
        }
        let determinant = self.count * self.qq - self.q * self.q;
        let free = if determinant > 0.0 { (self.qq * self.x - self.q * self.xq) / determinant } else { self.min };
        let min = stored_min(free);
        // The scale follows the minimum as stored, so a bounded or rounded minimum costs as little as it can.
        (((self.xq - min * self.q) / self.qq).max(0.0), min)
    }
}

const LANES: usize = 8;

fn total(lanes: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

fn sum(values: &[f32]) -> f32 {
    values.iter().sum()
}

fn squares(values: &[f32]) -> f32 {
    values.iter().map(|value| value * value).sum()
}

/// `1 / scale`, or 0 where the scale is so small that the type stores it as zero anyway.
fn reciprocal(scale: f32) -> f32 {
    if scale.abs() > 1e-30 { 1.0 / scale } else { 0.0 }
}
