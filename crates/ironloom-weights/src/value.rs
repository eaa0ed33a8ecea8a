//! Values of a model file's metadata, as GGUF types them.
//!
//! Arrays keep their element type. Arrays of strings are stored as one text with the end of each string, because a vocabulary
//! holds 50,000 to 250,000 of them: two allocations instead of one per string.
//!
//! Format: GGUF specification, `gguf_metadata_value_type`.

/// A value of a model file's metadata.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// An array whose elements have one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Strings(Strings),
    Arrays(Vec<Array>),
}

impl Value {
    /// What kind of value it is, for messages: `u32`, `array of f32`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
            Self::Array(array) => array.kind(),
        }
    }

    /// The value as an integer, whatever integer type the file chose; `None` for other kinds.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(value) => value.into(),
            Self::I8(value) => value.into(),
            Self::U16(value) => value.into(),
            Self::I16(value) => value.into(),
            Self::U32(value) => value.into(),
            Self::I32(value) => value.into(),
            Self::U64(value) => value.into(),
            Self::I64(value) => value.into(),
            _ => return None,
        })
    }
}

impl Array {
    /// What kind of array it is, for messages: `array of f32`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::U8(_) => "array of u8",
            Self::I8(_) => "array of i8",
            Self::U16(_) => "array of u16",
            Self::I16(_) => "array of i16",
            Self::U32(_) => "array of u32",
            Self::I32(_) => "array of i32",
            Self::U64(_) => "array of u64",
            Self::I64(_) => "array of i64",
            Self::F32(_) => "array of f32",
            Self::F64(_) => "array of f64",
            Self::Bool(_) => "array of bool",
            Self::Strings(_) => "array of strings",
            Self::Arrays(_) => "array of arrays",
        }
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(values) => values.len(),
            Self::I8(values) => values.len(),
            Self::U16(values) => values.len(),
            Self::I16(values) => values.len(),
            Self::U32(values) => values.len(),
            Self::I32(values) => values.len(),
            Self::U64(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::Bool(values) => values.len(),
            Self::Strings(values) => values.len(),
            Self::Arrays(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as integers, whatever integer type the file chose; `None` for other kinds.
    pub fn integers(&self) -> Option<Box<dyn Iterator<Item = i128> + '_>> {
        Some(match self {
            Self::U8(values) => Box::new(values.iter().map(|&value| value.into())),
            Self::I8(values) => Box::new(values.iter().map(|&value| value.into())),
            Self::U16(values) => Box::new(values.iter().map(|&value| value.into())),
            Self::I16(values) => Box::new(values.iter().map(|&value| value.into())),
            Self::U32(values) => Box::new(values.iter().map(|&value| value.into())),
            Self::I32(values) => Box::new(values.iter().map(|&value| value.into())),
            Self::U64(values) => Box::new(values.iter().map(|&value| value.into())),
            Self::I64(values) => Box::new(values.iter().map(|&value| value.into())),
            _ => return None,
        })
    }
}

/// A list of strings held as one text.
///
/// ```
/// use ironloom_weights::Strings;
/// let words: Strings = ["iron", "", "loom"].into_iter().collect();
/// assert_eq!((words.len(), words.get(2), words.get(3)), (3, Some("loom"), None));
/// assert_eq!(words.iter().collect::<String>(), "ironloom");
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    /// Where each string ends in `text`; each is a character boundary and none is before the one before it.
    ends: Vec<usize>,
}

impl Strings {
    /// The pieces of `text` that end at `ends`. `None` when an end is out of order, past the text or inside a character, or
    /// when the last end isn't the text's.
    pub fn from_parts(text: String, ends: Vec<usize>) -> Option<Self> {
        let ordered = ends.first().is_none_or(|&end| text.is_char_boundary(end))
            && ends.windows(2).all(|pair| pair[0] <= pair[1] && text.is_char_boundary(pair[1]));
        (ordered && ends.last().copied().unwrap_or(0) == text.len()).then_some(Self { text, ends })
    }

    /// How many strings there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string numbered `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        self.text.get(start..end)
    }

    /// The strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }
}

impl<S: AsRef<str>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut list = Self::default();
        for string in strings {
            list.text.push_str(string.as_ref());
            list.ends.push(list.text.len());
        }
        list
    }
}

impl std::fmt::Debug for Strings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

macro_rules! value_from {
    ($($variant:ident $type:ty),*) => { $(
        impl From<$type> for Value {
            fn from(value: $type) -> Self { Self::$variant(value) }
        }
        impl From<Vec<$type>> for Value {
            fn from(values: Vec<$type>) -> Self { Self::Array(Array::$variant(values)) }
        }
    )* };
}
value_from!(U8 u8, I8 i8, U16 u16, I16 i16, U32 u32, I32 i32, U64 u64, I64 i64, F32 f32, F64 f64, Bool bool);

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::String(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::String(value)
    }
}

impl From<Strings> for Value {
    fn from(values: Strings) -> Self {
        Self::Array(Array::Strings(values))
    }
}

impl From<Array> for Value {
    fn from(array: Array) -> Self {
        Self::Array(array)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_refuse_ends_that_do_not_fit() {
        let text = || "aé".to_owned();
        assert!(Strings::from_parts(text(), vec![1, 3]).is_some());
        assert!(Strings::from_parts(text(), vec![2, 3]).is_none(), "inside a character");
        assert!(Strings::from_parts(text(), vec![3, 1]).is_none(), "out of order");
        assert!(Strings::from_parts(text(), vec![1, 4]).is_none(), "past the text");
        assert!(Strings::from_parts(text(), vec![1]).is_none(), "text left over");
        assert!(Strings::from_parts(String::new(), vec![]).is_some());
        assert!(Strings::from_parts(String::new(), vec![0, 0]).is_some());
    }

    #[test]
    fn integers_of_any_type_read_alike() {
        assert_eq!(Value::I8(-3).as_integer(), Some(-3));
        assert_eq!(Value::U64(u64::MAX).as_integer(), Some(i128::from(u64::MAX)));
        assert_eq!(Value::F32(1.0).as_integer(), None);
        let array = Array::I16(vec![-1, 7]);
        assert_eq!(array.integers().map(Iterator::collect::<Vec<_>>), Some(vec![-1, 7]));
        assert!(Array::Bool(vec![true]).integers().is_none());
    }
}
