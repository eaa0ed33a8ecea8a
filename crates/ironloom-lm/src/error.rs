//! What can go wrong when a model is described, loaded or run.

use std::path::PathBuf;

use ironloom_core::Shape;

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong when a model is described, loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // each field is what its name and the message say
pub enum Error {
    /// Weights without a configuration.
    #[error("{} has no config.json beside its weights: give the folder that holds both, or a GGUF file", path.display())]
    MissingConfig { path: PathBuf },
    /// The configuration is not the JSON it should be.
    #[error("{}: config.json is not readable: {source}", path.display())]
    ConfigJson { path: PathBuf, source: serde_json::Error },
    /// A needed entry of the configuration is absent.
    #[error("the configuration has no {key:?}, which {architecture} needs")]
    MissingKey { key: String, architecture: String },
    /// An entry has a type or a value that cannot be.
    #[error("the configuration's {key:?} is {found}, and {expected} is needed")]
    InvalidValue { key: String, expected: String, found: String },
    /// A model family that Ironloom does not know.
    #[error("architecture {name:?} is not supported; these are: {supported}")]
    UnknownArchitecture { name: String, supported: String },
    /// An option of a known family that Ironloom does not have. Running without it would give wrong answers.
    #[error("the configuration's {key:?} is {value}, which is not supported: {reason}")]
    UnsupportedOption { key: String, value: String, reason: &'static str },
    /// Tensors that the configuration asks for are not in the checkpoint.
    #[error("{} lacks {count} of the model's tensors: {names}. Is it a part of a checkpoint, or of another model?", path.display())]
    MissingTensors { path: PathBuf, count: usize, names: String },
    /// A tensor's shape contradicts the configuration.
    #[error("tensor {tensor:?} has shape {found}, and the configuration asks for {expected}")]
    TensorShape { tensor: String, expected: Box<Shape>, found: Box<Shape> },
    /// A call mixes counts that must agree.
    #[error("{what} is {found}, and {expected} is needed")]
    Count { what: &'static str, expected: usize, found: usize },
    /// A pass was to run where the model is not.
    #[error(
        "the model is on {model} and was to run on {found}: run it on the device it was loaded for, `Model::device` (a \
         graphics card that is opened twice is two devices)"
    )]
    OtherDevice { model: String, found: String },
    /// A sequence would outgrow the model's context.
    #[error(
        "{found} positions do not fit in the context of {limit}: shorten the prompt, or load the model with a longer \
         context if it was trained for one"
    )]
    ContextFull { limit: usize, found: usize },
    /// A model, a tokenizer or a type that the format to write cannot hold.
    #[error("{what} cannot be written to {format}: {reason}")]
    NotExportable { what: String, format: &'static str, reason: String },
    /// A tokenizer or a chat template refused.
    #[error(transparent)]
    Text(#[from] crate::text::TextError),
    /// A file could not be read.
    #[error(transparent)]
    Weights(#[from] ironloom_weights::Error),
    /// A packed matrix refused.
    #[error("tensor {tensor:?}: {source}")]
    Pack { tensor: String, source: ironloom_quant::Error },
    /// A weight could not be packed for its device.
    #[error("tensor {tensor:?}: {source}")]
    Weight { tensor: String, source: ironloom_tensor::Error },
    /// A graphics card refused.
    #[error(transparent)]
    Kernels(#[from] ironloom_kernels::Error),
    /// A building block refused.
    #[error(transparent)]
    Nn(#[from] ironloom_nn::Error),
    /// An operation refused.
    #[error(transparent)]
    Tensor(#[from] ironloom_tensor::Error),
    /// A size or a memory plan refused.
    #[error(transparent)]
    Core(#[from] ironloom_core::Error),
}

impl Error {
    /// Whether a graphics card had no room.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Kernels(error) => error.is_out_of_memory(),
            Self::Tensor(error) | Self::Nn(ironloom_nn::Error::Tensor(error)) => error.is_out_of_memory(),
            _ => false,
        }
    }
}
