//! GGML super-blocks of 256 weights: `Q2_K Q3_K Q4_K Q5_K Q6_K`, read as codes.
//!
//! A super-block holds FP16 factors `d` (and `dmin`), and per group of 16 or 32 weights a small integer scale (and minimum):
//! `weight = (d * scale) * code - (dmin * minimum)`, each product rounded to f32 in that order.
//!
//! | type | bytes, in order | group | code |
//! |---|---|---|---|
//! | Q2_K | 16 × (scale low nibble, minimum high), 64 of 2 bits, d, dmin | 16 | 0..3 |
//! | Q3_K | 32 of third bits, 64 of 2 bits, 12 of 6-bit scales + 32, d | 16 | -4..3 |
//! | Q4_K | d, dmin, 12 of 6-bit scales and minima, 128 of nibbles | 32 | 0..15 |
//! | Q5_K | d, dmin, 12 of 6-bit scales and minima, 32 of fifth bits, 128 of nibbles | 32 | 0..31 |
//! | Q6_K | 128 of low nibbles, 64 of 2 high bits, 16 signed scales, d | 16 | -32..31 |
//!
//! Bit fields run across bytes: one byte's fields belong to weights 32 apart (64 for the low nibbles of Q6_K).

use super::codes::Decoded;
use super::plain::f16_at;

/// Where Q4_K and Q5_K keep their packed scales and minima.
const SCALES: std::ops::Range<usize> = 4..16;

pub(super) fn q2_k(block: &[u8; 84], out: Decoded<'_, 256, 16>) {
    two_bits(&block[16..80], out.codes);
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    for ((scale, min), &byte) in out.scales.iter_mut().zip(out.mins).zip(&block[..16]) {
        *scale = d * f32::from(byte & 15);
        *min = -(dmin * f32::from(byte >> 4));
    }
}

pub(super) fn q3_k(block: &[u8; 110], out: Decoded<'_, 256, 16>) {
    two_bits(&block[32..96], out.codes);
    for (bit, codes) in out.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (code, &third) in codes.iter_mut().zip(&block[..32]) {
            // A set bit adds 4 to a code that otherwise starts at -4.
            *code += if third & (1 << bit) != 0 { 0 } else { -4 };
        }
    }
    let (d, packed) = (f16_at(block, 108), &block[96..108]);
    for (group, scale) in out.scales.iter_mut().enumerate() {
        let low = packed[group % 8] >> (group / 8 * 4) & 15;
        let high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
        *scale = d * (f32::from(low | high << 4) - 32.0);
    }
    *out.mins = [-0.0; 16];
}

pub(super) fn q4_k(block: &[u8; 144], out: Decoded<'_, 256, 8>) {
    nibbles(&block[16..], out.codes);
    scales_and_mins(f16_at(block, 0), f16_at(block, 2), &block[SCALES], out.scales, out.mins);
}

pub(super) fn q5_k(block: &[u8; 176], out: Decoded<'_, 256, 8>) {
    nibbles(&block[48..], out.codes);
    for (bit, codes) in out.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (code, &fifth) in codes.iter_mut().zip(&block[16..48]) {
            *code |= if fifth & (1 << bit) != 0 { 16 } else { 0 };
        }
    }
    scales_and_mins(f16_at(block, 0), f16_at(block, 2), &block[SCALES], out.scales, out.mins);
}

pub(super) fn q6_k(block: &[u8; 210], out: Decoded<'_, 256, 16>) {
    for (half, codes) in out.codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let low = &block[64 * half..][..64];
        let high = &block[128 + 32 * half..][..32];
        for i in 0..32 {
            codes[i] = (low[i] & 15 | (high[i] & 3) << 4) as i8 - 32;
            codes[i + 32] = (low[i + 32] & 15 | (high[i] >> 2 & 3) << 4) as i8 - 32;
            codes[i + 64] = (low[i] >> 4 | (high[i] >> 4 & 3) << 4) as i8 - 32;
            codes[i + 96] = (low[i + 32] >> 4 | (high[i] >> 6) << 4) as i8 - 32;
        }
    }
    let d = f16_at(block, 208);
    for (scale, &byte) in out.scales.iter_mut().zip(&block[192..208]) {
        *scale = d * f32::from(byte as i8);
    }
    *out.mins = [-0.0; 16];
}

/// Byte i of each 32 holds four codes of 2 bits, for weights i, i + 32, i + 64 and i + 96 of a half.
fn two_bits(bytes: &[u8], codes: &mut [i8; 256]) {
    for (run, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (code, &byte) in codes.iter_mut().zip(&bytes[run / 4 * 32..][..32]) {
            *code = (byte >> (run % 4 * 2) & 3) as i8;
        }
    }
}

/// Byte i of each 32 holds two codes of 4 bits, for weights i and i + 32 of 64.
fn nibbles(bytes: &[u8], codes: &mut [i8; 256]) {
    for (codes, bytes) in codes.as_chunks_mut::<64>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
        let (low, high) = codes.split_at_mut(32);
        for ((low, high), &byte) in low.iter_mut().zip(high).zip(bytes) {
            *low = (byte & 15) as i8;
            *high = (byte >> 4) as i8;
        }
    }
}

/// Eight 6-bit scales and eight 6-bit minima in 12 bytes: groups 0..4 in the low 6 bits of bytes 0..4 and 4..8; groups 4..8
/// as nibbles in bytes 8..12 (scale low, minimum high), with their upper 2 bits on top of bytes 0..4 and 4..8.
fn scales_and_mins(d: f32, dmin: f32, packed: &[u8], scales: &mut [f32; 8], mins: &mut [f32; 8]) {
    for i in 0..4 {
        let (scale, min, both) = (packed[i], packed[i + 4], packed[i + 8]);
        scales[i] = d * f32::from(scale & 63);
        mins[i] = -(dmin * f32::from(min & 63));
        scales[i + 4] = d * f32::from(both & 15 | scale >> 6 << 4);
        mins[i + 4] = -(dmin * f32::from(both >> 4 | min >> 6 << 4));
    }
}
