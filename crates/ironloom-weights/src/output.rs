//! What the writers share: tensors to write, progress, and a file that appears under its name only when it's complete.

use std::{
    fs::{File, OpenOptions},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use ironloom_core::HostBuffer;

use crate::{Error, Result, TensorData, TensorInfo};

/// Any error, as a tensor's maker gives it.
pub type MakeError = Box<dyn std::error::Error + Send + Sync>;

/// A tensor to write. Its bytes are made when its turn comes and dropped after it, so a model larger than memory can be written.
pub struct NewTensor<'a> {
    info: TensorInfo,
    source: Source<'a>,
}

enum Source<'a> {
    Bytes(Vec<u8>),
    Stored(HostBuffer),
    Make(Box<dyn FnOnce() -> std::result::Result<Vec<u8>, MakeError> + 'a>),
}

impl<'a> NewTensor<'a> {
    /// A tensor of these bytes: little-endian, row-major.
    pub fn new(info: TensorInfo, bytes: Vec<u8>) -> Self {
        Self { info, source: Source::Bytes(bytes) }
    }

    /// A tensor whose bytes `make` gives when its turn comes.
    pub fn made(info: TensorInfo, make: impl FnOnce() -> std::result::Result<Vec<u8>, MakeError> + 'a) -> Self {
        Self { info, source: Source::Make(Box::new(make)) }
    }

    /// What the tensor is.
    pub fn info(&self) -> &TensorInfo {
        &self.info
    }
}

impl From<TensorData> for NewTensor<'_> {
    fn from(TensorData { name, dtype, shape, bytes }: TensorData) -> Self {
        Self { info: TensorInfo { name, dtype, shape }, source: Source::Stored(bytes) }
    }
}

impl std::fmt::Debug for NewTensor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("NewTensor").field(&self.info).finish()
    }
}

/// How far a writer is, given after each tensor.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The tensor just written.
    pub tensor: &'a str,
    /// Tensors written.
    pub tensors: usize,
    /// Tensors to write.
    pub total_tensors: usize,
    /// Bytes of tensors written.
    pub bytes: u64,
    /// Bytes of tensors to write.
    pub total_bytes: u64,
}

/// Counts tensors and bytes for a caller's progress display.
pub(crate) struct Meter<'a> {
    show: &'a mut dyn FnMut(Progress<'_>),
    tensors: usize,
    total_tensors: usize,
    bytes: u64,
    total_bytes: u64,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(show: &'a mut dyn FnMut(Progress<'_>), total_tensors: usize, total_bytes: u64) -> Self {
        Self { show, tensors: 0, total_tensors, bytes: 0, total_bytes }
    }

    fn add(&mut self, tensor: &str, bytes: u64) {
        self.tensors += 1;
        self.bytes += bytes;
        let &mut Self { tensors, total_tensors, bytes, total_bytes, .. } = self;
        (self.show)(Progress { tensor, tensors, total_tensors, bytes, total_bytes });
    }
}

/// A file being written beside its target. [`finish`](Self::finish) gives it the target's name; dropped before that, it's removed.
pub(crate) struct PartialFile {
    target: PathBuf,
    partial: PathBuf,
    writer: Option<BufWriter<File>>,
    renamed: bool,
}

impl PartialFile {
    pub(crate) fn create(target: &Path) -> Result<Self> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let error = |source| Error::Write { path: target.to_owned(), source };
        let name = target.file_name().ok_or_else(|| error(std::io::ErrorKind::InvalidFilename.into()))?;
        // The process and a counter keep two writers of one target apart.
        let mut partial_name = std::ffi::OsString::from(".");
        partial_name.push(name);
        partial_name.push(format!(".{}-{}.partial", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
        let partial = target.with_file_name(partial_name);
        let file = OpenOptions::new().write(true).create_new(true).open(&partial).map_err(error)?;
        const BUFFER: usize = 1 << 16;
        let writer = Some(BufWriter::with_capacity(BUFFER, file));
        Ok(Self { target: target.to_owned(), partial, writer, renamed: false })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.writer {
            Some(writer) => writer.write_all(bytes).map_err(|source| self.error(source)),
            None => Err(self.error(std::io::ErrorKind::BrokenPipe.into())),
        }
    }

    pub(crate) fn write_zeros(&mut self, count: usize) -> Result<()> {
        const ZEROS: [u8; 64] = [0; 64];
        let mut left = count;
        while left > 0 {
            let part = left.min(ZEROS.len());
            self.write(&ZEROS[..part])?;
            left -= part;
        }
        Ok(())
    }

    /// Writes a tensor's bytes, which must be as many as its type and shape take.
    pub(crate) fn write_tensor(&mut self, tensor: NewTensor<'_>, length: usize, meter: &mut Meter<'_>) -> Result<()> {
        let NewTensor { info, source } = tensor;
        let check = |bytes: &[u8]| {
            if bytes.len() == length {
                return Ok(());
            }
            let TensorInfo { name, dtype, shape } = info.clone();
            let (expected, found) = (length as u64, bytes.len() as u64);
            Err(Error::NewTensorLength { tensor: name, dtype, shape: Box::new(shape), expected, found })
        };
        match source {
            Source::Bytes(bytes) => {
                check(&bytes)?;
                self.write(&bytes)?;
            }
            Source::Stored(bytes) => {
                check(&bytes)?;
                self.write(&bytes)?;
                // What was copied out of a mapped file isn't needed again.
                bytes.release();
            }
            Source::Make(make) => {
                let bytes = make().map_err(|source| Error::NewTensor { tensor: info.name.clone(), source })?;
                check(&bytes)?;
                self.write(&bytes)?;
            }
        }
        meter.add(&info.name, length as u64);
        Ok(())
    }

    /// Makes sure that all bytes are on disk, without taking the target's name yet.
    pub(crate) fn sync(&mut self) -> Result<()> {
        if let Some(writer) = self.writer.take() {
            let file = writer.into_inner().map_err(|error| self.error(error.into_error()))?;
            file.sync_all().map_err(|source| self.error(source))?;
        }
        Ok(())
    }

    /// Takes the target's name, replacing a file that has it. A map of the replaced file stays valid.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.sync()?;
        std::fs::rename(&self.partial, &self.target).map_err(|source| self.error(source))?;
        self.renamed = true;
        // The name is on disk when the folder is. Not every file system can do this, and the data are safe already.
        #[cfg(unix)]
        if let Some(folder) = self.target.parent() {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }

    fn error(&self, source: std::io::Error) -> Error {
        Error::Write { path: self.target.clone(), source }
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.renamed {
            drop(self.writer.take());
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}
