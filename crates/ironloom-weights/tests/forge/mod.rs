//! Makes model files byte by byte, right or wrong, for the tests: an own account of the formats, apart from the writers.
#![allow(dead_code, unreachable_pub)] // each test file uses its part

use ironloom_weights::{Checkpoint, Error, Result};

/// Numbers of GGUF value types.
pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
/// Numbers of GGUF tensor types.
pub const F32: u32 = 0;
pub const Q4_0: u32 = 2;

/// A GGUF file in parts.
#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    /// In place of the real counts of tensors and keys.
    pub counts: Option<(u64, u64)>,
    pub alignment: usize,
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
}

impl Gguf {
    pub fn new() -> Self {
        Self { version: 3, counts: None, alignment: 32, keys: vec![], tensors: vec![], data: vec![] }
    }

    pub fn key(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.push([string(name), kind.to_le_bytes().to_vec(), value.to_vec()].concat());
        self
    }

    /// A table entry; `dims` innermost first.
    pub fn entry(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let mut entry = [string(name), (dims.len() as u32).to_le_bytes().to_vec()].concat();
        dims.iter().for_each(|dim| entry.extend(dim.to_le_bytes()));
        entry.extend(kind.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        self.tensors.push(entry);
        self
    }

    /// Zeros in the data section.
    pub fn data(mut self, bytes: usize) -> Self {
        self.data.resize(bytes, 0);
        self
    }

    pub fn build(&self) -> Vec<u8> {
        let (tensors, keys) = self.counts.unwrap_or((self.tensors.len() as u64, self.keys.len() as u64));
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(keys.to_le_bytes());
        bytes.extend(self.keys.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend(&self.data);
        bytes
    }
}

/// A string as GGUF stores it.
pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A safetensors file of this header and data.
pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Opens a file of these bytes. (Its map outlives its name.)
pub fn open_bytes(name: &str, bytes: &[u8]) -> Result<Checkpoint> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).expect("a temporary file");
    ironloom_weights::open(&path)
}

/// The error that a file of these bytes gives; its message must name the file.
#[track_caller]
pub fn refusal(name: &str, bytes: &[u8]) -> Error {
    let error = open_bytes(name, bytes).expect_err("the file must be refused");
    assert!(error.to_string().contains(name), "the file isn't named: {error}");
    error
}

/// Checks that a message has all of these parts.
#[track_caller]
pub fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}
