//! A weight matrix held packed on a device.

use std::sync::Arc;

use ironloom_kernels::{Buffer, Gpu, Slice, TileFormat, WeightLayout};
use ironloom_quant::{DeviceFormat, PackedMatrix, StoredMatrix, TileFormat as PackedTiles, TiledMatrix, WeightFormat};

use crate::{Device, Error, Result, Tensor, error::expect_count};

/// A weight matrix `[rows, cols]` in the packed form its device computes with, or dense, to be trained. Cloning shares it.
#[derive(Clone)]
pub struct Weight {
    form: Form,
}

#[derive(Clone)]
enum Form {
    Cpu(Arc<PackedMatrix>),
    Dense(Tensor),
    Cuda(CudaMatrix),
}

/// A matrix in memory of a graphics card, alone or as one of a stack of equal ones.
#[derive(Clone)]
pub(crate) struct CudaMatrix {
    pub(crate) layout: WeightLayout,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) buffer: Buffer,
    /// Where it starts in the buffer.
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

impl Weight {
    /// A weight on the processor.
    pub fn cpu(matrix: PackedMatrix) -> Self {
        Self { form: Form::Cpu(Arc::new(matrix)) }
    }

    /// A weight of single-precision rows, which has a gradient; on a graphics card one of an [`Arena`](crate::Arena).
    ///
    /// # Errors
    /// `values` are no matrix, or memory of a graphics card without a rounded copy.
    pub fn dense(values: Tensor) -> Result<Self> {
        const NAME: &str = "a dense weight";
        expect_count(NAME, "the number of dimensions", 2, values.shape().dims().len())?;
        if values.twin_slice()?.is_none() {
            values.as_f32()?;
        }
        Ok(Self { form: Form::Dense(values) })
    }

    /// The rows of a dense weight, `[rows, cols]`.
    pub fn as_dense(&self) -> Option<&Tensor> {
        match &self.form {
            Form::Dense(values) => Some(values),
            _ => None,
        }
    }

    /// The rows of a dense weight, to be changed.
    pub fn as_dense_mut(&mut self) -> Option<&mut Tensor> {
        match &mut self.form {
            Form::Dense(values) => Some(values),
            _ => None,
        }
    }

    /// Writes row `row` to `out`, as long as a row.
    ///
    /// # Errors
    /// There is no such row, `out` has another length, or the weight is not on the processor.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        let Form::Dense(values) = &self.form else { return Ok(self.as_cpu("a row of a weight")?.row(row, out)?) };
        let cols = self.cols();
        expect_count("a row of a weight", "the length of the output", cols, out.len())?;
        out.copy_from_slice(values.rows_view(row..row + 1)?.as_f32()?);
        Ok(())
    }

    /// All rows in single precision.
    ///
    /// # Errors
    /// A packed weight is not on the processor, or the device fails.
    pub fn unpacked(&self) -> Result<Vec<f32>> {
        if let Form::Dense(values) = &self.form {
            return values.clone().into_f32();
        }
        let cols = self.cols();
        let mut values = vec![0.0; self.rows() * cols];
        for (row, out) in values.chunks_exact_mut(cols.max(1)).enumerate() {
            self.row(row, out)?;
        }
        Ok(values)
    }

    /// A stored matrix, packed as `format` for `device`.
    ///
    /// # Errors
    /// The bytes are not the matrix, the type cannot be packed so, or the device has no room.
    pub fn from_stored(device: &Device, stored: &StoredMatrix<'_>, format: WeightFormat) -> Result<Self> {
        Ok(match device {
            Device::Cpu(cpu) => Self::cpu(PackedMatrix::from_stored(stored, format, &cpu.threads)?),
            Device::Cuda(cuda) => {
                Self::upload(cuda.gpu(), &TiledMatrix::from_stored(stored, format, device.threads())?)?
            }
        })
    }

    /// A matrix of `values`, row-major, packed as `format` for `device`.
    ///
    /// # Errors
    /// The values are not the matrix, or the device has no room.
    pub fn from_f32(device: &Device, values: &[f32], [rows, cols]: [usize; 2], format: WeightFormat) -> Result<Self> {
        Ok(match device {
            Device::Cpu(cpu) => Self::cpu(PackedMatrix::from_f32(values, rows, cols, format, &cpu.threads)?),
            Device::Cuda(cuda) => {
                Self::upload(cuda.gpu(), &TiledMatrix::from_f32(values, rows, cols, format, device.threads())?)?
            }
        })
    }

    fn upload(gpu: &Gpu, matrix: &TiledMatrix) -> Result<Self> {
        let (rows, cols, layout) = (matrix.rows(), matrix.cols(), layout_of(matrix.format()));
        let bytes = matrix.bytes();
        let buffer = gpu.upload(bytes, "weights")?;
        Ok(Self { form: Form::Cuda(CudaMatrix { layout, rows, cols, buffer, offset: 0, bytes: bytes.len() }) })
    }

    /// The same matrices one after the other in one piece of the device's memory, as kernels of routed experts read them.
    /// On the processor they stay where they are.
    ///
    /// # Errors
    /// They are not alike, or the device has no room.
    pub fn stack(device: &Device, weights: Vec<Self>) -> Result<Vec<Self>> {
        const NAME: &str = "a stack of weights";
        let Device::Cuda(cuda) = device else { return Ok(weights) };
        let matrices = weights.iter().map(|weight| weight.as_cuda(NAME)).collect::<Result<Vec<_>>>()?;
        let shape = |matrix: &CudaMatrix| (matrix.layout, matrix.rows, matrix.cols);
        if matrices.iter().any(|matrix| shape(matrix) != shape(matrices[0])) {
            return Err(Error::Device {
                operation: NAME,
                expected: "matrices of one shape and format",
                found: "of another",
            });
        }
        one_after_the_other(cuda.gpu(), &matrices, "weights of experts")
    }

    /// Weights that read the same input (q, k, v; gate, up), where they lie so that products of many rows on a graphics card
    /// read them as one matrix: rows of bfloat16 one after the other in one piece of memory. Packed weights stay where they
    /// are, for such products unpack them together; so do weights on the processor.
    ///
    /// # Errors
    /// The device has no room.
    pub fn join(device: &Device, weights: Vec<Self>) -> Result<Vec<Self>> {
        let Device::Cuda(cuda) = device else { return Ok(weights) };
        let matrices = weights.iter().map(|weight| weight.as_cuda("weights to join")).collect::<Result<Vec<_>>>()?;
        let joins = |matrix: &&CudaMatrix| matrix.is_bf16() && matrix.cols == matrices[0].cols;
        if !matrices.iter().all(joins) {
            return Ok(weights);
        }
        one_after_the_other(cuda.gpu(), &matrices, "weights")
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        match &self.form {
            Form::Cpu(matrix) => matrix.rows(),
            Form::Dense(values) => values.rows(),
            Form::Cuda(matrix) => matrix.rows,
        }
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        match &self.form {
            Form::Cpu(matrix) => matrix.cols(),
            Form::Dense(values) => values.width(),
            Form::Cuda(matrix) => matrix.cols,
        }
    }

    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        match &self.form {
            Form::Cpu(matrix) => matrix.bytes(),
            Form::Dense(values) => values.rows() * values.width() * size_of::<f32>(),
            Form::Cuda(matrix) => matrix.bytes,
        }
    }

    /// The packed form's name.
    pub fn format(&self) -> &'static str {
        match &self.form {
            Form::Cpu(matrix) => matrix.name(),
            Form::Dense(_) => "F32 (trainable)",
            Form::Cuda(matrix) => match matrix.layout {
                WeightLayout::Plain(dtype) => dtype.name(),
                WeightLayout::Tiles(format) => tile_name(format),
            },
        }
    }

    /// Whether products of few rows read it through the slow kernel for types without tiles.
    pub fn is_slow(&self) -> bool {
        matches!(&self.form, Form::Cuda(CudaMatrix { layout: WeightLayout::Plain(_), .. }))
    }

    /// The matrix on the processor.
    ///
    /// # Errors
    /// It is on another device.
    pub fn as_cpu(&self, operation: &'static str) -> Result<&PackedMatrix> {
        match &self.form {
            Form::Cpu(matrix) => Ok(matrix),
            Form::Cuda(_) => {
                Err(Error::Device { operation, expected: "the processor", found: "a weight on a graphics card" })
            }
            Form::Dense(_) => Err(Error::ElementType { operation, expected: "packed", found: "a dense weight" }),
        }
    }

    /// The matrix on a graphics card.
    pub(crate) fn as_cuda(&self, operation: &'static str) -> Result<&CudaMatrix> {
        match &self.form {
            Form::Cuda(matrix) => Ok(matrix),
            Form::Cpu(_) => {
                Err(Error::Device { operation, expected: "a graphics card", found: "a weight on the processor" })
            }
            Form::Dense(_) => {
                Err(Error::Device { operation, expected: "a graphics card, packed", found: "a dense weight" })
            }
        }
    }
}

impl CudaMatrix {
    pub(crate) fn slice(&self) -> Result<Slice<'_>> {
        Ok(self.buffer.part(self.offset, self.bytes)?)
    }

    /// Whether it lies as rows of bfloat16.
    pub(crate) fn is_bf16(&self) -> bool {
        self.layout == WeightLayout::Tiles(TileFormat::Bf16)
    }

    /// Whether `next` begins in the same piece of memory where this one ends.
    pub(crate) fn is_followed_by(&self, next: &Self) -> bool {
        let home = |matrix: &Self| matrix.buffer.slice().address();
        home(self) == home(next) && self.offset + self.bytes == next.offset
    }
}

/// Copies of `matrices` in one piece of memory. Sizes are whole 32 bytes in every tiled form, so no gap is needed for the
/// alignment that kernels ask for.
fn one_after_the_other(gpu: &Gpu, matrices: &[&CudaMatrix], what: &'static str) -> Result<Vec<Weight>> {
    let total = matrices.iter().try_fold(0usize, |total, matrix| total.checked_add(matrix.bytes));
    let buffer = gpu.allocate_lasting(total.ok_or(ironloom_core::Error::SizeOverflow)?, what)?;
    let mut offset = 0;
    let mut copies = Vec::with_capacity(matrices.len());
    for &matrix in matrices {
        gpu.copy(buffer.part(offset, matrix.bytes)?, matrix.slice()?)?;
        copies.push(Weight { form: Form::Cuda(CudaMatrix { buffer: buffer.clone(), offset, ..*matrix }) });
        offset += matrix.bytes;
    }
    Ok(copies)
}

fn layout_of(format: DeviceFormat) -> WeightLayout {
    let tiles = match format {
        DeviceFormat::Plain(dtype) => return WeightLayout::Plain(dtype),
        DeviceFormat::Tiles(tiles) => tiles,
    };
    WeightLayout::Tiles(match tiles {
        PackedTiles::Bf16 => TileFormat::Bf16,
        PackedTiles::Int8 => TileFormat::Int8,
        PackedTiles::Nf4 => TileFormat::Nf4,
        PackedTiles::Int4 => TileFormat::Int4,
        PackedTiles::Q4_0 => TileFormat::Q4_0,
        PackedTiles::Q4_1 => TileFormat::Q4_1,
        PackedTiles::Q8_0 => TileFormat::Q8_0,
        PackedTiles::Q4_K => TileFormat::Q4_K,
        PackedTiles::Q6_K => TileFormat::Q6_K,
    })
}

fn tile_name(format: TileFormat) -> &'static str {
    match format {
        TileFormat::Bf16 => "BF16",
        TileFormat::Int8 => "int8",
        TileFormat::Nf4 => "NF4",
        TileFormat::Int4 => "int4",
        TileFormat::Q4_0 => "Q4_0",
        TileFormat::Q4_1 => "Q4_1",
        TileFormat::Q8_0 => "Q8_0",
        TileFormat::Q4_K => "Q4_K",
        TileFormat::Q6_K => "Q6_K",
    }
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weight([{}, {}] {})", self.rows(), self.cols(), self.format())
    }
}
