//! What can go wrong between files and batches.

use std::{fmt, path::PathBuf};

/// Where in the data something was found: a file, and a line of it where it has lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// The line, counted from 1.
    pub line: Option<usize>,
}

impl Place {
    pub(crate) fn file(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), line: None }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        self.line.map_or(Ok(()), |line| write!(f, ":{line}"))
    }
}

/// What can go wrong between files and batches.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // each field is what its name and the message say
pub enum DataError {
    /// A source that names no files, or folders without files of its kind.
    #[error("{what} has no files of data: name files, or folders that hold files ending in {endings}")]
    NoFiles { what: String, endings: String },
    /// Nothing to train on.
    #[error("{what} holds no documents: give a file with text in it")]
    NoDocuments { what: String },
    /// A text that is not UTF-8.
    #[error("{place} is not UTF-8 at byte {offset}: convert the file to UTF-8")]
    Encoding { place: Place, offset: usize },
    /// A separator that would cut nothing.
    #[error("the separator of documents is empty: name the text that stands between two documents, or leave it out")]
    EmptySeparator,
    /// A line that is not JSON.
    #[error("{place} is not a JSON object: {reason}. Each line must be one object")]
    Json { place: Place, reason: String },
    /// A line that lacks what its kind of data needs.
    #[error("{place} has no {field:?} that is {wanted}; it has: {found}")]
    Field { place: Place, field: String, wanted: &'static str, found: String },
    /// A speaker nobody knows.
    #[error("{place} has a message of role {role:?}; roles are {known}")]
    Role { place: Place, role: String, known: String },
    /// A field that changes what a conversation teaches.
    #[error(
        "{place} has {field:?}, which is not read, so that another conversation would be learned: remove it, or write what \
         the model is to see and to say as \"prompt\" and \"completion\""
    )]
    Unread { place: Place, field: &'static str },
    /// A conversation without an answer.
    #[error(
        "{place} has no message of the assistant after another message, so there is nothing to learn: add the answer, or \
         remove the line"
    )]
    NoAnswer { place: Place },
    /// A chat template that the data need and the model lacks.
    #[error(
        "{what} holds conversations, and the model has no chat template: use a model with one (a chat_template.jinja in \
         its folder will do), or write the data as \"prompt\" and \"completion\""
    )]
    NoTemplate { what: String },
    /// A template whose text of the first messages changes with the messages after them.
    #[error(
        "{place}: the chat template writes message {message} another way once later messages follow it, so the answers' \
         places in the whole conversation can't be told. Learn each answer with the messages before it (answers = \
         \"each\"), or only the last one (answers = \"last\")"
    )]
    RewrittenTurns { place: Place, message: usize },
    /// A template whose start of an answer is not how it writes an answer.
    #[error(
        "{place}: the chat template starts an answer with {prompt:?}, and writes message {message}, an answer, as \
         {written:?}: what is learned would never be asked for. Give a template that writes answers as it starts them"
    )]
    AnswerStart { place: Place, message: usize, prompt: String, written: String },
    /// A template that leaves an answer's text out, such as one that wants lists of parts.
    #[error(
        "{place}: the chat template leaves out the text of message {message}, an answer: it may want another form of \
         content than plain text. Give a template for plain text"
    )]
    AnswerLeftOut { place: Place, message: usize },
    /// The template or the tokenizer refused a conversation or a text.
    #[error("{place}: {source}")]
    Text { place: Place, source: ironloom_lm::text::TextError },
    /// A document without tokens.
    #[error("{place} is a document without tokens: remove it, or put text in it")]
    EmptyDocument { place: Place },
    /// An id that the vocabulary lacks.
    #[error(
        "{what} holds the token id {id}, and the vocabulary has {vocab_size} tokens: tokenize the data with this model's \
         tokenizer"
    )]
    IdOutOfRange { what: String, id: u32, vocab_size: usize },
    /// Token ids of another tokenizer.
    #[error(
        "{what} was made with another tokenizer (its vocabulary of {found} tokens differs from this one of {expected}): \
         tokenize the texts again"
    )]
    OtherTokenizer { what: String, expected: usize, found: usize },
    /// A vocabulary whose ids do not fit in 32 bits, or of no tokens.
    #[error("a vocabulary of {vocab_size} tokens can't be written to a token file: it must have 1 to 4,294,967,295")]
    Vocabulary { vocab_size: usize },
    /// A token file that is not what its head or its description says.
    #[error("{} is not a whole token file: {reason}. Make it again", path.display())]
    TokenFile { path: PathBuf, reason: String },
    /// A file of plain ids without a description.
    #[error(
        "{} has no head of a token file, and there is no {}: write one, such as {{\"dtype\": \"u16\", \"vocab_size\": 50257, \
         \"end_id\": 50256}}",
        path.display(),
        description.display()
    )]
    NoDescription { path: PathBuf, description: PathBuf },
    /// An option that means nothing.
    #[error("{option} is {value}, and it must be {limits}")]
    Option { option: &'static str, value: String, limits: &'static str },
    /// A source whose part of the mix makes no sense.
    #[error("the weight of {what} is {weight}, and it must be a finite number above 0: raise it, or remove the source")]
    Weight { what: String, weight: f64 },
    /// No token anywhere that could be learned.
    #[error(
        "no row of {what} has a token to learn at {sequence_length} tokens a row: documents need two tokens or more, and \
         answers must begin within a row. Raise the sequence length, or look at the data"
    )]
    NothingToLearn { what: String, sequence_length: usize },
    /// One document can't be split by documents.
    #[error(
        "{what} has {documents} document(s), too few to hold some out: give a separator or more files, hold out the \
         tail, or name a file of held-out data"
    )]
    TooFewToSplit { what: String, documents: usize },
    /// A cursor of other data or options.
    #[error(
        "the saved place in the data was made with {what} = {saved}, and it is {found} now: go on with the data and \
         options of the first run, or begin a new one"
    )]
    OtherCursor { what: String, saved: String, found: String },
    /// The mapping of a file refused.
    #[error(transparent)]
    Core(#[from] ironloom_core::Error),
}

impl From<DataError> for crate::Error {
    fn from(error: DataError) -> Self {
        Self::Data(Box::new(error))
    }
}
