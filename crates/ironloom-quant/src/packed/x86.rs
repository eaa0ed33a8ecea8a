//! [`Lanes`] with the registers of x86-64: two of AVX2, or one of AVX-512.
//!
//! The methods are always inlined into kernels that enable the instructions, see [`kernels`](super::kernels).

use std::arch::x86_64::*;

use super::{lanes::Lanes, layout::STEP};

/// Two 8-lane registers.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// One 16-lane register.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

// SAFETY (all blocks of this file): the trait's callers promise the level's instructions and the bytes behind each pointer;
// every load and store used is an unaligned one, and a prefetch of any address is allowed.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx2 {
    type Floats = [__m256; 2];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Floats {
        unsafe { [_mm256_set1_ps(value); 2] }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Floats {
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::Floats) {
        unsafe {
            _mm256_storeu_ps(to, value[0]);
            _mm256_storeu_ps(to.add(8), value[1]);
        }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn lookup_nibbles(table: Self::Floats, from: *const u8) -> [Self::Floats; STEP] {
        // A permutation reads the low three bits of an index; the fourth, moved to the sign, picks the half of the table.
        unsafe {
            let mut words = [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())];
            let mut out = [table; STEP];
            for out in &mut out {
                for half in 0..2 {
                    let low = _mm256_permutevar8x32_ps(table[0], words[half]);
                    let high = _mm256_permutevar8x32_ps(table[1], words[half]);
                    let fourth = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(words[half]));
                    out[half] = _mm256_blendv_ps(low, high, fourth);
                    words[half] = _mm256_srli_epi32::<4>(words[half]);
                }
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self::Floats {
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self::Floats {
        unsafe {
            [_mm256_cvtph_ps(_mm_loadu_si128(from.cast())), _mm256_cvtph_ps(_mm_loadu_si128(from.add(16).cast()))]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self::Floats {
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16).cast()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))]
        }
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx512 {
    type Floats = __m512;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        unsafe { _mm512_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn lookup_nibbles(table: __m512, from: *const u8) -> [__m512; STEP] {
        // Only the low four bits of an index count, so nothing is masked off, and a word read one byte further on is a word
        // shifted by eight: loads have ports of their own, shifts share one with the multiply-adds.
        unsafe {
            let mut out = [table; STEP];
            for byte in 0..STEP / 2 {
                let words = _mm512_loadu_si512(from.add(byte).cast());
                out[byte * 2] = _mm512_permutexvar_ps(words, table);
                out[byte * 2 + 1] = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(words), table);
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> __m512 {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }
}
