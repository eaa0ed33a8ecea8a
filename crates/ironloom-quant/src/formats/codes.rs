//! Packed GGML blocks as small integers with a scale and a minimum per group.
//!
//! Every GGML block type Ironloom reads is affine in groups of 16 or 32: `weight = scale * code + min`, computed in f32 with
//! one multiplication and one addition (not fused). That form is what [`unpack`](super::unpack) evaluates, and what the
//! matrix products repack, so both see bit for bit the same weights. A type without minima gets the minimum -0.0: adding it
//! keeps every value, the sign of zero included, whereas +0.0 would turn -0.0 into 0.0.
//!
//! Data come from a mapped weight file and go to the caller's slices; nothing is allocated.

use ironloom_core::DType;

use super::{k_blocks, small_blocks};
use crate::{Error, Result};

/// How the codes of a packed type are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeLayout {
    /// Bits that hold any code once an offset is taken off: 4 (codes span at most 16 values) or 8.
    pub bits: u8,
    /// Weights that share a scale and a minimum: 16 or 32, consecutive within a block.
    pub group: usize,
    /// The smallest code: 0 for types with minima, negative for the others.
    pub lowest: i8,
    /// The largest code.
    pub highest: i8,
    /// Whether the minima can be other than -0.0.
    pub has_mins: bool,
}

/// The layout of the codes of `dtype`; `None` for types that are not GGML blocks.
pub fn layout(dtype: DType) -> Option<CodeLayout> {
    let (bits, group, lowest, highest, has_mins) = match dtype {
        DType::Q4_0 => (4, 32, -8, 7, false),
        DType::Q4_1 => (4, 32, 0, 15, true),
        DType::Q5_0 => (8, 32, -16, 15, false),
        DType::Q5_1 => (8, 32, 0, 31, true),
        DType::Q8_0 => (8, 32, -128, 127, false),
        DType::Q2_K => (4, 16, 0, 3, true),
        DType::Q3_K => (4, 16, -4, 3, false),
        DType::Q4_K => (4, 32, 0, 15, true),
        DType::Q5_K => (8, 32, 0, 31, true),
        DType::Q6_K => (8, 16, -32, 31, false),
        _ => return None,
    };
    Some(CodeLayout { bits, group, lowest, highest, has_mins })
}

/// Reads whole blocks of `dtype` as codes, scales and minima: `weight[i] = scales[g] * codes[i] + mins[g]`, `g = i / group`.
///
/// `bytes` is any number of whole blocks, `codes` has one entry per weight, `scales` and `mins` one per group of
/// [`CodeLayout::group`] weights.
///
/// # Errors
/// `dtype` has no [`layout`], or the lengths do not agree.
pub fn unpack_codes(dtype: DType, bytes: &[u8], codes: &mut [i8], scales: &mut [f32], mins: &mut [f32]) -> Result<()> {
    let Some(CodeLayout { group, .. }) = layout(dtype) else {
        return Err(Error::Unsupported { operation: "unpack codes of", dtype, supported: super::BLOCK_TYPES });
    };
    if !bytes.len().is_multiple_of(dtype.block_bytes()) {
        return Err(Error::NotWhole { what: "packed bytes", unit: dtype.block_bytes(), found: bytes.len() });
    }
    let elements = bytes.len() / dtype.block_bytes() * dtype.block_elements();
    let lengths = [("codes", codes.len(), elements), ("scales", scales.len(), elements / group)];
    for (what, found, expected) in lengths.into_iter().chain([("minima", mins.len(), elements / group)]) {
        if found != expected {
            return Err(Error::Length { what, expected, found });
        }
    }
    match dtype {
        DType::Q4_0 => each_block(bytes, codes, scales, mins, small_blocks::q4_0),
        DType::Q4_1 => each_block(bytes, codes, scales, mins, small_blocks::q4_1),
        DType::Q5_0 => each_block(bytes, codes, scales, mins, small_blocks::q5_0),
        DType::Q5_1 => each_block(bytes, codes, scales, mins, small_blocks::q5_1),
        DType::Q8_0 => each_block(bytes, codes, scales, mins, small_blocks::q8_0),
        DType::Q2_K => each_block(bytes, codes, scales, mins, k_blocks::q2_k),
        DType::Q3_K => each_block(bytes, codes, scales, mins, k_blocks::q3_k),
        DType::Q4_K => each_block(bytes, codes, scales, mins, k_blocks::q4_k),
        DType::Q5_K => each_block(bytes, codes, scales, mins, k_blocks::q5_k),
        // `layout` knows no other type.
        _ => each_block(bytes, codes, scales, mins, k_blocks::q6_k),
    }
    Ok(())
}

/// One block's codes and, per group, its scale and its minimum.
pub(super) struct Decoded<'a, const ELEMENTS: usize, const GROUPS: usize> {
    pub(super) codes: &'a mut [i8; ELEMENTS],
    pub(super) scales: &'a mut [f32; GROUPS],
    pub(super) mins: &'a mut [f32; GROUPS],
}

/// Calls `decode` on each block; its argument types carry the block's sizes, so that its loops have constant bounds.
fn each_block<const BYTES: usize, const ELEMENTS: usize, const GROUPS: usize>(
    bytes: &[u8],
    codes: &mut [i8],
    scales: &mut [f32],
    mins: &mut [f32],
    decode: impl Fn(&[u8; BYTES], Decoded<'_, ELEMENTS, GROUPS>),
) {
    let blocks = bytes.as_chunks::<BYTES>().0.iter();
    let codes = codes.as_chunks_mut::<ELEMENTS>().0.iter_mut();
    let groups = scales.as_chunks_mut::<GROUPS>().0.iter_mut().zip(mins.as_chunks_mut::<GROUPS>().0);
    for ((block, codes), (scales, mins)) in blocks.zip(codes).zip(groups) {
        decode(block, Decoded { codes, scales, mins });
    }
}
