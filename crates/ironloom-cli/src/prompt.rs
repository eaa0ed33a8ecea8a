//! From what a person wrote to the ids that the model is fed.
//!
//! A model with a chat template gets the prompt as a user's message; without one, or with `--raw`, it continues the prompt as
//! it stands.

use std::io::{self, Read};

use anyhow::{Context, Result, bail};
use ironloom_lm::text::{AddBos, AddGenerationPrompt, ChatTemplate, Message, Specials, Tokenizer, encode_chat};

/// Reads `-` from stdin, less the line end that the shell put there; anything else is the text itself.
///
/// # Errors
/// Stdin cannot be read or is not UTF-8.
pub(crate) fn text_or_stdin(text: &str) -> Result<String> {
    if text != "-" {
        return Ok(text.to_owned());
    }
    let mut read = String::new();
    io::stdin().lock().read_to_string(&mut read).context("cannot read the text from stdin")?;
    if read.ends_with('\n') {
        read.pop();
        if read.ends_with('\r') {
            read.pop();
        }
    }
    Ok(read)
}

/// A conversation that begins, with its system message if there is one.
pub(crate) fn messages(system: Option<&str>, user: &str) -> Vec<Message> {
    let system = system.map(|text| Message::new("system", text));
    system.into_iter().chain([Message::new("user", user)]).collect()
}

/// The ids of a conversation that the model is to answer.
///
/// # Errors
/// The template refuses the messages.
pub(crate) fn chat_ids(tokenizer: &Tokenizer, template: &ChatTemplate, messages: &[Message]) -> Result<Vec<u32>> {
    Ok(encode_chat(tokenizer, template, messages, AddGenerationPrompt::Yes)?)
}

/// The ids of a text that the model is to continue, with one start token where the model wants one: a text that begins with
/// its mark gets no second one.
///
/// # Errors
/// The text cannot be tokenized, or is empty and the model has no start token.
pub(crate) fn raw_ids(tokenizer: &Tokenizer, text: &str, specials: Specials) -> Result<Vec<u32>> {
    let mut ids = tokenizer.encode(text, specials, AddBos::Yes)?;
    if tokenizer.adds_bos() && ids.len() > 1 && ids[0] == ids[1] && Some(ids[0]) == tokenizer.bos_id() {
        ids.remove(0);
    }
    if ids.is_empty() {
        bail!("the prompt is empty and the model has no start token: write at least one character");
    }
    Ok(ids)
}
