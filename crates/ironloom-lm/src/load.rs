//! From a checkpoint to a [`Model`].
//!
//! The builder asks for every weight that the configuration names. Missing tensors are collected and refused together. Matrices
//! are packed one at a time, and the pages of the mapped file are given back after each, so that a model is never in memory twice.

use std::borrow::Cow;

use ironloom_core::{DType, MemoryPlan, Shape};
use ironloom_quant::WeightFormat;
use ironloom_tensor::{Device, StoredMatrix, Weight};
use ironloom_weights::{Checkpoint, TensorData};

use crate::{
    Architecture, Config, Error, Model, Result, RunMemory,
    builder::{Builder, Rows, Source},
    filled_up::{MatrixShape, filled_up},
    names::{Naming, Part},
};

/// How a model is loaded.
#[derive(Clone, Copy, Default)]
pub struct LoadOptions<'a> {
    /// How matrices are held; [`WeightFormat::Keep`] computes on what the file has.
    pub format: WeightFormat,
    /// Called as loading goes on, with the bytes done and all bytes.
    pub progress: Option<&'a dyn Fn(u64, u64)>,
}

impl std::fmt::Debug for LoadOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadOptions").field("format", &self.format).finish_non_exhaustive()
    }
}

impl Model {
    /// Loads the model of `checkpoint` for `device`.
    ///
    /// # Errors
    /// The configuration is not supported, tensors are missing or have other shapes than the configuration says, or the
    /// weights do not fit in memory. [`Model::unused_tensors`] says which tensors were left.
    pub fn load(checkpoint: &Checkpoint, device: &Device, options: &LoadOptions<'_>) -> Result<Self> {
        let config = Config::from_checkpoint(checkpoint)?;
        let total: u64 = checkpoint.tensors().map(|info| info.bytes().unwrap_or(0) as u64).sum();
        if let Some(available) = available_memory(device)? {
            // Rows may go through one by one, and a cache begins empty.
            RunMemory::new(&config, checkpoint, device, options.format)?
                .plan(0, 1)
                .check(available, "load a smaller or a more strongly quantized model, or close other programs")?;
        }
        let naming = Naming::of(checkpoint, config.architecture);
        refuse_router_biases(&config, checkpoint, naming)?;
        let source = CheckpointSource { checkpoint, missing: Vec::new(), done: 0, total };
        let mut builder = Builder::new(&config, device, options, source);
        let mut model = builder.model(naming)?;
        let missing = builder.source.missing;
        if let Some(first) = missing.first() {
            // The reader's own error for the first names the file and the nearest tensors it does have.
            return match checkpoint.tensor(first) {
                Err(error) if missing.len() == 1 => Err(error.into()),
                _ => Err(Error::MissingTensors {
                    path: checkpoint.path().to_owned(),
                    count: missing.len(),
                    names: missing.join(", "),
                }),
            };
        }
        model.unused = checkpoint.unused();
        Ok(model)
    }
}

/// Routing adds no bias to the probabilities that experts are chosen by: where a checkpoint has one, it must be zero.
fn refuse_router_biases(config: &Config, checkpoint: &Checkpoint, naming: Naming) -> Result<()> {
    if config.architecture != Architecture::Ernie45Moe {
        return Ok(());
    }
    for layer in 0..config.layers.len() {
        let name = naming.name(Part::RouterBias, layer);
        if !checkpoint.contains(&name) {
            continue;
        }
        let data = checkpoint.tensor(&name)?;
        let mut values = vec![0.0; data.shape.elements().map_err(ironloom_weights::Error::from)?];
        ironloom_quant::unpack(data.dtype, &data.bytes, &mut values)
            .map_err(|source| Error::Pack { tensor: name.clone(), source })?;
        if let Some(value) = values.iter().find(|value| **value != 0.0) {
            return Err(Error::UnsupportedOption {
                key: name,
                value: value.to_string(),
                reason: "experts are chosen by their probabilities alone, and with this bias the model would choose \
                         others: run it with transformers, or take a model whose bias is zero",
            });
        }
    }
    Ok(())
}

/// Bytes that a model may take on `device`, where that is known.
///
/// # Errors
/// The device fails.
pub fn available_memory(device: &Device) -> Result<Option<u64>> {
    Ok(match device {
        Device::Cuda(cuda) => Some(cuda.gpu().available_bytes()? as u64),
        _ => MemoryPlan::available_host_memory(),
    })
}

struct CheckpointSource<'a> {
    checkpoint: &'a Checkpoint,
    missing: Vec<String>,
    done: u64,
    total: u64,
}

impl CheckpointSource<'_> {
    /// The tensor of `name`, of one of the shapes `accepted`; `None` when the checkpoint has none of that name.
    fn tensor(&mut self, name: &str, accepted: &[Shape]) -> Result<Option<TensorData>> {
        if !self.checkpoint.contains(name) {
            self.missing.push(name.to_owned());
            return Ok(None);
        }
        let data = self.checkpoint.tensor(name)?;
        if !accepted.contains(&data.shape) {
            let (tensor, expected, found) = (name.to_owned(), Box::new(accepted[0]), Box::new(data.shape));
            return Err(Error::TensorShape { tensor, expected, found });
        }
        Ok(Some(data))
    }
}

impl Source for CheckpointSource<'_> {
    fn matrix(
        &mut self,
        name: &str,
        shape: MatrixShape,
        picked: Rows,
        format: WeightFormat,
        device: &Device,
    ) -> Result<Weight> {
        let [rows, cols] = shape.stored;
        let stored = match &picked {
            Rows::Pick { of, .. } => Shape::from([*of, cols]),
            Rows::Block { of, .. } => Shape::from([*of, rows, cols]),
            _ => Shape::from([rows, cols]),
        };
        let mut accepted = vec![stored];
        if stored == Shape::from([1, cols]) {
            accepted.push(Shape::from([cols]));
        }
        let pack = |source| Error::Weight { tensor: name.to_owned(), source };
        let Some(data) = self.tensor(name, &accepted)? else {
            return Weight::from_f32(device, &[0.0], [1, 1], WeightFormat::Keep).map_err(pack);
        };
        let row_bytes = data.dtype.bytes_for(cols)?;
        let row = |row: usize| &data.bytes[row * row_bytes..][..row_bytes];
        let (bytes, order): (Cow<'_, [u8]>, Option<&[u32]>) = match &picked {
            Rows::All => ((&*data.bytes).into(), None),
            Rows::Order(order) => ((&*data.bytes).into(), Some(order)),
            Rows::Pick { rows, .. } => (rows.iter().flat_map(|&picked| row(picked as usize)).copied().collect(), None),
            Rows::Block { index, .. } => (data.bytes[index * rows * row_bytes..][..rows * row_bytes].into(), None),
        };
        let mut stored = StoredMatrix { dtype: data.dtype, bytes: &bytes, rows, cols, row_order: order };
        let with_zeros: Vec<u8>;
        if shape.is_filled_up() {
            let [rows, cols] = shape.held;
            let in_order = |row: usize| order.map_or(row, |order| order[row] as usize);
            let rows_stored = (0..stored.rows).map(|row| &bytes[in_order(row) * row_bytes..][..row_bytes]);
            with_zeros = filled_up(rows_stored, [rows, data.dtype.bytes_for(cols)?]);
            stored = StoredMatrix { bytes: &with_zeros, rows, cols, row_order: None, ..stored };
        }
        let matrix = Weight::from_stored(device, &stored, format);
        self.done += (rows * row_bytes) as u64;
        data.bytes.release();
        matrix.map_err(pack)
    }

    fn vector(&mut self, name: &str, length: usize, order: Option<&[u32]>) -> Result<Vec<f32>> {
        let mut values = vec![0.0; length];
        if let Some(data) = self.tensor(name, &[Shape::from([length])])? {
            ironloom_quant::unpack(data.dtype, &data.bytes, &mut values)
                .map_err(|source| Error::Pack { tensor: name.to_owned(), source })?;
            self.done += data.bytes.len() as u64;
        }
        Ok(match order {
            Some(order) => order.iter().map(|row| values[*row as usize]).collect(),
            None => values,
        })
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        self.checkpoint.info(name).map(|info| info.dtype)
    }

    fn release(&self) {
        self.checkpoint.release();
    }

    fn progress(&self) -> (u64, u64) {
        (self.done.min(self.total), self.total)
    }
}
