//! Where the token ids of documents lie: three sections, in memory or in a mapped file.
//!
//! `ids` holds the ids of all documents one after another, little-endian in 2 or 4 bytes; `ends` where each document ends,
//! counted in tokens, in 8 bytes; `learned` a bit a token, lowest bit first, which is 1 where the token is to be learned. Without
//! it all are.

use std::ops::Range;

use ironloom_core::HostBuffer;

use super::{DataError, Document, Place};
use crate::Result;

/// How many bytes an id takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Two,
    Four,
}

impl Width {
    /// The smallest that holds every id of a vocabulary.
    pub(super) fn of_vocabulary(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::Two } else { Self::Four }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    pub(super) fn write(self, id: u32, out: &mut Vec<u8>) {
        out.extend_from_slice(&id.to_le_bytes()[..self.bytes()]);
    }
}

/// The token ids of documents.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) ids: HostBuffer,
    pub(super) width: Width,
    pub(super) ends: HostBuffer,
    pub(super) learned: Option<HostBuffer>,
    pub(super) vocab_size: usize,
    pub(super) largest_id: u32,
    /// Tells one tokenizer's vocabulary from another's; not known of files of plain ids.
    pub(super) vocabulary: Option<u64>,
}

impl Store {
    pub(super) fn documents(&self) -> usize {
        self.ends.len() / 8
    }

    pub(super) fn tokens(&self) -> usize {
        self.ids.len() / self.width.bytes()
    }

    /// Where a document ends; 0 for the one before the first.
    pub(super) fn end(&self, documents: usize) -> usize {
        let Some(before) = documents.checked_sub(1) else { return 0 };
        u64::from_le_bytes(array(&self.ends, before)) as usize
    }

    pub(super) fn id(&self, token: usize) -> u32 {
        match self.width {
            Width::Two => u32::from(u16::from_le_bytes(array(&self.ids, token))),
            Width::Four => u32::from_le_bytes(array(&self.ids, token)),
        }
    }

    pub(super) fn is_learned(&self, token: usize) -> bool {
        self.learned.as_ref().is_none_or(|bits| bits[token / 8] >> (token % 8) & 1 == 1)
    }

    /// How many tokens of a range are to be learned.
    pub(super) fn count_learned(&self, tokens: Range<usize>) -> usize {
        match &self.learned {
            None => tokens.len(),
            Some(_) => tokens.filter(|&token| self.is_learned(token)).count(),
        }
    }
}

fn array<const N: usize>(bytes: &[u8], index: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[index * N..][..N]);
    array
}

/// What is gathered of documents as they come, beside their ids.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) tokens: usize,
    pub(super) largest_id: u32,
    pub(super) ends: Vec<u8>,
    pub(super) learned: Option<Vec<u8>>,
}

impl Tally {
    /// Checks a document and counts it.
    pub(super) fn push(&mut self, document: &Document, place: &Place, vocab_size: usize) -> Result<()> {
        let Some(&largest) = document.ids.iter().max() else {
            return Err(DataError::EmptyDocument { place: place.clone() }.into());
        };
        if largest as usize >= vocab_size {
            return Err(DataError::IdOutOfRange { what: place.to_string(), id: largest, vocab_size }.into());
        }
        let start = self.tokens;
        self.tokens += document.ids.len();
        self.largest_id = self.largest_id.max(largest);
        self.ends.extend_from_slice(&(self.tokens as u64).to_le_bytes());
        if document.learned.is_some() && self.learned.is_none() {
            // Of the documents before, everything is learned.
            self.learned = Some(vec![u8::MAX; start.div_ceil(8)]);
        }
        if let Some(bits) = &mut self.learned {
            bits.resize(self.tokens.div_ceil(8), 0);
            for (offset, token) in (start..self.tokens).enumerate() {
                let bit = 1 << (token % 8);
                let is_learned = document.learned.as_ref().is_none_or(|learned| learned.get(offset) == Some(&true));
                bits[token / 8] = if is_learned { bits[token / 8] | bit } else { bits[token / 8] & !bit };
            }
        }
        Ok(())
    }
}

/// 64-bit FNV-1a, which tells contents apart where nobody means harm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fingerprint(pub(super) u64);

impl Fingerprint {
    pub(super) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
