//! A dense row-major tensor with shared storage.

use std::{ops::Range, sync::Arc};

use ironloom_core::Shape;
use ironloom_kernels::{Buffer, Form, Gpu, Slice};

use crate::{
    Context, Device, Error, Result, TensorId,
    error::{expect_count, expect_shape},
    kept::{Kept, Recipe},
};

/// A dense row-major tensor. Cloning shares the storage; an operation that takes a tensor by value writes in place when
/// nothing else shares it. A view is an offset and a shape over the leading dimension.
///
/// On a graphics card a tensor may hold bfloat16, or the two halves of an operand: the operation that makes it writes what
/// the next one reads.
#[derive(Clone, Debug)]
pub struct Tensor {
    shape: Shape,
    storage: Storage,
    /// Elements before the first.
    offset: usize,
    id: TensorId,
    /// How the elements are made again, all of them.
    recipe: Option<Arc<Recipe>>,
}

#[derive(Clone, Debug)]
enum Storage {
    F32(Arc<Vec<f32>>),
    Cuda(CudaStorage),
}

/// Rows on a graphics card.
#[derive(Clone, Debug)]
struct CudaStorage {
    gpu: Gpu,
    buffer: Buffer,
    form: Form,
    /// The rows are a part of wider ones: their width, and the columns before the part.
    columns: Option<(usize, usize)>,
    /// The same elements at the same places, rounded to bfloat16: what products read of a weight or a gradient.
    twin: Option<Buffer>,
}

/// Where a tensor's rows lie on a graphics card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CudaRows<'a> {
    pub(crate) slice: Slice<'a>,
    pub(crate) form: Form,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
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
        Ok(Self { shape, storage: Storage::F32(Arc::new(values)), offset: 0, id: TensorId::next(), recipe: None })
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// The size overflows.
    pub fn zeros(shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        Self::from_f32(vec![0.0; shape.elements()?], shape)
    }

    /// Rows of a graphics card that an operation has written or will write.
    pub(crate) fn on_cuda(gpu: &Gpu, buffer: Buffer, form: Form, shape: impl Into<Shape>) -> Self {
        let storage = Storage::Cuda(CudaStorage { gpu: gpu.clone(), buffer, form, columns: None, twin: None });
        Self { shape: shape.into(), storage, offset: 0, id: TensorId::next(), recipe: None }
    }

    /// The elements from `offset` on of a larger piece of memory.
    pub(crate) fn starting_at(self, offset: usize) -> Self {
        Self { offset, ..self }
    }

    /// The same with `twin`, which holds its elements rounded to bfloat16 or will.
    pub(crate) fn with_twin(mut self, twin: Buffer) -> Self {
        if let Storage::Cuda(storage) = &mut self.storage {
            storage.twin = Some(twin);
        }
        self
    }

    /// The same with the memory of `rounded`, which holds its elements as bfloat16.
    pub(crate) fn rounded_by(self, rounded: &Self) -> Result<Self> {
        match &rounded.storage {
            Storage::Cuda(storage) if rounded.offset == self.offset => Ok(self.with_twin(storage.buffer.clone())),
            _ => Err(rounded.misplaced("a rounded copy", "a graphics card")),
        }
    }

    /// The same, which `recipe` makes again: an operation that needs it on the way back need not keep it.
    pub(crate) fn made_by(self, recipe: Recipe) -> Self {
        Self { recipe: Some(Arc::new(recipe)), ..self }
    }

    /// What an operation keeps to have this tensor on the way back.
    pub(crate) fn kept(&self) -> Kept {
        match &self.recipe {
            Some(recipe) => Kept::Recipe(recipe.clone(), self.shape),
            None => Kept::Values(self.clone()),
        }
    }

    /// The elements as bfloat16, which products read: itself, its twin, or rounded now. Only rows in bfloat16 that are columns of
    /// wider ones have gaps.
    pub(crate) fn operand(&self, gpu: &Gpu, operation: &'static str) -> Result<Self> {
        let Storage::Cuda(storage) = &self.storage else { return Err(self.misplaced(operation, "a graphics card")) };
        if storage.form == Form::Bf16 {
            return Ok(self.clone());
        }
        if let Some(twin) = &storage.twin {
            let storage = CudaStorage { buffer: twin.clone(), form: Form::Bf16, twin: None, ..storage.clone() };
            return Ok(Self { storage: Storage::Cuda(storage), ..self.clone() });
        }
        let (rows, width) = (self.rows(), self.width());
        let out = Self::allocate(gpu, Form::Bf16, [rows, width], operation)?;
        let from = self.cuda(operation, Form::F32)?;
        ironloom_kernels::convert(gpu, from, out.cuda(operation, Form::Bf16)?, Form::Bf16, rows, width)?;
        Self { id: self.id, ..out }.reshape(self.shape)
    }

    /// Where the twin's elements lie, if there is one.
    pub(crate) fn twin_slice(&self) -> Result<Option<Slice<'_>>> {
        let Storage::Cuda(CudaStorage { twin: Some(twin), .. }) = &self.storage else { return Ok(None) };
        let start = self.offset * 2;
        Ok(Some(twin.part(start, twin.bytes().saturating_sub(start))?))
    }

    /// Memory of a pass for `[rows, width]`.
    pub(crate) fn allocate(gpu: &Gpu, form: Form, [rows, width]: [usize; 2], operation: &'static str) -> Result<Self> {
        let buffer = gpu.allocate(form.bytes(rows, width)?, operation)?;
        Ok(Self::on_cuda(gpu, buffer, form, [rows, width]))
    }

    /// The columns `range` of a tensor on a graphics card whose rows are whole, sharing the storage.
    ///
    /// # Errors
    /// The range ends past the columns, or the tensor is on the processor.
    pub fn columns(&self, range: Range<usize>) -> Result<Self> {
        let Storage::Cuda(storage) = &self.storage else { return Err(self.misplaced("columns", "a graphics card")) };
        let (expected, found) = (self.width(), range.end);
        if range.start > range.end || found > expected {
            return Err(Error::Count { operation: "columns", what: "the range's end", expected, found });
        }
        let columns = Some((self.width(), range.start));
        let storage = Storage::Cuda(CudaStorage { columns, ..storage.clone() });
        let shape = Shape::from([self.rows(), range.len()]);
        Ok(Self { shape, storage, offset: self.offset, id: TensorId::next(), recipe: None })
    }

    /// The wider rows on a graphics card that `parts` are columns of, where nothing else shares their memory.
    pub(crate) fn whole_of<const N: usize>(parts: [&Self; N]) -> Option<Self> {
        let storages = parts.map(|part| match &part.storage {
            Storage::Cuda(storage) => Some((part, storage)),
            Storage::F32(_) => None,
        });
        let (first, storage) = (*storages.first()?)?;
        let home = storage.buffer.slice().address();
        let together = storages
            .iter()
            .flatten()
            .filter(|(part, storage)| part.offset == first.offset && storage.buffer.slice().address() == home);
        let (stride, _) = storage.columns.filter(|_| together.count() == N && storage.buffer.holders() == N)?;
        let storage = Storage::Cuda(CudaStorage { columns: None, ..storage.clone() });
        let shape = Shape::from([first.rows(), stride]);
        Some(Self { shape, storage, offset: first.offset, id: TensorId::next(), recipe: None })
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
    /// They are not in the processor's memory.
    pub fn as_f32(&self) -> Result<&[f32]> {
        let Storage::F32(values) = &self.storage else {
            return Err(self.misplaced("reading a tensor", "the processor"));
        };
        Ok(&values[self.offset..self.offset + self.shape.elements()?])
    }

    /// The elements to write to: these alone, where others share them.
    ///
    /// # Errors
    /// They are not in the processor's memory, or the tensor is a part of another.
    pub fn as_f32_mut(&mut self) -> Result<&mut [f32]> {
        let elements = self.shape.elements()?;
        let misplaced = self.misplaced("writing a tensor", "the processor");
        let Storage::F32(values) = &mut self.storage else { return Err(misplaced) };
        expect_count("writing a tensor", "the number of elements", values.len(), elements)?;
        self.recipe = None;
        Ok(Arc::<Vec<f32>>::make_mut(values))
    }

    /// Adds the elements of `other`, of which there are as many.
    pub(crate) fn add_in_place(&mut self, other: &Self) -> Result<()> {
        const NAME: &str = "adding a gradient";
        let elements = self.shape.elements()?;
        if let Storage::Cuda(storage) = &mut self.storage {
            // What was rounded before is old now.
            storage.twin = None;
            self.recipe = None;
            let (gpu, form) = (storage.gpu.clone(), other.form().unwrap_or(Form::F32));
            if !storage.buffer.is_unique() {
                let copy = gpu.allocate(4 * elements, NAME)?;
                gpu.copy(copy.slice(), storage.buffer.part(4 * self.offset, 4 * elements)?)?;
                (storage.buffer, self.offset) = (copy, 0);
            }
            return Ok(ironloom_kernels::add(
                &gpu,
                self.cuda(NAME, Form::F32)?,
                other.cuda(NAME, form)?,
                form,
                elements,
            )?);
        }
        let terms = other.as_f32()?;
        self.as_f32_mut()?.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
        Ok(())
    }

    /// The elements as a vector: without a copy when nothing else shares them, or read from the device.
    ///
    /// # Errors
    /// The device fails.
    pub fn into_f32(self) -> Result<Vec<f32>> {
        let elements = self.shape.elements()?;
        let values = match self.storage {
            Storage::F32(values) => values,
            Storage::Cuda(_) => return self.read_cuda(),
        };
        if self.offset == 0 && elements == values.len() {
            return Ok(Arc::try_unwrap(values).unwrap_or_else(|shared| shared.as_ref().clone()));
        }
        Ok(values[self.offset..self.offset + elements].to_vec())
    }

    /// The same elements on `device`: this tensor where they are there already. Memory that lasts, for weights.
    ///
    /// # Errors
    /// The device has no room.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        match (&self.storage, device) {
            (Storage::F32(_), Device::Cpu(_)) | (Storage::Cuda(_), Device::Cuda(_)) => Ok(self.clone()),
            (Storage::Cuda(_), Device::Cpu(_)) => Self::from_f32(self.clone().into_f32()?, self.shape),
            (Storage::F32(_), Device::Cuda(cuda)) => {
                let buffer = cuda.gpu().upload(bytemuck::cast_slice(self.as_f32()?), "a tensor")?;
                Ok(Self { id: self.id, ..Self::on_cuda(cuda.gpu(), buffer, Form::F32, self.shape) })
            }
        }
    }

    /// Vectors that are added to what one input gives (the biases of q, k and v), where they lie so that products of many rows
    /// on a graphics card read them as one: one after the other in one piece of memory, and once more rounded to bfloat16.
    /// On the processor they stay where they are; so do vectors whose lengths are not in eights.
    ///
    /// # Errors
    /// The device has no room, or the vectors are not on it in single precision.
    pub fn join(device: &Device, vectors: Vec<Self>) -> Result<Vec<Self>> {
        const NAME: &str = "joined vectors";
        let Device::Cuda(cuda) = device else { return Ok(vectors) };
        if vectors.iter().any(|vector| !vector.width().is_multiple_of(8)) {
            return Ok(vectors);
        }
        let (gpu, total) = (cuda.gpu(), vectors.iter().map(Self::width).sum());
        let buffer = gpu.allocate_lasting(Form::F32.bytes(1, total)?, NAME)?;
        let twin = gpu.allocate_lasting(Form::Bf16.bytes(1, total)?, NAME)?;
        let mut offset = 0;
        let mut joined = Vec::with_capacity(vectors.len());
        for vector in &vectors {
            let bytes = Form::F32.bytes(1, vector.width())?;
            gpu.copy(buffer.part(4 * offset, bytes)?, vector.cuda(NAME, Form::F32)?.part(0, bytes)?)?;
            let copy = Self::on_cuda(gpu, buffer.clone(), Form::F32, [vector.width()]);
            joined.push(copy.starting_at(offset).with_twin(twin.clone()));
            offset += vector.width();
        }
        ironloom_kernels::convert(gpu, buffer.slice(), twin.slice(), Form::Bf16, 1, total)?;
        Ok(joined)
    }

    /// Whether the twin of `next` begins in the same piece of memory where this one's ends.
    pub(crate) fn is_followed_by(&self, next: &Self) -> bool {
        let home = |vector: &Self| match &vector.storage {
            Storage::Cuda(CudaStorage { twin: Some(twin), .. }) => Some(twin.slice().address()),
            _ => None,
        };
        home(self).is_some() && home(self) == home(next) && self.offset + self.width() == next.offset
    }

    /// The same elements in the form that products of this context's path read, rounded as that form is. On the processor
    /// that is this tensor.
    ///
    /// # Errors
    /// The device has no room, or the tensor is not in single precision.
    pub fn to_operand(&self, cx: &Context<'_>) -> Result<Self> {
        const NAME: &str = "the operand of a product";
        let Some(gpu) = cx.gpu() else { return Ok(self.clone()) };
        let (rows, width, form) = (self.rows(), self.width(), cx.operand_form());
        let out = Self::allocate(gpu, form, [rows, width], NAME)?;
        ironloom_kernels::convert(gpu, self.cuda(NAME, Form::F32)?, out.cuda(NAME, form)?, form, rows, width)?;
        out.reshape(self.shape)
    }

    /// Copies the elements, single precision on a graphics card, to `to` there.
    ///
    /// # Errors
    /// They are elsewhere or held otherwise, `to` is too small, or the device fails.
    pub fn copy_to(&self, to: Slice<'_>) -> Result<()> {
        const NAME: &str = "copying a tensor";
        let Storage::Cuda(storage) = &self.storage else { return Err(self.misplaced(NAME, "a graphics card")) };
        let bytes = 4 * self.shape.elements()?;
        Ok(storage.gpu.copy(to, self.cuda(NAME, Form::F32)?.part(0, bytes)?)?)
    }

    /// The rows on a graphics card, whatever lies between them.
    pub(crate) fn cuda_rows(&self, operation: &'static str) -> Result<CudaRows<'_>> {
        let Storage::Cuda(storage) = &self.storage else { return Err(self.misplaced(operation, "a graphics card")) };
        let (stride, first) = storage.columns.unwrap_or((self.width(), 0));
        let element = storage.form.bytes(1, 1)?;
        let start = (self.offset + first) * element;
        let slice = storage.buffer.slice();
        Ok(CudaRows { slice: slice.part(start, slice.bytes().saturating_sub(start))?, form: storage.form, stride })
    }

    /// The elements on a graphics card, in this form and without gaps.
    pub(crate) fn cuda(&self, operation: &'static str, form: Form) -> Result<Slice<'_>> {
        let rows = self.cuda_rows(operation)?;
        if rows.form != form || rows.stride != self.width() {
            let expected = form_name(form);
            return Err(Error::ElementType { operation, expected, found: self.element_name() });
        }
        Ok(rows.slice)
    }

    /// How its elements are held on a graphics card.
    pub(crate) fn form(&self) -> Option<Form> {
        match &self.storage {
            Storage::F32(_) => None,
            Storage::Cuda(storage) => Some(storage.form),
        }
    }

    fn read_cuda(&self) -> Result<Vec<f32>> {
        let Storage::Cuda(storage) = &self.storage else { return self.as_f32().map(<[f32]>::to_vec) };
        let (rows, width) = (self.rows(), self.width());
        let place = self.cuda_rows("reading a tensor")?;
        let row_bytes = place.form.bytes(1, place.stride)?;
        let bytes = rows.saturating_sub(1) * row_bytes + place.form.bytes(rows.min(1), width)?;
        let mut held = vec![0; bytes];
        storage.gpu.read(place.slice, &mut held)?;
        let mut out = Vec::with_capacity(rows * width);
        for row in held.chunks(row_bytes.max(1)) {
            let half = |at: usize| half::bf16::from_le_bytes([row[2 * at], row[2 * at + 1]]).to_f32();
            match place.form {
                Form::F32 => {
                    out.extend(row.as_chunks::<4>().0.iter().take(width).map(|&bytes| f32::from_le_bytes(bytes)))
                }
                Form::Bf16 => out.extend((0..width).map(half)),
                Form::Split => out.extend((0..width).map(|i| half(i) + half(width + i))),
            }
        }
        Ok(out)
    }

    pub(crate) fn misplaced(&self, operation: &'static str, expected: &'static str) -> Error {
        Error::Device { operation, expected, found: self.element_name() }
    }

    fn element_name(&self) -> &'static str {
        match &self.storage {
            Storage::F32(_) => "F32 on the processor",
            Storage::Cuda(storage) if storage.columns.is_some() => "columns of wider rows on a graphics card",
            Storage::Cuda(storage) => form_name(storage.form),
        }
    }

    /// Whether nothing else shares the storage.
    pub(crate) fn is_unique(&self) -> bool {
        match &self.storage {
            Storage::F32(values) => Arc::strong_count(values) == 1,
            Storage::Cuda(storage) => storage.buffer.is_unique(),
        }
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
        let inner: usize = match &self.storage {
            Storage::Cuda(CudaStorage { columns: Some((stride, _)), .. }) => *stride,
            _ => dims[1..].iter().product(),
        };
        let mut shape = dims.to_vec();
        shape[0] = range.len();
        Ok(Self {
            shape: Shape::new(&shape)?,
            storage: self.storage.clone(),
            offset: self.offset + range.start * inner,
            id: self.id,
            recipe: None,
        })
    }
}

fn form_name(form: Form) -> &'static str {
    match form {
        Form::F32 => "F32 on a graphics card",
        Form::Bf16 => "BF16 on a graphics card",
        Form::Split => "an operand in two BF16 halves on a graphics card",
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
