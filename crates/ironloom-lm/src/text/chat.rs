//! Chat templates: messages to the text a model was trained on.
//!
//! In: messages and a Jinja template out of `tokenizer_config.json`, `chat_template.jinja` or GGUF's
//! `tokenizer.chat_template`. Out: text, byte for byte what transformers' `apply_chat_template` gives. Templates run in minijinja,
//! set up as transformers sets up jinja2: block trimming on, loop controls, Python's methods on strings, `raise_exception`,
//! `strftime_now`, and values printed as Python prints them ([`python`](super::python)).

use std::{collections::BTreeMap, fmt};

use ironloom_weights::{Checkpoint, Format, Metadata};
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value, value::ValueKind};
use serde::Serialize;

use super::{AddBos, Result, Specials, TextError, Tokenizer, calendar::DateTime, json::token_content, python};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`, as the template knows them.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// Whether the text ends with the start of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddGenerationPrompt {
    /// The model is to answer.
    Yes,
    /// The conversation is complete, as for training.
    No,
}

/// The ids of a conversation.
///
/// The template writes every special token itself, so nothing is added around its text: exactly the ids of transformers'
/// `apply_chat_template`, and one start token where the template writes one.
///
/// # Errors
/// The template refuses the messages, or the text can't be tokenized.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    add_generation_prompt: AddGenerationPrompt,
) -> Result<Vec<u32>> {
    let text = template.render(messages, add_generation_prompt)?;
    tokenizer.encode(&text, Specials::Parse, AddBos::No)
}

/// A chat template, ready to render.
///
/// ```
/// use ironloom_lm::text::{AddGenerationPrompt, ChatTemplate, Message};
///
/// let template = ChatTemplate::new(
///     "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
/// )?;
/// let text = template.render(&[Message::new("user", " Hi ")], AddGenerationPrompt::Yes)?;
/// assert_eq!(text, "<|user|>Hi\n<|assistant|>");
/// # Ok::<(), ironloom_lm::text::TextError>(())
/// ```
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    variables: BTreeMap<String, Value>,
}

impl ChatTemplate {
    /// A template from its source.
    ///
    /// # Errors
    /// The source is not a valid template.
    pub fn new(source: impl Into<String>) -> Result<Self> {
        let source = source.into();
        let mut environment = environment();
        environment
            .add_template_owned(NAME, without_generation_tags(&source))
            .map_err(|error| TextError::Template { reason: reason(&error) })?;
        // transformers passes these two always, so that templates see them as None and not as undefined.
        let none = Value::from(());
        let variables = BTreeMap::from([("tools".to_owned(), none.clone()), ("documents".to_owned(), none)]);
        Ok(Self { environment, source, variables })
    }

    /// The template of a model: GGUF's `tokenizer.chat_template`, or of a folder `chat_template.jinja`, else the one in
    /// `tokenizer_config.json` (of several, the one named `default`). The model's special tokens are set.
    ///
    /// # Errors
    /// There is none, or it is not a valid template.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.format() {
            Format::Gguf { .. } => Self::from_metadata(checkpoint.metadata()),
            Format::Safetensors => {
                let config = checkpoint.folder_file("tokenizer_config.json")?;
                let config = config.as_deref().map(serde_json::from_slice).transpose().map_err(|error| {
                    TextError::Json { file: "tokenizer_config.json".to_owned(), reason: error.to_string() }
                })?;
                let file = checkpoint.folder_file("chat_template.jinja")?;
                Self::from_folder(&config.unwrap_or_default(), file)
            }
        }
    }

    fn from_metadata(metadata: &Metadata) -> Result<Self> {
        const KEY: &str = "tokenizer.chat_template";
        let Some(source) = metadata.string(KEY)? else {
            let named = metadata.iter().filter_map(|(key, _)| key.strip_prefix(KEY)?.strip_prefix('.'));
            return Err(TextError::NoTemplate { names: named.map(str::to_owned).collect() });
        };
        let mut template = Self::new(source)?;
        let tokens = metadata.strings("tokenizer.ggml.tokens")?;
        for (name, key) in [
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        ] {
            if let (Some(id), Some(tokens)) = (metadata.u32(key)?, tokens)
                && let Some(token) = tokens.get(id as usize)
            {
                template = template.with_variable(name, token);
            }
        }
        Ok(template)
    }

    fn from_folder(config: &serde_json::Value, file: Option<Vec<u8>>) -> Result<Self> {
        let source = match file {
            Some(bytes) => String::from_utf8(bytes).map_err(|error| TextError::Json {
                file: "chat_template.jinja".to_owned(),
                reason: error.to_string(),
            })?,
            None => match &config["chat_template"] {
                serde_json::Value::String(source) => source.clone(),
                serde_json::Value::Array(named) => {
                    let default = named.iter().find(|entry| entry["name"] == "default");
                    let source = default.and_then(|entry| entry["template"].as_str());
                    let names = named.iter().filter_map(|entry| entry["name"].as_str()).map(str::to_owned);
                    source.ok_or_else(|| TextError::NoTemplate { names: names.collect() })?.to_owned()
                }
                _ => return Err(TextError::NoTemplate { names: Vec::new() }),
            },
        };
        let mut template = Self::new(source)?;
        for name in ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"] {
            if let Some(token) = token_content(&config[name]) {
                template = template.with_variable(name, token);
            }
        }
        Ok(template)
    }

    /// Sets a variable of the template, such as `bos_token`, `enable_thinking` or `tools`.
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Serialize) -> Self {
        self.variables.insert(name.into(), Value::from_serialize(value));
        self
    }

    /// Renders at a fixed time, in seconds since 1970 (UTC), for templates that write today's date.
    pub fn at_time(mut self, seconds: u64) -> Self {
        set_clock(&mut self.environment, move || DateTime::at(seconds));
        self
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// There are no messages, the template refuses them ([`TextError::Refused`] with the template's words), or uses something that isn't supported.
    pub fn render(&self, messages: &[Message], add_generation_prompt: AddGenerationPrompt) -> Result<String> {
        if messages.is_empty() {
            return Err(TextError::EmptyConversation);
        }
        let mut context = self.variables.clone();
        context.insert("messages".to_owned(), Value::from_serialize(messages));
        context
            .insert("add_generation_prompt".to_owned(), Value::from(add_generation_prompt == AddGenerationPrompt::Yes));
        let template =
            self.environment.get_template(NAME).map_err(|error| TextError::Template { reason: reason(&error) })?;
        template.render(context).map_err(|error| match refusal(&error) {
            Some(message) => TextError::Refused { message },
            None => TextError::Template { reason: reason(&error) },
        })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("source", &self.source).field("variables", &self.variables).finish()
    }
}

/// No file name, so nothing is escaped for HTML.
const NAME: &str = "chat";

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| python::print(out, value));
    environment.add_filter("tojson", python::to_json);
    environment.add_filter("string", |value: &Value| python::text(value));
    // To Python a string is a sequence of characters, and a mapping has a length and items too.
    environment.add_test("iterable", |value: &Value| value.kind() == ValueKind::String || value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    environment.add_function("raise_exception", |message: String| -> std::result::Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
    });
    set_clock(&mut environment, DateTime::now);
    environment
}

fn set_clock(environment: &mut Environment<'static>, now: impl Fn() -> DateTime + Send + Sync + 'static) {
    environment.add_function("strftime_now", move |format: String| {
        now().format(&format).map_err(|unknown| {
            minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now doesn't know %{unknown}"))
        })
    });
}

/// What a template said when it refused a conversation.
#[derive(Debug)]
struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

fn refusal(error: &minijinja::Error) -> Option<String> {
    causes(error).find_map(|cause| cause.downcast_ref::<Refusal>()).map(|refusal| refusal.0.clone())
}

/// The message with its causes: minijinja's own text leaves out why a called macro or an included block failed.
fn reason(error: &minijinja::Error) -> String {
    causes(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn causes<'a>(error: &'a minijinja::Error) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |cause| cause.source())
}

/// The source with `{% generation %}` and `{% endgeneration %}`, which only mark the answers for training, turned into a
/// condition that always holds. The white space marks inside the tags keep their effect.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open);
        result.push_str(before);
        let Some(close) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(close + 2);
        let inside = &tag[2..close];
        let mark = |edge: Option<char>| edge.filter(|edge| matches!(edge, '-' | '+'));
        let (left, right) = (mark(inside.chars().next()), mark(inside.chars().next_back()));
        let replacement = match inside.trim_matches(['-', '+']).trim() {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match replacement {
            Some(statement) => {
                result.push_str("{%");
                result.extend(left);
                result.push(' ');
                result.push_str(statement);
                result.push(' ');
                result.extend(right);
                result.push_str("%}");
            }
            None => result.push_str(tag),
        }
        rest = after;
    }
    result.push_str(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String> {
        ChatTemplate::new(source)?.render(&[Message::new("user", "hi")], AddGenerationPrompt::No)
    }

    #[test]
    fn a_refusal_reaches_the_user_in_its_own_words() {
        let source = "{%- macro check() %}{{ raise_exception('Only <user> may speak!') }}{% endmacro %}{{ check() }}";
        let error = render(source).unwrap_err();
        assert!(matches!(&error, TextError::Refused { message } if message == "Only <user> may speak!"), "{error}");
    }

    #[test]
    fn what_is_not_known_fails_loudly() {
        for (source, word) in [
            ("{{ messages | no_such_filter }}", "no_such_filter"),
            ("{% no_such_tag %}", "no_such_tag"),
            ("{{ no_such_function() }}", "no_such_function"),
            ("{{ 'a'.no_such_method() }}", "no_such_method"),
            ("{% for m in messages %}", "unexpected end"),
            ("{{ strftime_now('%Q') }}", "%Q"),
            ("{{ nothing.role }}", "undefined"),
        ] {
            let error = render(source).unwrap_err();
            assert!(matches!(error, TextError::Template { .. }), "{source}: {error:?}");
            assert!(error.to_string().contains(word), "{source}: {error}");
        }
    }

    #[test]
    fn generation_tags_leave_their_content() {
        assert_eq!(render("a {%- generation -%} b {% endgeneration %} c").unwrap(), "ab  c");
        assert_eq!(
            render("{% for m in messages %}\n  {% generation %}\n{{ m.content }}{% endgeneration %}{% endfor %}")
                .unwrap(),
            "hi"
        );
    }

    #[test]
    fn dates_are_written_as_told() {
        let template = ChatTemplate::new("{{ strftime_now('%d %b %Y') }}").unwrap().at_time(1_721_952_000);
        let messages = [Message::new("user", "hi")];
        assert_eq!(template.render(&messages, AddGenerationPrompt::No).unwrap(), "26 Jul 2024");
        assert!(matches!(template.render(&[], AddGenerationPrompt::No), Err(TextError::EmptyConversation)));
    }

    #[test]
    fn values_print_as_python_prints_them() {
        let source =
            "{{ true }} {{ none }} {{ [1, 'a', none] }} {{ {'k': false} }} {{ 1.0 }} {{ nothing }}|{{ messages }}";
        assert_eq!(
            render(source).unwrap(),
            "True None [1, 'a', None] {'k': False} 1.0 |[{'role': 'user', 'content': 'hi'}]"
        );
        assert_eq!(
            render("{{ {'a': \"<é'&>\", 'b': [1, true]} | tojson }}").unwrap(),
            "{\"a\": \"<é'&>\", \"b\": [1, true]}"
        );
        assert_eq!(render("{{ [{'a': []}] | tojson(indent=2) }}").unwrap(), "[\n  {\n    \"a\": []\n  }\n]");
    }
}
