//! What each line of a Rust file is: code, documentation, test or blank.
//!
//! Files are formatted by rustfmt, so the item under a `#[cfg(test)]` ends at the first line that has its indentation and
//! starts with `}` (or, for an item without a body, with its `;`). No parser is needed.

/// What one line of a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineKind {
    Blank,
    Code,
    /// A comment of any kind.
    Documentation,
    Test,
}

/// The kind of each line of a Rust file that is not test code as a whole.
pub(super) fn kinds(text: &str) -> Vec<LineKind> {
    let lines: Vec<&str> = text.lines().collect();
    let mut kinds = Vec::with_capacity(lines.len());
    let mut i = 0;
    while i < lines.len() {
        if lines[i].trim() == "#[cfg(test)]" {
            let end = test_item_end(&lines, i);
            kinds.extend(lines[i..=end].iter().map(|line| kind_or(line, LineKind::Test)));
            i = end + 1;
        } else {
            let comment = lines[i].trim_start().starts_with("//");
            kinds.push(kind_or(lines[i], if comment { LineKind::Documentation } else { LineKind::Code }));
            i += 1;
        }
    }
    kinds
}

fn kind_or(line: &str, kind: LineKind) -> LineKind {
    if line.trim().is_empty() { LineKind::Blank } else { kind }
}

/// The last line of the item whose `#[cfg(test)]` is line `start`.
fn test_item_end(lines: &[&str], start: usize) -> usize {
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let depth = indentation(lines[start]);
    let ends = |line: &&str| {
        let text = line.trim_start();
        indentation(line) == depth && (text.starts_with('}') || text.ends_with(';') || text.ends_with("{}"))
    };
    lines[start + 1..].iter().position(ends).map_or(lines.len() - 1, |offset| start + 1 + offset)
}

#[cfg(test)]
mod tests {
    use super::{LineKind::*, *};

    #[test]
    fn test_modules_are_told_from_code() {
        let text = "//! Head.\n\nfn a() {}\n\n#[cfg(test)]\nmod tests {\n    fn b() {\n    }\n}\nfn c() {}\n";
        let expected = [Documentation, Blank, Code, Blank, Test, Test, Test, Test, Test, Code];
        assert_eq!(kinds(text), expected);
    }

    #[test]
    fn a_test_item_without_body_is_one_line() {
        assert_eq!(kinds("#[cfg(test)]\nmod tests;\nfn a() {}\n"), [Test, Test, Code]);
        assert_eq!(kinds("#[cfg(test)]"), [Test]);
    }
}
