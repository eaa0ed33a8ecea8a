//! The 256 numbers that a byte stands for in an 8-bit optimizer state.
//!
//! A state's block is divided by its largest magnitude, so values lie in `[-1, 1]`, most of them close to 0: a step of one size would lose
//! them. A dynamic map has seven decades, with half as many levels in each as in the one above. Decade `d` (0 to 6) covers
//! `10^(d-7)` to `10^(d-6)` with `n` bins of one width, and a level lies in the middle of its bin:
//!
//! ```text
//! level(d, k) = 10^(d-6) · (0.1 + 0.9 (k + ½) / n)         0 ≤ k < n
//! n = 2ᵈ with a sign (127 levels, and their negatives), n = 2ᵈ⁺¹ without (254 levels)
//! ```
//!
//! With 0 and 1 these are 256 levels. An exact 0 keeps what never had a gradient where it is; an exact 1 keeps the largest value.
//! Dettmers et al., "8-bit optimizers via block-wise quantization", 2022, describe such maps.

use std::sync::LazyLock;

/// Values from -1 to 1, for first moments.
pub(super) static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(Sign::Signed));
/// Values from 0 to 1, for second moments.
pub(super) static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(Sign::Unsigned));

const DECADES: i32 = 7;

/// A cell is the values that share a sign, an exponent and 7 bits of mantissa; it holds at most one boundary between two codes.
const CELL_SHIFT: u32 = 16;
/// The first cell of a sign: everything below 2⁻²⁴, which is nearer to 0 than to the smallest level.
const FIRST_CELL: u32 = 0x3380_0000 >> CELL_SHIFT;
/// The last cell of a sign begins at 1.
const LAST_CELL: u32 = (0x3f80_0000 >> CELL_SHIFT) - FIRST_CELL;
/// Cells of a sign, with room up to a power of two.
const CELLS: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sign {
    Signed,
    Unsigned,
}

/// A map with what makes the search for the nearest level short.
pub(super) struct DynamicMap {
    /// What a code stands for, ascending.
    levels: [f32; 256],
    /// Between level `i` and level `i + 1`; above the last level, infinity.
    middles: [f32; 256],
    zero: u8,
    /// The lowest code of each cell, of positive values and then of negative ones.
    lowest: [u8; 2 * CELLS],
}

impl DynamicMap {
    fn new(sign: Sign) -> Self {
        let mut values = vec![0.0, 1.0];
        for decade in 0..DECADES {
            let bins = 1u32 << (decade + i32::from(sign == Sign::Unsigned));
            let scale = (decade..DECADES - 1).fold(1.0f64, |scale, _| scale / 10.0);
            for bin in 0..bins {
                let level = scale * (0.1 + 0.9 * (f64::from(bin) + 0.5) / f64::from(bins));
                values.push(level as f32);
                if sign == Sign::Signed {
                    values.push(-level as f32);
                }
            }
        }
        values.sort_by(f32::total_cmp);
        let levels: [f32; 256] = std::array::from_fn(|code| values[code]);
        let middles: [f32; 256] =
            std::array::from_fn(|i| levels.get(i + 1).map_or(f32::INFINITY, |above| (levels[i] + above) / 2.0));
        let nearest = |value: f32| middles.partition_point(|&middle| middle < value) as u8;
        let lowest = |at: usize| {
            let edges = cell_edges((at % CELLS) as u32);
            nearest(if at < CELLS { edges.start } else { -edges.end.next_down() })
        };
        Self { levels, middles, zero: nearest(0.0), lowest: std::array::from_fn(lowest) }
    }

    /// The code of zero.
    pub(super) fn zero(&self) -> u8 {
        self.zero
    }

    /// What a code stands for.
    #[inline(always)]
    pub(super) fn level(&self, code: u8) -> f32 {
        self.levels[usize::from(code)]
    }

    /// The code of the level nearest to a value in `[-1, 1]`; the lower one of two as near. What lies outside gets the code of
    /// the end it lies beyond.
    #[inline(always)]
    pub(super) fn code(&self, value: f32) -> u8 {
        let bits = value.to_bits();
        let cell = ((bits & 0x7fff_ffff) >> CELL_SHIFT).saturating_sub(FIRST_CELL).min(LAST_CELL);
        // Without a branch: signs are as good as random.
        let lowest = self.lowest[cell as usize + CELLS * (bits >> 31) as usize];
        lowest + u8::from(value > self.middles[usize::from(lowest)])
    }
}

/// The magnitudes of a cell.
fn cell_edges(cell: u32) -> std::ops::Range<f32> {
    let edge = |cell: u32| f32::from_bits((cell + FIRST_CELL) << CELL_SHIFT);
    match cell {
        0 => 0.0..edge(1),
        _ if cell < LAST_CELL => edge(cell)..edge(cell + 1),
        _ => 1.0..f32::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_have_256_levels_in_order_with_zero_and_one() {
        for (map, smallest) in [(&*SIGNED, 5.5e-7), (&*UNSIGNED, 3.25e-7)] {
            assert!(map.levels.is_sorted_by(|a, b| a < b));
            assert_eq!(map.level(map.zero()), 0.0);
            assert_eq!(map.level(255), 1.0);
            assert!((map.level(map.zero() + 1) / smallest - 1.0).abs() < 1e-6);
        }
        assert_eq!((SIGNED.zero(), UNSIGNED.zero()), (127, 0));
        // The middle of the last of 64 bins in [0.1, 1], and of the first.
        assert_eq!(SIGNED.level(254), (0.1 + 0.9 * 63.5 / 64.0) as f32);
        assert_eq!(SIGNED.level(0), -SIGNED.level(254));
        assert_eq!(SIGNED.level(254 - 63), (0.1 + 0.9 * 0.5 / 64.0) as f32);
        assert_eq!(UNSIGNED.level(254), (0.1 + 0.9 * 127.5 / 128.0) as f32);
    }

    #[test]
    fn codes_are_those_of_the_nearest_levels() {
        for map in [&*SIGNED, &*UNSIGNED] {
            let nearest = |value: f32| {
                let distance = |code: &usize| {
                    let level = f64::from(map.levels[*code]);
                    // Of two as near, the lower one.
                    ((level - f64::from(value)).abs(), level)
                };
                (0..256).min_by(|a, b| distance(a).partial_cmp(&distance(b)).unwrap()).unwrap() as u8
            };
            for code in 0..=255 {
                assert_eq!(map.code(map.level(code)), code);
            }
            // A middle is itself rounded, so next to it either level is as near as can be told.
            let check = |value: f32| {
                let (found, expected) = (map.code(value), nearest(value));
                let distance = |code: u8| (f64::from(map.level(code)) - f64::from(value)).abs();
                let rounding = 1.2e-7 * f64::from(value.abs());
                assert!(
                    found == expected || distance(found) <= distance(expected) + rounding,
                    "{value}: {found} {expected}"
                );
            };
            // Both sides of each boundary, and both ends of each cell.
            let edges = (0..=LAST_CELL).map(|cell| cell_edges(cell).start);
            for value in map.middles[..255].iter().copied().chain(edges.clone()).chain(edges.map(|edge| -edge)) {
                [value.next_down(), value, value.next_up()].into_iter().for_each(check);
            }
            let mut philox = ironloom_core::Philox::new(8, 0);
            for _ in 0..100_000 {
                let value = philox.next_f32() * libm::exp10f(-8.0 * philox.next_f32());
                [value, -value].into_iter().for_each(check);
            }
        }
    }

    #[test]
    fn no_value_is_out_of_bounds() {
        for map in [&*SIGNED, &*UNSIGNED] {
            assert_eq!(map.code(7.0), 255);
            assert_eq!(map.code(f32::INFINITY), 255);
            assert_eq!(map.code(-7.0), 0);
            assert_eq!(map.code(f32::NEG_INFINITY), 0);
            assert_eq!(map.code(-0.0), map.zero());
            let _ = map.code(f32::NAN);
        }
    }
}
