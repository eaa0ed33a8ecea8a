//! Writes GGUF v3: the head from metadata and the list of tensors, then the data, tensor by tensor.

use std::{
    io::{self, Read, Write},
    ops::ControlFlow,
    path::Path,
};

use ironloom_core::PartialFile;

use super::{MAGIC, MAX_DIMENSIONS, MAX_KEY_BYTES, MAX_NESTING, VERSION_WRITTEN, value_type};
use crate::{
    Array, Error, Format, Metadata, NewTensor, Place, Progress, Result, TensorInfo, Value,
    layout::check_new,
    output::{Meter, write_error, write_tensor},
};

/// Writes a GGUF v3 file of this metadata and these tensors, in their order, replacing a file of this name only when all is
/// written. The alignment is the metadata's `general.alignment`, else 32. `progress` is called after each tensor;
/// where it breaks, the write is given up.
///
/// Nothing but the tensor being written is held in memory.
///
/// # Errors
/// A name is empty, too long or there twice; a tensor's type, shape or bytes don't fit the format; a tensor's maker fails;
/// [`Error::Cancelled`]; the file cannot be written. The target is then as it was.
pub fn write(
    path: impl AsRef<Path>,
    metadata: &Metadata,
    tensors: Vec<NewTensor<'_>>,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<()> {
    let path = path.as_ref();
    let alignment = super::alignment(path, metadata)?;
    let infos: Vec<&TensorInfo> = tensors.iter().map(NewTensor::info).collect();
    let lengths = check_new(path, &infos, 1..=MAX_DIMENSIONS, Format::Gguf { version: VERSION_WRITTEN })?;
    let mut head = Vec::new();
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&VERSION_WRITTEN.to_le_bytes());
    head.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    head.extend_from_slice(&(metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            let (place, length, limit) = (Place::Part("a metadata key"), key.len() as u64, MAX_KEY_BYTES as u64);
            return Err(Error::NameLength { path: path.to_owned(), place, length, limit });
        }
        push_string(&mut head, key);
        if !push_value(&mut head, value) {
            return Err(Error::Nesting { path: path.to_owned(), key: key.to_owned(), limit: MAX_NESTING });
        }
    }
    let mut offset = 0u64;
    for (info, &length) in infos.iter().zip(&lengths) {
        push_string(&mut head, &info.name);
        let dims = info.shape.dims();
        head.extend_from_slice(&(dims.len() as u32).to_le_bytes());
        dims.iter().rev().for_each(|&dim| head.extend_from_slice(&(dim as u64).to_le_bytes()));
        // `check_new` refused types without a number.
        head.extend_from_slice(&info.dtype.gguf_id().unwrap_or(u32::MAX).to_le_bytes());
        head.extend_from_slice(&offset.to_le_bytes());
        let next = offset.checked_add(length as u64).and_then(|end| end.checked_next_multiple_of(alignment as u64));
        offset = next.ok_or_else(|| super::overflow(path, info))?;
    }

    let total = lengths.iter().fold(0u64, |sum, &length| sum.saturating_add(length as u64));
    let mut meter = Meter::new(progress, tensors.len(), total);
    let failed = write_error(path);
    let mut file = PartialFile::create(path).map_err(failed)?;
    file.write_all(&head).map_err(failed)?;
    pad(&mut file, head.len(), alignment).map_err(failed)?;
    drop(head);
    for (tensor, length) in tensors.into_iter().zip(lengths) {
        write_tensor(&mut file, path, tensor, length, &mut meter)?;
        pad(&mut file, length, alignment).map_err(failed)?;
    }
    file.finish().map_err(failed)
}

/// Writes the zeros between `length` bytes and the next multiple of the alignment.
fn pad(file: &mut PartialFile, length: usize, alignment: usize) -> io::Result<()> {
    let zeros = (alignment - length % alignment) % alignment;
    io::copy(&mut io::repeat(0).take(zeros as u64), file).map(drop)
}

fn push_string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// Appends type and value; false when arrays nest too deep.
fn push_value(out: &mut Vec<u8>, value: &Value) -> bool {
    macro_rules! push {
        ($id:ident, $value:expr) => {{
            out.extend_from_slice(&value_type::$id.to_le_bytes());
            out.extend_from_slice(&$value.to_le_bytes());
        }};
    }
    match value {
        Value::U8(value) => push!(U8, value),
        Value::I8(value) => push!(I8, value),
        Value::U16(value) => push!(U16, value),
        Value::I16(value) => push!(I16, value),
        Value::U32(value) => push!(U32, value),
        Value::I32(value) => push!(I32, value),
        Value::U64(value) => push!(U64, value),
        Value::I64(value) => push!(I64, value),
        Value::F32(value) => push!(F32, value),
        Value::F64(value) => push!(F64, value),
        Value::Bool(value) => push!(BOOL, u8::from(*value)),
        Value::String(text) => {
            out.extend_from_slice(&value_type::STRING.to_le_bytes());
            push_string(out, text);
        }
        Value::Array(array) => {
            out.extend_from_slice(&value_type::ARRAY.to_le_bytes());
            return push_array(out, array, 1);
        }
    }
    true
}

fn push_array(out: &mut Vec<u8>, array: &Array, depth: usize) -> bool {
    macro_rules! push {
        ($id:ident, $values:expr) => {{
            out.extend_from_slice(&value_type::$id.to_le_bytes());
            out.extend_from_slice(&($values.len() as u64).to_le_bytes());
            $values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
        }};
    }
    match array {
        Array::U8(values) => push!(U8, values),
        Array::I8(values) => push!(I8, values),
        Array::U16(values) => push!(U16, values),
        Array::I16(values) => push!(I16, values),
        Array::U32(values) => push!(U32, values),
        Array::I32(values) => push!(I32, values),
        Array::U64(values) => push!(U64, values),
        Array::I64(values) => push!(I64, values),
        Array::F32(values) => push!(F32, values),
        Array::F64(values) => push!(F64, values),
        Array::Bool(values) => {
            out.extend_from_slice(&value_type::BOOL.to_le_bytes());
            out.extend_from_slice(&(values.len() as u64).to_le_bytes());
            out.extend(values.iter().map(|&value| u8::from(value)));
        }
        Array::Strings(strings) => {
            out.extend_from_slice(&value_type::STRING.to_le_bytes());
            out.extend_from_slice(&(strings.len() as u64).to_le_bytes());
            strings.iter().for_each(|text| push_string(out, text));
        }
        Array::Arrays(arrays) => {
            out.extend_from_slice(&value_type::ARRAY.to_le_bytes());
            out.extend_from_slice(&(arrays.len() as u64).to_le_bytes());
            return depth < MAX_NESTING && arrays.iter().all(|array| push_array(out, array, depth + 1));
        }
    }
    true
}
