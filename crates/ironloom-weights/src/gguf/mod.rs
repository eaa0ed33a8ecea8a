//! GGUF v2 and v3, little-endian.
//!
//! ```text
//! "GGUF"  version u32  tensors u64  keys u64
//! per key:     name (u64 length, bytes)  type u32  value
//! per tensor:  name  dimensions u32  dimension u64 …  (innermost first)  type u32  offset u64 from the start of the data
//! padding to general.alignment (32 unless given), then the data, each tensor padded likewise
//! ```
//! Versions 2 and 3 differ in that 3 may be big-endian, which isn't read here. Format: the GGUF specification of the ggml project.

mod read;
mod write;

use std::path::Path;

pub(crate) use read::{is_gguf, read};
pub use write::write;

use crate::{Error, Metadata, Result, TensorInfo, Value};

/// The four bytes a file starts with.
const MAGIC: &[u8; 4] = b"GGUF";
/// The version [`write()`] writes.
const VERSION_WRITTEN: u32 = 3;
/// The metadata key of the alignment.
const ALIGNMENT_KEY: &str = "general.alignment";
/// The alignment of a file that doesn't give one.
const DEFAULT_ALIGNMENT: u32 = 32;
/// The most dimensions a tensor can have.
const MAX_DIMENSIONS: usize = 4;
/// The longest key, in bytes.
const MAX_KEY_BYTES: usize = 65_535;
/// How deep arrays may hold arrays; the specification sets no bound and no known file goes past 2.
const MAX_NESTING: usize = 4;

/// Numbers of the value types.
mod value_type {
    pub(super) const U8: u32 = 0;
    pub(super) const I8: u32 = 1;
    pub(super) const U16: u32 = 2;
    pub(super) const I16: u32 = 3;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
    pub(super) const U64: u32 = 10;
    pub(super) const I64: u32 = 11;
    pub(super) const F64: u32 = 12;
}

/// The alignment that metadata give: a power of two.
fn alignment(path: &Path, metadata: &Metadata) -> Result<usize> {
    match metadata.get(ALIGNMENT_KEY) {
        None => Ok(DEFAULT_ALIGNMENT as usize),
        Some(&Value::U32(found)) if found.is_power_of_two() => Ok(found as usize),
        Some(value) => {
            let found = match value.as_integer() {
                Some(integer) => format!("{integer} ({})", value.kind()),
                None => value.kind().to_owned(),
            };
            Err(Error::Alignment { path: path.to_owned(), found })
        }
    }
}

fn overflow(path: &Path, info: &TensorInfo) -> Error {
    let dims = info.shape.dims().iter().map(|&dim| dim as u64).collect();
    Error::Overflow { path: path.to_owned(), tensor: info.name.clone(), dims }
}

/// The ggml project's name of a tensor type that this crate doesn't read.
fn unread_type_name(id: u32) -> Option<&'static str> {
    Some(match id {
        4 => "Q4_2, removed from GGUF",
        5 => "Q4_3, removed from GGUF",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        29 => "IQ1_M",
        31 => "Q4_0_4_4, removed from GGUF",
        32 => "Q4_0_4_8, removed from GGUF",
        33 => "Q4_0_8_8, removed from GGUF",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return None,
    })
}
