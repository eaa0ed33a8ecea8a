//! Streams an answer to a prompt.
//!
//! ```sh
//! cargo run --release -p ironloom-decode --example generate -- MODEL "Why is the sky blue?"
//! ```
//!
//! MODEL is a GGUF file or a model's folder.

use std::{error::Error, io::Write, ops::ControlFlow, sync::Arc};

use ironloom_decode::{GenerateOptions, Sampler, SamplerOptions, Session, SessionOptions, generate};
use ironloom_lm::{
    LoadOptions, Model,
    text::{AddBos, AddGenerationPrompt, ChatTemplate, Message, Specials, TextError, Tokenizer, encode_chat},
};
use ironloom_tensor::Device;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(prompt)) = (arguments.next(), arguments.next()) else {
        return Err("two arguments are needed: a model and a prompt".into());
    };
    let checkpoint = ironloom_weights::open(path)?;
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
    let device = Device::cpu(0);
    let model = Arc::new(Model::load(&checkpoint, &device, &LoadOptions::default())?);

    let ids = match ChatTemplate::from_checkpoint(&checkpoint) {
        Ok(template) => encode_chat(&tokenizer, &template, &[Message::new("user", prompt)], AddGenerationPrompt::Yes)?,
        // A base model: it goes on with the prompt itself.
        Err(TextError::NoTemplate { .. }) => tokenizer.encode(&prompt, Specials::Literal, AddBos::Yes)?,
        Err(error) => return Err(error.into()),
    };
    let mut session = Session::new(model, device, SessionOptions::default())?;
    session.feed(&ids)?;

    let mut sampler = Sampler::new(SamplerOptions { temperature: 0.7, top_p: 0.95, seed: 1, ..Default::default() })?;
    let mut out = std::io::stdout();
    let mut print = |piece: &str| match out.write_all(piece.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()), // nobody reads any more
    };
    let answer = generate(&mut session, &tokenizer, &mut sampler, &GenerateOptions::default(), &mut print)?;
    writeln!(out, "\n\n{:?} after {} tokens", answer.finish, answer.generated)?;
    if let Some(rate) = answer.tokens_per_second() {
        writeln!(out, "{rate:.1} tokens/s")?;
    }
    Ok(())
}
