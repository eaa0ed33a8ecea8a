//! What can go wrong while training.

use std::path::PathBuf;

use ironloom_core::DType;

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong while training.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // each field is what its name and the message say
pub enum Error {
    /// An option has a value that means nothing.
    #[error("{option} is {value}, and it must be {limits}")]
    InvalidOption { option: &'static str, value: f64, limits: &'static str },
    /// A schedule's parts are longer than the run.
    #[error(
        "the schedule has {warmup_steps} steps of warm-up and {decay_steps} of decay, and the run has {steps} in all: make \
         them shorter or the run longer"
    )]
    ScheduleLength { warmup_steps: u64, decay_steps: u64, steps: u64 },
    /// Weights, gradient and shape of a parameter disagree.
    #[error("parameter {name:?} of shape {shape:?} has {weights} weights and a gradient of {gradient} elements")]
    ParameterLength { name: String, shape: Vec<usize>, weights: usize, gradient: usize },
    /// A matrix without rows and columns.
    #[error(
        "parameter {name:?} is said to be a matrix, and its shape is {shape:?}: two dimensions at least are needed"
    )]
    NotAMatrix { name: String, shape: Vec<usize> },
    /// A step before the first.
    #[error("the optimizer's steps count from 1, and step 0 was asked for")]
    StepZero,
    /// The gradient's norm is infinite or not a number.
    #[error("the gradient's norm is {norm}: skip the step, and if it stays so, go back to a checkpoint")]
    GradientNotFinite { norm: f64 },
    /// State of another length than the parameter.
    #[error("state {tensor:?} has {found} elements, and its parameter needs {expected}: it is of another model")]
    StateLength { tensor: String, expected: usize, found: usize },
    /// State of an element type that no state has.
    #[error("state {tensor:?} is {dtype} of {bytes} bytes, and states are whole numbers of F32 or U8")]
    StateType { tensor: String, dtype: DType, bytes: usize },
    /// State that another optimizer saved.
    #[error("state {tensor:?} isn't one of {owner}: resume with the options that the checkpoint was made with")]
    ForeignState { tensor: String, owner: &'static str },
    /// A part of a parameter's state is missing.
    #[error("the state of {parameter:?} is incomplete: {missing} is not in the checkpoint")]
    IncompleteState { parameter: String, missing: &'static str },
    /// Matrix products refused.
    #[error(transparent)]
    Products(#[from] ironloom_quant::Error),
    /// A file or a folder could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    /// The data can't be trained on.
    #[error(transparent)]
    Data(Box<crate::data::DataError>),
    /// An adapter, or its files.
    #[error(transparent)]
    Lora(#[from] crate::lora::LoraError),
    /// A weight file could not be read or written.
    #[error(transparent)]
    Weights(#[from] ironloom_weights::Error),
    /// The model refused.
    #[error(transparent)]
    Model(#[from] ironloom_lm::Error),
    /// A model without trainable tensors.
    #[error("nothing in the model is trainable: load it with dense weights, or attach adapters")]
    NothingToTrain,
    /// A graphics card refused, or failed.
    #[error(transparent)]
    Kernels(#[from] ironloom_kernels::Error),
    /// A matrix that Muon can't move on a graphics card.
    #[error(
        "{name:?} is of shape {shape:?}, and on a graphics card Muon moves matrices whose sides are multiples of 8: choose \
         another optimizer, or the device cpu"
    )]
    MuonSides { name: String, shape: Vec<usize> },
    /// A routed model that goes to one expert a row and divides its weight by itself.
    #[error(
        "the model sends each row to one expert and normalizes its weight, which is then always 1: the router gets no gradient \
         (two experts a row, or a config.json with norm_topk_prob false, give it one)"
    )]
    RouterWithoutGradient,
    /// A step without a prediction to learn from.
    #[error(
        "none of the step's predictions counts: its answers may all be longer than the sequence, or the data be prompts only"
    )]
    NothingCounts,
    /// A run would begin where another one was.
    #[error("there is a run already, at {}: go on with it, or choose another folder", path.display())]
    FolderInUse { path: PathBuf },
    /// A run would go on where none was.
    #[error("the last checkpoint in {} isn't one of step {step}: there is nothing to go on from", folder.display())]
    NoCheckpoint { folder: PathBuf, step: u64 },
    /// Losses stay refused, whichever data come.
    #[error(
        "the loss of step {step} was refused again after the run went back to its last checkpoint {rollbacks} times: \
         lower the learning rate, lengthen the warm-up, or look at the data, and resume"
    )]
    NoProgress { step: u64, rollbacks: u32 },
    /// A tensor operation refused.
    #[error(transparent)]
    Tensor(#[from] ironloom_tensor::Error),
}
