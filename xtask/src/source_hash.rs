//! One hash over the sources that a record speaks of, so that a record older than its sources can be told.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// The SHA-256 of the Rust and CUDA sources in `folders` of `root`: of each file, in order, its path, its length and its bytes.
/// A folder that does not exist has no files.
pub(crate) fn hash_of(root: &Path, folders: &[&str]) -> Result<String> {
    let mut files = Vec::new();
    for folder in folders {
        collect(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut hash = Sha256::new();
    for file in files {
        let bytes = std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().replace('\\', "/");
        hash.update(format!("{name} {}\n", bytes.len()));
        hash.update(bytes);
    }
    Ok(format!("{:x}", hash.finalize()))
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path
            .extension()
            .is_some_and(|extension| ["rs", "cu", "cuh"].iter().any(|source| extension == *source))
        {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_contents_count_and_other_files_do_not() {
        let root = std::env::temp_dir().join(format!("ironloom-source-hash-{}", std::process::id()));
        std::fs::create_dir_all(root.join("a/inner")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(root.join(name), text).unwrap();
        let hash = || hash_of(&root, &["a", "missing"]).unwrap();
        write("a/inner/x.cu", "one");
        let first = hash();
        write("a/notes.md", "none");
        write("b.cu", "none");
        assert_eq!(hash(), first);
        write("a/inner/x.cu", "two");
        let second = hash();
        std::fs::rename(root.join("a/inner/x.cu"), root.join("a/x.cu")).unwrap();
        assert!(first != second && second != hash());
        std::fs::remove_dir_all(root).unwrap();
    }
}
