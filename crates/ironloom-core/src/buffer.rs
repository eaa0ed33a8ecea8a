//! Bytes on the host: owned, or a range of a memory-mapped file.

use std::{
    fs::File,
    ops::{Deref, Range},
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{Error, Result};

/// A file mapped into memory for reading.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: memmap2::Mmap,
}

impl MappedFile {
    /// Maps the whole file.
    ///
    /// The file must not be cut while it is mapped: reading past its new end ends the process with a bus error, as with
    /// every program that maps files.
    ///
    /// # Errors
    /// The file cannot be opened or mapped.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>> {
        let path = path.as_ref();
        let read = |source| Error::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(read)?;
        if file.metadata().map_err(read)?.is_dir() {
            return Err(read(std::io::Error::new(std::io::ErrorKind::IsADirectory, "it is a folder")));
        }
        // SAFETY: the map is read-only and private; the documented condition (the file isn't cut) is the caller's.
        let map = unsafe { memmap2::MmapOptions::new().map_copy_read_only(&file) }.map_err(read)?;
        Ok(Arc::new(Self { path: path.to_owned(), map }))
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells the system that the whole pages inside `range` are not needed for now. Their bytes stay readable (they are
    /// read from the file again), so this only ever lowers the resident memory.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            const PAGE: usize = 4096;
            let start = range.start.next_multiple_of(PAGE);
            let end = range.end.min(self.map.len()) / PAGE * PAGE;
            if start < end {
                // SAFETY: the pages belong to a read-only file mapping that is never written, so dropping them loses nothing.
                let _ =
                    unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl Deref for MappedFile {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.map
    }
}

/// Bytes on the host, owned or mapped. Cloning shares them.
#[derive(Clone, Debug)]
pub struct HostBuffer {
    source: Source,
    range: Range<usize>,
}

#[derive(Clone, Debug)]
enum Source {
    Owned(Arc<Vec<u8>>),
    Mapped(Arc<MappedFile>),
}

impl HostBuffer {
    /// A buffer that owns these bytes.
    pub fn owned(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { source: Source::Owned(Arc::new(bytes)), range }
    }

    /// The part `range` of a mapped file; `None` when the file is shorter.
    pub fn mapped(file: Arc<MappedFile>, range: Range<usize>) -> Option<Self> {
        (range.start <= range.end && range.end <= file.len()).then_some(Self { source: Source::Mapped(file), range })
    }

    /// Tells the system that these bytes are not needed for now, where they are mapped. See [`MappedFile::release`].
    pub fn release(&self) {
        if let Source::Mapped(file) = &self.source {
            file.release(self.range.clone());
        }
    }
}

impl Deref for HostBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let whole: &[u8] = match &self.source {
            Source::Owned(bytes) => bytes,
            Source::Mapped(file) => file,
        };
        &whole[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_and_owned_read_alike_and_survive_release() {
        let path = std::env::temp_dir().join(format!("ironloom-buffer-{}", std::process::id()));
        let bytes: Vec<u8> = (0..20_000u32).map(|i| i as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = MappedFile::open(&path).unwrap();
        let mapped = HostBuffer::mapped(file.clone(), 100..19_000).unwrap();
        mapped.release();
        assert_eq!(&*mapped, &*HostBuffer::owned(bytes[100..19_000].to_vec()));
        assert!(HostBuffer::mapped(file, 0..20_001).is_none());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_missing_file_and_a_folder_are_errors() {
        assert!(matches!(MappedFile::open("/nonexistent/x"), Err(Error::Read { .. })));
        assert!(matches!(MappedFile::open(std::env::temp_dir()), Err(Error::Read { .. })));
    }
}
