//! The exponential of numbers that are not positive, in operations that round alike on every machine.
//!
//! `exp(x) = 2^n * exp(r)` with `n = round(x / ln 2)` and `|r| <= ln 2 / 2`, where `exp(r)` is its series to the 13th power
//! (remainder below 5e-18). The system's `exp` differs between C libraries, and a last bit can turn a draw.

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

/// `exp(x)` for `x <= 0`, negative infinity included; 0 below -708. Without a branch, so that a loop over it becomes
/// vector instructions.
#[inline(always)]
pub(super) fn exp(x: f64) -> f64 {
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
    use super::exp;

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
