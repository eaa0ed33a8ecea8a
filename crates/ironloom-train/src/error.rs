//! What can go wrong while training.

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
    /// A weight file could not be read or written.
    #[error(transparent)]
    Weights(#[from] ironloom_weights::Error),
    /// The model refused.
    #[error(transparent)]
    Model(#[from] ironloom_lm::Error),
}
