//! What the machine can do: bytes read from memory, and multiply-adds in registers, with all threads.
//!
//! Both loops are plain Rust compiled for the processor's best vector level; they are the bounds that the other figures
//! are given as shares of.

use std::hint::black_box;

use anyhow::Result;
use ironloom_core::{SimdLevel, Threads};
use serde_json::json;

use super::measurement::{Measurement, Work, measure, seconds};

/// Larger than any last-level cache in use.
const BUFFER_BYTES: usize = 1 << 30;
/// Words of a vector register of 512 bits, and vectors added apart so that no addition waits for another.
type Line = [u64; 8];
const STRANDS: usize = 8;

/// GB/s of reading [`BUFFER_BYTES`] once.
pub(super) fn memory_bandwidth() -> Result<Measurement> {
    let threads = Threads::all();
    let level = SimdLevel::detect();
    // Written, not only reserved: untouched pages are all the same page of zeros.
    let buffer: Vec<Line> = (0..BUFFER_BYTES / size_of::<Line>()).map(|i| [i as u64; 8]).collect();
    let shape = json!({"bytes": BUFFER_BYTES, "threads": threads.count()});
    measure(Work::Unbounded, shape, || {
        let parts = threads.count();
        let (time, ()) = seconds(|| {
            threads.run(parts, |i| {
                let part = &buffer[buffer.len() * i / parts..buffer.len() * (i + 1) / parts];
                black_box(sum(level, part));
            });
            Ok(())
        })?;
        Ok(BUFFER_BYTES as f64 / time / 1e9)
    })
}

/// GFLOPS of multiply-adds in single precision, two operations each.
pub(super) fn multiply_add_peak() -> Result<Measurement> {
    const STEPS: usize = 4_000_000;
    let threads = Threads::all();
    let level = SimdLevel::detect();
    let shape = json!({"threads": threads.count()});
    measure(Work::Unbounded, shape, || {
        let (time, ()) = seconds(|| {
            threads.run(threads.count(), |_| {
                black_box(multiply_add(level, STEPS));
            });
            Ok(())
        })?;
        let operations = 2 * STEPS * CHAINS * FLOATS * threads.count();
        Ok(operations as f64 / time / 1e9)
    })
}

/// Floats of the widest vector, and chains of multiply-adds that hide each other's latency.
const FLOATS: usize = 16;
const CHAINS: usize = 12;

macro_rules! per_level {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty = $body:ident, $avx2:ident, $avx512:ident;)*) => {$(
        fn $name(level: SimdLevel, $($argument: $type),*) -> $result {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn $avx2($($argument: $type),*) -> $result { $body($($argument),*) }
                #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx2,fma")]
                fn $avx512($($argument: $type),*) -> $result { $body($($argument),*) }
                match level {
                    // SAFETY: the level was found on this processor.
                    SimdLevel::Avx512 => return unsafe { $avx512($($argument),*) },
                    // SAFETY: the level was found on this processor.
                    SimdLevel::Avx2 => return unsafe { $avx2($($argument),*) },
                    SimdLevel::Scalar => {}
                }
            }
            let _ = level;
            $body($($argument),*)
        }
    )*};
}

per_level! {
    sum(lines: &[Line]) -> Line = sum_of_lines, sum_avx2, sum_avx512;
    multiply_add(steps: usize) -> [[f32; FLOATS]; CHAINS] = chains_of_multiply_adds, multiply_add_avx2, multiply_add_avx512;
}

#[inline(always)]
fn sum_of_lines(lines: &[Line]) -> Line {
    let mut sums = [Line::default(); STRANDS];
    for lines in lines.as_chunks::<STRANDS>().0 {
        for (sum, line) in sums.iter_mut().zip(lines) {
            for (sum, word) in sum.iter_mut().zip(line) {
                *sum = sum.wrapping_add(*word);
            }
        }
    }
    sums.into_iter().fold(Line::default(), |mut total, sum| {
        total.iter_mut().zip(sum).for_each(|(total, word)| *total = total.wrapping_add(word));
        total
    })
}

#[inline(always)]
fn chains_of_multiply_adds(steps: usize) -> [[f32; FLOATS]; CHAINS] {
    let (factor, term) = (black_box([0.999_f32; FLOATS]), black_box([1e-3_f32; FLOATS]));
    let mut chains = black_box([[1.0_f32; FLOATS]; CHAINS]);
    for _ in 0..steps {
        for chain in &mut chains {
            for ((value, factor), term) in chain.iter_mut().zip(&factor).zip(&term) {
                *value = value.mul_add(*factor, *term);
            }
        }
    }
    chains
}
