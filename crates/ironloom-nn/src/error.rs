//! What can go wrong in a building block.

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in a building block.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option has a value outside its limits.
    #[error("{option} is {value}, and {limit} is needed")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        limit: &'static str,
    },
    /// A cache has another number of layers than the model.
    #[error("the cache has {found} layers and the model has {expected}: use a cache that this model made")]
    CacheLayers {
        /// The model's layers.
        expected: usize,
        /// The cache's layers.
        found: usize,
    },
    /// An operation refused.
    #[error(transparent)]
    Tensor(#[from] ironloom_tensor::Error),
}
