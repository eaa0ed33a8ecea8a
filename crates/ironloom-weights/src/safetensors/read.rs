//! Reads safetensors: one mapped file, or the files an index names.

use std::{
    collections::HashMap,
    path::{Component, Path},
    sync::{Arc, atomic::AtomicBool},
};

use ironloom_core::{DType, MappedFile, Shape};

use super::header::{self, Entry, ShardIndex};
use crate::{
    Checkpoint, Disguise, Error, Format, Metadata, Place, Result, TensorInfo,
    checkpoint::StoredTensor,
    layout,
    open::{map, refuse},
};

/// Bytes of the number that says how long the header is.
const LENGTH_BYTES: usize = 8;

/// Reads one file; `asked` is the path the user gave.
pub(crate) fn read(asked: &Path, file: Arc<MappedFile>) -> Result<Checkpoint> {
    let mut metadata = Metadata::of_file(asked);
    let tensors = read_file(&file, 0, &mut metadata)?;
    Checkpoint::new(asked.to_owned(), Format::Safetensors, metadata, vec![file], tensors)
}

/// Reads the files an index names; `asked` is the path the user gave.
pub(crate) fn read_index(asked: &Path, path: &Path) -> Result<Checkpoint> {
    let index_file = map(path)?;
    let index = header::parse_index(&index_file).map_err(|source| match Disguise::detect(&index_file) {
        Some(disguise @ (Disguise::WebPage | Disguise::GitLfsPointer { .. })) => {
            Error::NotWeights { path: path.to_owned(), disguise }
        }
        _ => Error::Index { path: path.to_owned(), source },
    })?;
    let folder = path.parent().unwrap_or(Path::new(""));
    check_shards(path, folder, &index)?;
    let mut metadata = Metadata::of_file(asked);
    let (mut files, mut tensors) = (Vec::new(), Vec::new());
    for (number, name) in (0u32..).zip(&index.files) {
        let file = map(&folder.join(name))?;
        tensors.append(&mut read_file(&file, number, &mut metadata)?);
        files.push(file);
    }
    check_index(path, &index, &tensors)?;
    Checkpoint::new(asked.to_owned(), Format::Safetensors, metadata, files, tensors)
}

/// Every shard's name must be plain, and every shard be there, before the first is read.
fn check_shards(path: &Path, folder: &Path, index: &ShardIndex) -> Result<()> {
    let first_tensor = |file: usize| {
        let tensor = index.tensors.iter().find(|(_, number)| *number as usize == file);
        tensor.map(|(name, _)| name.clone()).unwrap_or_default()
    };
    for (number, shard) in index.files.iter().enumerate() {
        let mut components = Path::new(shard).components();
        let plain = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
        if !plain || shard.contains(['/', '\\']) {
            let tensor = first_tensor(number);
            return Err(Error::ShardName { path: path.to_owned(), shard: shard.clone(), tensor });
        }
    }
    let missing: Vec<usize> =
        (0..index.files.len()).filter(|&number| !folder.join(&index.files[number]).exists()).collect();
    if let Some(&first) = missing.first() {
        let (shard, tensor) = (index.files[first].clone(), first_tensor(first));
        let (missing, shards) = (missing.len(), index.files.len());
        return Err(Error::MissingShard { path: path.to_owned(), shard, tensor, missing, shards });
    }
    Ok(())
}

/// Every tensor of the index must be in the file that the index names. Tensors the index leaves out are taken too: whoever
/// loads the model sees them as unused.
fn check_index(path: &Path, index: &ShardIndex, tensors: &[StoredTensor]) -> Result<()> {
    let found: HashMap<&str, u32> = tensors.iter().map(|tensor| (tensor.info.name.as_str(), tensor.file)).collect();
    let mut listed = HashMap::with_capacity(index.tensors.len());
    for (name, number) in &index.tensors {
        let file_name = |number: u32| index.files.get(number as usize).cloned().unwrap_or_default();
        if listed.insert(name.as_str(), number).is_some() {
            return Err(Error::DuplicateTensor { path: path.to_owned(), tensor: name.clone() });
        }
        let file = found.get(name.as_str()).copied();
        if file != Some(*number) {
            return Err(Error::IndexedTensor {
                path: path.to_owned(),
                tensor: name.clone(),
                shard: file_name(*number),
                found_in: file.map(file_name),
            });
        }
    }
    Ok(())
}

fn read_file(file: &MappedFile, number: u32, metadata: &mut Metadata) -> Result<Vec<StoredTensor>> {
    let path = file.path();
    let json = header_of(file)?;
    let data_start = LENGTH_BYTES + json.len();
    let header = header::parse_header(json).map_err(|source| Error::Header { path: path.to_owned(), source })?;
    let mut own_keys = std::collections::HashSet::new();
    for (key, value) in header.metadata {
        if !own_keys.insert(key.clone()) {
            return Err(Error::DuplicateKey { path: path.to_owned(), key });
        }
        // Shards repeat the same few keys; the first shard's stay.
        if !metadata.contains(&key) {
            metadata.insert(key, value);
        }
    }
    let mut tensors = Vec::with_capacity(header.tensors.len());
    for (name, entry) in header.tensors {
        tensors.push(stored(path, name, &entry, number, data_start)?);
    }
    layout::check_tiling(path, &tensors, data_start, 1, file.len())?;
    Ok(tensors)
}

/// The JSON of the header. A file that isn't safetensors is told apart here.
fn header_of(file: &MappedFile) -> Result<&[u8]> {
    let (path, size) = (file.path(), file.len() as u64);
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else { return Err(refuse(path, file)) };
    let length = u64::from_le_bytes(*length);
    // A header starts with `{`; what doesn't is no safetensors file, however its first bytes read as a length.
    if rest.first().is_some_and(|&first| first != b'{') || length < 2 {
        return Err(refuse(path, file));
    }
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    header.ok_or_else(|| match Disguise::detect(&file[..file.len().min(1024)]) {
        Some(disguise) => Error::NotWeights { path: path.to_owned(), disguise },
        None => Error::Truncated {
            path: path.to_owned(),
            place: Place::Part("the header"),
            needed: length.saturating_add(LENGTH_BYTES as u64),
            size,
        },
    })
}

fn stored(path: &Path, name: String, entry: &Entry, file: u32, data_start: usize) -> Result<StoredTensor> {
    let error_path = || path.to_owned();
    if name.is_empty() {
        let place = Place::Part("a tensor");
        return Err(Error::NameLength { path: error_path(), place, length: 0, limit: u64::MAX });
    }
    if entry.rank > Shape::MAX_RANK {
        let (found, limits) = (entry.rank as u64, 0..=Shape::MAX_RANK);
        return Err(Error::Rank { path: error_path(), tensor: name, found, limits });
    }
    // The format writes its types in capitals, and packed types are not among them.
    let dtype = DType::ALL.iter().copied().find(|dtype| !dtype.is_packed() && dtype.name() == entry.dtype);
    let Some(dtype) = dtype else {
        let dtype = entry.dtype.chars().take(32).collect();
        return Err(Error::UnknownType { path: error_path(), tensor: name, dtype, format: Format::Safetensors });
    };
    let (shape, length) = layout::checked_size(path, &name, dtype, entry.dims())?;
    let [start, end] = entry.data_offsets;
    if end.checked_sub(start) != Some(length as u64) {
        let (shape, expected, found) = (Box::new(shape), length as u64, end.saturating_sub(start));
        return Err(Error::DataLength { path: error_path(), tensor: name, dtype, shape, expected, found });
    }
    let Some(start) = usize::try_from(start).ok().and_then(|start| start.checked_add(data_start)) else {
        return Err(Error::Overflow { path: error_path(), tensor: name, dims: entry.dims().to_vec() });
    };
    let info = TensorInfo { name, dtype, shape };
    Ok(StoredTensor { info, file, start, length, used: AtomicBool::new(false) })
}
