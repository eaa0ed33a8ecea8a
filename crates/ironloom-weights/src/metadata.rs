//! A model file's metadata: named values in the file's order, with getters that say what they wanted and what they found.
//!
//! From GGUF these are its key-value pairs; from safetensors the strings of `__metadata__`.

use std::{path::Path, sync::Arc};

use indexmap::IndexMap;

use crate::{Array, Error, Result, Strings, Value};

/// Named values in the file's order.
///
/// ```
/// use ironloom_weights::Metadata;
/// let mut metadata = Metadata::new();
/// metadata.insert("general.architecture", "llama");
/// metadata.insert("llama.block_count", 30u32);
/// assert_eq!(metadata.required_u64("llama.block_count")?, 30);
/// assert_eq!(metadata.f32("llama.rope.freq_base")?, None);
/// let error = metadata.required_u32("general.architecture").unwrap_err().to_string();
/// assert!(error.contains("general.architecture") && error.contains("string"));
/// # Ok::<(), ironloom_weights::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    values: IndexMap<String, Value>,
    /// The file they come from, for messages.
    origin: Option<Arc<Path>>,
}

impl Metadata {
    /// No values.
    pub fn new() -> Self {
        Self::default()
    }

    pub(crate) fn of_file(path: &Path) -> Self {
        Self { values: IndexMap::new(), origin: Some(path.into()) }
    }

    /// Sets a value and returns the one that had this key.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) -> Option<Value> {
        self.values.insert(key.into(), value.into())
    }

    /// Removes a value, keeping the order of the others.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        self.values.shift_remove(key)
    }

    /// The value of this key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Whether there is a value of this key.
    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// Keys and values in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// An integer of any stored type that fits `u32`.
    ///
    /// # Errors
    /// The value is of another kind, or doesn't fit.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.read(key, "an integer from 0 to 4294967295", |value| u32::try_from(value.as_integer()?).ok())
    }

    /// An integer of any stored type that fits `u64`.
    ///
    /// # Errors
    /// The value is of another kind, or negative.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.read(key, "an integer from 0", |value| u64::try_from(value.as_integer()?).ok())
    }

    /// A floating-point number of either stored type.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        self.read(key, "a floating-point number", |value| match *value {
            Value::F32(value) => Some(value),
            Value::F64(value) => Some(value as f32),
            _ => None,
        })
    }

    /// A truth value.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "a bool", |value| if let Value::Bool(value) = *value { Some(value) } else { None })
    }

    /// A string.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        self.read(key, "a string", |value| if let Value::String(value) = value { Some(value.as_str()) } else { None })
    }

    /// An array of any element type.
    ///
    /// # Errors
    /// The value is no array.
    pub fn array(&self, key: &str) -> Result<Option<&Array>> {
        self.read(key, "an array", |value| if let Value::Array(array) = value { Some(array) } else { None })
    }

    /// An array of strings.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn strings(&self, key: &str) -> Result<Option<&Strings>> {
        self.read(key, "an array of strings", |value| match value {
            Value::Array(Array::Strings(strings)) => Some(strings),
            _ => None,
        })
    }

    /// An array of integers of any stored type that fit `u32`.
    ///
    /// # Errors
    /// The value is of another kind, or an element doesn't fit.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.read(key, "an array of integers from 0 to 4294967295", |value| match value {
            Value::Array(array) => array.integers()?.map(|element| u32::try_from(element).ok()).collect(),
            _ => None,
        })
    }

    /// An array of floating-point numbers of either stored type.
    ///
    /// # Errors
    /// The value is of another kind.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.read(key, "an array of floating-point numbers", |value| match value {
            Value::Array(Array::F32(values)) => Some(values.clone()),
            Value::Array(Array::F64(values)) => Some(values.iter().map(|&value| value as f32).collect()),
            _ => None,
        })
    }

    fn read<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            let found = match value.as_integer() {
                Some(integer) => format!("{} {integer}", value.kind()),
                None => value.kind().to_owned(),
            };
            Error::WrongKind { origin: self.origin.clone(), key: key.to_owned(), wanted, found }
        })
    }

    fn present<T>(&self, key: &str, wanted: &'static str, value: Result<Option<T>>) -> Result<T> {
        value?.ok_or_else(|| Error::MissingKey { origin: self.origin.clone(), key: key.to_owned(), wanted })
    }
}

macro_rules! required {
    ($($name:ident $getter:ident $type:ty, $wanted:literal;)*) => {
        /// Getters of values that must be there.
        impl Metadata { $(
            #[doc = concat!("Like [`Metadata::", stringify!($getter), "`], for a value that must be there.")]
            ///
            /// # Errors
            /// The value is absent, or of another kind.
            pub fn $name(&self, key: &str) -> Result<$type> {
                self.present(key, $wanted, self.$getter(key))
            }
        )* }
    };
}
required! {
    required_u32 u32 u32, "an integer";
    required_u64 u64 u64, "an integer";
    required_f32 f32 f32, "a floating-point number";
    required_bool bool bool, "a bool";
    required_string string &str, "a string";
    required_array array &Array, "an array";
    required_strings strings &Strings, "an array of strings";
    required_u32s u32s Vec<u32>, "an array of integers";
    required_f32s f32s Vec<f32>, "an array of floating-point numbers";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_read_across_types_and_say_what_does_not_fit() {
        let mut metadata = Metadata::new();
        metadata.insert("small", Value::I32(7));
        metadata.insert("negative", Value::I64(-1));
        metadata.insert("large", Value::U64(1 << 40));
        metadata.insert("list", vec![3i32, 4]);
        assert_eq!(metadata.u32("small").unwrap(), Some(7));
        assert_eq!(metadata.u64("large").unwrap(), Some(1 << 40));
        assert_eq!(metadata.u32s("list").unwrap(), Some(vec![3, 4]));
        let text = metadata.u32("negative").unwrap_err().to_string();
        assert!(text.contains("negative") && text.contains("i64 -1") && text.contains("integer"), "{text}");
        assert!(metadata.u32("large").unwrap_err().to_string().contains("u64 1099511627776"));
        assert!(metadata.string("small").unwrap_err().to_string().contains("a string"));
    }

    #[test]
    fn required_values_name_the_key() {
        let metadata = Metadata::of_file(Path::new("model.gguf"));
        let text = metadata.required_string("tokenizer.ggml.model").unwrap_err().to_string();
        assert!(text.contains("model.gguf") && text.contains("tokenizer.ggml.model"), "{text}");
    }
}
