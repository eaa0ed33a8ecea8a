//! Rules on files as a whole: each has a head, a bearable length and size, and a name that says something.

use std::path::Path;

use super::{Finding, SourceFile};
use crate::{table::grouped, workspace::Package};

const LONG: usize = 400;
const TOO_LONG: usize = 800;
const LARGEST: u64 = 1 << 20;
/// Golden tensors have a bound of their own: they are many.
const LARGEST_GOLDEN: u64 = 1_000_000;
/// Names that say nothing of what is inside.
const EMPTY_NAMES: [&str; 6] = ["utils", "util", "helpers", "helper", "common", "misc"];

/// Whether the rules on text apply: source, scripts, documents and configuration, not data.
pub(super) fn is_written_by_people(path: &Path) -> bool {
    let extensions = ["rs", "py", "sh", "cu", "cuh", "toml", "md", "yml", "yaml"];
    extension(path).is_some_and(|extension| extensions.contains(&extension)) || is_shell(path)
}

/// A `.rs` file starts with `//!`, a script in Python with a docstring, one in shell with a comment, CUDA with `//`.
pub(super) fn check_head(path: &Path, text: &str) -> Option<Finding> {
    // Lines that must stand above a head: the interpreter, and blank ones.
    let head = text.lines().find(|line| !line.trim().is_empty() && !line.starts_with("#!/"));
    let head = head.unwrap_or_default();
    let (good, wanted) = match extension(path) {
        Some("rs") => (head.starts_with("//!"), "`//!` lines"),
        Some("py") => (head.starts_with("\"\"\"") || head.starts_with("r\"\"\""), "a docstring"),
        Some("cu" | "cuh") => (head.starts_with("//"), "`//` lines"),
        _ if is_shell(path) => (head.starts_with('#'), "a comment"),
        _ => return None,
    };
    (!good).then(|| Finding::error("head", path, format!("starts without {wanted} that say what it does")).at(1))
}

/// A file past 400 lines is warned about; past 800 it is two files.
pub(super) fn check_length(path: &Path, text: &str) -> Option<Finding> {
    let is_code = is_shell(path) || matches!(extension(path), Some("rs" | "py" | "cu" | "cuh"));
    let lines = text.lines().count();
    let message = format!("{lines} lines");
    if !is_code || lines <= LONG {
        None
    } else if lines <= TOO_LONG {
        Some(Finding::warning("length", path, message))
    } else {
        Some(Finding::error("length", path, message + ", and 800 is the most: it is two things"))
    }
}

/// A file is at most 1 MiB (golden data 1 MB), and its name says something.
pub(super) fn check_name_and_size(path: &Path, bytes: u64) -> Vec<Finding> {
    let mut findings = Vec::new();
    let limit = if path.starts_with("tests/golden") { LARGEST_GOLDEN } else { LARGEST };
    if bytes > limit {
        let message = format!("{} bytes, and {} is the most", grouped(bytes), grouped(limit));
        findings.push(Finding::error("size", path, message));
    }
    let names = path.components().map(|part| part.as_os_str().to_string_lossy());
    let stems = names.map(|name| name.split('.').next().unwrap_or_default().to_owned());
    if let Some(empty) = stems.into_iter().find(|stem| EMPTY_NAMES.contains(&stem.as_str())) {
        findings.push(Finding::error("name", path, format!("`{empty}` says nothing of what is inside")));
    }
    findings
}

/// Every library that others may use documents all its public items.
pub(super) fn denies_missing_docs(packages: &[Package], sources: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in packages.iter().filter(|package| package.is_published()) {
        for target in package.targets.iter().filter(|target| target.kind.iter().any(|kind| kind == "lib")) {
            let source = sources.iter().find(|source| target.src_path.ends_with(&source.path));
            let text = source.and_then(|source| source.text.as_deref()).unwrap_or_default();
            if !text.lines().any(|line| line.trim() == "#![deny(missing_docs)]") {
                let path = source.map_or(target.src_path.as_path(), |source| &source.path);
                findings.push(Finding::error("missing-docs", path, "has no `#![deny(missing_docs)]`"));
            }
        }
    }
    findings
}

fn extension(path: &Path) -> Option<&str> {
    path.extension().and_then(|extension| extension.to_str())
}

/// A shell script, by its name: the repository's continuous integration starts one without a suffix.
fn is_shell(path: &Path) -> bool {
    extension(path) == Some("sh") || path.starts_with(".ci")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(path: &str, text: &str) -> bool {
        check_head(Path::new(path), text).is_none()
    }

    #[test]
    fn heads_by_language() {
        assert!(head("a.rs", "//! What it does.\n"));
        assert!(!head("a.rs", "// Not a head.\n") && !head("a.rs", "use std;\n") && !head("a.rs", ""));
        assert!(head("a.py", "#!/usr/bin/env python3\n\"\"\"Does it.\"\"\"\n") && !head("a.py", "import os\n"));
        assert!(head(".ci/run", "#!/usr/bin/env bash\n# Runs it.\n") && !head("a.sh", "#!/bin/sh\nset -e\n"));
        assert!(head("a.cu", "// Kernel.\n") && head("data.json", "{}"));
    }

    #[test]
    fn lengths() {
        let severity = |lines: usize| check_length(Path::new("a.rs"), &"x\n".repeat(lines)).map(|found| found.severity);
        assert_eq!(severity(400), None);
        assert_eq!(severity(401), Some(super::super::Severity::Warning));
        assert_eq!(severity(801), Some(super::super::Severity::Error));
        assert!(check_length(Path::new("a.md"), &"x\n".repeat(2000)).is_none());
    }

    #[test]
    fn names_and_sizes() {
        let rules = |path: &str, bytes| {
            check_name_and_size(Path::new(path), bytes).iter().map(|found| found.rule).collect::<Vec<_>>()
        };
        assert!(rules("crates/a/src/rmsnorm.rs", 10).is_empty());
        assert_eq!(rules("crates/a/src/utils.rs", 10), ["name"]);
        assert_eq!(rules("crates/common/src/a.rs", 10), ["name"]);
        assert_eq!(rules("tests/golden/x.bin", 1_000_001), ["size"]);
        assert!(rules("docs/x.png", 1_000_001).is_empty());
    }
}
