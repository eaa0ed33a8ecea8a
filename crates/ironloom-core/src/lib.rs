//! Types that every Ironloom crate shares: data types, shapes, host buffers, threads, random numbers, memory plans, and files
//! that appear whole.
//!
//! This is the bottom room of the house. Nothing here knows an operation, a model or a device; what lives here is what
//! two rooms would otherwise each define for themselves. See `docs/ARCHITECTURE.md` for the whole picture.
//!
//! ```
//! use ironloom_core::{DType, Shape};
//! let shape = Shape::from([32, 64]);
//! assert_eq!(DType::Q4_1.bytes_for(shape.elements().unwrap()).unwrap(), 32 * 64 / 32 * 20);
//! ```
#![deny(missing_docs)]

mod buffer;
mod cpu;
mod dtype;
mod error;
mod figures;
mod memory_plan;
mod partial;
mod random;
mod shape;
mod switches;
mod threads;

pub use buffer::{HostBuffer, MappedFile};
pub use cpu::SimdLevel;
pub use dtype::DType;
pub use error::{Error, Result};
pub use figures::{format_bytes, grouped};
pub use memory_plan::MemoryPlan;
pub use partial::{PartialFile, PartialFolder, SyncedFile, replace_file};
pub use random::Philox;
pub use shape::Shape;
pub use switches::is_off;
pub use threads::Threads;
