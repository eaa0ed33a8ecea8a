//! What running a model takes of a device's memory, by its configuration and its checkpoint alone: the plan before loading.
//!
//! On the processor these are the weights and the cache; what a pass takes beside them is small. On a graphics card, where
//! nothing can be swapped, the plan has every part: weights ([`weights`]), cache, and the memory of passes ([`passes`]).

mod passes;
mod weights;

use ironloom_core::MemoryPlan;
use ironloom_quant::WeightFormat;
use ironloom_tensor::Device;
use ironloom_weights::Checkpoint;

pub(crate) use self::weights::{ExpertForm, ExpertForms};
use self::weights::{Held, on_card, on_processor, taken};
use crate::{Config, Result, names::Naming};

/// What running the model of a checkpoint takes of a device's memory.
#[derive(Debug)]
pub struct RunMemory<'a> {
    config: &'a Config,
    device: &'a Device,
    weights: u64,
    /// The matrices on a graphics card.
    held: Vec<Held>,
}

impl<'a> RunMemory<'a> {
    /// Of the model that `config` describes, its weights those of `checkpoint`, held as `format` on `device`.
    ///
    /// # Errors
    /// A tensor's type holds no weights, or a size overflows.
    pub fn new(config: &'a Config, checkpoint: &Checkpoint, device: &'a Device, format: WeightFormat) -> Result<Self> {
        Ok(match device {
            Device::Cuda(_) => {
                let stored = |name: &str| checkpoint.info(name).map(|info| info.dtype);
                let held = on_card(config, Naming::of(checkpoint, config.architecture), stored, format)?;
                Self { config, device, weights: taken(config, &held), held }
            }
            _ => Self { config, device, weights: on_processor(config, checkpoint, format), held: Vec::new() },
        })
    }

    /// The plan of a sequence of `positions` positions, up to `rows` rows of it in a pass.
    pub fn plan(&self, positions: usize, rows: usize) -> MemoryPlan {
        let Self { config, device, .. } = *self;
        let plan = MemoryPlan::new()
            .with("weights", self.weights)
            .with(format!("cache of {positions} positions"), config.cache_bytes(device, positions));
        match device {
            Device::Cuda(_) => plan
                .with("workspace", passes::workspace(config, &self.held, rows))
                .with("graphs", passes::graphs(config, rows)),
            _ => plan,
        }
    }
}

impl Config {
    /// Bytes that the weights of `checkpoint` take of `device` once they are held as `format`, before they are loaded.
    ///
    /// # Errors
    /// As [`RunMemory::new`].
    pub fn weight_bytes(&self, checkpoint: &Checkpoint, device: &Device, format: WeightFormat) -> Result<u64> {
        Ok(RunMemory::new(self, checkpoint, device, format)?.weights)
    }
}
