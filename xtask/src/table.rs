//! Tables for a terminal: columns as wide as their widest cell, numbers to the right.

/// Rows under a heading, printed with aligned columns.
#[derive(Default)]
pub(crate) struct Table {
    heading: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these column names.
    pub(crate) fn new(heading: &[&str]) -> Self {
        Self { heading: heading.iter().map(|&name| name.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row; missing cells stay empty.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.heading.len();
        let cell = |row: &[String], i: usize| row.get(i).cloned().unwrap_or_default();
        let width = |i| self.rows.iter().chain([&self.heading]).map(|row| cell(row, i).chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|i| width(i).unwrap_or(0)).collect();
        let right: Vec<bool> = (0..columns).map(|i| self.rows.iter().all(|row| is_number(&cell(row, i)))).collect();
        let rule = [widths.iter().map(|&width| "-".repeat(width)).collect::<Vec<_>>()];
        for row in [&self.heading].into_iter().chain(&rule).chain(&self.rows) {
            let cells = (0..columns).map(|i| {
                let (text, width) = (cell(row, i), widths[i]);
                if right[i] { format!("{text:>width$}") } else { format!("{text:<width$}") }
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Whether a cell belongs at the right: a number with what may stand around it, or nothing.
fn is_number(text: &str) -> bool {
    let first = text.trim_start_matches(['+', '-', '.']).chars().next();
    first.is_none_or(|first| first.is_ascii_digit())
}

/// `1234567` as `1,234,567`: as `ironloom_core::grouped`, which the build without the feature `engine` has not.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align() {
        let mut table = Table::new(&["name", "lines"]);
        table.row(["core".into(), "9".into()]);
        table.row(["a longer one".into(), "1,200".into()]);
        let lines: Vec<String> = table.to_string().lines().map(str::to_owned).collect();
        assert_eq!(lines, ["name          lines", "------------  -----", "core              9", "a longer one  1,200"]);
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!([0, 999, 1000, 98_362_432].map(grouped), ["0", "999", "1,000", "98,362,432"]);
    }
}
