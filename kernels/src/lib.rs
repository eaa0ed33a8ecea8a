//! The CUDA side of Ironloom: one device, its memory, captured graphs, and one launcher for each kernel.
//!
//! [`Gpu`] is a context with one stream. Memory comes as [`Buffer`]s; a launcher takes [`Slice`]s of them and checks that
//! each holds what the kernel will touch. The kernels of `cuda/*.cu` are compiled by the build where it finds `nvcc` and are
//! embedded for every architecture; nothing of CUDA is needed to build or to link, and the driver and cuBLASLt are loaded
//! when a device is opened. Each thing that can be missing has its own [`Error`].
//!
//! The crate knows rows and widths; it knows no model and no tensor.
//!
//! ```no_run
//! use ironloom_kernels::Gpu;
//! let gpu = Gpu::open(0)?;
//! let buffer = gpu.upload(&[1, 2, 3, 4], "an example")?;
//! let mut back = [0; 4];
//! gpu.read(buffer.slice(), &mut back)?;
//! assert_eq!(back, [1, 2, 3, 4]);
//! # Ok::<(), ironloom_kernels::Error>(())
//! ```
#![deny(missing_docs)]

mod buffer;
mod driver;
mod error;
mod form;
mod gpu;
mod graph;
mod images;
mod launch;

pub use buffer::{Buffer, Slice};
pub use error::{Error, Result};
pub use form::Form;
pub use gpu::{Gpu, Properties};
pub use graph::{Event, Graph};
pub use images::{Image, images};
