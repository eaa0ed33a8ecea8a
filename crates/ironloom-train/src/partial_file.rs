//! A file that takes its name only when it is whole: written beside its target, synchronized, renamed.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// A file being written. Dropped before [`finish`](Self::finish), it is removed and the target stays as it was.
pub(crate) struct PartialFile {
    target: PathBuf,
    partial: PathBuf,
    pub(crate) writer: BufWriter<File>,
    renamed: bool,
}

impl PartialFile {
    pub(crate) fn create(target: &Path) -> io::Result<Self> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = target.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
        // The process and a counter keep two writers of one target apart.
        let mut partial_name = std::ffi::OsString::from(".");
        partial_name.push(name);
        partial_name.push(format!(".{}-{}.partial", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
        let partial = target.with_file_name(partial_name);
        let file = OpenOptions::new().write(true).create_new(true).open(&partial)?;
        Ok(Self { target: target.to_owned(), partial, writer: BufWriter::with_capacity(1 << 16, file), renamed: false })
    }

    /// Makes sure that all bytes are on disk, then takes the target's name, replacing a file that has it.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.writer.flush()?;
        self.writer.get_ref().sync_all()?;
        std::fs::rename(&self.partial, &self.target)?;
        self.renamed = true;
        // The name is on disk when the folder is. Not every file system can do this, and the data are safe already.
        #[cfg(unix)]
        if let Some(folder) = self.target.parent() {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

/// Gives `target` these contents, whole or not at all.
pub(crate) fn replace_file(target: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = PartialFile::create(target)?;
    file.writer.write_all(contents)?;
    file.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_file_or_the_new_one_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        replace_file(&path, b"old").unwrap();
        let mut unfinished = PartialFile::create(&path).unwrap();
        unfinished.writer.write_all(b"half").unwrap();
        drop(unfinished);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        replace_file(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
