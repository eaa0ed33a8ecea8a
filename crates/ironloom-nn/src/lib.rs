//! Building blocks that language and image models share: linear layers, embeddings, norms, rotary position embedding,
//! attention with kept keys and values, gated feed-forward blocks.
//!
//! A block holds weights and options, and its `forward` calls operations of `ironloom-tensor` with the context it is
//! given. It knows no file format and no model: what names its weights have, and which options a family uses, is
//! `ironloom-lm`'s.
//!
//! ```
//! use ironloom_nn::{RopeOptions, RopeScaling};
//! let rope = RopeOptions { base: 10_000.0, width: 64, scaling: RopeScaling::None };
//! let (frequencies, factor) = rope.inverse_frequencies()?;
//! assert_eq!((frequencies.len(), frequencies[0], factor), (32, 1.0, 1.0));
//! # Ok::<(), ironloom_nn::Error>(())
//! ```
#![deny(missing_docs)]

mod attention;
mod error;
mod feed_forward;
mod kv_cache;
mod layers;
mod rope;

pub use attention::{Attention, AttentionDocuments, AttentionInput, PassRows};
pub use error::{Error, Result};
pub use feed_forward::FeedForward;
pub use ironloom_tensor::ops::Activation;
pub use kv_cache::{KvCache, Span};
pub use layers::{Adapter, Embedding, Linear, RmsNorm, join, linear_many};
pub use rope::{RopeOptions, RopeScaling};
