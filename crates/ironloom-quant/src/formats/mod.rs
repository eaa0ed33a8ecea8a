//! Stored formats of weights: reading them, and packing into them.
//!
//! [`unpack`] turns the bytes of any readable type into f32, [`pack`] goes the other way, and [`codes`] gives the integers in
//! between for products that never see the floats. [`int8_rows`] and [`blocks64`] are formats that Ironloom holds weights in
//! itself; they know rows, so their scales are slices of their own beside the codes.

pub mod blocks64;
pub mod codes;
pub mod int8_rows;
mod k_blocks;
mod pack_blocks;
mod pack_k_blocks;
mod plain;
mod scale_search;
mod small_blocks;

use ironloom_core::DType;

use crate::{Error, Result};

/// The packed types that can be read.
const BLOCK_TYPES: &str = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K";
/// All types that can be read.
const READABLE_TYPES: &str = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K";

/// The types that can be packed into.
const PACKABLE_TYPES: &str = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q6_K";

/// Unpacks stored weights into f32.
///
/// `bytes` is whole blocks of `dtype`, and `out` has one entry per weight they hold. Each GGML block evaluates the formula of
/// its type with every operation rounded to f32 in the format's own order, so the values are bit for bit those of the
/// reference reader.
///
/// ```
/// use ironloom_core::DType;
/// let mut weights = [0.0; 2];
/// ironloom_quant::unpack(DType::BF16, &[0x80, 0x3f, 0x00, 0xc0], &mut weights).unwrap();
/// assert_eq!(weights, [1.0, -2.0]);
/// ```
///
/// # Errors
/// `dtype` is not a weight type, `bytes` is not whole blocks, or `out` has another length than they hold.
pub fn unpack(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let layout = codes::layout(dtype);
    if layout.is_none() && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::Unsupported { operation: "unpack", dtype, supported: READABLE_TYPES });
    }
    if !bytes.len().is_multiple_of(dtype.block_bytes()) {
        return Err(Error::NotWhole { what: "packed bytes", unit: dtype.block_bytes(), found: bytes.len() });
    }
    let expected = bytes.len() / dtype.block_bytes() * dtype.block_elements();
    if out.len() != expected {
        return Err(Error::Length { what: "unpacked weights", expected, found: out.len() });
    }
    let Some(layout) = layout else {
        plain::widen(dtype, bytes, out);
        return Ok(());
    };
    // Batches of 1024 weights stay in the first-level cache between the two passes.
    let (mut codes, mut scales, mut mins) = ([0; BATCH], [0.0; BATCH / 16], [0.0; BATCH / 16]);
    let batch_bytes = BATCH / dtype.block_elements() * dtype.block_bytes();
    for (bytes, out) in bytes.chunks(batch_bytes).zip(out.chunks_mut(BATCH)) {
        let groups = out.len() / layout.group;
        let (codes, scales, mins) = (&mut codes[..out.len()], &mut scales[..groups], &mut mins[..groups]);
        codes::unpack_codes(dtype, bytes, codes, scales, mins)?;
        match layout.group {
            16 => affine::<16>(codes, scales, mins, out),
            _ => affine::<32>(codes, scales, mins, out),
        }
    }
    Ok(())
}

/// Packs weights into a stored type, with the least squared error that the search finds.
///
/// Works on F32, F16, BF16 (rounded to nearest even) and on Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q6_K, block by block: packing a
/// part of the weights that is whole blocks gives that part of the bytes.
///
/// ```
/// use ironloom_core::DType;
/// let weights: Vec<f32> = (0..32).map(|i| i as f32 - 16.0).collect();
/// let packed = ironloom_quant::pack(DType::Q8_0, &weights).unwrap();
/// assert_eq!(packed.len(), 34);
/// ```
///
/// # Errors
/// The type cannot be packed into, `values` is not whole blocks of it, or a weight is not finite or too large for it.
pub fn pack(dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
    let Some(limit) = pack_limit(dtype) else {
        return Err(Error::Unsupported { operation: "pack into", dtype, supported: PACKABLE_TYPES });
    };
    let bytes = dtype.bytes_for(values.len())?;
    check_finite(values)?;
    if let Some(index) = values.iter().position(|value| value.abs() > limit) {
        return Err(Error::OutOfRange { index, value: values[index], dtype, limit });
    }
    let mut packed = Vec::with_capacity(bytes);
    match dtype {
        DType::Q4_0 => each_block(values, &mut packed, pack_blocks::q4_0),
        DType::Q4_1 => each_block(values, &mut packed, pack_blocks::q4_1),
        DType::Q5_0 => each_block(values, &mut packed, pack_blocks::q5_0),
        DType::Q5_1 => each_block(values, &mut packed, pack_blocks::q5_1),
        DType::Q8_0 => each_block(values, &mut packed, pack_blocks::q8_0),
        DType::Q4_K => each_block(values, &mut packed, pack_k_blocks::q4_k),
        DType::Q6_K => each_block(values, &mut packed, pack_k_blocks::q6_k),
        _ => plain::narrow(dtype, values, &mut packed),
    }
    Ok(packed)
}

/// The largest magnitude whose scale FP16 can hold, or that the plain type can; `None` for types that are not packed into.
fn pack_limit(dtype: DType) -> Option<f32> {
    Some(match dtype {
        DType::F32 => f32::MAX,
        DType::BF16 => half::bf16::MAX.to_f32(),
        // A minimum is stored as it is.
        DType::F16 | DType::Q4_1 | DType::Q5_1 => F16_MAX,
        DType::Q4_0 => 7.0 * F16_MAX,
        DType::Q5_0 => 15.0 * F16_MAX,
        DType::Q8_0 => 127.0 * F16_MAX,
        DType::Q4_K => 63.0 * F16_MAX,
        DType::Q6_K => 127.0 * 31.0 * F16_MAX,
        _ => return None,
    })
}

/// The largest FP16 number.
const F16_MAX: f32 = 65_504.0;

fn check_finite(values: &[f32]) -> Result<()> {
    if absmax(values).is_finite() {
        return Ok(());
    }
    let bad = values.iter().enumerate().find(|(_, value)| !value.is_finite());
    bad.map_or(Ok(()), |(index, &value)| Err(Error::NotFinite { index, value }))
}

/// The largest magnitude; not finite if any value is not.
fn absmax(values: &[f32]) -> f32 {
    // The bits of floats without their sign order as the numbers do, NaN last; an integer maximum vectorizes.
    f32::from_bits(values.iter().fold(0, |largest, value| largest.max(value.to_bits() & 0x7fff_ffff)))
}

fn each_block<const ELEMENTS: usize>(
    values: &[f32],
    packed: &mut Vec<u8>,
    pack: impl Fn(&[f32; ELEMENTS], &mut Vec<u8>),
) {
    values.as_chunks().0.iter().for_each(|values| pack(values, packed));
}

/// Weights unpacked at a time: whole blocks of every type.
const BATCH: usize = 1024;

fn affine<const GROUP: usize>(codes: &[i8], scales: &[f32], mins: &[f32], out: &mut [f32]) {
    let groups = codes.as_chunks::<GROUP>().0.iter().zip(out.as_chunks_mut::<GROUP>().0);
    for ((codes, out), (&scale, &min)) in groups.zip(scales.iter().zip(mins)) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = scale * f32::from(code) + min;
        }
    }
}
