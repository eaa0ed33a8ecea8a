//! `ironloom chat MODEL`: a conversation, line by line.
//!
//! On a terminal lines are edited and kept in a history file; from a pipe they are read as they come, without a prompt, so
//! that stdout holds the answers only. Ctrl-C stops an answer, Ctrl-D ends the program.

use std::{
    fs::OpenOptions,
    io::{self, BufRead, IsTerminal, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use ironloom_decode::{Error, FinishReason, Generation, Sampler, SamplerOptions, Session};
use ironloom_lm::text::Tokenizer;
use rustyline::{DefaultEditor, error::ReadlineError};

use crate::{
    console::{Console, Unit},
    conversation::Conversation,
    failure::{self, Outcome},
    interrupt::{self, Work},
    loading::{self, ModelOptions, Opened},
    machine::MachineOptions,
    run::{AnswerOptions, speed},
    sampling::SamplingOptions,
};

const EXAMPLES: &str = "\
Examples:
  ironloom chat model.gguf
  ironloom chat Qwen2.5-0.5B-Instruct/ --system \"Answer in one sentence.\" --temperature 0
  printf 'My name is Ada.\\nWhat is my name?\\n' | ironloom chat model.gguf --quiet

In the conversation, /help lists what else can be typed.";

const HELP: &str = "\
  /help            this list
  /system TEXT     set the system message; without a text, remove it
  /regenerate      take the last answer back and answer once more
  /reset           begin a new conversation
  /save FILE       write the conversation as JSON into a new file
  /quit            end (as does Ctrl-D)
  //text           a message that begins with /
Ctrl-C stops an answer.";

/// Ctrl-C that stop an answer before one ends the program: enough for an impatient hand.
const PATIENCE: usize = 3;

/// Talk with a model
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// A GGUF file or a Hugging Face folder
    model: PathBuf,
    /// What the model is told first
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Keep no history file of what was typed
    #[arg(long)]
    no_history: bool,
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    options: ModelOptions,
    #[command(flatten)]
    machine: MachineOptions,
}

/// Talks until the input ends.
pub(crate) fn run(arguments: &Arguments, console: &Console) -> Result<Outcome> {
    // The line editor takes SIGINT for itself when it is made and needs it never (it reads Ctrl-C as a key), so it comes first.
    let mut input = Input::new(arguments.no_history)?;
    interrupt::install()?;
    let sampling = arguments.sampling.sampler_options()?;
    let opened = Opened::new(&arguments.model)?;
    let tokenizer = opened.tokenizer()?;
    let template = loading::template(&opened.checkpoint)?.with_context(|| {
        format!(
            "{} has no chat template, so it cannot chat: `ironloom run` continues a text with it",
            arguments.model.display()
        )
    })?;
    let device = arguments.machine.open()?;
    let available = arguments.machine.device.available(&device)?;
    let context = opened.choose_context(&device, available, &arguments.options, console)?;
    let loaded = opened.load(device, context, arguments.options.weights, console)?;
    let conversation = Conversation::new(loaded.session()?, tokenizer, template, arguments.system.as_deref());
    let mut chat = Chat { arguments, console, sampling, conversation };
    if input.is_edited() {
        console.note(format_args!("{}. /help lists commands, Ctrl-D ends.", arguments.model.display()));
    }
    // One that comes between an answer's end and the editor's prompt is let go as it is there: the conversation stays.
    let _between = input.is_edited().then(|| Work::begin(usize::MAX));
    while let Some(line) = input.next_line()? {
        if chat.take(line.trim())?.is_break() {
            break;
        }
    }
    Ok(Outcome::Done)
}

struct Chat<'a> {
    arguments: &'a Arguments,
    console: &'a Console,
    sampling: SamplerOptions,
    conversation: Conversation,
}

impl Chat<'_> {
    /// Does what a line says. What fails is said and the conversation goes on; only a closed output ends it.
    fn take(&mut self, line: &str) -> Result<ControlFlow<()>> {
        let done = match line.strip_prefix('/') {
            _ if line.is_empty() => Ok(()),
            Some("quit") => return Ok(ControlFlow::Break(())),
            Some(message) if message.starts_with('/') => self.answer(Turn::Message(message)),
            Some(command) => self.command(command),
            None => self.answer(Turn::Message(line)),
        };
        match done {
            Err(error) if failure::is_closed_pipe(&error) => Err(error),
            Err(error) => {
                let _ = writeln!(io::stderr(), "error: {}", failure::line(&error));
                Ok(ControlFlow::Continue(()))
            }
            Ok(()) => Ok(ControlFlow::Continue(())),
        }
    }

    fn command(&mut self, command: &str) -> Result<()> {
        let (name, text) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let text = text.trim();
        match name {
            "help" => self.console.note(HELP),
            "system" => {
                self.conversation.set_system(text);
                self.console.note(if text.is_empty() { "no system message" } else { "system message set" });
            }
            "reset" => {
                self.conversation.reset();
                self.console.note("a new conversation");
            }
            "regenerate" => self.answer(Turn::Again)?,
            "save" => self.save(text)?,
            _ => bail!("there is no command /{name}: /help lists those there are, and // begins a message with /"),
        }
        Ok(())
    }

    fn answer(&mut self, turn: Turn<'_>) -> Result<()> {
        let Self { arguments, console, sampling, conversation } = self;
        if turn == Turn::Again {
            // The same seed would write the same answer.
            sampling.seed = sampling.seed.wrapping_add(1);
        }
        let mut sampler = Sampler::new(sampling.clone())?;
        let work = Work::begin(PATIENCE);
        let reading = console.progress("reading", Unit::Tokens);
        let mut progress = |fed: ironloom_decode::FeedProgress| {
            reading.set(fed.done as u64, fed.total as u64);
            work.flow()
        };
        let mut closed = None;
        let mut answer = |session: &mut Session, tokenizer: &Tokenizer| -> Result<Generation> {
            arguments.answer.generate(session, tokenizer, &mut sampler, &mut |text| match console.print_part(text) {
                Ok(()) => work.flow(),
                Err(error) => {
                    closed = Some(error);
                    ControlFlow::Break(())
                }
            })
        };
        let answered = match turn {
            Turn::Message(text) => conversation.ask(text, &mut progress, &mut answer),
            Turn::Again => conversation.regenerate(&mut progress, &mut answer),
        };
        drop(reading);
        if let Some(error) = closed {
            return Err(error).context("cannot print the answer");
        }
        let cancelled = |error: &anyhow::Error| matches!(error.downcast_ref(), Some(Error::Cancelled { .. }));
        match answered {
            Ok(Some(generation)) => {
                console.print("")?;
                let (held, context) = (conversation.len(), conversation.context());
                if generation.finish == FinishReason::ContextFull {
                    console.note(format_args!(
                        "note: the context of {context} tokens is full; /reset begins a new conversation"
                    ));
                }
                console.note(format_args!("[{}, {held} of {context} tokens held]", speed(&generation)));
                Ok(())
            }
            Ok(None) => {
                console.note("stopped");
                Ok(())
            }
            Err(error) if cancelled(&error) => {
                console.note("stopped");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn save(&self, file: &str) -> Result<()> {
        if file.is_empty() {
            bail!("/save needs the name of a file");
        }
        let cannot = || format!("cannot write {file}");
        let mut text = serde_json::to_string_pretty(self.conversation.messages()).with_context(cannot)?;
        text.push('\n');
        let mut out = OpenOptions::new().write(true).create_new(true).open(Path::new(file)).with_context(cannot)?;
        out.write_all(text.as_bytes()).with_context(cannot)?;
        self.console.note(format_args!("saved to {file}"));
        Ok(())
    }
}

/// What is to be answered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn<'a> {
    Message(&'a str),
    Again,
}

/// Where lines come from.
enum Input {
    Edited { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    Piped(io::Lines<io::StdinLock<'static>>),
}

impl Input {
    fn new(no_history: bool) -> Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Piped(io::stdin().lock().lines()));
        }
        let mut editor = Box::new(DefaultEditor::new().context("cannot edit lines on this terminal")?);
        let history = history_file().filter(|_| !no_history);
        if let Some(file) = &history {
            // A first start has no history yet.
            let _ = editor.load_history(file);
        }
        Ok(Self::Edited { editor, history })
    }

    fn is_edited(&self) -> bool {
        matches!(self, Self::Edited { .. })
    }

    /// The next line; `None` at the end of the input.
    fn next_line(&mut self) -> Result<Option<String>> {
        match self {
            Self::Piped(lines) => lines.next().transpose().context("cannot read the message"),
            Self::Edited { editor, history } => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        if editor.add_history_entry(line.as_str()).unwrap_or(false)
                            && let Some(file) = history
                        {
                            // A conversation is worth more than its history: what cannot be written is let go.
                            let _ = file.parent().map(std::fs::create_dir_all);
                            let _ = editor.save_history(file);
                        }
                        return Ok(Some(line));
                    }
                    // Ctrl-C at the prompt drops what was typed.
                    Err(ReadlineError::Interrupted) => {}
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(error) => return Err(error).context("cannot read the message"),
                }
            },
        }
    }
}

/// `$XDG_STATE_HOME/ironloom/chat_history`, else `~/.local/state/ironloom/chat_history`.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = state.or_else(|| Some(std::env::home_dir()?.join(".local").join("state")))?;
    Some(state.join("ironloom").join("chat_history"))
}
