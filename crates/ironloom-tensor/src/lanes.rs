//! Sums, maxima and exponentials whose bits do not depend on the processor.
//!
//! Plain Rust over 16 fixed lanes, compiled once per vector level by [`per_level!`]: the compiler may use wider
//! instructions but may not reorder floating-point arithmetic, so every level gives the same bits. The system's `expf`
//! would not: its rounding differs between versions and processors.

/// Lanes of every reduction.
pub(crate) const LANES: usize = 16;

/// Defines a function whose body is compiled for each vector level; the first argument chooses the level.
macro_rules! per_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(level: ironloom_core::SimdLevel, $($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $type),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $type),*) $(-> $ret)? { body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $type),*) $(-> $ret)? { body($($arg),*) }
            match level {
                // SAFETY: a level is only chosen on a processor that has it (`SimdLevel::supported`).
                #[cfg(target_arch = "x86_64")]
                ironloom_core::SimdLevel::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                ironloom_core::SimdLevel::Avx512 => unsafe { avx512($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use per_level;

/// The lanes added in a fixed order: halves onto halves.
#[inline(always)]
pub(crate) fn add_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of squares, element `i` in lane `i % 16`.
#[inline(always)]
pub(crate) fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = chunk[i].mul_add(chunk[i], lanes[i]);
        }
    }
    for (i, &value) in tail.iter().enumerate() {
        lanes[i] = value.mul_add(value, lanes[i]);
    }
    add_lanes(lanes)
}

/// The scalar product, element `i` in lane `i % 16`.
#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (x, y) in x.chunks(LANES).zip(y.chunks(LANES)) {
        for (lane, (x, y)) in lanes.iter_mut().zip(x.iter().zip(y)) {
            *lane = x.mul_add(*y, *lane);
        }
    }
    add_lanes(lanes)
}

/// The sum, element `i` in lane `i % 16`.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] += chunk[i];
        }
    }
    for (i, &value) in tail.iter().enumerate() {
        lanes[i] += value;
    }
    add_lanes(lanes)
}

/// The largest element; negative infinity when there is none. NaN elements are passed over.
#[inline(always)]
pub(crate) fn maximum(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
        }
    }
    for (i, &value) in tail.iter().enumerate() {
        lanes[i] = if value > lanes[i] { value } else { lanes[i] };
    }
    lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// `e^x`, within 2 units in the last place where the result is normal; 0 below -104, infinity above 88.73, NaN for NaN.
///
/// Range reduction `x = n ln 2 + r` with a two-part `ln 2` (Cody and Waite), then the Taylor polynomial of degree 7 on
/// `|r| <= ln 2 / 2`, whose remainder is under 2^-26.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4; // ln 2 less the above
    let clamped = if x > 89.0 { 89.0 } else { x };
    let clamped = if clamped < -104.0 { -104.0 } else { clamped };
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, clamped);
    let r = n.mul_add(-LN2_LOW, r);
    let mut p = 1.0 / 5040.0f32;
    p = p.mul_add(r, 1.0 / 720.0);
    p = p.mul_add(r, 1.0 / 120.0);
    p = p.mul_add(r, 1.0 / 24.0);
    p = p.mul_add(r, 1.0 / 6.0);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r, 1.0);
    p = p.mul_add(r, 1.0);
    // 2^n in two factors, so that n from -150 to 128 stays representable.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |k: i32| f32::from_bits(((k + 127) as u32) << 23);
    p * power(half) * power(n - half)
}

/// [`exp`] for a softmax that goes on into products: 0 instead of less than 2^-80. Beside the largest, which is 1, so little
/// changes no sum, and denormal numbers, which it would become in products, take a hundred times as long.
#[inline(always)]
pub(crate) fn softmax_exp(x: f32) -> f32 {
    let y = exp(x);
    if y < f32::from_bits((127 - 80) << 23) { 0.0 } else { y }
}

#[cfg(test)]
mod tests {
    use ironloom_core::SimdLevel;

    use super::*;

    per_level! {
        fn exp_all(x: &[f32], out: &mut [f32]) {
            for (out, &x) in out.iter_mut().zip(x) {
                *out = exp(x);
            }
        }
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place_at_every_level() {
        let x: Vec<f32> = (-87_000..=88_000).map(|i| i as f32 / 1000.0 + 1e-4).collect();
        let mut reference = vec![0.0; x.len()];
        exp_all(SimdLevel::Scalar, &x, &mut reference);
        for (&x, &got) in x.iter().zip(&reference) {
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::EPSILON) * exact;
            assert!((f64::from(got) - exact).abs() <= 2.0 * unit, "exp({x}) = {got}, {exact}");
        }
        for level in SimdLevel::supported() {
            let mut out = vec![0.0; x.len()];
            exp_all(level, &x, &mut out);
            assert_eq!(out, reference, "{level:?}");
        }
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY), exp(-200.0)), (1.0, 0.0, 0.0));
        assert_eq!((exp(f32::INFINITY), exp(200.0)), (f32::INFINITY, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((softmax_exp(-55.4), softmax_exp(-55.5)), (exp(-55.4), 0.0));
        assert!(softmax_exp(f32::NAN).is_nan());
    }

    #[test]
    fn reductions_cover_tails() {
        let x: Vec<f32> = (1..=37).map(|i| i as f32).collect();
        assert_eq!(sum(&x), 703.0);
        assert_eq!(sum_of_squares(&x), 17_575.0);
        assert_eq!(maximum(&x), 37.0);
        assert_eq!(maximum(&[]), f32::NEG_INFINITY);
    }
}
