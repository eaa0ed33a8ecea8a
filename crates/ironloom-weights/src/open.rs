//! From a path to a [`Checkpoint`]: finds the weights a path means and reads them by what they are.
//!
//! A folder means, in this order: `model.safetensors`, the only `*.safetensors.index.json`, the only `.safetensors` file, the only
//! `.gguf` file. A file is read by its first bytes, so that a GGUF under another name opens and an error page under a model's
//! name is told.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    sync::Arc,
};

use ironloom_core::MappedFile;

use crate::{Checkpoint, Disguise, Error, Result, gguf, safetensors};

/// Opens a model: a `.gguf` file, a `.safetensors` file, a `*.safetensors.index.json`, or a folder with one of them.
///
/// The files are mapped, not read: opening takes milliseconds, and bytes come from the disk when a tensor's are used.
///
/// # Errors
/// The path leads to no weights, or a file is damaged; see [`Error`].
pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
    let path = path.as_ref();
    let metadata = std::fs::metadata(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    if metadata.is_dir() {
        let weights = weights_in(path)?;
        return open_file(path, &weights);
    }
    open_file(path, path)
}

/// Maps a file after checking that it's a file with bytes. (Opening a pipe would wait for its writer.)
pub(crate) fn map(path: &Path) -> Result<Arc<MappedFile>> {
    let metadata = std::fs::metadata(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    if !metadata.is_file() {
        return Err(Error::NotAFile { path: path.to_owned() });
    }
    if metadata.len() == 0 {
        return Err(Error::Empty { path: path.to_owned() });
    }
    Ok(MappedFile::open(path)?)
}

/// Says what a file is that is in place of weights, or that it's nothing known.
pub(crate) fn refuse(path: &Path, bytes: &[u8]) -> Error {
    let path = path.to_owned();
    match Disguise::detect(&bytes[..bytes.len().min(1024)]) {
        Some(disguise) => Error::NotWeights { path, disguise },
        None => Error::UnknownFormat { path, start: bytes[..bytes.len().min(8)].to_vec() },
    }
}

fn open_file(asked: &Path, path: &Path) -> Result<Checkpoint> {
    if path.extension() == Some(OsStr::new("json")) {
        return safetensors::read_index(asked, path);
    }
    let file = map(path)?;
    if gguf::is_gguf(&file) {
        return gguf::read(asked, file);
    }
    safetensors::read(asked, file)
}

fn weights_in(folder: &Path) -> Result<PathBuf> {
    let single = folder.join("model.safetensors");
    if single.exists() {
        return Ok(single);
    }
    let read = |source| Error::Read { path: folder.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(read)? {
        // A name that isn't UTF-8 cannot end in one of the endings looked for and be named in a message.
        if let Ok(name) = entry.map_err(read)?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort_unstable();
    for ending in [".safetensors.index.json", ".safetensors", ".gguf"] {
        let mut candidates: Vec<&String> = names.iter().filter(|name| name.ends_with(ending)).collect();
        match candidates.as_slice() {
            [] => continue,
            [only] => return Ok(folder.join(only)),
            [shard, ..] if ending == ".safetensors" && shard.contains("-of-") => {
                return Err(Error::NoIndex { path: folder.to_owned(), shard: (*shard).clone() });
            }
            _ => {
                const SHOWN: usize = 5;
                let more = candidates.len().saturating_sub(SHOWN);
                candidates.truncate(SHOWN);
                let mut candidates: Vec<String> = candidates.into_iter().cloned().collect();
                if more > 0 {
                    candidates.push(format!("and {more} more"));
                }
                return Err(Error::SeveralWeights { path: folder.to_owned(), candidates });
            }
        }
    }
    let pickles = [".bin", ".pt", ".pth", ".ckpt"];
    let pickle = names.iter().find(|name| pickles.iter().any(|ending| name.ends_with(ending)));
    let found = pickle.map(|name| format!("{name}, a Python pickle: convert it to safetensors"));
    Err(Error::NoWeights { path: folder.to_owned(), found })
}
