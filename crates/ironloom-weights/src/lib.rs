//! Reads and writes model files: GGUF v2 and v3, and safetensors, single or sharded.
//!
//! [`open`] takes a `.gguf` file, a `.safetensors` file, an index of shards or a model's folder, and gives a [`Checkpoint`]:
//! metadata, the list of tensors and, for a tensor asked for by name, its bytes in the mapped file. What a file *is* decides its
//! content, not its name. A checkpoint counts which tensors were asked for, so that a loader can report what a model left unused.
//!
//! A file is not trusted. Every count, offset and size is checked against the file before it's used, arithmetic on them is
//! checked, and nothing is allocated because a header says so: memory while opening is bounded by the bytes really there.
//! Every byte of a file must belong to something: overlaps, gaps and bytes left over are errors, because they are what a cut or
//! doubled download looks like. The readers are our own for that reason: errors have to name the file, the tensor, what was
//! expected and what was found.
//!
//! [`gguf::write`], [`safetensors::write`] and [`safetensors::write_sharded`] stream tensor by tensor into a file beside the
//! target, which takes the target's name only when it's complete and on disk.
//!
//! ```
//! use ironloom_weights::{DType, Metadata, NewTensor, TensorInfo, gguf, unwatched};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("tiny.gguf");
//! let mut metadata = Metadata::new();
//! metadata.insert("general.architecture", "llama");
//! let info = TensorInfo { name: "output_norm.weight".into(), dtype: DType::F32, shape: [2].into() };
//! let bytes: Vec<u8> = [1.0f32, 0.5].iter().flat_map(|value| value.to_le_bytes()).collect();
//! gguf::write(&path, &metadata, vec![NewTensor::new(info, bytes)], &mut unwatched)?;
//!
//! let checkpoint = ironloom_weights::open(&path)?;
//! assert_eq!(checkpoint.metadata().required_string("general.architecture")?, "llama");
//! assert_eq!(checkpoint.tensor("output_norm.weight")?.shape.dims(), [2]);
//! assert!(checkpoint.unused().is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(missing_docs)]

#[cfg(target_endian = "big")]
compile_error!(
    "model files hold little-endian numbers, and tensors are used where they lie: a little-endian machine is needed"
);

mod checkpoint;
mod disguise;
mod error;
pub mod gguf;
mod layout;
mod metadata;
mod open;
mod output;
pub mod safetensors;
mod value;

pub use checkpoint::{Checkpoint, Format, TensorData, TensorInfo};
pub use disguise::Disguise;
pub use error::{Error, Place, Result};
pub use ironloom_core::{DType, Shape};
pub use metadata::Metadata;
pub use open::open;
pub use output::{MakeError, NewTensor, Progress, unwatched};
pub use value::{Array, Strings, Value};
