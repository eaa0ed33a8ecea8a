//! Fills rows with parts of documents: each into the fullest row that has room for it, longest first.
//!
//! "Best fit decreasing" needs at most 11/9 of the fewest rows possible, and with many short documents hardly any more
//! (Johnson, 1973). A part is never cut to fill a row.

use std::{collections::BTreeMap, ops::Range};

/// A part of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) document: usize,
    /// In tokens of the document.
    pub(super) tokens: Range<usize>,
}

/// Puts parts, none longer than a row, into rows.
pub(super) fn pack(mut parts: Vec<Part>, row_length: usize) -> Vec<Vec<Part>> {
    parts.sort_by_key(|part| std::cmp::Reverse(part.tokens.len()));
    let mut rows: Vec<Vec<Part>> = Vec::new();
    // Rows by the room they have left.
    let mut by_room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for part in parts {
        let length = part.tokens.len();
        let fitting = by_room.range(length..).next().map(|(&room, _)| room);
        let (row, room) = match fitting {
            Some(room) => {
                let rows_left = by_room.get_mut(&room);
                let row = rows_left.and_then(Vec::pop).unwrap_or_default();
                if by_room.get(&room).is_some_and(Vec::is_empty) {
                    by_room.remove(&room);
                }
                rows[row].push(part);
                (row, room - length)
            }
            None => {
                rows.push(vec![part]);
                (rows.len() - 1, row_length.saturating_sub(length))
            }
        };
        if room > 0 {
            by_room.entry(room).or_default().push(row);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(lengths: &[usize]) -> Vec<Part> {
        lengths.iter().enumerate().map(|(document, &length)| Part { document, tokens: 0..length }).collect()
    }

    fn lengths(rows: &[Vec<Part>]) -> Vec<Vec<usize>> {
        rows.iter().map(|row| row.iter().map(|part| part.tokens.len()).collect()).collect()
    }

    #[test]
    fn parts_go_where_they_fit_best() {
        let rows = pack(parts(&[3, 7, 5, 2, 3, 10]), 10);
        assert_eq!(lengths(&rows), [vec![10], vec![7, 3], vec![5, 3, 2]]);
        assert_eq!(pack(Vec::new(), 10), Vec::<Vec<Part>>::new());
    }

    #[test]
    fn every_part_once_no_row_too_long_and_rows_nearly_full() {
        let mut draws = ironloom_core::Philox::new(3, 0);
        let all = parts(&(0..1000).map(|_| 1 + (draws.next_u32() % 300) as usize).collect::<Vec<_>>());
        let total: usize = all.iter().map(|part| part.tokens.len()).sum();
        let rows = pack(all, 512);
        let mut documents: Vec<usize> = rows.iter().flatten().map(|part| part.document).collect();
        documents.sort_unstable();
        assert!(documents.into_iter().eq(0..1000));
        assert!(lengths(&rows).iter().all(|row| row.iter().sum::<usize>() <= 512));
        assert!(total as f64 / (rows.len() * 512) as f64 > 0.98, "{} rows for {total} tokens", rows.len());
    }
}
