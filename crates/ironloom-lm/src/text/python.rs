//! Values as Python writes them, for templates that expect its `str()`, `repr()` and `json.dumps`.
//!
//! minijinja prints `true`, `none` and JSON-like lists; jinja2 prints what Python does: `True`, `None`, `['a', 1]`. Its `tojson`
//! escapes HTML, and transformers replaces it by `json.dumps(value, ensure_ascii=False)`, which spaces after commas and colons.

use minijinja::{
    Error, ErrorKind, Output, Value,
    value::{Kwargs, ValueKind},
};
use serde_json::Value as Json;

/// Prints a value where a template says `{{ value }}`.
pub(super) fn print(out: &mut Output<'_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None => out.write_str(&text(value)).map_err(Error::from),
    }
}

/// Python's `str()`: strings are themselves, the undefined is nothing.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        ValueKind::Undefined => String::new(),
        _ => representation(value),
    }
}

/// Python's `repr()`.
fn representation(value: &Value) -> String {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            format!("[{}]", items().map(|item| representation(&item)).collect::<Vec<_>>().join(", "))
        }
        ValueKind::Map => {
            let entries = items().map(|key| {
                let entry = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", representation(&key), representation(&entry))
            });
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut result = String::from(quote);
    for character in text.chars() {
        match character {
            '\n' => result.push_str("\\n"),
            '\r' => result.push_str("\\r"),
            '\t' => result.push_str("\\t"),
            '\\' => result.push_str("\\\\"),
            _ if character == quote => result.extend(['\\', quote]),
            _ if character.is_ascii_control() => result.push_str(&format!("\\x{:02x}", u32::from(character))),
            _ => result.push(character),
        }
    }
    result.push(quote);
    result
}

/// The filter `tojson`: `json.dumps(value, ensure_ascii=False, indent=indent)`.
pub(super) fn to_json(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "cannot write as JSON").with_source(error))?;
    let mut result = String::new();
    dump(&json, indent, 0, &mut result);
    Ok(Value::from(result))
}

fn dump(json: &Json, indent: Option<usize>, depth: usize, out: &mut String) {
    let line = |depth: usize, out: &mut String| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent.saturating_mul(depth)));
        }
    };
    let comma = if indent.is_some() { "," } else { ", " };
    match json {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index == 0 { "" } else { comma });
                line(depth + 1, out);
                dump(item, indent, depth + 1, out);
            }
            line(depth, out);
            out.push(']');
        }
        Json::Object(entries) if !entries.is_empty() => {
            out.push('{');
            for (index, (key, value)) in entries.iter().enumerate() {
                out.push_str(if index == 0 { "" } else { comma });
                line(depth + 1, out);
                out.push_str(&Json::String(key.clone()).to_string());
                out.push_str(": ");
                dump(value, indent, depth + 1, out);
            }
            line(depth, out);
            out.push('}');
        }
        plain => out.push_str(&plain.to_string()),
    }
}
