//! Writes safetensors: one file, or shards with an index.

use std::{io::Write, ops::ControlFlow, path::Path};

use ironloom_core::{PartialFile, Shape};
use serde_json::json;

use super::METADATA_NAME;
use crate::{
    Error, Format, Metadata, NewTensor, Progress, Result, TensorInfo, Value,
    layout::check_new,
    output::{Meter, write_error, write_tensor},
};

/// The name readers look for first in a folder.
const SINGLE_FILE: &str = "model.safetensors";
/// The name of the index readers look for next.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Writes one safetensors file of these tensors, replacing a file of this name only when all is written. Tensors of wider
/// elements come first, so that each starts at a multiple of its element size; within one width they keep their order.
/// `progress` is called after each tensor; where it breaks, the write is given up.
///
/// Nothing but the tensor being written is held in memory.
///
/// # Errors
/// Metadata are other than strings; a name is empty or there twice; a tensor's type, shape or bytes don't fit the format; a
/// tensor's maker fails; [`Error::Cancelled`]; the file cannot be written. The target is then as it was.
pub fn write(
    path: impl AsRef<Path>,
    metadata: &Metadata,
    tensors: Vec<NewTensor<'_>>,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<()> {
    let path = path.as_ref();
    let tensors = checked(path, tensors)?;
    let mut meter = meter(&tensors, progress);
    write_file(path, metadata, tensors, &mut meter)?.finish().map_err(write_error(path))
}

/// Writes a folder's `model.safetensors`, or, when the tensors together take more than `max_shard_bytes`, its
/// `model-00001-of-0000N.safetensors` and their index. A tensor larger than that has a shard for itself. The folder is made
/// when it's not there. Shards take their names when all of them are written, and the index comes last, so that a reader never
/// finds half a model.
///
/// # Errors
/// As for [`write()`]; or the folder holds a `model.safetensors` or an index that readers would take in place of the files to write.
pub fn write_sharded(
    folder: impl AsRef<Path>,
    metadata: &Metadata,
    tensors: Vec<NewTensor<'_>>,
    max_shard_bytes: u64,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<()> {
    let folder = folder.as_ref();
    std::fs::create_dir_all(folder).map_err(write_error(folder))?;
    let tensors = checked(folder, tensors)?;
    let mut meter = meter(&tensors, progress);
    let total = total_bytes(&tensors);
    let shards = split(tensors, max_shard_bytes);
    let single = shards.len() <= 1;
    let in_the_way = folder.join(if single { INDEX_FILE } else { SINGLE_FILE });
    if in_the_way.exists() {
        return Err(Error::InTheWay { path: in_the_way });
    }
    if single {
        let (path, tensors) = (folder.join(SINGLE_FILE), shards.into_iter().flatten().collect());
        return write_file(&path, metadata, tensors, &mut meter)?.finish().map_err(write_error(&path));
    }

    let (count, mut weight_map, mut files) = (shards.len(), serde_json::Map::new(), Vec::new());
    for (number, tensors) in (1..).zip(shards) {
        let name = format!("model-{number:05}-of-{count:05}.safetensors");
        for (tensor, _) in &tensors {
            weight_map.insert(tensor.info().name.clone(), name.clone().into());
        }
        let path = folder.join(&name);
        let file = write_file(&path, metadata, tensors, &mut meter)?.sync().map_err(write_error(&path))?;
        files.push((path, file));
    }
    let path = folder.join(INDEX_FILE);
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let mut file = PartialFile::create(&path).map_err(write_error(&path))?;
    file.write_all(&json_bytes(&path, &index, "\n")?).map_err(write_error(&path))?;
    let file = file.sync().map_err(write_error(&path))?;
    files.push((path, file));
    for (path, file) in files {
        file.take_name().map_err(write_error(&path))?;
    }
    Ok(())
}

type Sized<'a> = (NewTensor<'a>, usize);

/// The tensors with their sizes, widest elements first.
fn checked<'a>(path: &Path, tensors: Vec<NewTensor<'a>>) -> Result<Vec<Sized<'a>>> {
    let infos: Vec<&TensorInfo> = tensors.iter().map(NewTensor::info).collect();
    let lengths = check_new(path, &infos, 0..=Shape::MAX_RANK, Format::Safetensors)?;
    let mut tensors: Vec<Sized<'a>> = tensors.into_iter().zip(lengths).collect();
    tensors.sort_by_key(|(tensor, _)| std::cmp::Reverse(tensor.info().dtype.block_bytes()));
    Ok(tensors)
}

fn total_bytes(tensors: &[Sized<'_>]) -> u64 {
    tensors.iter().fold(0u64, |sum, (_, length)| sum.saturating_add(*length as u64))
}

fn meter<'a>(tensors: &[Sized<'_>], progress: &'a mut dyn FnMut(Progress<'_>) -> ControlFlow<()>) -> Meter<'a> {
    Meter::new(progress, tensors.len(), total_bytes(tensors))
}

/// Fills shards in order; each has at least one tensor.
fn split(tensors: Vec<Sized<'_>>, max_shard_bytes: u64) -> Vec<Vec<Sized<'_>>> {
    let mut shards: Vec<Vec<Sized<'_>>> = Vec::new();
    let mut filled = 0u64;
    for tensor in tensors {
        let with = filled.saturating_add(tensor.1 as u64);
        match shards.last_mut().filter(|_| with <= max_shard_bytes) {
            Some(shard) => {
                shard.push(tensor);
                filled = with;
            }
            None => {
                filled = tensor.1 as u64;
                shards.push(vec![tensor]);
            }
        }
    }
    shards
}

fn write_file(path: &Path, metadata: &Metadata, tensors: Vec<Sized<'_>>, meter: &mut Meter<'_>) -> Result<PartialFile> {
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        let mut strings = serde_json::Map::new();
        for (key, value) in metadata.iter() {
            let Value::String(text) = value else {
                return Err(Error::StringsOnly { path: path.to_owned(), key: key.to_owned(), found: value.kind() });
            };
            strings.insert(key.to_owned(), text.as_str().into());
        }
        header.insert(METADATA_NAME.to_owned(), strings.into());
    }
    let mut offset = 0u64;
    for (tensor, length) in &tensors {
        let info = tensor.info();
        let end = offset.checked_add(*length as u64).ok_or_else(|| Error::Overflow {
            path: path.to_owned(),
            tensor: info.name.clone(),
            dims: info.shape.dims().iter().map(|&dim| dim as u64).collect(),
        })?;
        let entry = json!({ "dtype": info.dtype.name(), "shape": info.shape.dims(), "data_offsets": [offset, end] });
        header.insert(info.name.clone(), entry);
        offset = end;
    }
    // Spaces after the object keep the data at a multiple of 8 bytes.
    let mut header = json_bytes(path, &header.into(), "")?;
    header.resize(header.len().next_multiple_of(8), b' ');

    let failed = write_error(path);
    let mut file = PartialFile::create(path).map_err(failed)?;
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    file.write_all(&header).map_err(failed)?;
    for (tensor, length) in tensors {
        write_tensor(&mut file, path, tensor, length, meter)?;
    }
    Ok(file)
}

fn json_bytes(path: &Path, value: &serde_json::Value, end: &str) -> Result<Vec<u8>> {
    let bytes = if end.is_empty() { serde_json::to_vec(value) } else { serde_json::to_vec_pretty(value) };
    let mut bytes = bytes.map_err(|source| write_error(path)(source.into()))?;
    bytes.extend_from_slice(end.as_bytes());
    Ok(bytes)
}
