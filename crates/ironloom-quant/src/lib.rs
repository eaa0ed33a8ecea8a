//! Packed formats of weights, and matrix products straight from packed bytes.
#![deny(missing_docs)]

mod error;
pub mod formats;

pub use error::{Error, Result};
pub use formats::unpack;
