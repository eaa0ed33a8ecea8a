//! Parses the JSON of a safetensors header, and of an index of shards, into lists.
//!
//! The JSON is read as a stream into the lists that are needed, without a tree of values between: memory grows with the
//! entries really found. Names that come twice are kept twice, for the caller to refuse.

use std::fmt;

use ironloom_core::Shape;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::METADATA_NAME;

/// A safetensors header.
#[derive(Default)]
pub(super) struct Header {
    pub(super) metadata: Vec<(String, String)>,
    pub(super) tensors: Vec<(String, Entry)>,
}

/// What a header says of one tensor.
pub(super) struct Entry {
    pub(super) dtype: String,
    dims: [u64; Shape::MAX_RANK],
    /// How many dimensions there are; those past [`Shape::MAX_RANK`] are counted only.
    pub(super) rank: usize,
    /// Start and end in the data.
    pub(super) data_offsets: [u64; 2],
}

impl Entry {
    /// The dimensions that fit, outermost first.
    pub(super) fn dims(&self) -> &[u64] {
        &self.dims[..self.rank.min(Shape::MAX_RANK)]
    }
}

/// The `weight_map` of an index: names of tensors with the number of their file, and the files' names.
#[derive(Default)]
pub(super) struct ShardIndex {
    pub(super) tensors: Vec<(String, u32)>,
    pub(super) files: Vec<String>,
}

pub(super) fn parse_header(json: &[u8]) -> serde_json::Result<Header> {
    serde_json::from_slice(json)
}

pub(super) fn parse_index(json: &[u8]) -> serde_json::Result<ShardIndex> {
    serde_json::from_slice(json)
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with a tensor for each name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header::default();
                let mut metadata_seen = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA_NAME {
                        if std::mem::replace(&mut metadata_seen, true) {
                            return Err(A::Error::custom(format_args!("{METADATA_NAME} is there twice")));
                        }
                        header.metadata = map
                            .next_value_seed(Pairs)
                            .map_err(|error| A::Error::custom(format_args!("{METADATA_NAME}: {error}")))?;
                        continue;
                    }
                    let entry = map
                        .next_value::<Entry>()
                        .map_err(|error| A::Error::custom(format_args!("tensor {name:?}: {error}")))?;
                    header.tensors.push((name, entry));
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// An object of strings, in order and with repeated keys kept.
struct Pairs;

impl<'de> DeserializeSeed<'de> for Pairs {
    type Value = Vec<(String, String)>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Pairs {
    type Value = Vec<(String, String)>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(pairs)
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            dtype: String,
            shape: Dims,
            data_offsets: [u64; 2],
        }
        let Fields { dtype, shape: Dims { dims, rank }, data_offsets } = Fields::deserialize(deserializer)?;
        Ok(Self { dtype, dims, rank, data_offsets })
    }
}

/// Dimensions in a fixed place, so that a list of millions of them takes no memory.
struct Dims {
    dims: [u64; Shape::MAX_RANK],
    rank: usize,
}

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DimsVisitor;
        impl<'de> Visitor<'de> for DimsVisitor {
            type Value = Dims;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Dims, A::Error> {
                let mut shape = Dims { dims: [0; Shape::MAX_RANK], rank: 0 };
                while let Some(dim) = list.next_element()? {
                    if let Some(place) = shape.dims.get_mut(shape.rank) {
                        *place = dim;
                    }
                    shape.rank += 1;
                }
                Ok(shape)
            }
        }
        deserializer.deserialize_seq(DimsVisitor)
    }
}

impl<'de> Deserialize<'de> for ShardIndex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IndexVisitor;
        impl<'de> Visitor<'de> for IndexVisitor {
            type Value = ShardIndex;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with \"weight_map\"")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ShardIndex, A::Error> {
                let mut index = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key != "weight_map" {
                        map.next_value::<IgnoredAny>()?;
                    } else if index.is_some() {
                        return Err(A::Error::duplicate_field("weight_map"));
                    } else {
                        index = Some(map.next_value_seed(WeightMap)?);
                    }
                }
                index.ok_or_else(|| A::Error::missing_field("weight_map"))
            }
        }
        deserializer.deserialize_map(IndexVisitor)
    }
}

struct WeightMap;

impl<'de> DeserializeSeed<'de> for WeightMap {
    type Value = ShardIndex;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<ShardIndex, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap {
    type Value = ShardIndex;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of file names")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ShardIndex, A::Error> {
        let mut index = ShardIndex::default();
        let mut numbers = std::collections::HashMap::<String, u32>::new();
        while let Some((tensor, file)) = map.next_entry::<String, String>()? {
            let number = match numbers.get(&file) {
                Some(&number) => number,
                None => {
                    let number = u32::try_from(index.files.len()).map_err(A::Error::custom)?;
                    index.files.push(file.clone());
                    numbers.insert(file, number);
                    number
                }
            };
            index.tensors.push((tensor, number));
        }
        Ok(index)
    }
}
