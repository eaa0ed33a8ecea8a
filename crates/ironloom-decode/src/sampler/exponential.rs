//! The exponential of numbers that are not positive, in operations that round alike on every machine.
//!
//! `exp(x) = 2^n * exp(r)` with `n = round(x / ln 2)` and `|r| <= ln 2 / 2`, where `exp(r)` is its series to the 13th power
//! (remainder below 5e-18). The system's `exp` differs between C libraries, and a last bit can turn a draw. Products and sums
//! are rounded one by one, never fused, so vectors of any width give the same bits.

use ironloom_core::SimdLevel;

/// `1.5 * 2^52`: adding it rounds a small number to an integer and leaves that integer in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// The high part of ln 2, short enough that its product with `n` is exact.
const LN_2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
/// The rest of ln 2.
const LN_2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
/// Below this the result is 0; its own exponential is still a normal number.
const LOWEST: f64 = -708.0;

/// `1/2!` to `1/13!`, highest first.
const SERIES: [f64; 12] = [
    1.0 / 6_227_020_800.0,
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    1.0 / 2.0,
];

/// Appends `exp((logit - max) * sharpness)` of each logit, none of which is above `max`.
pub(super) fn extend_weights(weights: &mut Vec<f64>, logits: &[f32], max: f64, sharpness: f64) {
    let start = weights.len();
    weights.resize(start + logits.len(), 0.0);
    let out = &mut weights[start..];
    match SimdLevel::detect() {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 | SimdLevel::Avx512 => {
            // SAFETY: these levels are found only where the processor has AVX2.
            unsafe { weigh_avx2(out, logits, max, sharpness) }
        }
        _ => weigh(out, logits, max, sharpness),
    }
}

/// [`weigh`], compiled to vectors of four.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn weigh_avx2(out: &mut [f64], logits: &[f32], max: f64, sharpness: f64) {
    weigh(out, logits, max, sharpness);
}

#[inline(always)]
fn weigh(out: &mut [f64], logits: &[f32], max: f64, sharpness: f64) {
    out.iter_mut().zip(logits).for_each(|(weight, &logit)| *weight = exp((f64::from(logit) - max) * sharpness));
}

/// `exp(x)` for `x <= 0`, negative infinity included; 0 below -708. Without a branch, so that a loop over it becomes
/// vector instructions.
#[inline(always)]
fn exp(x: f64) -> f64 {
    let bounded = if x < LOWEST { LOWEST } else { x };
    let shifted = bounded * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (bounded - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut sum = SERIES[0];
    for &coefficient in &SERIES[1..] {
        sum = sum * r + coefficient;
    }
    let exp_r = (sum * r + 1.0) * r + 1.0;
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    if x < LOWEST { 0.0 } else { exp_r * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_the_same_bits_at_every_level() {
        let logits: Vec<f32> = (0..1003).map(|i| -(i as f32) * 0.731).collect();
        let plain: Vec<f64> = logits.iter().map(|&logit| exp((f64::from(logit) - 0.0) * 1.25)).collect();
        let mut weights = vec![7.0];
        extend_weights(&mut weights, &logits, 0.0, 1.25);
        assert_eq!(weights[0], 7.0);
        assert!(weights[1..].iter().zip(&plain).all(|(a, b)| a.to_bits() == b.to_bits()));
    }

    #[test]
    fn it_is_within_two_units_of_the_last_place() {
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -f64::from(i) * 0.003_537;
            let reference = x.exp();
            if reference > 1e-300 {
                worst = worst.max(((exp(x) - reference) / reference).abs());
            }
        }
        assert!(worst < 2.0 * f64::EPSILON, "worst relative error {worst:e}");
    }

    #[test]
    fn the_ends_are_exact() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e300), 0.0);
        assert!(exp(-708.0) > 0.0);
        assert!(exp(-1e-300) <= 1.0);
    }
}
