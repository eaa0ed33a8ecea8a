//! GGML blocks of 32 weights: `Q4_0 Q4_1 Q5_0 Q5_1 Q8_0`, read as codes.
//!
//! Layouts, little endian, in order (`d` and `m` are FP16):
//!
//! | type | bytes | weight |
//! |---|---|---|
//! | Q4_0 | d, 16 × two nibbles | `d * (nibble - 8)` |
//! | Q4_1 | d, m, 16 × two nibbles | `d * nibble + m` |
//! | Q5_0 | d, 32 fifth bits, 16 × two nibbles | `d * (five bits - 16)` |
//! | Q5_1 | d, m, 32 fifth bits, 16 × two nibbles | `d * five bits + m` |
//! | Q8_0 | d, 32 signed bytes | `d * byte` |
//!
//! Byte j of the nibbles holds weight j low and weight j + 16 high; bit j of the fifth bits belongs to weight j.

use super::codes::Decoded;
use super::plain::f16_at;

pub(super) fn q4_0(block: &[u8; 18], out: Decoded<'_, 32, 1>) {
    nibbles(&block[2..], out.codes);
    out.codes.iter_mut().for_each(|code| *code -= 8);
    (*out.scales, *out.mins) = ([f16_at(block, 0)], [-0.0]);
}

pub(super) fn q4_1(block: &[u8; 20], out: Decoded<'_, 32, 1>) {
    nibbles(&block[4..], out.codes);
    (*out.scales, *out.mins) = ([f16_at(block, 0)], [f16_at(block, 2)]);
}

pub(super) fn q5_0(block: &[u8; 22], out: Decoded<'_, 32, 1>) {
    nibbles(&block[6..], out.codes);
    fifth_bits(&block[2..6], out.codes);
    out.codes.iter_mut().for_each(|code| *code -= 16);
    (*out.scales, *out.mins) = ([f16_at(block, 0)], [-0.0]);
}

pub(super) fn q5_1(block: &[u8; 24], out: Decoded<'_, 32, 1>) {
    nibbles(&block[8..], out.codes);
    fifth_bits(&block[4..8], out.codes);
    (*out.scales, *out.mins) = ([f16_at(block, 0)], [f16_at(block, 2)]);
}

pub(super) fn q8_0(block: &[u8; 34], out: Decoded<'_, 32, 1>) {
    for (code, &byte) in out.codes.iter_mut().zip(&block[2..]) {
        *code = byte as i8;
    }
    (*out.scales, *out.mins) = ([f16_at(block, 0)], [-0.0]);
}

fn nibbles(bytes: &[u8], codes: &mut [i8; 32]) {
    let (low, high) = codes.split_at_mut(16);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
        *low = (byte & 15) as i8;
        *high = (byte >> 4) as i8;
    }
}

fn fifth_bits(bytes: &[u8], codes: &mut [i8; 32]) {
    for (codes, &byte) in codes.as_chunks_mut::<8>().0.iter_mut().zip(bytes) {
        for (bit, code) in codes.iter_mut().enumerate() {
            *code |= if byte & (1 << bit) != 0 { 16 } else { 0 };
        }
    }
}
