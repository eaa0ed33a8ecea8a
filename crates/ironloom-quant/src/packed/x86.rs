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

/// The first, second, third and fourth bytes of sixteen numbers, each sixteen twice.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn byte_planes(table: [__m256; 2]) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let byte = _mm256_set1_epi32(255);
        let mut rest = [_mm256_castps_si256(table[0]), _mm256_castps_si256(table[1])];
        let mut planes = [byte; 4];
        for plane in &mut planes {
            let words = _mm256_packus_epi32(_mm256_and_si256(rest[0], byte), _mm256_and_si256(rest[1], byte));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            *plane = _mm256_permute4x64_epi64::<0b10_00_10_00>(_mm256_packus_epi16(words, words));
            for half in &mut rest {
                *half = _mm256_srli_epi32::<8>(*half);
            }
        }
        planes
    }
}

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
        // Bytes of the same four rows side by side, then each byte of the numbers by a table of its own, put together by
        // interleaving: 3.5 instructions for eight numbers. Permutations of eight numbers, of which the fourth bit picks, take 5.
        unsafe {
            let planes = byte_planes(table);
            let turn = _mm256_setr_epi8(
                0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11,
                15,
            );
            let nibble = _mm256_set1_epi8(15);
            let mut out = [table; STEP];
            for half in 0..2 {
                let words = _mm256_shuffle_epi8(_mm256_loadu_si256(from.add(32 * half).cast()), turn);
                for odd in 0..2 {
                    let shifted = if odd == 0 { words } else { _mm256_srli_epi16::<4>(words) };
                    let codes = _mm256_and_si256(shifted, nibble);
                    let mut bytes = planes;
                    for byte in &mut bytes {
                        *byte = _mm256_shuffle_epi8(*byte, codes);
                    }
                    let low = [_mm256_unpacklo_epi8(bytes[0], bytes[1]), _mm256_unpackhi_epi8(bytes[0], bytes[1])];
                    let high = [_mm256_unpacklo_epi8(bytes[2], bytes[3]), _mm256_unpackhi_epi8(bytes[2], bytes[3])];
                    for pair in 0..2 {
                        let first = _mm256_unpacklo_epi16(low[pair], high[pair]);
                        let second = _mm256_unpackhi_epi16(low[pair], high[pair]);
                        out[4 * pair + odd][half] = _mm256_castsi256_ps(first);
                        out[4 * pair + 2 + odd][half] = _mm256_castsi256_ps(second);
                    }
                }
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn count_nibbles(table: Self::Floats, from: *const u8) -> [Self::Floats; STEP] {
        // Bits p to p + 4 of the fraction of 2^(23 - p) count ones: the nibble put there and the power taken off again is exact.
        unsafe {
            let first = _mm256_broadcastss_ps(_mm256_castps256_ps128(table[0]));
            let powers = [_mm256_set1_ps(8_388_608.0), _mm256_set1_ps(524_288.0)];
            let masks = [_mm256_set1_epi32(0xF), _mm256_set1_epi32(0xF0)];
            let mut words = [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())];
            let mut out = [table; STEP];
            for j in 0..STEP {
                let place = j % 2;
                let taken = _mm256_sub_ps(powers[place], first);
                for half in 0..2 {
                    let code = _mm256_and_si256(words[half], masks[place]);
                    let sum = _mm256_or_si256(code, _mm256_castps_si256(powers[place]));
                    out[j][half] = _mm256_sub_ps(_mm256_castsi256_ps(sum), taken);
                    if place == 1 {
                        words[half] = _mm256_srli_epi32::<8>(words[half]);
                    }
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
