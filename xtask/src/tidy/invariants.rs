//! Every numbered invariant of `docs/ARCHITECTURE.md` names the tests that hold it, and those tests exist.
//!
//! The form, anywhere below a heading with the word "Invariants" and before the next heading of its level or higher:
//!
//! ```text
//! 3. **A row's result does not depend on the rows beside it.** … Test: `batch_rows_are_independent`, `cargo xtask tidy`.
//! ```

use std::{collections::HashSet, path::Path};

use super::{Finding, SourceFile};

const DOCUMENT: &str = "docs/ARCHITECTURE.md";

/// Each invariant without a test, or with one that does not exist.
pub(super) fn check(sources: &[SourceFile]) -> Vec<Finding> {
    let Some(document) = sources.iter().find(|source| source.path == Path::new(DOCUMENT)) else { return Vec::new() };
    let rust = sources.iter().filter(|source| source.path.extension().is_some_and(|extension| extension == "rs"));
    let tests: HashSet<&str> = rust.filter_map(|source| source.text.as_deref()).flat_map(test_names).collect();
    let invariants = invariants(document.text.as_deref().unwrap_or_default());
    let mut findings = Vec::new();
    if invariants.is_empty() {
        findings.push(Finding::error("invariant", Path::new(DOCUMENT), "has no numbered invariants"));
    }
    for invariant in invariants {
        let mut found =
            |message| findings.push(Finding::error("invariant", Path::new(DOCUMENT), message).at(invariant.line));
        let named = named_tests(&invariant.text);
        if named.is_empty() {
            found("an invariant names its test: \"Test: `name`\"".to_owned());
        }
        for name in named.iter().filter(|name| !exists(name, &tests)) {
            found(format!("there is no test `{name}`"));
        }
    }
    findings
}

struct Invariant {
    line: usize,
    text: String,
}

/// The items of the numbered lists under the invariants' heading.
fn invariants(document: &str) -> Vec<Invariant> {
    let mut invariants: Vec<Invariant> = Vec::new();
    let mut inside = None;
    let mut in_item = false;
    for (i, line) in document.lines().enumerate() {
        let level = line.chars().take_while(|&c| c == '#').count();
        if level > 0 {
            in_item = false;
            inside = match inside {
                Some(above) if level > above => inside,
                _ => line.to_lowercase().contains("invariants").then_some(level),
            };
        } else if inside.is_none() {
            continue;
        } else if starts_item(line) {
            invariants.push(Invariant { line: i + 1, text: line.to_owned() });
            in_item = true;
        } else if in_item && (line.starts_with(' ') || line.trim().is_empty()) {
            let Some(invariant) = invariants.last_mut() else { continue };
            invariant.text.push(' ');
            invariant.text.push_str(line.trim());
        } else {
            in_item = false;
        }
    }
    invariants
}

fn starts_item(line: &str) -> bool {
    let digits = line.chars().take_while(char::is_ascii_digit).count();
    digits > 0 && line[digits..].starts_with(". ")
}

/// What stands in back quotes behind `Test:` or `Tests:`.
fn named_tests(text: &str) -> Vec<&str> {
    let behind = ["Test:", "Tests:"].iter().filter_map(|word| text.split_once(word)).map(|(_, behind)| behind).next();
    behind.unwrap_or_default().split('`').skip(1).step_by(2).collect()
}

/// Whether it is a test function (a path's last part), or a command of this program.
fn exists(name: &str, tests: &HashSet<&str>) -> bool {
    match name.strip_prefix("cargo xtask ") {
        Some(command) => ["test", "tidy", "check-parity", "bench", "golden", "kernels"]
            .contains(&command.split(' ').next().unwrap_or_default()),
        None => tests.contains(name.rsplit("::").next().unwrap_or(name)),
    }
}

/// The functions of a Rust file that stand under a `#[test]`.
fn test_names(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut under_test = false;
    for line in text.lines().map(str::trim) {
        if line == "#[test]" {
            under_test = true;
        } else if let Some(signature) = line.strip_prefix("fn ").filter(|_| under_test) {
            names.extend(signature.split(['(', '<']).next());
            under_test = false;
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(document: &str) -> Vec<String> {
        let source = |path: &str, text: &str| SourceFile { path: path.into(), bytes: 0, text: Some(text.to_owned()) };
        let code = "#[test]\nfn holds() {}\nfn no_test() {}\n#[test]\n#[should_panic]\nfn holds_too() {}\n";
        let sources = [source(DOCUMENT, document), source("a.rs", code)];
        check(&sources).into_iter().map(|found| format!("{}: {}", found.line.unwrap_or(0), found.message)).collect()
    }

    #[test]
    fn named_tests_must_exist() {
        let good =
            "## Invariants\n\n1. One holds.\n   Test: `a::holds`.\n2. Two. Tests: `holds_too`, `cargo xtask tidy`.\n";
        assert!(findings(good).is_empty());
        assert_eq!(findings("## Invariants\n1. One. Test: `no_test`.\n"), ["2: there is no test `no_test`"]);
        assert_eq!(findings("# Invariants\n1. One `holds`.\n").len(), 1);
        assert_eq!(findings("# Other\n1. One.\n").len(), 1);
    }

    #[test]
    fn only_the_invariants_section_counts() {
        let text =
            "# Rooms\n1. Not one.\n## The invariants\ntext\n### Inner\n1. One. Test: `holds`.\n## After\n1. Not one.\n";
        assert!(findings(text).is_empty());
    }

    #[test]
    fn no_document_is_no_finding() {
        assert!(check(&[]).is_empty());
    }
}
