//! Training of language models.
//!
//! What this room promises: two runs of one configuration, and a run that was ended and resumed, give the same bits on one
//! device, with any number of threads. So nothing here splits a sum by threads, and every state can be saved exactly.
#![deny(missing_docs)]

pub mod data;
mod ema;
mod error;
mod gradient_norm;
pub mod log;
pub mod lora;
pub mod optimizer;
mod partial_file;
mod pieces;
pub mod plot;
mod saved_tensor;
mod schedule;
mod spike_guard;

pub use ema::WeightAverage;
pub use error::{Error, Result};
pub use gradient_norm::{GradientNorm, clip_factor};
pub use saved_tensor::{SavedTensor, SavedValues};
pub use schedule::{Decay, Schedule};
pub use spike_guard::{SpikeGuard, SpikeGuardOptions, SpikeGuardState, Verdict};
