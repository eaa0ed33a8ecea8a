//! What can go wrong while decoding.

/// The result of a fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong while decoding.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option has a value that means nothing.
    #[error("{option} is {value}, and it must be {limits}")]
    InvalidOption {
        /// The option's name.
        option: &'static str,
        /// What it was set to.
        value: f64,
        /// What it may be, in words.
        limits: &'static str,
    },
    /// A stop string is empty: it would stop every text before it starts.
    #[error("stop string {index} is empty and would stop every text at once: remove it")]
    EmptyStop {
        /// Its place in the list, from 0.
        index: usize,
    },
    /// A logit is NaN or positive infinity, so there is no distribution to sample.
    #[error("the logit of token {id} is {value}: the model's arithmetic failed before sampling")]
    NotFinite {
        /// The token.
        id: usize,
        /// Its logit.
        value: f32,
    },
    /// Every token is masked.
    #[error("none of {vocabulary} tokens can be sampled: every logit is negative infinity")]
    NoCandidate {
        /// How many logits there were.
        vocabulary: usize,
    },
}
