//! Where ours runs, and the precision it works in there.
//!
//! The processor computes in single precision throughout. A graphics card has two kinds of kernels: those of few rows read
//! their operands in two bfloat16 halves, those of many rows in bfloat16. A plain version on a card rounds what the kernels'
//! contract rounds, and sums in single precision.

use anyhow::{Result, ensure};
use half::bf16;
use ironloom_tensor::{Context, Device, Path, Tensor};

/// How numbers between operations are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Precision {
    /// 24 bits of mantissa.
    Single,
    /// The sum of two bfloat16: 16 bits.
    Split,
    /// 8 bits.
    Bf16,
}

impl Precision {
    /// The values as they are held.
    pub(super) fn round(self, values: &[f32]) -> Vec<f32> {
        let near = |value: f32| bf16::from_f32(value).to_f32();
        match self {
            Self::Single => values.to_vec(),
            Self::Split => values.iter().map(|&value| near(value) + near(value - near(value))).collect(),
            Self::Bf16 => values.iter().map(|&value| near(value)).collect(),
        }
    }

    /// The error of a rounding that is always allowed, as a share of the number: the largest of single precision; of the
    /// others a quarter of it, which is less than their root mean square.
    pub(super) fn unit(self) -> f64 {
        match self {
            Self::Single => f64::from(f32::EPSILON) / 2.0,
            Self::Split => 2f64.powi(-19),
            Self::Bf16 => 2f64.powi(-10),
        }
    }
}

/// A device, and which of its kernels ours uses.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) device: Device,
    path: Path,
}

impl Place {
    /// A place for each kind of kernels.
    pub(super) fn each(device: &Device) -> Vec<Self> {
        let paths: &[Path] = if is_cpu(device) { &[Path::Many] } else { &[Path::Few, Path::Many] };
        paths.iter().map(|&path| Self { device: device.clone(), path }).collect()
    }

    /// The place of operations in single precision, of which there is one kind.
    pub(super) fn single(device: &Device) -> Self {
        Self { device: device.clone(), path: Path::Many }
    }

    pub(super) fn is_cpu(&self) -> bool {
        is_cpu(&self.device)
    }

    /// Whether it is a card's kernels of few rows.
    pub(super) fn is_few(&self) -> bool {
        self.path == Path::Few
    }

    /// Whether products here take so many rows.
    pub(super) fn takes(&self, rows: usize) -> bool {
        !self.is_few() || rows <= 64
    }

    pub(super) fn context(&self) -> Context<'_> {
        Context::inference(&self.device).with_path(self.path)
    }

    /// A case's shape, with the kernels where there is a choice.
    pub(super) fn shape(&self, shape: &str) -> String {
        match (self.is_cpu(), self.path) {
            (true, _) => shape.to_owned(),
            (false, Path::Few) => format!("{shape}, few rows"),
            (false, Path::Many) => format!("{shape}, many rows"),
        }
    }

    /// How products read their input.
    pub(super) fn operands(&self) -> Precision {
        match (self.is_cpu(), self.path) {
            (true, _) => Precision::Single,
            (false, Path::Few) => Precision::Split,
            (false, Path::Many) => Precision::Bf16,
        }
    }

    /// How activations that are no product's input are held, other than the residual stream, which is in single precision.
    pub(super) fn activations(&self) -> Precision {
        if self.is_cpu() || self.is_few() { Precision::Single } else { Precision::Bf16 }
    }

    /// How caches hold keys and values.
    pub(super) fn caches(&self) -> Precision {
        if self.is_cpu() { Precision::Single } else { Precision::Bf16 }
    }

    /// Weights, given as their format holds them, as products multiply by them.
    pub(super) fn weights(&self, held: &[f32]) -> Vec<f32> {
        self.activations().round(held)
    }

    /// A tensor in single precision.
    pub(super) fn tensor(&self, values: Vec<f32>, shape: [usize; 2]) -> Result<Tensor> {
        Ok(Tensor::from_f32(values, shape)?.to_device(&self.device)?)
    }

    /// A vector in single precision.
    pub(super) fn vector(&self, values: Vec<f32>) -> Result<Tensor> {
        let length = values.len();
        Ok(Tensor::from_f32(values, [length])?.to_device(&self.device)?)
    }

    /// What a product reads.
    pub(super) fn operand(&self, values: Vec<f32>, shape: [usize; 2]) -> Result<Tensor> {
        Ok(self.tensor(values, shape)?.to_operand(&self.context())?)
    }

    /// An activation that is no product's input.
    pub(super) fn activation(&self, values: Vec<f32>, shape: [usize; 2]) -> Result<Tensor> {
        match self.activations() {
            Precision::Single => self.tensor(values, shape),
            _ => self.operand(values, shape),
        }
    }

    /// Activations of `rows` rows that one call makes: on a card, columns of the same rows.
    pub(super) fn side_by_side<const N: usize>(&self, parts: [&[f32]; N], rows: usize) -> Result<[Tensor; N]> {
        let widths = parts.map(|part| part.len() / rows.max(1));
        ensure!(parts.iter().zip(widths).all(|(part, width)| part.len() == width * rows), "parts of other rows");
        let mut tensors = Vec::with_capacity(N);
        if self.is_cpu() {
            for (part, width) in parts.iter().zip(widths) {
                tensors.push(self.tensor(part.to_vec(), [rows, width])?);
            }
        } else {
            let row =
                |row: usize| parts.iter().zip(widths).flat_map(move |(part, width)| &part[row * width..][..width]);
            let whole = self.activation((0..rows).flat_map(row).copied().collect(), [rows, widths.iter().sum()])?;
            let mut first = 0;
            for width in widths {
                tensors.push(whole.columns(first..first + width)?);
                first += width;
            }
        }
        tensors.try_into().map_err(|_| anyhow::anyhow!("not as many tensors as parts"))
    }
}

/// Whether it is the processor.
pub(super) fn is_cpu(device: &Device) -> bool {
    matches!(device, Device::Cpu(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roundings_are_of_their_size() {
        let values: Vec<f32> = (1..4000).map(|i| (i as f32).sqrt()).collect();
        for (precision, largest) in [(Precision::Split, 2f64.powi(-17)), (Precision::Bf16, 2f64.powi(-8))] {
            let error =
                |(&value, &rounded): (&f32, &f32)| ((f64::from(rounded) - f64::from(value)) / f64::from(value)).abs();
            let rounded = precision.round(&values);
            let errors: Vec<f64> = values.iter().zip(&rounded).map(error).collect();
            let mean = (errors.iter().map(|error| error * error).sum::<f64>() / errors.len() as f64).sqrt();
            assert!(errors.iter().all(|&error| error <= largest), "{precision:?}");
            assert!(precision.unit() < mean && mean < 3.0 * precision.unit(), "{precision:?}: {mean:e}");
        }
        assert_eq!(Precision::Single.round(&values), values);
    }
}
