//! Lines per crate: code, tests, documentation, and what a change added.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

use super::{
    SourceFile, is_test_file,
    rust_lines::{LineKind, kinds},
};
use crate::{
    table::{Table, grouped},
    workspace::{self, Package},
};

/// The lines of one crate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Count {
    name: String,
    files: u64,
    code: u64,
    tests: u64,
    documentation: u64,
    /// Lines added less lines removed since the commit compared with.
    change: i64,
}

/// The lines of each crate, of what belongs to none, and of all together.
pub(super) fn per_crate(packages: &[Package], sources: &[SourceFile], since: Option<&str>) -> Result<Vec<Count>> {
    let mut counts: Vec<Count> =
        packages.iter().map(|package| Count { name: package.name.clone(), ..Count::default() }).collect();
    counts.push(Count { name: "elsewhere".to_owned(), ..Count::default() });
    for source in sources {
        let Some(text) = source.text.as_deref().filter(|_| is_counted(&source.path)) else { continue };
        counts[owner(packages, &source.path)].add(&source.path, text);
    }
    for (path, change) in changes(since.unwrap_or("HEAD"))? {
        if is_counted(&path) {
            counts[owner(packages, &path)].change += change;
        }
    }
    let sum = counts.iter().fold(Count { name: "all".to_owned(), ..Count::default() }, |sum, count| Count {
        files: sum.files + count.files,
        code: sum.code + count.code,
        tests: sum.tests + count.tests,
        documentation: sum.documentation + count.documentation,
        change: sum.change + count.change,
        ..sum
    });
    counts.push(sum);
    Ok(counts)
}

/// The counts for a terminal.
pub(super) fn table(counts: &[Count]) -> Table {
    let mut table = Table::new(&["crate", "files", "code", "tests", "docs", "change"]);
    for count in counts {
        let numbers = [count.files, count.code, count.tests, count.documentation].map(grouped);
        let [files, code, tests, documentation] = numbers;
        let change = if count.change == 0 { String::new() } else { format!("{:+}", count.change) };
        table.row([count.name.clone(), files, code, tests, documentation, change]);
    }
    table
}

impl Count {
    fn add(&mut self, path: &Path, text: &str) {
        self.files += 1;
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        if is_test_file(path) {
            self.tests += lines.count() as u64;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            for kind in kinds(text) {
                match kind {
                    LineKind::Blank => {}
                    LineKind::Code => self.code += 1,
                    LineKind::Documentation => self.documentation += 1,
                    LineKind::Test => self.tests += 1,
                }
            }
        } else {
            for line in lines {
                let comment = line.trim_start().starts_with(['#', '/']);
                *(if comment { &mut self.documentation } else { &mut self.code }) += 1;
            }
        }
    }
}

/// Programs and kernels; not documents or configuration.
fn is_counted(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["rs", "py", "cu", "cuh"].iter().any(|counted| extension == *counted))
}

/// Which crate a file is of: the one whose folder it is in, for a regression test the one it tests; else none, the last row.
fn owner(packages: &[Package], path: &Path) -> usize {
    let tested =
        path.strip_prefix("tests/regressions").ok().and_then(Path::file_stem).map(|stem| stem.to_string_lossy());
    let is_owner = |package: &Package| match &tested {
        Some(tested) => package.name.strip_prefix("ironloom-").unwrap_or("cli") == tested,
        None => path.starts_with(package.folder()),
    };
    packages.iter().position(is_owner).unwrap_or(packages.len())
}

/// Lines added less lines removed, per file, between a commit and the working tree.
fn changes(since: &str) -> Result<Vec<(PathBuf, i64)>> {
    let printed = workspace::git(&["diff", "--numstat", "--no-renames", since])?;
    Ok(printed.lines().filter_map(change).collect())
}

/// One line of `git diff --numstat`; binary files have no numbers.
fn change(line: &str) -> Option<(PathBuf, i64)> {
    let mut fields = line.splitn(3, '\t');
    let (added, removed, path) = (fields.next()?, fields.next()?, fields.next()?);
    Some((path.into(), added.parse::<i64>().ok()? - removed.parse::<i64>().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_tests_and_documentation_are_told_apart() {
        let mut count = Count::default();
        count.add(Path::new("a/src/lib.rs"), "//! Head.\n\nfn a() {}\n#[cfg(test)]\nmod tests {\n}\n");
        count.add(Path::new("a/tests/b.rs"), "//! Head.\nfn b() {}\n");
        count.add(Path::new("a/c.py"), "\"\"\"Head.\"\"\"\n# why\nprint()\n");
        assert_eq!((count.files, count.code, count.tests, count.documentation), (3, 3, 5, 2));
    }

    #[test]
    fn changes_are_read_from_git() {
        assert_eq!(change("12\t3\txtask/src/main.rs"), Some(("xtask/src/main.rs".into(), 9)));
        assert_eq!(change("-\t-\tdocs/picture.png"), None);
    }

    #[test]
    fn a_regression_test_counts_for_the_crate_it_tests() {
        let packages = workspace::packages().unwrap();
        let name = |path: &str| packages.get(owner(&packages, Path::new(path))).map(|package| package.name.as_str());
        assert_eq!(name("tests/regressions/weights.rs"), Some("ironloom-weights"));
        assert_eq!(name("crates/ironloom-core/src/lib.rs"), Some("ironloom-core"));
        assert_eq!(name("tests/golden/make.py"), None);
    }
}
