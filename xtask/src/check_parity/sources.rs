//! The hash of the sources that parity speaks of, and the records that speak of others.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Deserialize;

use crate::source_hash::hash_of;

/// The folders whose Rust and CUDA sources the results depend on.
const OPERATION_SOURCES: [&str; 4] =
    ["crates/ironloom-quant/src", "crates/ironloom-tensor/src", "crates/ironloom-nn/src", "kernels"];

/// A record that was made on other sources than those here.
pub(crate) struct Stale {
    /// The record, relative to the top of the workspace.
    pub(crate) file: PathBuf,
    /// What is wrong with it.
    pub(crate) message: String,
}

/// What is read of a record.
#[derive(Deserialize)]
struct Record {
    commit: String,
    failed: usize,
    sources: String,
}

/// Every parity record that does not speak of the sources below `root`.
pub(crate) fn stale_records(root: &Path) -> Vec<Stale> {
    let Ok(sources) = hash_of_sources(root) else { return Vec::new() };
    let devices = std::fs::read_dir(root.join("benches/records")).into_iter().flatten().flatten();
    let mut stale = Vec::new();
    for path in devices.map(|device| device.path().join("parity.json")).filter(|path| path.exists()) {
        let file = path.strip_prefix(root).unwrap_or(&path).to_owned();
        let record = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Record>(&bytes).ok());
        let message = match record {
            Some(record) if record.sources == sources && record.failed == 0 => continue,
            Some(record) if record.failed > 0 => format!("{} of its cases failed", record.failed),
            Some(record) => format!("is of other sources (commit {}): run check-parity --record", record.commit),
            None => "cannot be read: run check-parity --record".to_owned(),
        };
        stale.push(Stale { file, message });
    }
    stale
}

/// The hash of the operations' sources.
pub(super) fn hash_of_sources(root: &Path) -> Result<String> {
    hash_of(root, &OPERATION_SOURCES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_stale_when_a_source_has_changed() {
        let root = std::env::temp_dir().join(format!("ironloom-parity-{}", std::process::id()));
        let source = root.join("crates/ironloom-quant/src/lib.rs");
        std::fs::create_dir_all(source.parent().unwrap()).unwrap();
        std::fs::create_dir_all(root.join("benches/records/cpu")).unwrap();
        std::fs::write(&source, "fn a() {}").unwrap();
        let record = serde_json::json!({
            "commit": "abc", "failed": 0, "sources": hash_of_sources(&root).unwrap(),
        });
        let path = root.join("benches/records/cpu/parity.json");
        std::fs::write(&path, record.to_string()).unwrap();
        assert!(stale_records(&root).is_empty());
        std::fs::write(&source, "fn b() {}").unwrap();
        let stale = stale_records(&root);
        assert_eq!((stale.len(), stale[0].file.as_path()), (1, Path::new("benches/records/cpu/parity.json")));
        std::fs::remove_dir_all(root).unwrap();
    }
}
