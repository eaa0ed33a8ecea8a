//! An opened model: its metadata and its tensors, found by name in the mapped files.

use std::{
    path::{Component, Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ironloom_core::{DType, HostBuffer, MappedFile, Shape};

use crate::{Disguise, Error, Metadata, Result};

/// An opened model. [`open`](crate::open) makes it; the files stay mapped while it or a tensor's bytes live.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    format: Format,
    metadata: Metadata,
    files: Vec<Arc<MappedFile>>,
    tensors: Vec<StoredTensor>,
    /// Numbers of tensors in the order of their names. A sorted list needs no second copy of the names.
    by_name: Vec<usize>,
}

/// The format of an opened model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// GGUF.
    Gguf {
        /// 2 or 3.
        version: u32,
    },
    /// safetensors, in one file or several.
    Safetensors,
}

/// What a stored tensor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the file.
    pub name: String,
    /// Its element or block type.
    pub dtype: DType,
    /// Its dimensions, outermost first (GGUF stores them innermost first).
    pub shape: Shape,
}

impl TensorInfo {
    /// Bytes that the tensor takes.
    ///
    /// # Errors
    /// The size overflows, or rows aren't whole blocks of a packed type.
    pub fn bytes(&self) -> ironloom_core::Result<usize> {
        if let Some(&row) = self.shape.dims().last() {
            self.dtype.bytes_for(row)?;
        }
        self.dtype.bytes_for(self.shape.elements()?)
    }
}

/// A stored tensor with its bytes.
#[derive(Clone, Debug)]
pub struct TensorData {
    /// Its name in the file.
    pub name: String,
    /// Its element or block type.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: Shape,
    /// Its elements or blocks, little-endian, row-major. They may start at any address.
    pub bytes: HostBuffer,
}

/// A tensor as a reader found it: `start` and `length` are in bytes from the start of the file numbered `file`.
#[derive(Debug)]
pub(crate) struct StoredTensor {
    pub(crate) info: TensorInfo,
    pub(crate) file: u32,
    pub(crate) start: usize,
    pub(crate) length: usize,
    pub(crate) used: AtomicBool,
}

impl Checkpoint {
    pub(crate) fn new(
        path: PathBuf,
        format: Format,
        metadata: Metadata,
        files: Vec<Arc<MappedFile>>,
        tensors: Vec<StoredTensor>,
    ) -> Result<Self> {
        let mut by_name: Vec<usize> = (0..tensors.len()).collect();
        let name = |number: usize| tensors[number].info.name.as_str();
        by_name.sort_unstable_by(|&a, &b| name(a).cmp(name(b)));
        if let Some(pair) = by_name.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
            return Err(Error::DuplicateTensor { path, tensor: name(pair[0]).to_owned() });
        }
        Ok(Self { path, format, metadata, files, tensors, by_name })
    }

    /// What was opened: the file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format of the files.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The metadata inside the files.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Bytes of all files of weights together.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len() as u64).sum()
    }

    /// Tells the system that no part of the files is needed for now: their bytes stay readable, and are read from the files
    /// again when asked for. Reading a small tensor maps up to 2 MiB around it, so a loader calls this now and then.
    pub fn release(&self) {
        self.files.iter().for_each(|file| file.release(0..file.len()));
    }

    /// A file beside safetensors weights, such as `config.json` or `tokenizer.json`, read whole. `None` when it isn't there,
    /// and for GGUF, which holds everything itself.
    ///
    /// # Errors
    /// The file cannot be read, is a web page or a pointer, or `name` isn't a plain file name.
    pub fn folder_file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let mut components = Path::new(name).components();
        if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
            return Err(Error::FileName { name: name.to_owned() });
        }
        let Some(folder) = self.files.first().and_then(|file| file.path().parent()) else { return Ok(None) };
        let path = folder.join(name);
        if matches!(self.format, Format::Gguf { .. }) {
            return Ok(None);
        }
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::Read { path, source }),
        };
        match Disguise::detect(&bytes[..bytes.len().min(1024)]) {
            Some(disguise @ (Disguise::WebPage | Disguise::GitLfsPointer { .. })) => {
                Err(Error::NotWeights { path, disguise })
            }
            _ => Ok(Some(bytes)),
        }
    }

    /// Every tensor, in the order of the files.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter().map(|tensor| &tensor.info)
    }

    /// What the tensor of this name is, if there is one. Doesn't mark it as used.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.find(name).map(|tensor| &tensor.info)
    }

    /// Whether there is a tensor of this name. Doesn't mark it as used.
    pub fn contains(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The tensor of this name, marked as used.
    ///
    /// # Errors
    /// There is none; the error names those with the nearest names.
    pub fn tensor(&self, name: &str) -> Result<TensorData> {
        let found = self.find(name).and_then(|stored| Some((stored, self.bytes_of(stored)?)));
        let Some((stored, bytes)) = found else {
            return Err(Error::MissingTensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
                nearest: self.nearest_names(name),
            });
        };
        stored.used.store(true, Ordering::Relaxed);
        let TensorInfo { name, dtype, shape } = stored.info.clone();
        Ok(TensorData { name, dtype, shape, bytes })
    }

    /// Names of the tensors that nobody has asked for, in the order of the files.
    pub fn unused(&self) -> Vec<String> {
        let unused = self.tensors.iter().filter(|tensor| !tensor.used.load(Ordering::Relaxed));
        unused.map(|tensor| tensor.info.name.clone()).collect()
    }

    fn find(&self, name: &str) -> Option<&StoredTensor> {
        let at = |&number: &usize| self.tensors[number].info.name.as_str().cmp(name);
        let position = self.by_name.binary_search_by(at).ok()?;
        self.tensors.get(self.by_name[position])
    }

    fn bytes_of(&self, stored: &StoredTensor) -> Option<HostBuffer> {
        let file = self.files.get(stored.file as usize)?.clone();
        HostBuffer::mapped(file, stored.start..stored.start.checked_add(stored.length)?)
    }

    fn nearest_names(&self, name: &str) -> Vec<String> {
        const SHOWN: usize = 3;
        // Nobody mistypes a name of kilobytes, and the distance takes the product of the lengths.
        const LONGEST: usize = 256;
        let short = self.tensors().filter(|info| info.name.len() <= LONGEST && name.len() <= LONGEST);
        let mut ranked: Vec<(usize, &str)> =
            short.map(|info| (edit_distance(name.as_bytes(), info.name.as_bytes()), info.name.as_str())).collect();
        ranked.sort_unstable();
        ranked.into_iter().take(SHOWN).map(|(_, name)| name.to_owned()).collect()
    }
}

/// The fewest insertions, removals and replacements that turn `a` into `b` (Levenshtein).
fn edit_distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, &from) in a.iter().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, &to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distances() {
        assert_eq!(edit_distance(b"kitten", b"sitting"), 3);
        assert_eq!(edit_distance(b"", b"abc"), 3);
        assert_eq!(edit_distance(b"same", b"same"), 0);
    }
}
