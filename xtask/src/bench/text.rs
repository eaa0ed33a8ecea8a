//! Benchmarks of text: how long the tokenizer takes.

use anyhow::{Result, ensure};
use ironloom_lm::text::{AddBos, Specials, Tokenizer};
use serde_json::json;

use super::{
    inputs::text,
    measurement::{Measurement, Work, measure, seconds},
};
use crate::smollm2;

const CHARACTERS: usize = 50_000;

/// Milliseconds of turning 50,000 characters into ids.
pub(super) fn tokenize_50k() -> Result<Measurement> {
    let tokenizer = Tokenizer::from_checkpoint(&ironloom_weights::open(smollm2::fetch()?)?)?;
    let text = text(CHARACTERS);
    let encode = || Ok(tokenizer.encode(&text, Specials::Literal, AddBos::No)?);
    let ids = encode()?;
    ensure!(tokenizer.decode(&ids) == text, "the text does not survive its ids");
    let shape = json!({"characters": CHARACTERS, "ids": ids.len()});
    measure(Work::Unbounded, shape, || Ok(1000.0 * seconds(encode)?.0))
}
