//! Text out of a language model: sessions, samplers, stop rules and batches.
//!
//! A [`Session`] is one sequence of a model. It is fed ids (a prompt, a turn), gives logits, and grows by what a [`Sampler`]
//! picks from them. [`generate`] runs it to the end of an answer and gives the text as it becomes certain: whole characters
//! that belong to no stop string. A [`BatchDecoder`] runs many sessions in one pass of the model per step.
//!
//! What this room promises:
//!
//! * A sequence's ids depend on its prompt, its sampler's options and the model, on nothing else: not on sequences beside
//!   it, on how the prompt was cut, or on a session having been truncated, forked or fed before. It takes a model that
//!   keeps the same promise, and `ironloom-lm`'s does on the processor. On a graphics card its ids depend on how prompts
//!   were cut into passes too; a batch cuts them as the session alone does.
//! * The same seed gives the same text on every machine of one architecture, as long as the logits are the same bits.
//! * Limits hold: `max_tokens`, the context, every end token. A full context ends the answer; nothing is shifted out.
//! * What fails or is cancelled leaves a session as it was.
//!
//! ```no_run
//! use std::{ops::ControlFlow, sync::Arc};
//! use ironloom_decode::{GenerateOptions, Sampler, SamplerOptions, Session, SessionOptions, generate};
//! use ironloom_lm::{LoadOptions, Model, text::{AddBos, Specials, Tokenizer}};
//! use ironloom_tensor::Device;
//!
//! let checkpoint = ironloom_weights::open("model.gguf")?;
//! let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
//! let device = Device::cpu(0);
//! let model = Arc::new(Model::load(&checkpoint, &device, &LoadOptions::default())?);
//! let mut session = Session::new(model, device, SessionOptions::default())?;
//! session.feed(&tokenizer.encode("Once upon a time", Specials::Literal, AddBos::Yes)?)?;
//! let mut sampler = Sampler::new(SamplerOptions { temperature: 0.8, top_p: 0.95, seed: 1, ..Default::default() })?;
//! let options = GenerateOptions { max_tokens: 100, stop: vec!["The end".into()] };
//! let answer = generate(&mut session, &tokenizer, &mut sampler, &options, &mut |piece| {
//!     print!("{piece}");
//!     ControlFlow::Continue(())
//! })?;
//! println!("{:?}", answer.finish);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Models are known by the seam [`LanguageModel`] alone. Nothing here computes on a device or knows a model's insides.
#![deny(missing_docs)]

mod answer;
mod batch;
mod error;
mod generate;
mod model;
mod padding;
mod sampler;
mod session;
mod steps;
mod stop;

pub use answer::AnswerText;
pub use batch::{BatchDecoder, RowEvent, RowId, RowLimits};
pub use error::{Error, Result};
pub use generate::{FinishReason, GenerateOptions, Generation, generate};
pub use model::{Cache, LanguageModel, Span};
pub use padding::{Padding, strip_left_padding};
pub use sampler::{Sampler, SamplerOptions};
pub use session::{FeedProgress, Session, SessionOptions};
pub use steps::{CudaSteps, StepRow, Steps};
pub use stop::{Released, StopStrings};
