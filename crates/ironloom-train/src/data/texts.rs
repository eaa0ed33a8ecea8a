//! Plain text: a file is a document, or several with a separator between them.
//!
//! The file is mapped, so that one larger than memory is read as well. White space around a document that a separator
//! cut out is left out, and so are documents of nothing else: a separator at the end of the file makes no empty document.

use std::path::Path;

use ironloom_core::MappedFile;

use super::{DataError, Place};
use crate::Result;

pub(super) fn read(
    path: &Path,
    separator: Option<&str>,
    each: &mut dyn FnMut(&str, &Place) -> Result<()>,
) -> Result<()> {
    let file = MappedFile::open(path).map_err(DataError::from)?;
    let bytes = file.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&file);
    let before = file.len() - bytes.len();
    let Some(separator) = separator else {
        let place = Place::file(path);
        return each(utf8(bytes, before, &place)?, &place);
    };
    if separator.is_empty() {
        return Err(DataError::EmptySeparator.into());
    }
    let (mut start, mut line) = (0, 1);
    while start < bytes.len() {
        let end = find(&bytes[start..], separator.as_bytes()).map_or(bytes.len(), |found| start + found);
        let part = &bytes[start..end];
        let text = part.trim_ascii();
        let lines_before = count_lines(&part[..part.len() - part.trim_ascii_start().len()]);
        let place = Place { path: path.to_owned(), line: Some(line + lines_before) };
        if !text.is_empty() {
            let offset = before + start + (part.len() - part.trim_ascii_start().len());
            each(utf8(text, offset, &place)?, &place)?;
        }
        line += count_lines(&bytes[start..(end + separator.len()).min(bytes.len())]);
        start = end + separator.len();
    }
    Ok(())
}

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

fn utf8<'a>(bytes: &'a [u8], before: usize, place: &Place) -> Result<&'a str> {
    std::str::from_utf8(bytes)
        .map_err(|error| DataError::Encoding { place: place.clone(), offset: before + error.valid_up_to() }.into())
}

fn count_lines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte == b'\n').count()
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    let (&first, rest) = wanted.split_first()?;
    let mut start = 0;
    loop {
        start += bytes[start..].iter().position(|&byte| byte == first)? + 1;
        if bytes[start..].starts_with(rest) {
            return Some(start - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(bytes: &[u8], separator: Option<&str>) -> Vec<(String, Option<usize>)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        std::fs::write(&path, bytes).unwrap();
        let mut found = Vec::new();
        read(&path, separator, &mut |text, place| {
            found.push((text.to_owned(), place.line));
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    fn separators_cut_and_leave_no_empty_documents() {
        let found = documents(b"one\n\n---\n\ntwo\nlines\n---\n  \n---\nlast---", Some("---"));
        let expected = [("one", 1), ("two\nlines", 5), ("last", 10)];
        assert_eq!(found, expected.map(|(text, line)| (text.to_owned(), Some(line))));
        assert_eq!(documents(b"aab", Some("ab")), [("a".to_owned(), Some(1))]);
        assert_eq!(documents(b" \n ", Some("---")), []);
    }

    #[test]
    fn a_whole_file_is_kept_as_it_is_but_for_its_mark() {
        assert_eq!(documents("\u{feff} é\n".as_bytes(), None), [(" é\n".to_owned(), None)]);
        assert_eq!(documents(b"", None), [(String::new(), None)]);
    }
}
