//! What can go wrong between text and token ids.

use std::fmt;

/// The result of a fallible call of this module.
pub type Result<T> = std::result::Result<T, TextError>;

/// What can go wrong between text and token ids.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // each field is what its name and the message say
pub enum TextError {
    /// The model file could not be read, or a metadata value is missing or of another kind.
    #[error(transparent)]
    Weights(#[from] ironloom_weights::Error),
    /// A folder without `tokenizer.json`.
    #[error("{folder} holds no tokenizer.json: put the model's tokenizer.json beside its weights")]
    NoTokenizer { folder: String },
    /// A GGUF tokenizer that isn't byte-level BPE or SentencePiece BPE.
    #[error(
        "tokenizer.ggml.model is {model:?}, and \"gpt2\" (byte-level BPE) and \"llama\" (SentencePiece BPE) are supported"
    )]
    UnknownModel { model: String },
    /// A byte-level tokenizer whose splitting rule isn't known: guessing it would give wrong ids without a sign.
    #[error(
        "tokenizer.ggml.pre is {pre:?}, a pre-tokenizer that is not supported (known are {known}): use the model's Hugging Face \
         folder, whose tokenizer.json says how it splits text"
    )]
    UnknownPretokenizer { pre: String, known: String },
    /// A byte-level tokenizer that doesn't say how it splits text.
    #[error(
        "the file has a byte-level tokenizer and no tokenizer.ggml.pre, so how it splits text is unknown: convert the model \
         again with a current converter, or use its Hugging Face folder"
    )]
    MissingPretokenizer,
    /// Two lists of the vocabulary that should be as long as each other.
    #[error("{key} has {found} elements, and the vocabulary has {expected} tokens")]
    Length { key: &'static str, found: usize, expected: usize },
    /// A token type GGUF doesn't define.
    #[error("tokenizer.ggml.token_type of token {id} is {found}, and GGUF defines 1 to 6")]
    TokenType { id: usize, found: i128 },
    /// A token id past the vocabulary.
    #[error("{what} is token {id}, and the vocabulary has {vocab_size} tokens")]
    IdOutOfRange { what: String, id: u64, vocab_size: usize },
    /// A merge of tokens that aren't in the vocabulary.
    #[error("merge {rank} ({merge:?}) names a token that is not in the vocabulary")]
    Merge { rank: usize, merge: String },
    /// A vocabulary or a text too long to be indexed.
    #[error("{what} has {bytes} bytes, and at most {limit} are supported")]
    TooLong { what: &'static str, bytes: usize, limit: usize },
    /// A tokenizer without any tokens.
    #[error("the tokenizer has no tokens")]
    EmptyVocabulary,
    /// `tokenizer.json`, or another configuration file, can't be read as what it should be.
    #[error("cannot read {file}: {reason}")]
    Json { file: String, reason: String },
    /// A decoder of `tokenizer.json` whose tokens don't stand for bytes.
    #[error("tokenizer.json has a decoder that is not supported: {decoder}")]
    UnknownDecoder { decoder: String },
    /// The `tokenizers` crate refused a text.
    #[error("cannot tokenize: {reason}")]
    Tokenize { reason: String },
    /// Training a tokenizer failed.
    #[error("cannot train a tokenizer: {reason}")]
    Train { reason: String },
    /// A vocabulary smaller than the bytes and special tokens it must hold.
    #[error("a vocabulary of {vocab_size} cannot hold 256 bytes and {specials} special tokens")]
    VocabularyTooSmall { vocab_size: usize, specials: usize },

    /// The model has no chat template.
    #[error(
        "the model has no chat template{}: prompt it with plain text, or make a template with `ChatTemplate::new`",
        Names(names)
    )]
    NoTemplate { names: Vec<String> },
    /// A conversation without messages.
    #[error("the conversation has no messages: give at least one")]
    EmptyConversation,
    /// The template is not valid, or uses something that isn't supported.
    #[error("the chat template cannot be used: {reason}")]
    Template { reason: String },
    /// The template refused the conversation, in its own words.
    #[error("the chat template refused the conversation: {message}")]
    Refused { message: String },
}

struct Names<'a>(&'a [String]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " of that name (it has {})", self.0.join(", ")) }
    }
}
