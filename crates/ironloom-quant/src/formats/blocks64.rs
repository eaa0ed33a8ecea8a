//! int4 and NF4: blocks of 64 weights of 4 bits with an FP32 absmax, 0.5625 bytes a weight.
//!
//! `weight = levels[code] * absmax`, where `absmax` is the largest magnitude in the block and `levels` sixteen numbers:
//! for int4 `(code - 8) / 7` (code 0 is never written, so that the levels lie symmetric around zero); for NF4 the quantiles of
//! a normal distribution of Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314, appendix E.
//!
//! Byte j of a block holds weight j in the low nibble and weight j + 32 in the high one. A row is whole blocks: its tail is
//! padded with zeros, and both code books hold zero exactly. A block of zeros has absmax 0.
//!
//! Works a row at a time on the caller's slices, so that rows can be split over threads and written where they are read.

use super::{absmax, check_finite};
use crate::{Error, Result};

/// Weights in a block.
pub const BLOCK: usize = 64;
/// Bytes of codes in a block.
pub const BLOCK_BYTES: usize = BLOCK / 2;

/// Which sixteen levels the codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeBook {
    /// Equal steps, from -1 to 1 in sevenths.
    Int4,
    /// Equally likely levels of a normal distribution.
    Nf4,
}

impl CodeBook {
    /// The level of each code, as a share of the block's absmax.
    pub const fn levels(self) -> &'static [f32; 16] {
        match self {
            Self::Int4 => &INT4_LEVELS,
            Self::Nf4 => &NF4_LEVELS,
        }
    }

    /// The code whose level is 0.
    pub const fn zero_code(self) -> u8 {
        match self {
            Self::Int4 => 8,
            Self::Nf4 => 7,
        }
    }

    /// The bounds between neighbouring levels: a weight takes as its code the number of bounds below it.
    const fn bounds(self) -> &'static [f32; 15] {
        match self {
            Self::Int4 => &INT4_BOUNDS,
            Self::Nf4 => &NF4_BOUNDS,
        }
    }
}

/// Blocks in a row of `cols` weights.
pub const fn row_blocks(cols: usize) -> usize {
    cols.div_ceil(BLOCK)
}

/// Packs one row: `codes` has [`BLOCK_BYTES`] per block of the row, `absmax` one entry per block.
///
/// ```
/// use ironloom_quant::formats::blocks64::{CodeBook, pack_row, unpack_row};
/// let row: Vec<f32> = (0..70).map(|i| (i as f32 - 35.0) / 35.0).collect();
/// let (mut codes, mut absmax, mut read) = ([0; 64], [0.0; 2], vec![0.0; 70]);
/// pack_row(CodeBook::Nf4, &row, &mut codes, &mut absmax).unwrap();
/// unpack_row(CodeBook::Nf4, &codes, &absmax, &mut read).unwrap();
/// assert_eq!((read[0], read[35], read[69]), (row[0], 0.0, row[69]));
/// ```
///
/// # Errors
/// A weight is not finite, or the lengths do not agree.
pub fn pack_row(code_book: CodeBook, values: &[f32], codes: &mut [u8], absmax: &mut [f32]) -> Result<()> {
    check_lengths(values.len(), codes.len(), absmax.len())?;
    check_finite(values)?;
    let blocks = codes.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(absmax);
    for (values, (codes, absmax)) in values.chunks(BLOCK).zip(blocks) {
        let mut block = [0.0; BLOCK];
        block[..values.len()].copy_from_slice(values);
        *absmax = pack_block(code_book, &block, codes);
    }
    Ok(())
}

/// Unpacks one row of `out.len()` weights.
///
/// # Errors
/// The lengths do not agree.
pub fn unpack_row(code_book: CodeBook, codes: &[u8], absmax: &[f32], out: &mut [f32]) -> Result<()> {
    check_lengths(out.len(), codes.len(), absmax.len())?;
    let levels = code_book.levels();
    for (out, (codes, absmax)) in out.chunks_mut(BLOCK).zip(codes.as_chunks::<BLOCK_BYTES>().0.iter().zip(absmax)) {
        for (i, out) in out.iter_mut().enumerate() {
            let byte = codes[i % BLOCK_BYTES];
            let code = if i < BLOCK_BYTES { byte & 15 } else { byte >> 4 };
            *out = levels[usize::from(code)] * absmax;
        }
    }
    Ok(())
}

fn check_lengths(cols: usize, codes: usize, absmax: usize) -> Result<()> {
    let blocks = row_blocks(cols);
    for (what, found, expected) in [
        ("codes of a row of 4-bit blocks", codes, blocks * BLOCK_BYTES),
        ("absmax of a row of 4-bit blocks", absmax, blocks),
    ] {
        if found != expected {
            return Err(Error::Length { what, expected, found });
        }
    }
    Ok(())
}

fn pack_block(code_book: CodeBook, values: &[f32; BLOCK], packed: &mut [u8; BLOCK_BYTES]) -> f32 {
    let absmax = absmax(values);
    if absmax == 0.0 {
        packed.fill(code_book.zero_code() * 17);
        return 0.0;
    }
    // Divided, not multiplied by 1 / absmax, which is infinite for the smallest blocks.
    let shares = values.map(|value| value / absmax);
    let mut codes = [0i32; BLOCK];
    for &bound in code_book.bounds() {
        for (code, &share) in codes.iter_mut().zip(&shares) {
            *code += i32::from(share > bound);
        }
    }
    let (low, high) = codes.split_at(BLOCK_BYTES);
    for (byte, (low, high)) in packed.iter_mut().zip(low.iter().zip(high)) {
        *byte = (low | high << 4) as u8;
    }
    absmax
}

const INT4_LEVELS: [f32; 16] = {
    let mut levels = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        levels[code] = (code as f32 - 8.0) / 7.0;
        code += 1;
    }
    levels
};

/// The table of QLoRA's appendix E, in the digits of the f32 numbers it is used with.
#[allow(clippy::excessive_precision)]
const NF4_LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_800_998_687_7,
    -0.525_073_051_452_636_7,
    -0.394_917_488_098_144_53,
    -0.284_441_381_692_886_35,
    -0.184_773_430_228_233_34,
    -0.091_050_036_251_544_95,
    0.0,
    0.079_580_299_556_255_34,
    0.160_930_201_411_247_25,
    0.246_112_301_945_686_34,
    0.337_915_241_718_292_24,
    0.440_709_829_330_444_34,
    0.562_617_003_917_694_1,
    0.722_956_836_223_602_3,
    1.0,
];

const INT4_BOUNDS: [f32; 15] = bounds(&INT4_LEVELS);
const NF4_BOUNDS: [f32; 15] = bounds(&NF4_LEVELS);

const fn bounds(levels: &[f32; 16]) -> [f32; 15] {
    let mut bounds = [0.0; 15];
    let mut code = 0;
    while code < 15 {
        bounds[code] = 0.5 * (levels[code] + levels[code + 1]);
        code += 1;
    }
    bounds
}

#[cfg(test)]
mod tests {
    use ironloom_core::Philox;

    use super::*;

    const BOOKS: [CodeBook; 2] = [CodeBook::Int4, CodeBook::Nf4];

    fn round_trip(code_book: CodeBook, values: &[f32]) -> Vec<f32> {
        let blocks = row_blocks(values.len());
        // Stale bytes, as in a buffer that is used again.
        let (mut codes, mut absmax) = (vec![0xff; blocks * BLOCK_BYTES], vec![f32::NAN; blocks]);
        pack_row(code_book, values, &mut codes, &mut absmax).unwrap();
        let mut read = vec![f32::NAN; values.len()];
        unpack_row(code_book, &codes, &absmax, &mut read).unwrap();
        read
    }

    /// Expected: 0.1075 and 0.0920 (numpy, four million weights; the mean of a million varies by 0.0001).
    #[test]
    fn normal_weights_lose_what_the_formats_are_known_to_lose() {
        let mut draws = Philox::new(7, 0);
        let values: Vec<f32> = (0..1 << 20).map(|_| draws.next_normal()).collect();
        for (code_book, expected) in [(CodeBook::Int4, 0.1074), (CodeBook::Nf4, 0.0920)] {
            let read = round_trip(code_book, &values);
            let squares = values.iter().zip(&read).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            let rms = (squares / values.len() as f64).sqrt();
            println!("{code_book:?}: RMS error {rms:.5}");
            assert!((rms - expected).abs() < 0.0005, "{code_book:?}: RMS error {rms}, expected {expected}");
        }
    }

    #[test]
    fn every_weight_takes_its_nearest_level() {
        let mut draws = Philox::new(5, 64);
        let values: Vec<f32> = (0..640).map(|_| draws.next_normal()).collect();
        for code_book in BOOKS {
            for (values, read) in values.chunks(BLOCK).zip(round_trip(code_book, &values).chunks(BLOCK)) {
                let absmax = values.iter().fold(0.0f32, |absmax, value| absmax.max(value.abs()));
                for (value, read) in values.iter().zip(read) {
                    let nearest = code_book.levels().iter().map(|level| (level * absmax - value).abs());
                    let nearest = nearest.fold(f32::INFINITY, f32::min);
                    assert!((read - value).abs() <= nearest + 1e-6, "{code_book:?}: {value} became {read}");
                }
            }
        }
    }

    #[test]
    fn byte_j_holds_weight_j_low_and_weight_j_plus_32_high() {
        for code_book in BOOKS {
            for at in [0, 1, 31, 32, 63] {
                let mut values = [0.0; BLOCK];
                values[at] = -2.0;
                let (mut codes, mut absmax) = ([0; BLOCK_BYTES], [0.0]);
                pack_row(code_book, &values, &mut codes, &mut absmax).unwrap();
                let lowest = if code_book == CodeBook::Int4 { 1 } else { 0 };
                let zero = code_book.zero_code();
                let expected = if at < 32 { lowest | zero << 4 } else { zero | lowest << 4 };
                assert_eq!((codes[at % 32], absmax), (expected, [2.0]), "{code_book:?} weight {at}");
                assert!((0..32).filter(|&i| i != at % 32).all(|i| codes[i] == zero * 17), "{code_book:?} weight {at}");
            }
        }
    }

    /// QLoRA's construction: eight equal shares of probability below zero and seven above, from the quantile 0.9677083 that
    /// leaves half a share beyond the outermost level, scaled to reach -1 and 1.
    #[test]
    fn nf4_levels_are_quantiles_of_a_normal_distribution() {
        let cumulative = |x: f64| 0.5 * (1.0 + libm::erf(x / std::f64::consts::SQRT_2));
        let outermost = 0.967_708_3;
        let (mut low, mut high) = (1.0, 3.0);
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            if cumulative(middle) < outermost { low = middle } else { high = middle }
        }
        for (code, &level) in NF4_LEVELS.iter().enumerate() {
            let (steps, from_middle) = if code < 7 { (7.0, code as f64 - 7.0) } else { (8.0, code as f64 - 7.0) };
            let expected = 0.5 + from_middle / steps * (outermost - 0.5);
            let found = cumulative(f64::from(level) * low);
            assert!((found - expected).abs() < 1e-6, "code {code}: {found} and {expected}");
        }
    }

    #[test]
    fn odd_rows_and_extreme_blocks() {
        for code_book in BOOKS {
            for cols in [0, 1, 31, 32, 33, 63, 64, 65, 127, 129] {
                let values: Vec<f32> = (0..cols).map(|i| if i % 2 == 0 { 0.5 } else { -0.5 }).collect();
                assert_eq!(round_trip(code_book, &values), values, "{code_book:?}, {cols} columns");
            }
            for value in [0.0, 1e-45, -1e-40, f32::MIN_POSITIVE, f32::MAX, -f32::MAX] {
                assert_eq!(round_trip(code_book, &[value, 0.0]), [value, 0.0], "{code_book:?}");
            }
            assert_eq!(code_book.levels()[usize::from(code_book.zero_code())], 0.0);
        }
    }

    #[test]
    fn bad_rows_are_refused() {
        let (mut codes, mut absmax) = ([0; 64], [0.0; 2]);
        let mut values = [0.0; 65];
        values[64] = f32::INFINITY;
        let error = pack_row(CodeBook::Nf4, &values, &mut codes, &mut absmax).unwrap_err();
        assert!(matches!(error, Error::NotFinite { index: 64, .. }), "{error}");
        assert!(pack_row(CodeBook::Nf4, &values[..64], &mut codes, &mut absmax).is_err());
        assert!(unpack_row(CodeBook::Int4, &codes, &absmax[..1], &mut values).is_err());
    }
}
