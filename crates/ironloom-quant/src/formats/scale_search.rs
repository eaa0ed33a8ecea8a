//! Searches for the scale (and minimum) of a group of weights that lose least.
//!
//! Given weights x and codes q in a range of integers, they minimise the squared error `Σ (x - scale * q - min)²`. For a fixed
//! scale and minimum the best codes are the nearest ones; for fixed codes the best scale and minimum solve a least-squares
//! problem of one or two unknowns. Alternating the two descends to a local optimum, so it is started from several scales:
//! the one that puts the weight of largest magnitude on the outermost code, and others around it that clip it or leave room.
//! The scale is rounded to its stored form before each trial: what is compared is the error that a reader will see.
//!
//! Sums run in four fixed lanes without fused operations: the same bytes on every machine.

/// The integers a code may take.
#[derive(Clone, Copy)]
pub(super) struct CodeRange {
    pub(super) lowest: f32,
    pub(super) highest: f32,
}

impl CodeRange {
    /// The code nearest to `position`, as a float.
    fn nearest(self, position: f32) -> f32 {
        // Comparisons, not `max` and `min`, which would also have to treat NaN; positions are finite.
        let position = if position > self.lowest { position } else { self.lowest };
        let position = if position < self.highest { position } else { self.highest };
        // Adding 1.5 * 2^23 leaves no bit for fractions: rounds to even without the library call that baseline x86-64 needs.
        const ROUNDER: f32 = 12_582_912.0;
        (position + ROUNDER) - ROUNDER
    }
}

/// A scale and a minimum with the squared error they leave.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    pub(super) scale: f32,
    pub(super) min: f32,
    pub(super) error: f32,
}

/// Where the weight of largest magnitude is put at the start of a descent, as a share of the outermost code. Nine starts were
/// 0.1% (Q4_0) to 1.8% (Q8_0) better in RMS error on normal weights, in two to three times the time.
const STARTS: [f32; 4] = [1.0, 0.9, 0.8, 1.1];
/// The most alternations of one descent.
const ALTERNATIONS: usize = 6;

/// The best `scale` for `x ≈ scale * q`; `min` of the result is 0.
///
/// `stored` rounds a scale to what will be stored. A multiple of four weights, all finite.
pub(super) fn fit_scale<const N: usize>(values: &[f32; N], range: CodeRange, stored: impl Fn(f32) -> f32) -> Fit {
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
/// then the best beside the bound. A multiple of four weights, all finite.
pub(super) fn fit_scale_and_min<const N: usize>(
    values: &[f32; N],
    range: CodeRange,
    stored_scale: impl Fn(f32) -> f32,
    stored_min: impl Fn(f32) -> f32,
) -> Fit {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (count, x) = (values.len() as f32, sum(values));
    let mut best = Trial::of(values, 0.0, stored_min(x / count), range).fit();
    for start in STARTS {
        let span = (high - low) * (1.0 / start);
        let middle = 0.5 * (low + high);
        let mut min = stored_min(middle - 0.5 * span);
        let mut scale = stored_scale((middle + 0.5 * span - min) / range.highest);
        for _ in 0..ALTERNATIONS {
            let trial = Trial::of(values, scale, min, range);
            if trial.error < best.error {
                best = trial.fit();
            }
            let (next_scale, next_min) = trial.best_scale_and_min(count, x, &stored_min);
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
    /// `Σ q`
    pub(super) q: f32,
    /// `Σ q²`
    pub(super) qq: f32,
    /// `Σ x q`
    pub(super) xq: f32,
}

impl Trial {
    /// Codes `values` with that scale and minimum. A multiple of four weights.
    pub(super) fn of<const N: usize>(values: &[f32; N], scale: f32, min: f32, range: CodeRange) -> Self {
        let inverse = reciprocal(scale);
        // Element by element first, then the sums: two loops that vectorize where one does not.
        let codes = values.map(|value| range.nearest((value - min) * inverse));
        let [mut error, mut q_sum, mut qq, mut xq] = [[0.0f32; LANES]; 4];
        for (values, codes) in values.as_chunks::<LANES>().0.iter().zip(codes.as_chunks::<LANES>().0) {
            for lane in 0..LANES {
                let (value, q) = (values[lane], codes[lane]);
                let residual = value - (scale * q + min);
                error[lane] += residual * residual;
                q_sum[lane] += q;
                qq[lane] += q * q;
                xq[lane] += value * q;
            }
        }
        let [error, q, qq, xq] = [error, q_sum, qq, xq].map(total);
        Self { scale, min, error, q, qq, xq }
    }

    fn fit(&self) -> Fit {
        Fit { scale: self.scale, min: self.min, error: self.error }
    }

    /// The scale that fits these codes best beside no minimum.
    fn best_scale(&self) -> f32 {
        if self.qq > 0.0 { self.xq / self.qq } else { 0.0 }
    }

    /// The scale and stored minimum that fit these codes best; `x` is the sum of the `count` weights.
    fn best_scale_and_min(&self, count: f32, x: f32, stored_min: impl Fn(f32) -> f32) -> (f32, f32) {
        if self.qq <= 0.0 {
            return (0.0, stored_min(x / count));
        }
        let determinant = count * self.qq - self.q * self.q;
        let free = if determinant > 0.0 { (self.qq * x - self.q * self.xq) / determinant } else { self.min };
        let min = stored_min(free);
        // The scale follows the minimum as stored, so a bounded or rounded minimum costs as little as it can.
        (((self.xq - min * self.q) / self.qq).max(0.0), min)
    }
}

const LANES: usize = 4;

fn total(lanes: [f32; LANES]) -> f32 {
    (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
}

pub(super) fn sum(values: &[f32]) -> f32 {
    values.iter().sum()
}

fn squares(values: &[f32]) -> f32 {
    values.iter().map(|value| value * value).sum()
}

/// `1 / scale`, or 0 where the scale is so small that the type stores it as zero anyway.
fn reciprocal(scale: f32) -> f32 {
    if scale.abs() > 1e-30 { 1.0 / scale } else { 0.0 }
}
