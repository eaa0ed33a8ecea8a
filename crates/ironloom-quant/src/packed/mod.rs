//! Weight matrices packed for products on the CPU: [`PackedMatrix`] and [`matmul`].
//!
//! A matrix `[rows, cols]` is repacked once, when it is loaded, into panels of sixteen rows whose weights lie side by side,
//! so that a lane of a 512-bit register is an output row: no product ends in a horizontal sum, and the order of a row's sum
//! does not depend on the width of the registers. Activations stay f32, so a result is that of the stored weights, rounded
//! as f32 sums are; nothing is quantized on the way.
//!
//! Codes of four bits (`Q4_0 Q4_1 Q2_K Q3_K Q4_K`, int4, NF4) go through one table of sixteen f32, codes of up to eight
//! (`Q5_0 Q5_1 Q8_0 Q5_K Q6_K`, int8 rows) through signed bytes; F32, F16 and BF16 stay what they are. Scales keep the file's
//! precision. See `layout.rs` for the bytes and `kernels.rs` for the order of sums, which is part of the contract: every SIMD
//! level, number of threads and number of rows of x gives the same bits.
//!
//! ```
//! use ironloom_core::Threads;
//! use ironloom_quant::{PackedMatrix, Product, WeightFormat, matmul};
//! let threads = Threads::new(1);
//! let matrix = PackedMatrix::from_f32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, 3, WeightFormat::Keep, &threads)?;
//! let mut out = [0.0; 2];
//! matmul(&threads, &[1.0, 0.0, -1.0], 1, &mut [Product { matrix: &matrix, out: &mut out }])?;
//! assert_eq!(out, [-2.0, -2.0]);
//! # Ok::<(), ironloom_quant::Error>(())
//! ```

mod kernels;
mod lanes;
mod layout;
mod matmul;
mod matrix;
mod repack;
#[cfg(target_arch = "x86_64")]
mod x86;

#[doc(hidden)]
pub use matmul::matmul_at;
pub use matmul::{Product, matmul};
pub use matrix::{PackedMatrix, WeightFormat};
