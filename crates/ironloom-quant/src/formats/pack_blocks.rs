//! Packing into GGML blocks of 32 weights: `Q4_0 Q4_1 Q5_0 Q5_1 Q8_0`.
//!
//! The layouts are those of [`small_blocks`](super::small_blocks); the scales come out of
//! [`scale_search`](super::scale_search), tried as the FP16 numbers that are stored.

use half::f16;

use super::F16_MAX;
use super::scale_search::{CodeRange, fit_scale, fit_scale_and_min, nearest_codes};

/// What a packer of blocks of 32 is given: weights that are finite and within the type's reach.
type Block = [f32; 32];

pub(super) fn q4_0(values: &Block, packed: &mut Vec<u8>) {
    let codes = symmetric(values, CodeRange { lowest: -8.0, highest: 7.0 }, packed);
    packed.extend(nibbles(&codes));
}

pub(super) fn q4_1(values: &Block, packed: &mut Vec<u8>) {
    let codes = affine(values, CodeRange { lowest: 0.0, highest: 15.0 }, packed);
    packed.extend(nibbles(&codes));
}

pub(super) fn q5_0(values: &Block, packed: &mut Vec<u8>) {
    let codes = symmetric(values, CodeRange { lowest: -16.0, highest: 15.0 }, packed);
    packed.extend(fifth_bits(&codes));
    packed.extend(nibbles(&codes));
}

pub(super) fn q5_1(values: &Block, packed: &mut Vec<u8>) {
    let codes = affine(values, CodeRange { lowest: 0.0, highest: 31.0 }, packed);
    packed.extend(fifth_bits(&codes));
    packed.extend(nibbles(&codes));
}

pub(super) fn q8_0(values: &Block, packed: &mut Vec<u8>) {
    // -128 stays unused: products that take the magnitude of a code in a signed byte rely on it.
    let codes = symmetric(values, CodeRange { lowest: -127.0, highest: 127.0 }, packed);
    packed.extend(codes.map(|code| code.wrapping_sub(127)));
}

/// `value` as it will be read back from FP16.
pub(super) fn as_f16(value: f32) -> f32 {
    f16::from_f32(value.clamp(-F16_MAX, F16_MAX)).to_f32()
}

pub(super) fn push_f16(packed: &mut Vec<u8>, value: f32) {
    packed.extend_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Writes the scale, and returns codes that count from the lowest.
fn symmetric(values: &Block, range: CodeRange, packed: &mut Vec<u8>) -> [u8; 32] {
    let fit = fit_scale(values, range, as_f16);
    push_f16(packed, fit.scale);
    let mut codes = [0; 32];
    nearest_codes(values, fit.scale, 0.0, range, &mut codes);
    codes
}

/// Writes the scale and the minimum, and returns the codes.
fn affine(values: &Block, range: CodeRange, packed: &mut Vec<u8>) -> [u8; 32] {
    let fit = fit_scale_and_min(values, range, as_f16, as_f16);
    push_f16(packed, fit.scale);
    push_f16(packed, fit.min);
    let mut codes = [0; 32];
    nearest_codes(values, fit.scale, fit.min, range, &mut codes);
    codes
}

fn nibbles(codes: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|i| codes[i] & 15 | codes[i + 16] << 4)
}

fn fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    std::array::from_fn(|byte| (0..8).fold(0, |bits, bit| bits | (codes[8 * byte + bit] >> 4 & 1) << bit))
}
