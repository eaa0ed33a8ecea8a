//! Sizes and places of tensors, checked: what a shape takes in bytes, and that a file's tensors tile its data section.
//!
//! Both formats store a table of tensors with offsets into one data section. A sound file's tensors, in the order of their
//! offsets, follow each other without overlap; each starts at the first multiple of the alignment (1 for safetensors) after the
//! one before, and the last one ends at the file's end, give or take its padding.

use std::{collections::HashSet, ops::RangeInclusive, path::Path};

use ironloom_core::{DType, Shape};

use crate::{Error, Format, Place, Result, TensorInfo, checkpoint::StoredTensor, safetensors::METADATA_NAME};

/// The shape and the byte size of a tensor with these dimensions, outermost first.
pub(crate) fn checked_size(path: &Path, tensor: &str, dtype: DType, dims: &[u64]) -> Result<(Shape, usize)> {
    let error_dims = || (path.to_owned(), tensor.to_owned(), dims.to_vec());
    if dims.contains(&0) {
        let (path, tensor, dims) = error_dims();
        return Err(Error::ZeroDimension { path, tensor, dims });
    }
    if let Some(&row) = dims.last()
        && !row.is_multiple_of(dtype.block_elements() as u64)
    {
        return Err(Error::PartialBlock { path: path.to_owned(), tensor: tensor.to_owned(), dtype, found: row });
    }
    let size = || {
        let mut narrow = [0usize; Shape::MAX_RANK];
        for (to, &from) in narrow.get_mut(..dims.len())?.iter_mut().zip(dims) {
            *to = usize::try_from(from).ok()?;
        }
        let shape = Shape::new(&narrow[..dims.len()]).ok()?;
        Some((shape, dtype.bytes_for(shape.elements().ok()?).ok()?))
    };
    size().ok_or_else(|| {
        let (path, tensor, dims) = error_dims();
        Error::Overflow { path, tensor, dims }
    })
}

/// Checks that the tensors tile the data section, which lies from `data_start` to the file's end.
///
/// `tensors` have their `start` from the start of the file.
pub(crate) fn check_tiling(
    path: &Path,
    tensors: &[StoredTensor],
    data_start: usize,
    alignment: usize,
    size: usize,
) -> Result<()> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_unstable_by_key(|&number| tensors[number].start);
    let (path, start_of_data) = (path.to_owned(), data_start as u64);
    let mut expected = start_of_data;
    let mut end = start_of_data;
    let mut previous: Option<&StoredTensor> = None;
    let mut outside: Option<&StoredTensor> = None;
    for tensor in order.into_iter().map(|number| &tensors[number]) {
        let start = tensor.start as u64;
        let offset = start.saturating_sub(start_of_data);
        let name = || tensor.info.name.clone();
        if let Some(other) = previous.filter(|_| start < end) {
            let (other, other_end) = (other.info.name.clone(), end - start_of_data);
            return Err(Error::Overlap { path, tensor: name(), offset, other, other_end });
        }
        if start != expected {
            return Err(Error::Gap { path, tensor: name(), offset, expected: expected - start_of_data });
        }
        // Both were checked to fit in `usize`, so their sum fits in 65 bits at most.
        end = start.saturating_add(tensor.length as u64);
        expected = end.checked_next_multiple_of(alignment as u64).unwrap_or(u64::MAX);
        previous = Some(tensor);
        if end > size as u64 && outside.is_none() {
            outside = Some(tensor);
        }
    }
    if let Some(tensor) = outside {
        let place = Place::Tensor(tensor.info.name.clone());
        return Err(Error::Truncated { path, place, needed: end, size: size as u64 });
    }
    if size as u64 > expected {
        return Err(Error::Trailing { path, expected: end, size: size as u64 });
    }
    Ok(())
}

/// Checks tensors that are to be written as `format`, and gives the bytes each takes.
pub(crate) fn check_new(
    path: &Path,
    tensors: &[&TensorInfo],
    ranks: RangeInclusive<usize>,
    format: Format,
) -> Result<Vec<usize>> {
    let mut names = HashSet::new();
    let check = |info: &&TensorInfo| {
        let (path, tensor) = (|| path.to_owned(), || info.name.clone());
        if info.name.is_empty() {
            return Err(Error::NameLength { path: path(), place: Place::Part("a tensor"), length: 0, limit: 65_535 });
        }
        if !names.insert(info.name.clone()) {
            return Err(Error::DuplicateTensor { path: path(), tensor: tensor() });
        }
        if matches!(format, Format::Safetensors) && info.name == METADATA_NAME {
            return Err(Error::ReservedName { path: path(), tensor: tensor() });
        }
        if !ranks.contains(&info.shape.rank()) {
            let (found, limits) = (info.shape.rank() as u64, ranks.clone());
            return Err(Error::Rank { path: path(), tensor: tensor(), found, limits });
        }
        let writable = match format {
            Format::Gguf { .. } => info.dtype.gguf_id().is_some(),
            Format::Safetensors => !info.dtype.is_packed(),
        };
        if !writable {
            return Err(Error::UnknownType { path: path(), tensor: tensor(), dtype: info.dtype.to_string(), format });
        }
        let dims: Vec<u64> = info.shape.dims().iter().map(|&dim| dim as u64).collect();
        checked_size(&path(), &info.name, info.dtype, &dims).map(|(_, length)| length)
    };
    tensors.iter().map(check).collect()
}
