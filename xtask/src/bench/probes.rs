//! What the machine can do: bytes read from memory, and multiply-adds in registers, with all threads.
//!
//! Both run at the processor's best vector level; they are the bounds that the other figures are given as shares of.

use std::hint::black_box;

use anyhow::Result;
use ironloom_core::{SimdLevel, Threads};
use serde_json::json;

use super::measurement::{Measurement, Work, measure, seconds};

/// As much as the measured models hold: where that fits in the last-level cache, so do they.
const BUFFER_BYTES: usize = 96 << 20;
/// How often it is read: decoding, too, reads the same weights again for every token.
const ROUNDS: usize = 10;
/// Words of a vector register of 512 bits. On a cache line of its own: reads across two lines run at half the speed.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Line([u64; 8]);
/// Lines added apart, so that no addition waits for another.
const STRANDS: usize = 8;
/// Lines between strands. Processors fetch ahead in several streams faster than in one, and the products of one row read
/// eight panels of about this length side by side.
const STRAND_LINES: usize = 96;
/// Lines of a strand that are read one after the other.
const STEP_LINES: usize = 6;

/// GB/s of reading [`BUFFER_BYTES`] again and again.
pub(super) fn memory_bandwidth() -> Result<Measurement> {
    let threads = Threads::all();
    let level = SimdLevel::detect();
    // Written, not only reserved: untouched pages are all the same page of zeros.
    let buffer: Vec<Line> = (0..BUFFER_BYTES / size_of::<Line>()).map(|i| Line([i as u64; 8])).collect();
    let shape = json!({"bytes": BUFFER_BYTES, "threads": threads.count()});
    measure(Work::Unbounded, shape, || {
        let parts = threads.count();
        let (time, ()) = seconds(|| {
            threads.run(parts, |i| {
                let part = &buffer[buffer.len() * i / parts..buffer.len() * (i + 1) / parts];
                (0..ROUNDS).for_each(|_| {
                    black_box(sum(level, black_box(part)));
                });
            });
            Ok(())
        })?;
        Ok((ROUNDS * BUFFER_BYTES) as f64 / time / 1e9)
    })
}

/// GFLOPS of multiply-adds in single precision, two operations each.
pub(super) fn multiply_add_peak() -> Result<Measurement> {
    const STEPS: usize = 20_000_000;
    let threads = Threads::all();
    let level = SimdLevel::detect();
    let shape = json!({"threads": threads.count()});
    measure(Work::Unbounded, shape, || {
        let (time, ()) = seconds(|| {
            threads.run(threads.count(), |_| multiply_add(level, STEPS));
            Ok(())
        })?;
        let operations = 2 * STEPS * CHAINS * floats(level) * threads.count();
        Ok(operations as f64 / time / 1e9)
    })
}

/// Chains of multiply-adds that hide each other's latency (four cycles, two a cycle, and some more).
const CHAINS: usize = 12;

fn sum(level: SimdLevel, lines: &[Line]) -> Line {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2(lines: &[Line]) -> Line {
            sum_of_lines(lines)
        }
        #[target_feature(enable = "avx512f")]
        fn avx512(lines: &[Line]) -> Line {
            sum_of_lines(lines)
        }
        match level {
            // SAFETY: the level was found on this processor.
            SimdLevel::Avx512 => return unsafe { avx512(lines) },
            // SAFETY: the level was found on this processor.
            SimdLevel::Avx2 => return unsafe { avx2(lines) },
            SimdLevel::Scalar => {}
        }
    }
    let _ = level;
    sum_of_lines(lines)
}

#[inline(always)]
fn sum_of_lines(lines: &[Line]) -> Line {
    let mut sums = [Line::default(); STRANDS];
    for block in lines.chunks_exact(STRANDS * STRAND_LINES) {
        for step in 0..STRAND_LINES / STEP_LINES {
            for (strand, sum) in sums.iter_mut().enumerate() {
                for line in &block[strand * STRAND_LINES + step * STEP_LINES..][..STEP_LINES] {
                    for (sum, word) in sum.0.iter_mut().zip(line.0) {
                        *sum = sum.wrapping_add(word);
                    }
                }
            }
        }
    }
    sums.into_iter().fold(Line::default(), |mut total, sum| {
        total.0.iter_mut().zip(sum.0).for_each(|(total, word)| *total = total.wrapping_add(word));
        total
    })
}

/// Floats that one multiply-add takes.
fn floats(level: SimdLevel) -> usize {
    match level {
        SimdLevel::Avx512 => 16,
        SimdLevel::Avx2 => 8,
        SimdLevel::Scalar => 1,
    }
}

/// `steps` multiply-adds in each of [`CHAINS`] chains. In intrinsics: from a plain loop the compiler makes chains of its own.
fn multiply_add(level: SimdLevel, steps: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps};
        #[target_feature(enable = "avx2,fma")]
        fn avx2(steps: usize) {
            let (factor, term) = (_mm256_set1_ps(0.999), _mm256_set1_ps(1e-3));
            let mut chains = [_mm256_set1_ps(black_box(1.0)); CHAINS];
            for _ in 0..steps {
                for chain in &mut chains {
                    *chain = _mm256_fmadd_ps(*chain, factor, term);
                }
            }
            black_box(chains);
        }
        #[target_feature(enable = "avx512f")]
        fn avx512(steps: usize) {
            let (factor, term) = (_mm512_set1_ps(0.999), _mm512_set1_ps(1e-3));
            let mut chains = [_mm512_set1_ps(black_box(1.0)); CHAINS];
            for _ in 0..steps {
                for chain in &mut chains {
                    *chain = _mm512_fmadd_ps(*chain, factor, term);
                }
            }
            black_box(chains);
        }
        match level {
            // SAFETY: the level was found on this processor.
            SimdLevel::Avx512 => return unsafe { avx512(steps) },
            // SAFETY: the level was found on this processor.
            SimdLevel::Avx2 => return unsafe { avx2(steps) },
            SimdLevel::Scalar => {}
        }
    }
    let _ = level;
    let mut chains = [black_box(1.0_f32); CHAINS];
    for _ in 0..steps {
        for chain in &mut chains {
            *chain = *chain * 0.999 + 1e-3;
        }
    }
    black_box(chains);
}
