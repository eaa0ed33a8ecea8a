//! What can go wrong when a model file is read or written.
//!
//! Every refusal names the file, the tensor or key, what was expected and what was found, and where there is one the way out.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use ironloom_core::{DType, Shape, format_bytes, grouped};

use crate::Disguise;

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The part of a file that an error is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A fixed part, such as `the tensor count`.
    Part(&'static str),
    /// The metadata value of this key.
    Key(String),
    /// The tensor of this name.
    Tensor(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Part(part) => f.write_str(part),
            Self::Key(key) => write!(f, "metadata key {key:?}"),
            Self::Tensor(name) => write!(f, "tensor {name:?}"),
        }
    }
}

/// What can go wrong when a model file is read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // each field is what its name and the message say
pub enum Error {
    /// The system could not read a file.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// The system could not write a file.
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    /// The caller ended a write.
    #[error("{} is not written: the write was cancelled", path.display())]
    Cancelled { path: PathBuf },
    /// Not a regular file or folder.
    #[error("{} is neither a file nor a folder; give a .gguf or .safetensors file or a model's folder", path.display())]
    NotAFile { path: PathBuf },
    /// The file has no bytes.
    #[error("{} is empty (0 bytes): download it again", path.display())]
    Empty { path: PathBuf },
    /// The file is something else than weights.
    #[error("{} {disguise}", path.display())]
    NotWeights { path: PathBuf, disguise: Disguise },
    /// The file starts like no format this crate reads.
    #[error(
        "{} starts with {start:02x?}, and is neither GGUF (which starts with \"GGUF\") nor safetensors (8 bytes of header \
         length, then '{{'): it is damaged or another kind of file", path.display()
    )]
    UnknownFormat { path: PathBuf, start: Vec<u8> },
    /// A folder without weights.
    #[error(
        "{} holds no weights: expected model.safetensors, model.safetensors.index.json or one .gguf file{}",
        path.display(), found.as_ref().map(|name| format!(", found {name}")).unwrap_or_default()
    )]
    NoWeights { path: PathBuf, found: Option<String> },
    /// Shards without their index.
    #[error("{} holds shards of a model ({shard}) and no index: download model.safetensors.index.json too", path.display())]
    NoIndex { path: PathBuf, shard: String },
    /// A folder with several candidates.
    #[error("{} holds several models ({}): give the path of one of them", path.display(), candidates.join(", "))]
    SeveralWeights { path: PathBuf, candidates: Vec<String> },

    /// A big-endian GGUF file.
    #[error("{} is a big-endian GGUF file, and only little-endian ones are read: convert the model again", path.display())]
    BigEndian { path: PathBuf },
    /// A GGUF version this crate doesn't read.
    #[error("{} is GGUF version {version}, and versions 2 and 3 are read: convert the model again", path.display())]
    Version { path: PathBuf, version: u32 },
    /// A part of a model that is split over several GGUF files.
    #[error(
        "{} is a part of a model split over {parts} GGUF files: join them with `llama-gguf-split --merge`", path.display()
    )]
    SplitGguf { path: PathBuf, parts: u64 },
    /// The file ends too early.
    #[error(
        "{} ends inside {place}: it needs {} bytes at least and has {}; it is cut or damaged, download it again",
        path.display(), group(*needed), group(*size)
    )]
    Truncated { path: PathBuf, place: Place, needed: u64, size: u64 },
    /// A count that the rest of the file cannot hold.
    #[error(
        "{}: {place} says {count}, and the {} bytes left in the file hold at most {limit}: it is cut or damaged",
        path.display(), group(*room)
    )]
    Count { path: PathBuf, place: Place, count: u64, limit: u64, room: u64 },
    /// A name or string that isn't UTF-8.
    #[error("{}: {place} is not valid UTF-8{}", path.display(), element.map(|i| format!(" in element {i}")).unwrap_or_default())]
    NotUtf8 { path: PathBuf, place: Place, element: Option<usize> },
    /// A key or tensor name without characters, or too long.
    #[error("{}: {place} has a name of {length} bytes, and 1 to {limit} are allowed", path.display())]
    NameLength { path: PathBuf, place: Place, length: u64, limit: u64 },
    /// Two values of one key.
    #[error("{}: metadata key {key:?} is there twice", path.display())]
    DuplicateKey { path: PathBuf, key: String },
    /// Two tensors of one name.
    #[error("{}: tensor {tensor:?} is there twice", path.display())]
    DuplicateTensor { path: PathBuf, tensor: String },
    /// A metadata value of a type GGUF doesn't have.
    #[error("{}: metadata key {key:?} has value type {id}, and GGUF defines 0 to 12", path.display())]
    ValueType { path: PathBuf, key: String, id: u32 },
    /// A truth value that is neither 0 nor 1.
    #[error("{}: metadata key {key:?} is a bool of value {found}, and 0 and 1 are allowed", path.display())]
    BoolValue { path: PathBuf, key: String, found: u8 },
    /// Arrays of arrays of arrays …
    #[error("{}: metadata key {key:?} nests arrays deeper than {limit}", path.display())]
    Nesting { path: PathBuf, key: String, limit: usize },
    /// An alignment that isn't a power of two.
    #[error("{}: general.alignment is {found}, and it must be a power of two of type u32", path.display())]
    Alignment { path: PathBuf, found: String },

    /// A number of dimensions the format doesn't allow.
    #[error("{}: tensor {tensor:?} has {found} dimensions, and {} are allowed", path.display(), allowed(limits))]
    Rank { path: PathBuf, tensor: String, found: u64, limits: std::ops::RangeInclusive<usize> },
    /// A dimension of 0.
    #[error("{}: tensor {tensor:?} has a dimension of 0 in its shape {dims:?}", path.display())]
    ZeroDimension { path: PathBuf, tensor: String, dims: Vec<u64> },
    /// A size that overflows.
    #[error("{}: tensor {tensor:?} of shape {dims:?} is larger than any memory: the file is damaged", path.display())]
    Overflow { path: PathBuf, tensor: String, dims: Vec<u64> },
    /// Rows that aren't whole blocks of a packed type.
    #[error(
        "{}: tensor {tensor:?} has rows of {found} elements, and {dtype} packs {} at a time", path.display(),
        dtype.block_elements()
    )]
    PartialBlock { path: PathBuf, tensor: String, dtype: DType, found: u64 },
    /// An element type this crate doesn't read.
    #[error("{}: tensor {tensor:?} has type {dtype}, which is not read; readable are {}", path.display(), readable(*format))]
    UnknownType { path: PathBuf, tensor: String, dtype: String, format: crate::Format },
    /// A tensor whose data do not start where the alignment says.
    #[error("{}: tensor {tensor:?} starts at byte {offset} of the data, which is not a multiple of {alignment}", path.display())]
    Misaligned { path: PathBuf, tensor: String, offset: u64, alignment: u64 },
    /// Two tensors share bytes.
    #[error(
        "{}: tensor {tensor:?} starts at byte {offset} of the data, inside tensor {other:?}, which ends at {other_end}",
        path.display()
    )]
    Overlap { path: PathBuf, tensor: String, offset: u64, other: String, other_end: u64 },
    /// Bytes that belong to no tensor lie before this one.
    #[error("{}: tensor {tensor:?} starts at byte {offset} of the data, and {expected} was expected", path.display())]
    Gap { path: PathBuf, tensor: String, offset: u64, expected: u64 },
    /// Bytes that belong to no tensor lie at the end.
    #[error(
        "{} has {} bytes and its tensors end at {}: {} bytes too many; it is damaged or two files in one", path.display(),
        group(*size), group(*expected), group(size.saturating_sub(*expected))
    )]
    Trailing { path: PathBuf, expected: u64, size: u64 },
    /// Offsets and shape disagree.
    #[error("{}: tensor {tensor:?} is {dtype} {shape} ({expected} bytes), and its data_offsets span {found} bytes", path.display())]
    DataLength { path: PathBuf, tensor: String, dtype: DType, shape: Box<Shape>, expected: u64, found: u64 },

    /// The header isn't what safetensors defines.
    #[error("{}: the header is not a valid safetensors header: {source}", path.display())]
    Header { path: PathBuf, source: serde_json::Error },
    /// The index isn't what Hugging Face defines.
    #[error("{} is not a valid index of shards (a JSON object with \"weight_map\"): {source}", path.display())]
    Index { path: PathBuf, source: serde_json::Error },
    /// A file the index names is not there.
    #[error(
        "{} says that tensor {tensor:?} is in {shard}, which is not there ({missing} of {shards} files are missing): \
         download the missing files", path.display()
    )]
    MissingShard { path: PathBuf, shard: String, tensor: String, missing: usize, shards: usize },
    /// A shard's name that leads out of the folder.
    #[error("{} names the file {shard:?} for tensor {tensor:?}, and only plain file names are allowed", path.display())]
    ShardName { path: PathBuf, shard: String, tensor: String },
    /// A tensor the index names is not in its file.
    #[error("{} says that tensor {tensor:?} is in {shard}, {}", path.display(), match found_in {
        Some(other) => format!("and it is in {other}"),
        None => "and no file has it".to_owned(),
    })]
    IndexedTensor { path: PathBuf, tensor: String, shard: String, found_in: Option<String> },

    /// A tensor that was asked for isn't there.
    #[error("{} has no tensor {tensor:?}{}", path.display(), nearest_names(nearest))]
    MissingTensor { path: PathBuf, tensor: String, nearest: Vec<String> },
    /// A metadata value that was asked for isn't there.
    #[error("{} has no metadata key {key:?} ({wanted})", origin_name(origin))]
    MissingKey { origin: Option<Arc<Path>>, key: String, wanted: &'static str },
    /// A metadata value is of another kind than was asked for.
    #[error("{}: metadata key {key:?} should be {wanted}, and is {found}", origin_name(origin))]
    WrongKind { origin: Option<Arc<Path>>, key: String, wanted: &'static str, found: String },
    /// A tensor to write has bytes that aren't what its type and shape take.
    #[error("tensor {tensor:?} is {dtype} {shape} ({expected} bytes), and {found} bytes were given to write")]
    NewTensorLength { tensor: String, dtype: DType, shape: Box<Shape>, expected: u64, found: u64 },
    /// The maker of a tensor to write failed.
    #[error("cannot make tensor {tensor:?} to write: {source}")]
    NewTensor { tensor: String, source: crate::MakeError },
    /// A name that the format keeps for itself.
    #[error("{}: no tensor can have the name {tensor:?} in a safetensors file", path.display())]
    ReservedName { path: PathBuf, tensor: String },
    /// safetensors metadata are strings.
    #[error("{}: metadata key {key:?} is {found}, and safetensors holds strings only", path.display())]
    StringsOnly { path: PathBuf, key: String, found: &'static str },
    /// A file in the folder would be read in place of the one to write.
    #[error("{} would be read in place of the files to write: remove it or choose another folder", path.display())]
    InTheWay { path: PathBuf },
    /// A size or shape that the crate below refuses.
    #[error(transparent)]
    Core(ironloom_core::Error),
    /// A name that leads out of the model's folder.
    #[error("{name:?} is not a plain file name")]
    FileName { name: String },
}

fn origin_name(origin: &Option<Arc<Path>>) -> String {
    origin.as_ref().map_or_else(|| "the metadata".to_owned(), |path| path.display().to_string())
}

fn nearest_names(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("; nearest are {}", names.join(", ")) }
}

fn allowed(limits: &std::ops::RangeInclusive<usize>) -> String {
    format!("{} to {}", limits.start(), limits.end())
}

fn readable(format: crate::Format) -> String {
    let dtypes = DType::ALL.iter().filter(|dtype| match format {
        crate::Format::Gguf { .. } => dtype.gguf_id().is_some(),
        crate::Format::Safetensors => !dtype.is_packed(),
    });
    dtypes.map(|dtype| dtype.name()).collect::<Vec<_>>().join(" ")
}

/// `98362432` as `98,362,432`; sizes above 1 GB also in units.
fn group(bytes: u64) -> String {
    let number = grouped(bytes);
    if bytes >= 1 << 30 { format!("{number} ({})", format_bytes(bytes)) } else { number }
}

impl From<ironloom_core::Error> for Error {
    fn from(error: ironloom_core::Error) -> Self {
        match error {
            ironloom_core::Error::Read { path, source } => Self::Read { path, source },
            other => Self::Core(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every fallible call returns one, and crates above hold it in their own errors.
    #[test]
    fn errors_are_small() {
        assert!(size_of::<Error>() <= 104, "{}", size_of::<Error>());
    }

    #[test]
    fn sizes_are_grouped() {
        assert_eq!((group(7).as_str(), group(98_362_432).as_str()), ("7", "98,362,432"));
        assert_eq!(group(1 << 30), "1,073,741,824 (1.0 GiB)");
    }
}
