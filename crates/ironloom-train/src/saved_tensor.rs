//! State as named tensors, the form in which a checkpoint holds it.
//!
//! Everything that decides how a run goes on is single-precision numbers or bytes, so a saved and restored state is the same
//! bits.

use std::borrow::Cow;

use ironloom_core::DType;

use crate::{Error, Result};

/// One named tensor of a state: a flat list of numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedTensor<'a> {
    /// Its name, such as `model.norm.weight.first_moment`.
    pub name: String,
    /// Its values.
    pub values: SavedValues<'a>,
}

/// The values of a [`SavedTensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum SavedValues<'a> {
    /// Single precision.
    F32(Cow<'a, [f32]>),
    /// Codes of one byte.
    U8(Cow<'a, [u8]>),
}

impl SavedTensor<'_> {
    /// The element type in a weight file.
    pub fn dtype(&self) -> DType {
        match self.values {
            SavedValues::F32(_) => DType::F32,
            SavedValues::U8(_) => DType::U8,
        }
    }

    /// Elements; the tensor's one dimension in a weight file.
    pub fn len(&self) -> usize {
        match &self.values {
            SavedValues::F32(values) => values.len(),
            SavedValues::U8(values) => values.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes in a weight file: little-endian.
    pub fn bytes(&self) -> &[u8] {
        match &self.values {
            SavedValues::F32(values) => bytemuck::cast_slice(values),
            SavedValues::U8(values) => values,
        }
    }
}

impl SavedTensor<'static> {
    /// A tensor as a weight file holds it.
    ///
    /// # Errors
    /// Another type than these two, or bytes that are no whole elements.
    pub fn from_bytes(name: String, dtype: DType, bytes: &[u8]) -> Result<Self> {
        let values = match dtype {
            DType::U8 => SavedValues::U8(bytes.to_vec().into()),
            DType::F32 if bytes.len().is_multiple_of(4) => {
                let (numbers, _) = bytes.as_chunks::<4>();
                SavedValues::F32(numbers.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
            }
            _ => return Err(Error::StateType { tensor: name, dtype, bytes: bytes.len() }),
        };
        Ok(Self { name, values })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_bit_for_bit() {
        let numbers = vec![0.0, -0.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE / 2.0, 1.5];
        let tensor = SavedTensor { name: "a".into(), values: SavedValues::F32((&numbers).into()) };
        let read = SavedTensor::from_bytes("a".into(), tensor.dtype(), tensor.bytes()).unwrap();
        assert_eq!(read.bytes(), tensor.bytes());
        assert_eq!(read.len(), 6);
        let tensor = SavedTensor { name: "b".into(), values: SavedValues::U8(vec![0, 7, 255].into()) };
        assert_eq!(SavedTensor::from_bytes("b".into(), tensor.dtype(), tensor.bytes()).unwrap(), tensor);
        assert!(matches!(SavedTensor::from_bytes("c".into(), DType::F32, &[0; 5]), Err(Error::StateType { .. })));
        assert!(matches!(SavedTensor::from_bytes("c".into(), DType::BF16, &[0; 4]), Err(Error::StateType { .. })));
    }
}
