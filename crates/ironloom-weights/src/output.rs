//! What the writers share: tensors to write, and progress.

use std::{
    io::{self, Write},
    ops::ControlFlow,
    path::Path,
};

use ironloom_core::{HostBuffer, PartialFile};

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

/// How far a writer is, given after each tensor to a caller, who may end the write.
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

/// The progress of a writer that nobody watches: it always goes on.
pub fn unwatched(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Counts tensors and bytes for a caller's progress display.
pub(crate) struct Meter<'a> {
    show: &'a mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    tensors: usize,
    total_tensors: usize,
    bytes: u64,
    total_bytes: u64,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(
        show: &'a mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
        total_tensors: usize,
        total_bytes: u64,
    ) -> Self {
        Self { show, tensors: 0, total_tensors, bytes: 0, total_bytes }
    }

    fn add(&mut self, tensor: &str, bytes: u64) -> ControlFlow<()> {
        self.tensors += 1;
        self.bytes += bytes;
        let &mut Self { tensors, total_tensors, bytes, total_bytes, .. } = self;
        (self.show)(Progress { tensor, tensors, total_tensors, bytes, total_bytes })
    }
}

/// Writes a tensor's bytes, which must be as many as its type and shape take, into the file that is to be `path`.
pub(crate) fn write_tensor(
    file: &mut PartialFile,
    path: &Path,
    NewTensor { info, source }: NewTensor<'_>,
    length: usize,
    meter: &mut Meter<'_>,
) -> Result<()> {
    let mut write = |bytes: &[u8]| {
        if bytes.len() == length {
            return file.write_all(bytes).map_err(write_error(path));
        }
        let TensorInfo { name, dtype, shape } = info.clone();
        let (expected, found) = (length as u64, bytes.len() as u64);
        Err(Error::NewTensorLength { tensor: name, dtype, shape: Box::new(shape), expected, found })
    };
    match source {
        Source::Bytes(bytes) => write(&bytes)?,
        Source::Stored(bytes) => {
            write(&bytes)?;
            // What was copied out of a mapped file isn't needed again.
            bytes.release();
        }
        Source::Make(make) => {
            write(&make().map_err(|source| Error::NewTensor { tensor: info.name.clone(), source })?)?;
        }
    }
    match meter.add(&info.name, length as u64) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Cancelled { path: path.to_owned() }),
    }
}

/// Says that `path` could not be written.
pub(crate) fn write_error(path: &Path) -> impl Fn(io::Error) -> Error + Copy {
    move |source| Error::Write { path: path.to_owned(), source }
}
