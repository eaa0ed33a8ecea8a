//! Packing into GGML super-blocks of 256 weights: `Q4_K` and `Q6_K`.
//!
//! The layouts are those of [`k_blocks`](super::k_blocks). Each group's own best scale (and minimum) is found first, as if it
//! could be stored exactly; their largest fix the FP16 factors. Then, a few rounds: every group takes the best integers next
//! to its present ones, judged by the error a reader would see, and the factors are fitted by least squares to all 256
//! weights at the codes reached. The best state seen is written, so no round can make it worse.

use half::f16;

use super::F16_MAX;
use super::pack_blocks::{as_f16, push_f16};
use super::scale_search::{CodeRange, Trial, fit_scale, fit_scale_and_min, nearest_codes, sum};

/// Rounds of integers, then factors. RMS error of Q4_K on normal weights after 1 to 4: 0.0706, 0.0703, 0.0701, 0.0701.
const ROUNDS: usize = 4;

/// Codes that the outermost weight of a Q4_K group may be moved to, by a larger integer scale. A group with one outlier has an
/// error of up to seven factors `d` there and nowhere to hide it: `d * scale * 14` or so may come closer than any `* 15`.
/// RMS error of a super-block with two outliers of 400 times the others: 0.0605 to 0.0264; on normal weights 0.2% less.
const LOWER_CODES: [f32; 3] = [14.0, 13.0, 12.0];

const Q4_CODES: CodeRange = CodeRange { lowest: 0.0, highest: 15.0 };
const Q6_CODES: CodeRange = CodeRange { lowest: -32.0, highest: 31.0 };

pub(super) fn q4_k(values: &[f32; 256], packed: &mut Vec<u8>) {
    let groups = values.as_chunks::<32>().0;
    let Affine { d, dmin, scales, mins, .. } = fit_affine(groups);
    push_f16(packed, d);
    push_f16(packed, dmin);
    let (scale_bytes, min_bytes) = (scales.map(|scale| scale as u8), mins.map(|min| min as u8));
    packed.extend((0..4).map(|i| scale_bytes[i] | scale_bytes[i + 4] >> 4 << 6));
    packed.extend((0..4).map(|i| min_bytes[i] | min_bytes[i + 4] >> 4 << 6));
    packed.extend((4..8).map(|i| scale_bytes[i] & 15 | min_bytes[i] << 4));
    let mut codes = [0; 256];
    for (group, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        nearest_codes(&groups[group], d * scales[group], -(dmin * mins[group]), Q4_CODES, codes);
    }
    for codes in codes.as_chunks::<64>().0 {
        packed.extend((0..32).map(|i| codes[i] | codes[i + 32] << 4));
    }
}

pub(super) fn q6_k(values: &[f32; 256], packed: &mut Vec<u8>) {
    let groups = values.as_chunks::<16>().0;
    let Symmetric { d, scales, .. } = fit_symmetric(groups);
    let mut codes = [0; 256];
    for (group, codes) in codes.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        nearest_codes(&groups[group], d * scales[group], 0.0, Q6_CODES, codes);
    }
    for codes in codes.as_chunks::<128>().0 {
        packed.extend((0..64).map(|i| codes[i] & 15 | codes[i + 64] << 4));
    }
    for codes in codes.as_chunks::<128>().0 {
        let high = |i: usize| codes[i] >> 4;
        packed.extend((0..32).map(|i| high(i) | high(i + 32) << 2 | high(i + 64) << 4 | high(i + 96) << 6));
    }
    packed.extend(scales.map(|scale| scale as i8 as u8));
    push_f16(packed, d);
}

/// Factors and the integers of 8 groups, kept as floats: `weight = (d * scale) * code - (dmin * min)`.
#[derive(Clone, Copy)]
struct Affine {
    d: f32,
    dmin: f32,
    scales: [f32; 8],
    mins: [f32; 8],
    error: f32,
}

fn fit_affine(groups: &[[f32; 32]]) -> Affine {
    // Minima are stored as magnitudes that are taken off.
    let fits = groups.iter().map(|group| fit_scale_and_min(group, Q4_CODES, |scale| scale, |min| min.min(0.0)));
    let (mut scales, mut mins) = ([0.0f32; 8], [0.0f32; 8]);
    for (fit, (scale, min)) in fits.zip(scales.iter_mut().zip(&mut mins)) {
        (*scale, *min) = (fit.scale, -fit.min);
    }
    let mut d = f16_beyond(scales.iter().copied().fold(0.0, f32::max) / 63.0);
    let mut dmin = f16_beyond(mins.iter().copied().fold(0.0, f32::max) / 63.0);
    let (mut scales, mut mins) =
        (scales.map(|scale| steps(scale, d, 0.0, 63.0)), mins.map(|min| steps(min, dmin, 0.0, 63.0)));
    let mut best = Affine { d: 0.0, dmin: 0.0, scales: [0.0; 8], mins: [0.0; 8], error: f32::INFINITY };
    for _ in 0..ROUNDS {
        let mut error = 0.0;
        let [mut uu, mut uv, mut vv, mut xu, mut xv] = [0.0f64; 5];
        for (group, (scale, min)) in groups.iter().zip(scales.iter_mut().zip(&mut mins)) {
            let beside = neighbours(*scale, 0.0, 63.0)
                .flat_map(|scale| neighbours(*min, 0.0, 63.0).map(move |min| (scale, min)));
            let lower_codes = LOWER_CODES.map(|code| ((*scale * 15.0 / code).round().min(63.0), *min));
            let near = beside.chain(lower_codes);
            let (trial, integers) =
                best_trial((*scale, *min), near, |(scale, min)| Trial::of(group, d * scale, -(dmin * min), Q4_CODES));
            (*scale, *min) = integers;
            error += trial.error;
            let (scale, min) = (f64::from(*scale), f64::from(*min));
            uu += scale * scale * f64::from(trial.qq);
            uv += scale * min * f64::from(trial.q);
            vv += min * min * 32.0;
            xu += scale * f64::from(trial.xq);
            xv += min * f64::from(sum(group));
        }
        if error >= best.error {
            break;
        }
        best = Affine { d, dmin, scales, mins, error };
        // Least squares of x = d u - dmin v over the super-block, with u = scale * code and v = min.
        let determinant = uu * vv - uv * uv;
        if determinant > 1e-9 * uu * vv {
            d = as_f16(((vv * xu - uv * xv) / determinant) as f32);
            dmin = as_f16(((uv * xu - uu * xv) / determinant) as f32);
        } else if uu > 0.0 {
            d = as_f16((xu / uu) as f32);
        }
    }
    best
}

/// A factor and the integers of 16 groups, kept as floats: `weight = (d * scale) * code`.
#[derive(Clone, Copy)]
struct Symmetric {
    d: f32,
    scales: [f32; 16],
    error: f32,
}

fn fit_symmetric(groups: &[[f32; 16]]) -> Symmetric {
    let mut scales = [0.0f32; 16];
    for (group, scale) in groups.iter().zip(&mut scales) {
        *scale = fit_scale(group, Q6_CODES, |scale| scale).scale;
    }
    let peak = scales.iter().fold(0.0f32, |peak, &scale| if scale.abs() > peak.abs() { scale } else { peak });
    // The range of a signed byte reaches one further below zero.
    let mut d = f16_beyond(peak / -128.0);
    let mut scales = scales.map(|scale| steps(scale, d, -128.0, 127.0));
    let mut best = Symmetric { d: 0.0, scales: [0.0; 16], error: f32::INFINITY };
    for _ in 0..ROUNDS {
        let mut error = 0.0;
        let [mut uu, mut xu] = [0.0f64; 2];
        for (group, scale) in groups.iter().zip(&mut scales) {
            let near = neighbours(*scale, -128.0, 127.0);
            let (trial, integer) = best_trial(*scale, near, |scale| Trial::of(group, d * scale, 0.0, Q6_CODES));
            *scale = integer;
            error += trial.error;
            uu += f64::from(*scale).powi(2) * f64::from(trial.qq);
            xu += f64::from(*scale) * f64::from(trial.xq);
        }
        if error >= best.error {
            break;
        }
        best = Symmetric { d, scales, error };
        if uu > 0.0 {
            d = as_f16((xu / uu) as f32);
        }
    }
    best
}

/// The nearest FP16 number to `value` that is no closer to zero, so that the integers of a range reach what they must. This
/// matters where the factor is subnormal: that of Q6_K weights of 0.001 is one of the first few FP16 numbers.
fn f16_beyond(value: f32) -> f32 {
    let nearest = f16::from_f32(as_f16(value));
    let falls_short = nearest.to_f32().abs() < value.abs().min(F16_MAX);
    f16::from_bits(nearest.to_bits() + u16::from(falls_short)).to_f32()
}

/// How many steps of `step` come nearest to `value`.
fn steps(value: f32, step: f32, lowest: f32, highest: f32) -> f32 {
    if step == 0.0 { 0.0 } else { (value / step).round().clamp(lowest, highest) }
}

/// The integer and the ones beside it, where they exist.
fn neighbours(integer: f32, lowest: f32, highest: f32) -> impl Iterator<Item = f32> {
    [integer - 1.0, integer, integer + 1.0].into_iter().filter(move |near| (lowest..=highest).contains(near))
}

/// The candidate that leaves the least error; `present` wins a tie.
fn best_trial<T: Copy>(present: T, others: impl Iterator<Item = T>, trial: impl Fn(T) -> Trial) -> (Trial, T) {
    others
        .map(|candidate| (trial(candidate), candidate))
        .fold((trial(present), present), |best, next| if next.0.error < best.0.error { next } else { best })
}
