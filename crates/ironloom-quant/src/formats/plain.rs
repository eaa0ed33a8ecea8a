//! Plain element types: F32, F16 and BF16, little endian.
//!
//! Widening to f32 is exact. Narrowing rounds to nearest, ties to even.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ironloom_core::DType;

/// The FP16 number at byte `offset` of a block.
pub(super) fn f16_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

/// Widens little-endian floats of `dtype` (F32, F16 or BF16); the lengths agree.
pub(super) fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (out, &bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f32::from_le_bytes(bytes);
            }
        }
        DType::F16 => {
            // A buffer of aligned halves, because conversion of slices uses the machine's instructions eight at a time.
            let mut halves = [f16::ZERO; 512];
            for (out, bytes) in out.chunks_mut(halves.len()).zip(bytes.chunks(2 * halves.len())) {
                let halves = &mut halves[..out.len()];
                for (half, &bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
                    *half = f16::from_le_bytes(bytes);
                }
                halves.convert_to_f32_slice(out);
            }
        }
        _ => {
            for (out, &bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16);
            }
        }
    }
}

/// Narrows to `dtype` (F32, F16 or BF16) numbers that do not exceed its range.
pub(super) fn narrow(dtype: DType, values: &[f32], packed: &mut Vec<u8>) {
    match dtype {
        DType::F32 => packed.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        DType::F16 => packed.extend(values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes())),
        _ => packed.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes())),
    }
}
