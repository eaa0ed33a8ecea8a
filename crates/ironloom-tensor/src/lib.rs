//! Tensors, devices and the operations that models are made of.
//!
//! An operation is a function in [`ops`]: it takes a [`Context`] (the device it runs on and, in training, the tape that
//! records it), checks its shapes, and fails with its name and both shapes when they don't fit. Its CPU form is the
//! reference that every other device is held against, so it fixes the order of every sum: the same bits come out at every
//! vector level, on any number of threads, and whatever rows lie beside a row.
//!
//! Tensors are dense and row-major; packed weights are not tensors and enter as [`Weight`].
//!
//! ```
//! use ironloom_tensor::{Context, Device, Tensor, ops};
//! let device = Device::cpu(2);
//! let cx = Context::inference(&device);
//! let x = Tensor::from_f32(vec![3.0, 4.0], [1, 2])?;
//! let y = ops::rmsnorm(&cx, &x, &Tensor::from_f32(vec![1.0, 1.0], [2])?, 0.0)?;
//! assert!((y.as_f32()?[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6);
//! # Ok::<(), ironloom_tensor::Error>(())
//! ```
#![deny(missing_docs)]

mod arena;
mod device;
mod error;
mod gemm;
mod indices;
mod kept;
mod lanes;
pub mod ops;
mod tape;
mod tensor;
mod weight;

pub use arena::{ARENA_ALIGNMENT, Arena, ArenaPlace};
pub use device::{Context, CpuDevice, CudaDevice, Device, Path};
pub use error::{Error, Result};
pub use indices::Indices;
pub use ironloom_quant::StoredMatrix;
pub use tape::{Gradients, Tape, TensorId};
pub use tensor::Tensor;
pub use weight::Weight;
