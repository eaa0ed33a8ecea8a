//! Sixteen f32 lanes, one per output row of a panel: the vocabulary that every product kernel is written in.
//!
//! [`Scalar`] is the reference: arrays and `f32::mul_add`. The levels in [`x86`](super::x86) do the same operations with
//! registers. All operations here are exact or rounded once, so a kernel written in them gives the same bits at every level.

use super::layout::STEP;

/// Rows of a panel, and lanes of a vector.
pub(super) const LANES: usize = 16;

/// Operations on sixteen lanes.
///
/// # Safety
/// Every function needs the processor to have the level's instructions, and every pointer argument must be readable (or
/// writable) for the bytes named; no alignment is asked for.
pub(super) trait Lanes: Copy {
    /// Sixteen f32.
    type Floats: Copy;

    unsafe fn splat(value: f32) -> Self::Floats;
    /// Reads 64 bytes.
    unsafe fn load(from: *const f32) -> Self::Floats;
    /// Writes 64 bytes.
    unsafe fn store(to: *mut f32, value: Self::Floats);
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Reads 64 bytes as sixteen little-endian words; may read three more. Result j is `table[nibble j of each word]`.
    unsafe fn lookup_nibbles(table: Self::Floats, from: *const u8) -> [Self::Floats; STEP];
    /// The same where `table[i]` is `table[0] + i`, small integers.
    #[inline(always)]
    unsafe fn count_nibbles(table: Self::Floats, from: *const u8) -> [Self::Floats; STEP] {
        // SAFETY: the same promise.
        unsafe { Self::lookup_nibbles(table, from) }
    }
    /// Reads 16 bytes as signed integers.
    unsafe fn load_i8(from: *const u8) -> Self::Floats;
    /// Reads 32 bytes as IEEE half precision.
    unsafe fn load_f16(from: *const u8) -> Self::Floats;
    /// Reads 32 bytes as bfloat16.
    unsafe fn load_bf16(from: *const u8) -> Self::Floats;
}

/// The reference level.
#[derive(Clone, Copy)]
pub(super) struct Scalar;

impl Lanes for Scalar {
    type Floats = [f32; LANES];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Floats {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Floats {
        // SAFETY: the caller says 64 bytes are readable.
        unsafe { from.cast::<Self::Floats>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::Floats) {
        // SAFETY: the caller says 64 bytes are writable.
        unsafe { to.cast::<Self::Floats>().write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn lookup_nibbles(table: Self::Floats, from: *const u8) -> [Self::Floats; STEP] {
        // SAFETY: the caller says 64 bytes are readable.
        let words = unsafe { from.cast::<[u32; LANES]>().read_unaligned() }.map(u32::from_le);
        std::array::from_fn(|j| words.map(|word| table[(word >> (4 * j) & 15) as usize]))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::Floats {
        // SAFETY: the caller says 16 bytes are readable.
        unsafe { from.cast::<[i8; LANES]>().read() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self::Floats {
        // SAFETY: the caller says 32 bytes are readable.
        let bits = unsafe { from.cast::<[[u8; 2]; LANES]>().read() };
        bits.map(|bits| half::f16::from_le_bytes(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self::Floats {
        // SAFETY: the caller says 32 bytes are readable.
        let bits = unsafe { from.cast::<[[u8; 2]; LANES]>().read() };
        bits.map(|bits| half::bf16::from_le_bytes(bits).to_f32())
    }
}
