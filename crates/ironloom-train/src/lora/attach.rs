//! Adapters on a model's layers, and off them.

use std::collections::HashMap;

use ironloom_lm::Model;
use ironloom_nn::{Adapter, Linear};
use ironloom_tensor::{Tensor, Weight};

use super::{LoraAdapter, LoraError, LoraMatrices, LoraOptions, layer_stream};
use crate::{Error, Result};

impl LoraAdapter {
    /// Adapters that add nothing yet, for the layers of `model` that the options name.
    ///
    /// # Errors
    /// The options don't make sense, or a target names none of the model's layers.
    pub fn new(model: &Model, options: LoraOptions, base_model: Option<String>, seed: u64) -> Result<Self> {
        let linears = model.linears();
        let selected = options.select(linears.iter().map(|(name, _)| name.as_str()))?;
        let matrices = |(name, Linear { weight, .. }): &(String, Linear)| {
            LoraMatrices::new(name, weight.rows(), weight.cols(), options.rank, seed)
        };
        let chosen = linears.iter().filter(|(name, _)| selected.contains(&name.as_str()));
        let layers = chosen.map(matrices).collect();
        Ok(Self { options, base_model, layers })
    }

    /// Puts the adapters on their layers, in place of others.
    ///
    /// # Errors
    /// The model has no layer of a name, or a layer has another shape: the adapter is another model's. The model is then as it was.
    pub fn attach(&self, model: &mut Model) -> Result<()> {
        let linears = model.linears();
        let mut made = HashMap::new();
        for LoraMatrices { layer, inputs, outputs, a, b } in &self.layers {
            let Some((_, linear)) = linears.iter().find(|(name, _)| name == layer) else {
                return Err(LoraError::NoSuchLayer { layer: layer.clone() }.into());
            };
            let found = [linear.weight.rows(), linear.weight.cols()];
            if found != [*outputs, *inputs] {
                let (layer, expected) = (layer.clone(), [*outputs, *inputs]);
                return Err(LoraError::LayerShape { layer, expected, found }.into());
            }
            let dense = |values: Vec<f32>, shape: [usize; 2]| Weight::dense(Tensor::from_f32(values, shape)?);
            let rank = self.options.rank;
            // A factor of another size is refused below.
            let rows = model.config().stored_rows(layer).filter(|_| b.len() == outputs * rank);
            let b = match rows {
                Some(rows) => rows.iter().flat_map(|row| &b[*row as usize * rank..][..rank]).copied().collect(),
                None => b.clone(),
            };
            let adapter = Adapter {
                a: dense(a.clone(), [rank, *inputs])?,
                b: dense(b, [*outputs, rank])?,
                scale: self.options.scale(),
                dropout: self.options.dropout as f32,
                stream: layer_stream(layer),
            };
            made.insert(layer.as_str(), Box::new(adapter));
        }
        model.for_each_linear(|name, linear| {
            linear.adapter = made.remove(name);
            Ok(())
        })?;
        Ok(())
    }

    /// The adapters as they are on `model` now.
    ///
    /// # Errors
    /// There are none, or the device fails.
    pub fn of(model: &Model, options: LoraOptions, base_model: Option<String>) -> Result<Self> {
        let mut layers = Vec::new();
        for (layer, linear) in model.linears() {
            if let Some(adapter) = &linear.adapter {
                let (inputs, outputs) = (adapter.a.cols(), adapter.b.rows());
                let (a, mut b) = (adapter.a.unpacked()?, adapter.b.unpacked()?);
                if let Some(rows) = model.config().stored_rows(&layer) {
                    let (held, rank) = (b.clone(), adapter.b.cols());
                    for (row, place) in rows.into_iter().enumerate() {
                        b[place as usize * rank..][..rank].copy_from_slice(&held[row * rank..][..rank]);
                    }
                }
                layers.push(LoraMatrices { layer, inputs, outputs, a, b });
            }
        }
        if layers.is_empty() {
            return Err(Error::NothingToTrain);
        }
        Ok(Self { options, base_model, layers })
    }
}
