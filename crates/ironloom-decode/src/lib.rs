//! Text out of a language model: samplers and stop rules.
#![deny(missing_docs)]

mod error;
mod sampler;
mod stop;

pub use error::{Error, Result};
pub use sampler::{Sampler, SamplerOptions};
pub use stop::{Released, StopStrings};
