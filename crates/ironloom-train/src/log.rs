//! The log of a run: one JSON object a line, each with the step it tells of.
//!
//! A line is written at once when its step is done. A run that goes on from a checkpoint first drops the lines of the steps that it will
//! do again, and a last line that an end of the process cut short.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

use ironloom_core::replace_file;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{Error, Result};

/// A log that is being written.
///
/// ```
/// use ironloom_train::log::{TrainingLog, entries};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("log.jsonl");
/// let mut log = TrainingLog::create(&path)?;
/// log.append(1, &serde_json::json!({"loss": 8.25}))?;
/// log.append(2, &serde_json::json!({"loss": 8.0}))?;
/// let mut log = TrainingLog::resume(&path, 1)?;
/// log.append(2, &serde_json::json!({"loss": 7.5}))?;
/// assert_eq!(std::fs::read_to_string(&path)?, "{\"step\":1,\"loss\":8.25}\n{\"step\":2,\"loss\":7.5}\n");
/// assert_eq!(entries(&path)?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TrainingLog {
    path: PathBuf,
    file: File,
}

impl TrainingLog {
    /// An empty log; one that was there is replaced.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::with_lines(path, b"")
    }

    /// The log of a run that goes on after `step`: later lines are dropped. Where there is no log, one is begun.
    ///
    /// # Errors
    /// The file can't be read or written; then it is as it was.
    pub fn resume(path: impl AsRef<Path>, step: u64) -> Result<Self> {
        let path = path.as_ref();
        let mut kept = Vec::new();
        for (line, entry) in lines(&read(path)?) {
            if step_of(&entry).is_some_and(|number| number <= step) {
                kept.extend_from_slice(line);
                kept.push(b'\n');
            }
        }
        Self::with_lines(path, &kept)
    }

    fn with_lines(path: &Path, lines: &[u8]) -> Result<Self> {
        let error = |source| Error::Write { path: path.to_owned(), source };
        replace_file(path, lines).map_err(error)?;
        let file = OpenOptions::new().append(true).open(path).map_err(error)?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Adds a line: `{"step": …}` with the fields of `fields`, which must be a structure or a map. Numbers that are not finite
    /// become null.
    ///
    /// # Errors
    /// The file can't be written, or `fields` is neither.
    pub fn append(&mut self, step: u64, fields: &impl Serialize) -> Result<()> {
        #[derive(Serialize)]
        struct Line<'a, T> {
            step: u64,
            #[serde(flatten)]
            fields: &'a T,
        }
        let error = |source| Error::Write { path: self.path.clone(), source };
        let mut line = serde_json::to_vec(&Line { step, fields }).map_err(|source| error(source.into()))?;
        line.push(b'\n');
        // In one piece, so that no reader sees half a line.
        self.file.write_all(&line).map_err(error)
    }

    /// Where the log is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// All lines of a log, with their steps. Lines that are not whole are passed over.
///
/// # Errors
/// The file can't be read.
pub fn entries(path: impl AsRef<Path>) -> Result<Vec<(u64, Map<String, Value>)>> {
    let bytes = read(path.as_ref())?;
    Ok(lines(&bytes).filter_map(|(_, entry)| Some((step_of(&entry)?, entry))).collect())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read.map_err(|source| Error::Read { path: path.to_owned(), source }),
    }
}

/// The whole lines that are JSON objects.
fn lines(bytes: &[u8]) -> impl Iterator<Item = (&[u8], Map<String, Value>)> {
    let lines = bytes.split_inclusive(|&byte| byte == b'\n').filter_map(|line| line.strip_suffix(b"\n"));
    lines.filter_map(|line| Some((line, serde_json::from_slice(line).ok()?)))
}

fn step_of(entry: &Map<String, Value>) -> Option<u64> {
    entry.get("step")?.as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_log_has_each_step_once_and_no_half_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let mut log = TrainingLog::resume(&path, 0).unwrap();
        for step in 1..=5 {
            log.append(step, &serde_json::json!({"loss": 10.0 - step as f64})).unwrap();
        }
        // A kill in the middle of a line, even of one of a step that is kept.
        log.file.write_all(b"{\"step\":3,\"lo").unwrap();
        let mut log = TrainingLog::resume(&path, 3).unwrap();
        log.append(4, &serde_json::json!({"loss": f64::NAN, "note": "again\n"})).unwrap();
        let found = entries(&path).unwrap();
        assert_eq!(found.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert!(found[3].1["loss"].is_null());
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 4);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_line_has_its_step_first_and_must_have_fields() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let mut log = TrainingLog::create(&path).unwrap();
        assert!(log.append(1, &3).is_err());
        log.append(1, &serde_json::json!({})).unwrap();
        assert_eq!(std::fs::read_to_string(log.path()).unwrap(), "{\"step\":1}\n");
        assert!(TrainingLog::create(folder.path().join("none/log.jsonl")).is_err());
    }
}
