//! safetensors, in one file or sharded with an index.
//!
//! ```text
//! header length u64   header: JSON object   data
//! {"__metadata__": {key: string …}, name: {"dtype": "F32", "shape": [outermost …], "data_offsets": [start, end]} …}
//! ```
//! Offsets count from the start of the data; tensors tile them without a gap. An index, `*.safetensors.index.json`, is
//! `{"weight_map": {name: file …}}` with the files beside it. Format: the safetensors project's README; the index is Hugging Face's.

mod header;
mod read;
mod write;

pub(crate) use read::{read, read_index};
pub use write::{write, write_sharded};

/// The header's name for what isn't a tensor.
pub(crate) const METADATA_NAME: &str = "__metadata__";
