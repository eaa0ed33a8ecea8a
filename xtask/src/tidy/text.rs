//! Rules on lines: no paths of one person's machine, no left-over marks and macros, a reason on each ignored test.

use std::path::Path;

use super::{
    Finding, is_test_file,
    rust_lines::{LineKind, kinds},
};

/// Folders that exist on one machine only. They are put together here so that this file passes its own rule.
const MACHINE_FOLDERS: [&str; 4] = ["work", "root", "home", "tmp"];
/// Of those, the ones that a test may use for a path it makes up.
const FOLDERS_TESTS_MAY_NAME: [&str; 2] = ["home", "tmp"];
/// Marks of unfinished work, as whole words.
const MARKS: [&str; 4] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("HA", "CK")];
/// What a merge leaves behind, at the start of a line.
const CONFLICTS: [&str; 2] = ["<<<<<<< ", ">>>>>>> "];
/// Macros of unfinished or watched code.
const MACROS: [&str; 3] = [concat!("to", "do!"), concat!("unimple", "mented!"), concat!("db", "g!")];

/// The findings of every line.
pub(super) fn check(path: &Path, text: &str) -> Vec<Finding> {
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    let all_test = is_test_file(path);
    let kinds = if is_rust { kinds(text) } else { Vec::new() };
    let mut findings = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let in_test = is_rust && (all_test || kinds.get(i) == Some(&LineKind::Test));
        let mut found = |rule, message| findings.push(Finding::error(rule, path, message).at(i + 1));
        for folder in MACHINE_FOLDERS {
            if names_folder(line, folder) && !(in_test && FOLDERS_TESTS_MAY_NAME.contains(&folder)) {
                found("absolute-path", format!("names a folder of one machine, /{folder}"));
            }
        }
        if let Some(mark) = MARKS.into_iter().find(|mark| has_word(line, mark)) {
            found("left-over", format!("`{mark}` marks unfinished work: do it, or file it"));
        }
        if CONFLICTS.iter().any(|conflict| line.starts_with(conflict)) {
            found("left-over", "a merge conflict".to_owned());
        }
        if let Some(name) = MACROS.into_iter().find(|name| is_rust && calls_macro(line, name)) {
            found("left-over", format!("`{name}` does not belong in finished code"));
        }
        if is_rust && line.trim() == concat!("#[ig", "nore]") {
            found("ignored-test", "an ignored test says why: `#[ignore = \"reason\"]`".to_owned());
        }
    }
    findings
}

/// Whether the line names `/folder` at the start of an absolute path.
fn names_folder(line: &str, folder: &str) -> bool {
    let path = format!("/{folder}");
    // After one of these, `/folder` is the middle of a longer path, an address or a variable's tail.
    let continues = |before: char| before.is_alphanumeric() || "._-/~$}>)*".contains(before);
    let is_part = |after: char| after.is_alphanumeric() || "_-.".contains(after);
    line.match_indices(&path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + path.len()..].chars().next();
        !before.is_some_and(continues) && !after.is_some_and(is_part)
    })
}

fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_part) && !after.is_some_and(is_part)
    })
}

fn calls_macro(line: &str, name: &str) -> bool {
    line.match_indices(name).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + name.len()..].chars().next();
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_') && after.is_some_and(|c| "([{".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(path: &str, text: &str) -> Vec<&'static str> {
        check(Path::new(path), text).iter().map(|found| found.rule).collect()
    }

    #[test]
    fn paths_of_one_machine() {
        let path = |folder| format!("let x = \"/{folder}/x\";\n");
        for folder in MACHINE_FOLDERS {
            assert_eq!(rules("a/src/lib.rs", &path(folder)), ["absolute-path"], "{folder}");
        }
        assert_eq!(rules("a.md", "put it in /tmp\n"), ["absolute-path"]);
        for fine in
            ["https://example.org/home/x", "the /rooted tree", "docs/work/plan", "~/tmp", "${A}/tmp", "/workspace"]
        {
            assert!(rules("a.md", fine).is_empty(), "{fine}");
        }
    }

    #[test]
    fn tests_may_make_up_paths_but_not_name_the_machine() {
        let inside = |folder: &str| format!("#[cfg(test)]\nmod tests {{\n    const A: &str = \"/{folder}/x\";\n}}\n");
        assert!(rules("a/src/lib.rs", &inside("tmp")).is_empty());
        assert_eq!(rules("a/src/lib.rs", &inside("work")), ["absolute-path"]);
        assert!(rules("a/tests/b.rs", "const A: &str = \"/home/x\";\n").is_empty());
        assert_eq!(rules("tests/golden/a.py", "open(\"/tmp/x\")\n"), ["absolute-path"]);
    }

    #[test]
    fn left_over_marks_and_macros() {
        for mark in MARKS {
            assert_eq!(rules("a.toml", &format!("# {mark}: later\n")), ["left-over"], "{mark}");
            assert!(rules("a.toml", &format!("# mktemp {mark}{mark}\n")).is_empty(), "{mark}");
        }
        for name in MACROS {
            assert_eq!(rules("a.rs", &format!("    {name}(x)\n")), ["left-over"], "{name}");
            assert!(rules("a.rs", &format!("    my_{name}(x)\n")).is_empty(), "{name}");
        }
        assert_eq!(rules("a.md", &format!("{}HEAD\n", CONFLICTS[0])), ["left-over"]);
    }

    #[test]
    fn an_ignored_test_has_a_reason() {
        assert_eq!(rules("a/tests/b.rs", concat!("#[ig", "nore]\n")), ["ignored-test"]);
        assert!(rules("a/tests/b.rs", "#[ignore = \"takes an hour\"]\n").is_empty());
    }
}
