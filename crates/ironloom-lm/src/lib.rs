//! Language models: what they are ([`Config`]), their weights and forward pass ([`Model`]), their text ([`text`]), and other
//! formats to write them in ([`export`]).
//!
//! Every family is one description of a block with its options, read from GGUF metadata or a Hugging Face `config.json`. What
//! is not known is refused by name, for a model that runs with an option left out answers fluently and wrong.
//!
//! ```no_run
//! use ironloom_lm::{LoadOptions, LogitRows, Model};
//! use ironloom_nn::Span;
//! use ironloom_tensor::{Context, Device};
//! let checkpoint = ironloom_weights::open("model.gguf")?;
//! let device = Device::cpu(0);
//! let model = Model::load(&checkpoint, &device, &LoadOptions::default())?;
//! let mut cache = model.new_cache();
//! let ids = [1, 2, 3];
//! let mut spans = [Span { cache: &mut cache, rows: ids.len() }];
//! let logits = model.forward(&Context::inference(&device), &ids, &mut spans, LogitRows::Last)?;
//! assert_eq!(logits.width(), model.config().vocab_size);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(missing_docs)]

mod builder;
mod config;
mod error;
mod experts;
pub mod export;
mod filled_up;
mod linear_layers;
mod load;
mod memory;
mod model;
mod names;
mod passes;
mod profile;
mod random;
pub mod text;
mod training;

pub use config::{Architecture, Config, DenseShape, ExpertsConfig, FeedForwardConfig, LayerConfig, SharedExpertConfig};
pub use error::{Error, Result};
pub use experts::Experts;
pub use ironloom_kernels::KernelTime;
pub use load::{LoadOptions, available_memory};
pub use memory::RunMemory;
pub use model::{LogitRows, Model};
pub use random::RandomWeights;
pub use training::{CardRows, Parameter, ParameterRole, TrainingPass, TrainingRows};
