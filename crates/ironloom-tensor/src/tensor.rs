//! A dense row-major tensor with shared storage.

use std::{ops::Range, sync::Arc};

use ironloom_core::Shape;

use crate::{Error, Result, TensorId, error::expect_shape};

/// A dense row-major tensor. Cloning shares the storage; an operation that takes a tensor by value writes in place when
/// nothing else shares it. A view is an offset and a shape over the leading dimension.
#[derive(Clone, Debug)]
pub struct Tensor {
    shape: Shape,
    storage: Storage,
    offset: usize,
    id: TensorId,
}

#[derive(Clone, Debug)]
enum Storage {
    F32(Arc<Vec<f32>>),
}

impl Tensor {
    /// A tensor of `values`, in row-major order.
    ///
    /// # Errors
    /// The number of values is not the shape's.
    pub fn from_f32(values: Vec<f32>, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let expected = shape.elements()?;
        if values.len() != expected {
            return Err(Error::Count {
                operation: "tensor",
                what: "the number of values",
                expected,
                found: values.len(),
            });
        }
        Ok(Self { shape, storage: Storage::F32(Arc::new(values)), offset: 0, id: TensorId::next() })
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// The size overflows.
    pub fn zeros(shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        Self::from_f32(vec![0.0; shape.elements()?], shape)
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// What a tape knows this tensor by. Clones and views share it.
    pub fn id(&self) -> TensorId {
        self.id
    }

    /// The last dimension; 1 for a scalar.
    pub fn width(&self) -> usize {
        self.shape.dims().last().copied().unwrap_or(1)
    }

    /// The product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        let dims = self.shape.dims();
        dims[..dims.len().saturating_sub(1)].iter().product()
    }

    /// The elements.
    ///
    /// # Errors
    /// They are not single precision.
    pub fn as_f32(&self) -> Result<&[f32]> {
        let Storage::F32(values) = &self.storage;
        Ok(&values[self.offset..self.offset + self.shape.elements()?])
    }

    /// The elements as a vector, without a copy when nothing else shares them.
    ///
    /// # Errors
    /// They are not single precision.
    pub fn into_f32(self) -> Result<Vec<f32>> {
        let elements = self.shape.elements()?;
        let Storage::F32(values) = self.storage;
        if self.offset == 0 && elements == values.len() {
            return Ok(Arc::try_unwrap(values).unwrap_or_else(|shared| shared.as_ref().clone()));
        }
        Ok(values[self.offset..self.offset + elements].to_vec())
    }

    /// The same elements under another shape.
    ///
    /// # Errors
    /// The shapes hold different numbers of elements.
    pub fn reshape(mut self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.elements()? != self.shape.elements()? {
            expect_shape("reshape", "the tensor", shape, &self.shape)?;
        }
        self.shape = shape;
        Ok(self)
    }

    /// The rows `range` of the first dimension, sharing the storage.
    ///
    /// # Errors
    /// The range ends past the first dimension.
    pub fn rows_view(&self, range: Range<usize>) -> Result<Self> {
        let dims = self.shape.dims();
        let length = dims.first().copied().unwrap_or(0);
        if range.start > range.end || range.end > length {
            return Err(Error::Count {
                operation: "rows view",
                what: "the range's end",
                expected: length,
                found: range.end,
            });
        }
        let inner: usize = dims[1..].iter().product();
        let mut shape = dims.to_vec();
        shape[0] = range.len();
        Ok(Self {
            shape: Shape::new(&shape)?,
            storage: self.storage.clone(),
            offset: self.offset + range.start * inner,
            id: self.id,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_share_and_check() {
        let tensor = Tensor::from_f32((0..12).map(|i| i as f32).collect(), [4, 3]).unwrap();
        let view = tensor.rows_view(1..3).unwrap();
        assert_eq!(view.as_f32().unwrap(), &[3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        assert_eq!(view.rows_view(1..2).unwrap().into_f32().unwrap(), [6.0, 7.0, 8.0]);
        assert!(tensor.rows_view(3..5).is_err());
        assert!(tensor.clone().reshape([5, 3]).is_err());
        assert!(Tensor::from_f32(vec![0.0; 5], [2, 3]).is_err());
    }
}
