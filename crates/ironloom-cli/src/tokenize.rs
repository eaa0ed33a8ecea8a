//! `ironloom tokenize MODEL TEXT`: the ids of a text and what each stands for, or the text of ids.

use std::path::PathBuf;

use anyhow::{Context, Result};
use ironloom_lm::text::{AddBos, AddGenerationPrompt, Specials, Tokenizer};
use serde::Serialize;

use crate::{
    console::Console,
    failure::{Outcome, Usage},
    figures::{counted, cut},
    loading, prompt,
};

const EXAMPLES: &str = "\
Examples:
  ironloom tokenize model.gguf \"Hello, world\"
  ironloom tokenize model.gguf \"Hello\" --chat --system \"Be brief.\"
  ironloom tokenize model.gguf --decode 1,9690,198
  ironloom tokenize model.gguf - --json < page.txt";

/// Show the tokens of a text, or the text of tokens
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// A GGUF file or a Hugging Face folder
    model: PathBuf,
    /// The text; `-` reads it from stdin
    #[arg(required_unless_present = "decode", allow_hyphen_values = true)]
    text: Option<String>,
    /// Decode these ids, separated by commas or spaces
    #[arg(long, value_name = "IDS", conflicts_with_all = ["text", "chat", "special", "no_bos"])]
    decode: Option<String>,
    /// Put the text into the model's chat template, as a user's message
    #[arg(long)]
    chat: bool,
    /// The system message before it
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Read special tokens such as <|im_end|> in the text as such
    #[arg(long)]
    special: bool,
    /// Leave out the start token
    #[arg(long, conflicts_with = "chat")]
    no_bos: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    /// What was tokenized, or what the ids stand for.
    text: String,
    count: usize,
    ids: Vec<u32>,
    pieces: Vec<String>,
}

/// Tokenizes or decodes.
pub(crate) fn run(arguments: &Arguments, console: &Console) -> Result<Outcome> {
    let checkpoint = loading::open(&arguments.model)?;
    let tokenizer = loading::tokenizer(&checkpoint)?;
    let (text, ids) = match (&arguments.decode, &arguments.text) {
        (Some(ids), _) => {
            let ids = parse_ids(ids, &tokenizer)?;
            (tokenizer.decode(&ids), ids)
        }
        (None, text) => {
            let text = prompt::text_or_stdin(text.as_deref().unwrap_or_default())?;
            if arguments.chat {
                let template = loading::template(&checkpoint)?
                    .with_context(|| format!("{} has no chat template", arguments.model.display()))?;
                let messages = prompt::messages(arguments.system.as_deref(), &text);
                let text = template.render(&messages, AddGenerationPrompt::Yes)?;
                let ids = prompt::chat_ids(&tokenizer, &template, &messages)?;
                (text, ids)
            } else {
                let specials = if arguments.special { Specials::Parse } else { Specials::Literal };
                let add_bos = if arguments.no_bos { AddBos::No } else { AddBos::Yes };
                let ids = tokenizer.encode(&text, specials, add_bos)?;
                (text, ids)
            }
        }
    };
    let pieces: Vec<String> = ids.iter().map(|&id| tokenizer.token_text(id).unwrap_or_default()).collect();
    if arguments.json {
        console.print_json(&Report { text, count: ids.len(), ids, pieces })?;
    } else if arguments.decode.is_some() {
        console.print(text)?;
    } else {
        let lines = ids.iter().map(|&id| format!("{id:>8}  {}\n", cut(&shown(&tokenizer, id), 100)));
        console.print(lines.collect::<String>().trim_end())?;
        console.note(counted(ids.len(), "token"));
    }
    Ok(Outcome::Done)
}

/// A token in quotes; bytes that are no text on their own as in a byte string of Rust.
fn shown(tokenizer: &Tokenizer, id: u32) -> String {
    match String::from_utf8(tokenizer.token_bytes(id)) {
        Ok(text) if text.is_empty() => format!("{:?}", tokenizer.token_text(id).unwrap_or_default()),
        Ok(text) => format!("{text:?}"),
        Err(error) => format!("b\"{}\"", error.as_bytes().escape_ascii()),
    }
}

fn parse_ids(text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let parse = |part: &str| {
        let id = part.parse().ok().filter(|&id| (id as usize) < tokenizer.vocab_size());
        id.ok_or_else(|| {
            let limit = tokenizer.vocab_size();
            Usage(format!("{part:?} is no token id: numbers from 0 to {} are", limit.saturating_sub(1))).into()
        })
    };
    text.split([',', ' ', '\t', '\n', '[', ']']).filter(|part| !part.is_empty()).map(parse).collect()
}
