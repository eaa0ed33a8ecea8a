//! Training of language models.
//!
//! What this room promises: two runs of one configuration, and a run that was ended and resumed, give the same bits on one
//! device, with any number of threads. So nothing here splits a sum by threads, and every state can be saved exactly.
#![deny(missing_docs)]

mod card;
mod checkpoint;
pub mod data;
mod ema;
mod error;
mod gradient_norm;
pub mod log;
pub mod lora;
mod meter;
pub mod optimizer;
mod pieces;
mod plan;
pub mod plot;
pub mod run;
mod saved_tensor;
mod schedule;
mod spike_guard;
mod trainer;

pub use checkpoint::{Checkpoints, Occasion, RunState, read_state, resume, resume_adapters, roll_back};
pub use ema::WeightAverage;
pub use error::{Error, Result};
pub use gradient_norm::{GradientNorm, clip_factor};
pub use meter::{Meter, card_rate, operations_per_token};
pub use plan::{FrozenWeights, RunSize, adapter_memory, training_memory};
pub use run::Run;
pub use saved_tensor::{SavedTensor, SavedValues};
pub use schedule::{Decay, Schedule};
pub use spike_guard::{SpikeGuard, SpikeGuardOptions, SpikeGuardState, Verdict};
pub use trainer::{StepReport, Trainer, TrainerOptions, TrainerState};
