//! Weights of cases: stored in every type, and as the formats hold them.

use anyhow::Result;
use half::f16;
use ironloom_core::DType;
use ironloom_quant::{PackedMatrix, TiledMatrix, WeightFormat, pack, unpack};
use ironloom_tensor::{Device, StoredMatrix, Weight};

use crate::check_parity::inputs::Inputs;

/// A matrix as a file holds it, and the format it is to be held in.
pub(super) struct Matrix {
    dtype: DType,
    bytes: Vec<u8>,
    rows: usize,
    cols: usize,
    format: WeightFormat,
}

impl Matrix {
    /// Standard-normal weights in `dtype`; for a type that nothing here packs, random blocks with scales of that size.
    pub(super) fn random(
        (dtype, format): (DType, WeightFormat),
        [rows, cols]: [usize; 2],
        inputs: &mut Inputs,
    ) -> Result<Self> {
        let bytes = stored_weights(dtype, rows * cols, inputs)?;
        Ok(Self { dtype, bytes, rows, cols, format })
    }

    fn stored(&self) -> StoredMatrix<'_> {
        let Self { dtype, ref bytes, rows, cols, .. } = *self;
        StoredMatrix { dtype, bytes, rows, cols, row_order: None }
    }

    /// Packed for `device`.
    pub(super) fn weight(&self, device: &Device) -> Result<Weight> {
        Ok(Weight::from_stored(device, &self.stored(), self.format)?)
    }

    /// The weights that it stands for on `device`, in its format.
    pub(super) fn held(&self, device: &Device) -> Result<Vec<f32>> {
        let Self { dtype, ref bytes, rows, cols, format } = *self;
        let mut weights = vec![0.0; rows * cols];
        let threads = device.threads();
        match device {
            Device::Cpu(_) if format == WeightFormat::Keep => unpack(dtype, bytes, &mut weights)?,
            Device::Cpu(_) => {
                let matrix = PackedMatrix::from_stored(&self.stored(), format, threads)?;
                let mut rows = weights.chunks_exact_mut(cols).enumerate();
                rows.try_for_each(|(row, weights)| matrix.row(row, weights))?;
            }
            _ => {
                let matrix = TiledMatrix::from_stored(&self.stored(), format, threads)?;
                let mut rows = weights.chunks_exact_mut(cols).enumerate();
                rows.try_for_each(|(row, weights)| matrix.row(row, weights))?;
            }
        }
        Ok(weights)
    }

    /// The same with every fourth byte zero: what a wrong kernel would read.
    pub(super) fn with_bytes_dropped(&self) -> Self {
        let kept = |(i, &byte): (usize, &u8)| if i % 4 == 3 { 0 } else { byte };
        Self { bytes: self.bytes.iter().enumerate().map(kept).collect(), ..*self }
    }

    /// Whether weights are a scale times a code plus a minimum, whose sums products take apart.
    pub(super) fn has_minima(&self) -> bool {
        let with_minima = [DType::Q4_1, DType::Q5_1, DType::Q2_K, DType::Q4_K, DType::Q5_K];
        with_minima.contains(&self.dtype) && self.format == WeightFormat::Keep
    }
}

/// Every type that a file may hold a matrix in, kept, and F32 in every format that weights are converted to.
pub(super) fn formats() -> Vec<(DType, WeightFormat)> {
    let is_float = |dtype: DType| [DType::F32, DType::F16, DType::BF16].contains(&dtype);
    let stored = DType::ALL.iter().copied().filter(|dtype| dtype.is_packed() || is_float(*dtype));
    let converted = [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4, WeightFormat::Nf4];
    stored
        .map(|dtype| (dtype, WeightFormat::Keep))
        .chain(converted.map(|format| (DType::F32, format)))
        .chain([(DType::Q4_K, WeightFormat::Int8)])
        .collect()
}

/// The formats that a card has kernels of their own for.
pub(super) const FAST_FORMATS: [(DType, WeightFormat); 9] = [
    (DType::F32, WeightFormat::Bf16),
    (DType::F32, WeightFormat::Int8),
    (DType::F32, WeightFormat::Int4),
    (DType::F32, WeightFormat::Nf4),
    (DType::Q4_0, WeightFormat::Keep),
    (DType::Q4_1, WeightFormat::Keep),
    (DType::Q8_0, WeightFormat::Keep),
    (DType::Q4_K, WeightFormat::Keep),
    (DType::Q6_K, WeightFormat::Keep),
];

/// The format's name for a reader.
pub(super) fn name((dtype, format): (DType, WeightFormat)) -> String {
    match format {
        WeightFormat::Keep => format!("{dtype}"),
        format => format!("{dtype} as {format:?}"),
    }
}

fn stored_weights(dtype: DType, count: usize, inputs: &mut Inputs) -> Result<Vec<u8>> {
    // Where a block's half-precision factors are: the scale of scales and, if any, the scale of minima.
    let factors: &[usize] = match dtype {
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q5_K => &[0, 2],
        _ => return Ok(pack(dtype, &inputs.normal(count))?),
    };
    let mut bytes = inputs.bytes(dtype.bytes_for(count)?);
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for &at in factors {
            let factor = f16::from_f32(0.01 + 0.01 * inputs.normal(1)[0].abs());
            block[at..at + 2].copy_from_slice(&factor.to_le_bytes());
        }
    }
    Ok(bytes)
}
