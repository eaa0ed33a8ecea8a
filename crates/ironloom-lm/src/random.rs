//! Models of random weights: the true shape of a model that is not at hand, for measuring speed and for tests.
//!
//! Sums of four uniform bytes are near enough to normal, and a large model is made in seconds: each row has a stream of its
//! own, so that the threads share the rows. Stored types whose packing is a search (Q4_K, Q6_K) repeat a block of distinct
//! rows instead: speed does not depend on the values.

use std::sync::{Mutex, PoisonError};

use ironloom_core::{DType, Philox, Threads};
use ironloom_quant::WeightFormat;
use ironloom_tensor::{Device, StoredMatrix, Tensor, Weight};

use crate::{
    Config, Error, LoadOptions, Model, Result,
    builder::{Builder, Rows, Source},
    filled_up::{MatrixShape, filled_up},
    names::Naming,
};

/// How the matrices of a model of random weights are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub enum RandomWeights {
    /// All alike.
    As(WeightFormat),
    /// The mix of a file that llama.cpp calls Q4_K_M: Q6_K for the head (which a tied model's embedding is) and for the
    /// values and the down projections of the first eighth of the layers, of the last, and of every third between;
    /// Q4_K for the rest.
    Q4_K_M,
}

impl From<WeightFormat> for RandomWeights {
    fn from(format: WeightFormat) -> Self {
        Self::As(format)
    }
}

impl Model {
    /// A model of random weights: normal with a deviation of 0.02, norms of one. For measuring speed and for tests.
    ///
    /// # Errors
    /// The configuration contradicts itself, its matrices have no whole blocks of a stored type, or the device has no room.
    pub fn random(config: &Config, device: &Device, weights: impl Into<RandomWeights>, seed: u64) -> Result<Self> {
        RandomSource::new(config, weights.into(), seed).model(config, device)
    }

    /// The same on the processor, its matrices as dense rows.
    pub(crate) fn random_dense(config: &Config, device: &Device, seed: u64) -> Result<Self> {
        let weights = RandomWeights::As(WeightFormat::F32);
        RandomSource { dense: true, ..RandomSource::new(config, weights, seed) }.model(config, device)
    }
}

struct RandomSource {
    seed: u64,
    weights: RandomWeights,
    /// Whether matrices are not packed.
    dense: bool,
    /// Layers of the model.
    layers: usize,
    /// Whether the embedding is also the head.
    tied: bool,
    /// Matrices made.
    matrices: u64,
}

/// Rows of a matrix that differ, where packing them is a search.
const DISTINCT_ROWS: usize = 256;

impl RandomSource {
    fn new(config: &Config, weights: RandomWeights, seed: u64) -> Self {
        let (layers, tied) = (config.layers.len(), config.tied_embeddings);
        Self { seed, weights, dense: false, layers, tied, matrices: 0 }
    }

    fn model(self, config: &Config, device: &Device) -> Result<Model> {
        let format = match self.weights {
            RandomWeights::As(format) => format,
            RandomWeights::Q4_K_M => WeightFormat::Keep,
        };
        let options = LoadOptions { format, progress: None };
        Builder::new(config, device, &options, self).model(Naming::Gguf)
    }

    /// The stored type of a matrix; none for what is packed as the loader is told to.
    fn stored_type(&self, name: &str) -> Option<DType> {
        // A router is small and decides much: it is not quantized.
        if self.weights != RandomWeights::Q4_K_M || name.contains("_inp") {
            return None;
        }
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        let finer = match layer {
            None => self.tied || name.starts_with("output"),
            Some(layer) => {
                let eighth = self.layers / 8;
                let chosen = layer < eighth || layer >= 7 * self.layers / 8 || (layer - eighth.min(layer)) % 3 == 2;
                chosen && (name.contains("attn_v") || name.contains("ffn_down"))
            }
        };
        Some(if finer { DType::Q6_K } else { DType::Q4_K })
    }

    /// `rows` rows of random weights.
    fn values(&self, rows: usize, cols: usize, threads: &Threads) -> Vec<f32> {
        let mut values = vec![0.0f32; rows * cols];
        let places: Vec<Mutex<&mut [f32]>> = values.chunks_mut(cols.max(1)).map(Mutex::new).collect();
        threads.run_ranges(rows, 16, |range| {
            for row in range {
                let mut draws = Philox::new(self.seed, (self.matrices << 32) + row as u64);
                let mut place = places[row].lock().unwrap_or_else(PoisonError::into_inner);
                for value in place.iter_mut() {
                    let sum: u32 = draws.next_u32().to_le_bytes().iter().map(|byte| u32::from(*byte)).sum();
                    *value = (sum as f32 - 510.0) * (0.02 / 147.8);
                }
            }
        });
        drop(places);
        values
    }

    /// The same in a stored type, with few distinct rows.
    fn stored(
        &self,
        dtype: DType,
        rows: usize,
        cols: usize,
        threads: &Threads,
    ) -> std::result::Result<Vec<u8>, ironloom_quant::Error> {
        let distinct = rows.min(DISTINCT_ROWS);
        let values = self.values(distinct, cols, threads);
        let packed: Vec<Mutex<_>> = (0..distinct).map(|_| Mutex::new(Ok(Vec::new()))).collect();
        threads.run(distinct, |row| {
            let bytes = ironloom_quant::pack(dtype, &values[row * cols..][..cols]);
            *packed[row].lock().unwrap_or_else(PoisonError::into_inner) = bytes;
        });
        let packed = packed.into_iter().map(|row| row.into_inner().unwrap_or_else(PoisonError::into_inner));
        let packed = packed.collect::<std::result::Result<Vec<_>, _>>()?;
        Ok((0..rows).flat_map(|row| &packed[row % distinct]).copied().collect())
    }
}

impl Source for RandomSource {
    fn matrix(
        &mut self,
        name: &str,
        shape: MatrixShape,
        _: Rows,
        format: WeightFormat,
        device: &Device,
    ) -> Result<Weight> {
        let [rows, cols] = shape.stored;
        let weight = match self.stored_type(name) {
            None => {
                let mut values = self.values(rows, cols, device.threads());
                if shape.is_filled_up() {
                    values = filled_up(values.chunks(cols.max(1)), shape.held);
                }
                match self.dense {
                    true => Tensor::from_f32(values, shape.held).and_then(Weight::dense),
                    false => Weight::from_f32(device, &values, shape.held, format),
                }
            }
            // Whole blocks of a stored type are whole eights.
            Some(dtype) => {
                let bytes = self
                    .stored(dtype, rows, cols, device.threads())
                    .map_err(|source| Error::Pack { tensor: name.to_owned(), source })?;
                Weight::from_stored(device, &StoredMatrix { dtype, bytes: &bytes, rows, cols, row_order: None }, format)
            }
        };
        self.matrices += 1;
        weight.map_err(|source| Error::Weight { tensor: name.to_owned(), source })
    }

    fn vector(&mut self, name: &str, length: usize, _: Option<&[u32]>) -> Result<Vec<f32>> {
        Ok(vec![if name.ends_with(".bias") { 0.0 } else { 1.0 }; length])
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        Some(self.stored_type(name).unwrap_or(DType::F32))
    }

    fn release(&self) {}

    fn progress(&self) -> (u64, u64) {
        (0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DenseShape;

    #[test]
    fn the_mix_is_that_of_llama_cpp() {
        let config = Config::qwen2_5_3b();
        let source = RandomSource::new(&config, RandomWeights::Q4_K_M, 1);
        let dtype = |name: &str| source.stored_type(name).unwrap();
        assert_eq!(dtype("token_embd.weight"), DType::Q6_K);
        assert_eq!(dtype("blk.0.attn_q.weight"), DType::Q4_K);
        let finer: Vec<usize> =
            (0..36).filter(|layer| dtype(&format!("blk.{layer}.ffn_down.weight")) == DType::Q6_K).collect();
        assert_eq!(finer, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 31, 32, 33, 34, 35]);
        let untied = RandomSource { tied: false, ..source };
        assert_eq!(untied.stored_type("token_embd.weight"), Some(DType::Q4_K));
        assert_eq!(untied.stored_type("output.weight"), Some(DType::Q6_K));
    }

    #[test]
    fn a_mixed_model_is_held_in_the_bits_of_its_types() {
        let config = Config::dense(DenseShape {
            vocab_size: 512,
            width: 256,
            layers: 2,
            heads: 4,
            kv_heads: 4,
            head_width: 64,
            inner_width: 512,
        });
        let model = Model::random(&config, &Device::cpu(2), RandomWeights::Q4_K_M, 3).unwrap();
        let bits = 8.0 * model.weight_bytes() as f64 / config.parameters() as f64;
        assert!((4.5..7.0).contains(&bits), "{bits} bits a weight");
    }
}
