//! Files and folders that take their names only when they are whole: written beside their target, then renamed.
//!
//! Whatever fails, and whenever a process ends, the target is what it was or what it was to become. What is given up is removed at
//! once. Of an ended process a file may stay, under a name that nobody reads, and a folder until the next that is made for the target.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

/// Gives `target` these contents, whole or not at all.
///
/// # Errors
/// The file can't be written; the target is then as it was.
pub fn replace_file(target: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = PartialFile::create(target)?;
    file.write_all(contents)?;
    file.finish()
}

/// A file being written. Dropped before [`finish`](Self::finish), it is removed and the target stays as it was.
///
/// ```
/// use std::io::Write;
/// # let folder = std::env::temp_dir().join(format!("ironloom-partial-example-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// let path = folder.join("ids");
/// let mut file = ironloom_core::PartialFile::create(&path)?;
/// file.write_all(&[1, 2, 3])?;
/// assert!(!path.exists());
/// file.finish()?;
/// assert_eq!(std::fs::read(&path)?, [1, 2, 3]);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct PartialFile {
    // Closed before what is beside the target is removed, for some systems keep files that are open.
    writer: BufWriter<File>,
    beside: Beside,
}

impl PartialFile {
    /// Starts a file that is to be `target`.
    ///
    /// # Errors
    /// `target` names no file, or its folder can't be written.
    pub fn create(target: &Path) -> io::Result<Self> {
        const BUFFER: usize = 1 << 16;
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        // The process and a counter keep two writers of one target apart.
        let ending = format!(".{}-{}.partial", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let partial = beside(target, ".", &ending)?;
        let file = OpenOptions::new().write(true).create_new(true).open(&partial)?;
        let beside = Beside { target: target.to_owned(), partial, remove: |path| fs::remove_file(path), named: false };
        Ok(Self { writer: BufWriter::with_capacity(BUFFER, file), beside })
    }

    /// Makes sure that all bytes are on disk, without taking the target's name yet.
    ///
    /// # Errors
    /// The disk is full or can't be written.
    pub fn sync(self) -> io::Result<SyncedFile> {
        let Self { writer, beside } = self;
        let file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok(SyncedFile(beside))
    }

    /// Makes sure that all bytes are on disk, then takes the target's name.
    ///
    /// # Errors
    /// As of [`sync`](Self::sync) and [`SyncedFile::take_name`].
    pub fn finish(self) -> io::Result<()> {
        self.sync()?.take_name()
    }
}

impl Write for PartialFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl Seek for PartialFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.writer.seek(to)
    }
}

/// A file that is closed and on disk, and has not its name yet. Dropped so, it is removed.
#[derive(Debug)]
pub struct SyncedFile(Beside);

impl SyncedFile {
    /// Takes the target's name, replacing a file that has it. A map of the replaced file stays valid.
    ///
    /// # Errors
    /// The file can't be renamed; the target is then as it was.
    pub fn take_name(self) -> io::Result<()> {
        self.0.take_name()
    }
}

/// A folder being written. Dropped before [`finish`](Self::finish), it is removed and the target stays as it was.
///
/// No system exchanges two folders at once. A process that ends between the two renames of [`finish`](Self::finish) leaves the old
/// folder, whole, under the name that ends with [`REPLACED`](Self::REPLACED); the next writer of the target puts it back.
#[derive(Debug)]
pub struct PartialFolder(Beside);

impl PartialFolder {
    /// What the name of a folder that isn't whole ends with.
    pub const ENDING: &str = ".unfinished";
    /// What the name of a folder ends with while another takes its place.
    pub const REPLACED: &str = ".replaced";

    /// Makes an empty folder that is to be `target`. What an ended process left of another is removed.
    ///
    /// # Errors
    /// `target` names no folder, or the disk can't be written.
    pub fn create(target: &Path) -> io::Result<Self> {
        let (partial, replaced) = (beside(target, "", Self::ENDING)?, beside(target, "", Self::REPLACED)?);
        match (target.exists(), replaced.exists()) {
            (true, true) => fs::remove_dir_all(&replaced)?,
            (false, true) => fs::rename(&replaced, target)?,
            (_, false) => {}
        }
        if partial.exists() {
            fs::remove_dir_all(&partial)?;
        }
        fs::create_dir_all(&partial)?;
        let target = target.to_owned();
        Ok(Self(Beside { target, partial, remove: |path| fs::remove_dir_all(path), named: false }))
    }

    /// Where the folder is until it is finished. What is written there with [`PartialFile`] or [`replace_file`] is on disk at once.
    pub fn path(&self) -> &Path {
        &self.0.partial
    }

    /// Takes the target's name, replacing a folder that has it.
    ///
    /// # Errors
    /// The old folder can't be moved away, which stays then, or the new one renamed.
    pub fn finish(self) -> io::Result<()> {
        let target = self.0.target.clone();
        if !target.exists() {
            return self.0.take_name();
        }
        let replaced = beside(&target, "", Self::REPLACED)?;
        fs::rename(&target, &replaced)?;
        self.0.take_name().inspect_err(|_| drop(fs::rename(&replaced, &target)))?;
        fs::remove_dir_all(&replaced)
    }
}

/// The target's name with something before and after it.
fn beside(target: &Path, beginning: &str, ending: &str) -> io::Result<PathBuf> {
    let mut name = std::ffi::OsString::from(beginning);
    name.push(target.file_name().ok_or(io::ErrorKind::InvalidFilename)?);
    name.push(ending);
    Ok(target.with_file_name(name))
}

/// What is written beside its target, and removed unless it takes the target's name.
#[derive(Debug)]
struct Beside {
    target: PathBuf,
    partial: PathBuf,
    remove: fn(&Path) -> io::Result<()>,
    named: bool,
}

impl Beside {
    fn take_name(mut self) -> io::Result<()> {
        fs::rename(&self.partial, &self.target)?;
        self.named = true;
        // The name is on disk when the folder is. Not every file system can do this, and the data are safe already.
        #[cfg(unix)]
        if let Some(folder) = self.target.parent() {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.named {
            let _ = (self.remove)(&self.partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder for a test's own files, and the names in it.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ironloom-partial-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_old_file_or_the_new_one_and_nothing_else() {
        let folder = Scratch::new("file");
        let path = folder.0.join("file");
        replace_file(&path, b"old").unwrap();
        let unfinished = || {
            let mut file = PartialFile::create(&path).unwrap();
            file.write_all(b"half").unwrap();
            file
        };
        let two = [unfinished(), unfinished()];
        assert_eq!(folder.names().len(), 3);
        drop(two);
        drop(unfinished().sync().unwrap());
        assert_eq!((fs::read(&path).unwrap(), folder.names()), (b"old".to_vec(), vec!["file".to_owned()]));
        replace_file(&path, b"new").unwrap();
        assert_eq!((fs::read(&path).unwrap(), folder.names()), (b"new".to_vec(), vec!["file".to_owned()]));
    }

    #[test]
    fn the_old_folder_or_the_new_one_and_nothing_else() {
        let folder = Scratch::new("folder");
        let path = folder.0.join("model");
        let unfinished = |contents: &str| {
            let partial = PartialFolder::create(&path).unwrap();
            assert_eq!(fs::read_dir(partial.path()).unwrap().count(), 0);
            replace_file(&partial.path().join(contents), b"").unwrap();
            partial
        };
        unfinished("old").finish().unwrap();
        drop(unfinished("half"));
        assert!(path.join("old").exists() && folder.names() == ["model"]);
        // As a process that ended leaves it.
        std::mem::forget(unfinished("half"));
        unfinished("new").finish().unwrap();
        assert!(path.join("new").exists() && !path.join("old").exists() && folder.names() == ["model"]);
        // Ended between the two renames: the old one comes back. Ended after them: what was replaced goes.
        let replaced = folder.0.join("model.replaced");
        fs::rename(&path, &replaced).unwrap();
        drop(unfinished("half"));
        assert!(path.join("new").exists() && folder.names() == ["model"]);
        fs::create_dir(&replaced).unwrap();
        drop(unfinished("half"));
        assert!(path.join("new").exists() && folder.names() == ["model"]);
    }

    #[test]
    fn a_target_without_a_name_is_refused() {
        assert_eq!(PartialFile::create(Path::new("/")).unwrap_err().kind(), io::ErrorKind::InvalidFilename);
        assert_eq!(PartialFolder::create(Path::new("..")).unwrap_err().kind(), io::ErrorKind::InvalidFilename);
    }
}
