//! A shuffled order that is computed, not stored.
//!
//! `position -> number` is a bijection of `0..count`, so that any part of an epoch's order is found without the rest, in constant memory.
//! It is a Feistel network over the smallest even number of bits that holds `count`, walked on until the result lies below
//! `count` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), with Philox as the round function.

use ironloom_core::Philox;

/// Enough that also the smallest domains come out even.
const ROUNDS: u64 = 8;

/// One order of the numbers `0..count`, identified by a seed and a stream number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Permutation {
    key: [u32; 2],
    stream: u64,
    count: u64,
    half_bits: u32,
}

impl Permutation {
    pub(crate) fn new(seed: u64, stream: u64, count: u64) -> Self {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        Self { key: [seed as u32, (seed >> 32) as u32], stream, count, half_bits: bits.div_ceil(2).max(1) }
    }

    /// The number at `position`, which must be below `count`.
    pub(crate) fn at(&self, position: u64) -> u64 {
        debug_assert!(position < self.count);
        let mut value = self.encipher(position);
        while value >= self.count {
            value = self.encipher(value);
        }
        value
    }

    fn encipher(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            // Halves have at most 32 bits, so the round stands above them.
            let drawn = Philox::block_at(self.key, self.stream, round << 32 | right);
            (left, right) = (right, left ^ (u64::from(drawn[0]) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_once_at_every_count() {
        for count in (1..70).chain([255, 256, 257, 1000, 4097]) {
            let order = Permutation::new(11, 3, count);
            let mut numbers: Vec<u64> = (0..count).map(|position| order.at(position)).collect();
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn a_huge_count_stays_within_it() {
        for count in [u64::MAX, (1 << 40) + 1] {
            let order = Permutation::new(1, 0, count);
            assert!((0..100).all(|position| order.at(position) < count));
        }
    }

    /// Each number comes to each place about as often: 24 degrees of freedom, and 51 is passed once in a thousand.
    #[test]
    fn small_orders_are_even() {
        const DRAWS: u64 = 20_000;
        let mut seen = [[0u32; 5]; 5];
        for stream in 0..DRAWS {
            let order = Permutation::new(5, stream, 5);
            for position in 0..5 {
                seen[position as usize][order.at(position) as usize] += 1;
            }
        }
        let expected = DRAWS as f64 / 5.0;
        let chi_squared: f64 = seen.iter().flatten().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        assert!(chi_squared < 51.0, "{chi_squared}");
    }

    #[test]
    fn neighbours_part() {
        let order = Permutation::new(9, 1, 1000);
        let kept = (0..999).filter(|&position| order.at(position) + 1 == order.at(position + 1)).count();
        assert!(kept < 10, "{kept} neighbours of 999 stayed together");
    }
}
