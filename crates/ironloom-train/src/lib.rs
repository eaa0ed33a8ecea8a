//! Training of language models.
//!
//! What this room promises: two runs of one configuration, and a run that was ended and resumed, give the same bits on one
//! device, with any number of threads. So nothing here splits a sum by threads, and every state can be saved exactly.
#![deny(missing_docs)]

mod error;

pub use error::{Error, Result};
