//! Typed access to a JSON object's entries, with errors that name the key, what was needed and what was found.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// A JSON object of a configuration; `null` counts as absent.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: &'static str,
    architecture: &'a str,
}

impl<'a> Fields<'a> {
    pub(super) fn new(value: &'a Value, prefix: &'static str, architecture: &'a str) -> Result<Self> {
        let map = value.as_object().ok_or_else(|| invalid(prefix, "an object", value))?;
        Ok(Self { map, prefix, architecture })
    }

    fn name(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_owned() } else { format!("{}.{key}", self.prefix) }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn object(&self, key: &'static str) -> Result<Option<Fields<'a>>> {
        self.get(key).map(|value| Fields::new(value, key, self.architecture)).transpose()
    }

    fn typed<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        self.get(key).map(|value| read(value).ok_or_else(|| invalid(&self.name(key), expected, value))).transpose()
    }

    pub(super) fn count(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a count below 2^32", |value| {
            value.as_u64().filter(|n| *n <= u64::from(u32::MAX)).map(|n| n as usize)
        })
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(super) fn counts(&self, key: &str) -> Result<Option<Vec<usize>>> {
        self.typed(key, "a list of counts", |value| {
            value.as_array()?.iter().map(|item| item.as_u64().map(|n| n as usize)).collect()
        })
    }

    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.typed(key, "a list of strings", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    pub(super) fn required<T>(&self, key: &str, value: Result<Option<T>>) -> Result<T> {
        value?.ok_or_else(|| Error::MissingKey { key: self.name(key), architecture: self.architecture.to_owned() })
    }

    pub(super) fn required_count(&self, key: &str) -> Result<usize> {
        self.required(key, self.count(key))
    }

    /// Refuses the entry unless it is absent or one of `accepted`.
    pub(super) fn refuse_unless(&self, key: &str, accepted: &[Value], reason: &'static str) -> Result<()> {
        match self.get(key) {
            Some(value) if !accepted.contains(value) => {
                Err(Error::UnsupportedOption { key: self.name(key), value: short(value), reason })
            }
            _ => Ok(()),
        }
    }
}

fn invalid(key: &str, expected: &str, found: &Value) -> Error {
    let key = if key.is_empty() { "configuration" } else { key };
    Error::InvalidValue { key: key.to_owned(), expected: expected.to_owned(), found: short(found) }
}

/// The value as JSON, cut where it is long.
pub(super) fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}
