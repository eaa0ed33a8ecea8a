//! `cargo xtask tidy`: the house rules that a tool can hold, and the lines of each crate.
//!
//! Every file git tracks (or would track) is read once; each rule is a function from a file's path and text to findings:
//! [`files`] (heads, lengths, sizes, names), [`text`] (paths of one machine, left-over marks), [`layering`] (which crate may use
//! which), [`invariants`] (each promise of the architecture names a test that exists). Errors fail the command, warnings are
//! said. [`count`] makes the table.

mod count;
mod files;
mod invariants;
mod layering;
mod rust_lines;
mod text;

use std::{
    fmt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use crate::{check_parity, kernels, workspace};

/// What `tidy` takes.
#[derive(clap::Args, Default)]
pub(crate) struct Arguments {
    /// Print findings and counts as one JSON object
    #[arg(long)]
    json: bool,
    /// Count what changed since this commit
    #[arg(long, value_name = "COMMIT")]
    since: Option<String>,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    Warning,
    Error,
}

/// One breach of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    severity: Severity,
    rule: &'static str,
    file: PathBuf,
    /// Counted from 1.
    line: Option<usize>,
    message: String,
}

impl Finding {
    fn error(rule: &'static str, file: &Path, message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, rule, file: file.to_owned(), line: None, message: message.into() }
    }

    fn warning(rule: &'static str, file: &Path, message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(rule, file, message) }
    }

    fn at(self, line: usize) -> Self {
        Self { line: Some(line), ..self }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = if self.severity == Severity::Error { "error" } else { "warning" };
        write!(f, "{severity}[{}] {}", self.rule, self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": {}", self.message)
    }
}

/// A file of the workspace with its text, where it is text that people write.
struct SourceFile {
    /// Relative to the top of the workspace.
    path: PathBuf,
    bytes: u64,
    text: Option<String>,
}

/// Checks everything; fails when a rule is broken.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let sources = read_sources()?;
    let packages = workspace::packages()?;

    let mut findings: Vec<Finding> = sources.iter().flat_map(check_file).collect();
    findings.extend(layering::check(&packages));
    findings.extend(files::denies_missing_docs(&packages, &sources));
    findings.extend(invariants::check(&sources));
    findings.extend(
        check_parity::stale_records(workspace::root())
            .into_iter()
            .map(|stale| Finding::warning("parity-record", &stale.file, stale.message)),
    );
    findings.extend(
        kernels::stale_record(workspace::root())
            .map(|message| Finding::warning("kernel-record", Path::new(kernels::RECORD), message)),
    );
    let counts = count::per_crate(&packages, &sources, arguments.since.as_deref())?;
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();

    if arguments.json {
        let report = serde_json::json!({"findings": findings, "errors": errors, "crates": counts});
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        findings.iter().for_each(|finding| println!("{finding}"));
        println!("{}", count::table(&counts));
        println!("{} files, {errors} errors, {} warnings", sources.len(), findings.len() - errors);
    }
    if errors > 0 {
        bail!("{errors} house rules are broken");
    }
    Ok(())
}

/// The rules that look at one file alone.
fn check_file(source: &SourceFile) -> Vec<Finding> {
    let mut findings = files::check_name_and_size(&source.path, source.bytes);
    if let Some(text) = &source.text {
        findings.extend(files::check_head(&source.path, text));
        findings.extend(files::check_length(&source.path, text));
        findings.extend(text::check(&source.path, text));
    }
    findings
}

fn read_sources() -> Result<Vec<SourceFile>> {
    let read = |path: PathBuf| {
        let place = workspace::root().join(&path);
        let bytes = place.metadata().with_context(|| format!("cannot read {}", path.display()))?.len();
        let text = match files::is_written_by_people(&path) {
            true => Some(std::fs::read_to_string(&place).with_context(|| format!("cannot read {}", path.display()))?),
            false => None,
        };
        Ok(SourceFile { path, bytes, text })
    };
    workspace::files()?.into_iter().map(read).collect()
}

/// Whether a file is test code as a whole.
fn is_test_file(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "tests") || path.file_stem().is_some_and(|stem| stem == "tests")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_read_like_a_compiler_s() {
        let finding = Finding::error("length", Path::new("a/b.rs"), "801 lines").at(3);
        assert_eq!(finding.to_string(), "error[length] a/b.rs:3: 801 lines");
    }

    #[test]
    fn a_file_that_breaks_rules_is_found_out() {
        let text = format!("fn main() {{\n    {}!();\n}}\n", concat!("to", "do"));
        let source = SourceFile { path: "crates/a/src/utils.rs".into(), bytes: 5_000_000, text: Some(text) };
        let mut rules: Vec<_> = check_file(&source).iter().map(|finding| finding.rule).collect();
        rules.sort();
        assert_eq!(rules, ["head", "left-over", "name", "size"]);
    }
}
