//! JSONL: one JSON object a line. Blank lines are passed over; anything else is an error that names file and line.

use std::path::Path;

use ironloom_lm::text::Message;
use serde_json::{Map, Value};

use super::{Answers, DataError, Place, SourceFormat, source::read_lines};
use crate::Result;

/// Who may speak. Whether a template knows a role is the template's to say.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Fields of a conversation and of its messages that change what it teaches, and that nothing here reads.
const UNREAD: [&str; 5] = ["tools", "functions", "tool_calls", "function_call", "weight"];

type Object = Map<String, Value>;

pub(super) fn read(path: &Path, each: &mut dyn FnMut(&Object, &Place) -> Result<()>) -> Result<()> {
    read_lines(path, &mut |line, place| {
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        if line.is_empty() {
            return Ok(());
        }
        let object: Object = serde_json::from_slice(line)
            .map_err(|error| DataError::Json { place: place.clone(), reason: reason(&error) })?;
        each(&object, place)
    })
}

/// The parser's reason without its line, which is always the first.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    match text.strip_suffix(&position) {
        Some(reason) => format!("{reason} at column {}", error.column()),
        None => text,
    }
}

/// A field that is a text.
pub(super) fn string<'a>(object: &'a Object, field: &str, place: &Place) -> Result<&'a str> {
    let text = object.get(field).and_then(Value::as_str);
    text.ok_or_else(|| lacks(object, field, "a text", place).into())
}

/// The messages of a conversation.
pub(super) fn messages(object: &Object, place: &Place) -> Result<Vec<Message>> {
    const FIELD: &str = "messages";
    refuse_unread(object, place)?;
    let list = object.get(FIELD).and_then(Value::as_array).filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| lacks(object, FIELD, "a list of one or more messages", place))?;
    let message = |message: &Value| {
        let nothing = Map::new();
        let message = message.as_object().unwrap_or(&nothing);
        let (role, content) = (string(message, "role", place)?, string(message, "content", place)?);
        refuse_unread(message, place)?;
        if !ROLES.contains(&role) {
            let known = ROLES.join(", ");
            return Err(DataError::Role { place: place.clone(), role: role.to_owned(), known }.into());
        }
        Ok(Message::new(role, content))
    };
    list.iter().map(message).collect()
}

/// Refuses what would be learned as something else than it says. A weight of 1 is what every message has.
fn refuse_unread(object: &Object, place: &Place) -> Result<()> {
    let says_nothing = |value: &Value| {
        value.is_null() || value.as_f64() == Some(1.0) || value.as_array().is_some_and(|list| list.is_empty())
    };
    match UNREAD.iter().find(|field| object.get(**field).is_some_and(|value| !says_nothing(value))) {
        Some(&field) => Err(DataError::Unread { place: place.clone(), field }.into()),
        None => Ok(()),
    }
}

fn lacks(object: &Object, field: &str, wanted: &'static str, place: &Place) -> DataError {
    let kind = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(list) if list.is_empty() => "an empty list",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    let fields: Vec<String> = object.iter().map(|(name, value)| format!("{name:?} ({})", kind(value))).collect();
    let found = if fields.is_empty() { "nothing".to_owned() } else { fields.join(", ") };
    DataError::Field { place: place.clone(), field: field.to_owned(), wanted, found }
}

/// The format that the fields of the first object are of.
pub(super) fn guess(path: &Path) -> Result<SourceFormat> {
    let mut format = None;
    read_lines(path, &mut |line, place| {
        if format.is_some() || line.is_empty() {
            return Ok(());
        }
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        let object: Object = serde_json::from_slice(line)
            .map_err(|error| DataError::Json { place: place.clone(), reason: reason(&error) })?;
        format = Some(if object.contains_key("messages") {
            SourceFormat::Chat { answers: Answers::default() }
        } else if object.contains_key("completion") {
            SourceFormat::Completion
        } else if object.contains_key("text") {
            SourceFormat::JsonText { field: "text".to_owned() }
        } else {
            return Err(lacks(&object, "messages\", \"completion\" or \"text", "there", place).into());
        });
        Ok(())
    })?;
    Ok(format.ok_or_else(|| DataError::NoDocuments { what: path.display().to_string() })?)
}
