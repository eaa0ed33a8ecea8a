//! pip at work in a folder of its own: what it fetches is seen as it comes, and cleared away with all it leaves behind.
//!
//! Whoever fetches a package makes a [`WorkFolder`] beside the final place, lets [`run`] fill it, checks what came, and renames
//! the wanted part into place: an interrupted download leaves no half file under a good name.

use std::{
    ffi::OsStr,
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::python;

/// A folder of a download older than this was left by a run that was ended.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// Runs pip with `arguments` and its temporary files in `work`, showing how many of the `bytes` expected have come.
///
/// # Errors
/// There is no pip, or it fails: then with the last thing it said.
pub(crate) fn run(arguments: &[&OsStr], work: &WorkFolder, bytes: u64) -> Result<()> {
    let pip = python::pip().context("no pip found (tried python3 -m pip, pip3, pip, python -m pip)")?;
    let mut command = pip.command();
    command.args(arguments).args(["--quiet", "--disable-pip-version-check", "--no-input"]);
    // pip writes what it receives into TMPDIR first: there its progress can be seen, and is cleared away with the rest.
    command.env("TMPDIR", work.path()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {pip}"))?;
    let bar = progress_bar(bytes);
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("cannot wait for {pip}"))? {
            break status;
        }
        bar.set_position(size(work.path()).min(bytes));
        std::thread::sleep(Duration::from_millis(100));
    };
    bar.finish_and_clear();
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut said);
    }
    if !status.success() {
        let reason = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it gave no reason");
        let what = arguments.first().map_or_else(String::new, |word| word.to_string_lossy().into_owned());
        bail!("{pip} {what} failed: {}", reason.trim());
    }
    Ok(())
}

/// A folder for one download, removed when dropped.
pub(crate) struct WorkFolder(PathBuf);

impl WorkFolder {
    const PREFIX: &'static str = ".download-";

    /// Makes one inside `folder`, and clears what runs left there that were ended before they could.
    pub(crate) fn make(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
        Self::remove_abandoned(folder);
        let path = folder.join(format!("{}{}", Self::PREFIX, std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot make the folder {}", path.display()))?;
        Ok(Self(path))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn remove_abandoned(folder: &Path) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let ours = entry.file_name().to_string_lossy().starts_with(Self::PREFIX);
            let age = entry.metadata().ok().and_then(|data| data.modified().ok()?.elapsed().ok());
            if ours && age.is_some_and(|age| age > ABANDONED_AFTER) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The bytes of all files below a folder: what pip has received so far.
fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(data) if data.is_dir() => size(&entry.path()),
        Ok(data) => data.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

fn progress_bar(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_folder_clears_itself() {
        let folder = std::env::temp_dir().join(format!("ironloom-pip-{}", std::process::id()));
        let work = WorkFolder::make(&folder).unwrap();
        fs::create_dir(work.path().join("inner")).unwrap();
        fs::write(work.path().join("inner/part"), [0; 70]).unwrap();
        fs::write(work.path().join("small"), [0; 7]).unwrap();
        assert_eq!(size(work.path()), 77);
        drop(work);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir_all(folder).unwrap();
    }
}
