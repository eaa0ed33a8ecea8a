//! Text to token ids and back: tokenizers, chat templates, streaming, and training a tokenizer.
//!
//! A [`Tokenizer`] comes from a GGUF file's metadata or from a Hugging Face `tokenizer.json`. Byte-level BPE (GPT-2, Llama 3,
//! Qwen, SmolLM) and SentencePiece BPE (Llama 2, Mistral, InternLM2, Gemma) run on this module's own code, which gives the ids of
//! the `tokenizers` crate 10 to 50 times sooner; a `tokenizer.json` of any other kind is handed to that crate. A
//! [`ChatTemplate`] turns messages into the text the model was trained on, and [`encode_chat`] into ids with exactly one start
//! token. A [`TextStream`] gives text as ids arrive. [`train_bpe`] makes a `tokenizer.json` from texts.
//!
//! Text that a template made is encoded with [`Specials::Parse`]; text from outside with [`Specials::Literal`], so that
//! `<|im_end|>` inside it is just characters.

mod byte_level;
mod calendar;
mod chat;
mod error;
mod gguf;
mod json;
mod letters;
mod merge;
mod pretokenize;
mod python;
mod sentencepiece;
mod special_tokens;
mod stream;
mod tokenizer;
mod train;
mod vocabulary;

pub(crate) use gguf::{GgufAlgorithm, algorithm as gguf_algorithm, tokenizer as tokenizer_of_metadata};
pub(crate) use json::token_content;

pub use chat::{AddGenerationPrompt, ChatTemplate, Message, encode_chat};
pub use error::{Result, TextError};
pub use special_tokens::Specials;
pub use stream::TextStream;
pub use tokenizer::{AddBos, Tokenizer};
pub use train::{TrainOptions, train_bpe};
pub use vocabulary::TokenKind;
