//! Counter-based random numbers: Philox 4x32-10.
//!
//! A number depends only on the key (seed, stream) and its position, so the same stream can be drawn on a CPU and on a GPU,
//! in any order, by any number of threads. Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// A stream of random numbers identified by a seed and a stream number.
///
/// ```
/// use ironloom_core::Philox;
/// let mut draws = Philox::new(7, 0);
/// let (first, second) = (draws.next_u32(), draws.next_u32());
/// assert_eq!((first, second), { let mut again = Philox::new(7, 0); (again.next_u32(), again.next_u32()) });
/// ```
#[derive(Clone, Debug)]
pub struct Philox {
    key: [u32; 2],
    stream: u64,
    position: u64,
    block: [u32; 4],
}

impl Philox {
    /// The stream numbered `stream` of `seed`, at its start.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], stream, position: 0, block: [0; 4] }
    }

    /// The four numbers at block `counter` of the stream: the function every device computes alike.
    pub fn block_at(key: [u32; 2], stream: u64, counter: u64) -> [u32; 4] {
        let mut x = [counter as u32, (counter >> 32) as u32, stream as u32, (stream >> 32) as u32];
        let mut key = key;
        for _ in 0..10 {
            let a = u64::from(MULTIPLIERS[0]) * u64::from(x[0]);
            let b = u64::from(MULTIPLIERS[1]) * u64::from(x[2]);
            x = [(b >> 32) as u32 ^ x[1] ^ key[0], b as u32, (a >> 32) as u32 ^ x[3] ^ key[1], a as u32];
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        x
    }

    /// How many 32-bit numbers were drawn; [`Philox::seek`] comes back here.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Moves to the number at `position`.
    pub fn seek(&mut self, position: u64) {
        self.position = position;
        if !position.is_multiple_of(4) {
            self.block = Self::block_at(self.key, self.stream, position / 4);
        }
    }

    /// 32 uniform bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.position.is_multiple_of(4) {
            self.block = Self::block_at(self.key, self.stream, self.position / 4);
        }
        let value = self.block[(self.position % 4) as usize];
        self.position += 1;
        value
    }

    /// Uniform in `[0, 1)`, with 24 bits.
    pub fn next_f32(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// Uniform in `[0, 1)`, with 53 bits.
    pub fn next_f64(&mut self) -> f64 {
        let high = u64::from(self.next_u32()) << 21;
        let low = u64::from(self.next_u32()) >> 11;
        (high | low) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    /// Standard normal (Box-Muller, one of the pair).
    pub fn next_normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.next_f64()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.next_f64()).cos()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' Random123 test vectors for philox4x32-10.
    #[test]
    fn known_answers() {
        assert_eq!(Philox::block_at([0, 0], 0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            Philox::block_at([u32::MAX; 2], u64::MAX, u64::MAX),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn seeking_continues_the_stream() {
        let mut straight = Philox::new(42, 3);
        let numbers: Vec<u32> = (0..23).map(|_| straight.next_u32()).collect();
        for start in 0..23 {
            let mut moved = Philox::new(42, 3);
            moved.seek(start as u64);
            assert_eq!(moved.next_u32(), numbers[start], "from {start}");
        }
    }

    #[test]
    fn normals_have_unit_variance() {
        let mut draws = Philox::new(1, 0);
        let values: Vec<f64> = (0..20_000).map(|_| f64::from(draws.next_normal())).collect();
        let mean = values.iter().sum::<f64>() / 20_000.0;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "mean {mean}, variance {variance}");
    }
}
