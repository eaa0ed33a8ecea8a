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
    /// A session's context was asked to be longer than the model's.
    #[error("a context of {asked} was asked for and the model takes {limit}: ask for at most {limit}")]
    ContextOption {
        /// The context asked for.
        asked: usize,
        /// The model's.
        limit: usize,
    },
    /// Ids do not fit in the context.
    #[error(
        "the prompt has {prompt} tokens and the context of {context} has room for {}: shorten the prompt, drop earlier \
         turns, or open the session with a longer context",
        context.saturating_sub(*held)
    )]
    PromptTooLong {
        /// Ids to be fed.
        prompt: usize,
        /// Ids held already.
        held: usize,
        /// The most ids the session holds.
        context: usize,
    },
    /// The session holds as many ids as it can.
    #[error("the context of {context} tokens is full: truncate the session or open one with a longer context")]
    ContextFull {
        /// The most ids the session holds.
        context: usize,
    },
    /// An id is outside of the model's vocabulary.
    #[error(
        "token {position} has the id {id} and the model knows ids below {vocabulary}: is the tokenizer this model's?"
    )]
    UnknownId {
        /// The id.
        id: u32,
        /// Its place among the ids given, from 0.
        position: usize,
        /// How many ids the model knows.
        vocabulary: usize,
    },
    /// Nothing was fed, so there is nothing to continue.
    #[error("the session is empty: feed it at least one token, such as the start token")]
    EmptySession,
    /// A session was asked to keep more ids than it holds.
    #[error("cannot keep {asked} tokens of a session that holds {length}")]
    TruncateBeyond {
        /// How many were to be kept.
        asked: usize,
        /// How many there are.
        length: usize,
    },
    /// Feeding was cancelled by its progress function.
    #[error("feeding was cancelled after {done} of {total} tokens")]
    Cancelled {
        /// Ids that had been computed.
        done: usize,
        /// Ids that were to be computed.
        total: usize,
    },
    /// A session of another model was to join a batch.
    #[error("the session is of another model than the batch: make both from the same `Arc`")]
    OtherModel,
    /// A row is not in the batch.
    #[error("row {row} is not in the batch: it has left or never joined")]
    UnknownRow {
        /// The row's number.
        row: u64,
    },
    /// A matrix of ids does not divide into rows, or its mask is of another size.
    #[error("{found} {what} and {expected} were expected for rows of {width}")]
    PaddedShape {
        /// What was counted.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
        /// The length of a row.
        width: usize,
    },
    /// A row has padding after its first token.
    #[error(
        "row {row} has padding at column {column}, after its first token: only padding on the left can be taken off"
    )]
    PaddingInside {
        /// The row, from 0.
        row: usize,
        /// The column, from 0.
        column: usize,
    },
    /// A row is nothing but padding.
    #[error("row {row} is nothing but padding: give it at least one token")]
    EmptyRow {
        /// The row, from 0.
        row: usize,
    },
    /// A model was to run where it is not.
    #[error(
        "the model is on {model} and was to run on {found}: give the device that the model was loaded for (a graphics card \
         that is opened twice is two devices)"
    )]
    OtherDevice {
        /// Where the model is.
        model: String,
        /// Where it was to run.
        found: String,
    },
    /// A device has no room for steps that it makes by itself. Sessions and batches go on without them.
    #[error("the device has no room for steps ahead of the host: {source}")]
    NoRoomForSteps {
        /// What found no room.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A step was waited for that was not launched.
    #[error("no step is in flight: launch one before waiting for it")]
    NothingInFlight,
    /// A pass of the model failed.
    #[error("the model failed: {source}")]
    Model {
        /// The model's own error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A model's pass did not do what [`LanguageModel`](crate::LanguageModel) asks of it.
    #[error("the model's pass left {found} {what} and {expected} were due: its implementation is at fault")]
    WrongPass {
        /// What was counted.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
}
