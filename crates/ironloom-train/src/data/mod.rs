//! Data: from files to batches of token ids, the same ones in every run and after every resumption.
//!
//! ```text
//! files    Source: text, JSONL (text, chat, prompt and completion), token files
//!   → Documents    token ids of every document, in memory or mapped, with a bit a token where only answers are learned
//!   → split        documents held out for measuring
//!   → Loader       rows of sequence_length tokens from a weighted mix, in an order that seed and epoch decide
//!   → Batch        ids, targets, and the lengths of the documents in it
//! ```
//!
//! Nothing is shuffled in memory: an epoch's order is a permutation that is computed number by number,
//! so a token file larger than memory is shuffled as well as a small one, and where a run stands is a few numbers, the [`Cursor`].

mod batch;
mod chat;
mod cursor;
mod documents;
mod error;
mod json_lines;
mod loader;
mod one_pass;
mod packing;
mod permutation;
mod rows;
mod source;
mod split;
mod store;
mod texts;
mod token_file;

pub use batch::{Batch, IGNORED, counted};
pub use chat::Answers;
pub use cursor::{Cursor, SourceCursor, SourceState};
pub use documents::{CutDocuments, Document, Documents, DocumentsBuilder};
pub use error::{DataError, Place};
pub use loader::{Loader, LoaderOptions, Share};
pub use one_pass::OnePass;
pub use rows::{Order, Overlong, Packing};
pub use source::{EndToken, Source, SourceFormat, Tokenization};
pub use split::HeldOut;
pub use token_file::{TokenFileWriter, tokenize};
