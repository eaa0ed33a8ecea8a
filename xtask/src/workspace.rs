//! Where the workspace is, what it holds, and how its cargo is called.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// The workspace's top folder: the nearest at or above the current one; outside of any, the one that this program was built in.
/// So a program that was built elsewhere works on the checkout that it is started in.
pub(crate) fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let current = std::env::current_dir().ok();
        let found = current.as_deref().and_then(top_above);
        // The manifest of this crate is one folder below the top.
        let built = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
        found.or(built).unwrap_or(Path::new(".")).to_owned()
    })
}

/// The nearest folder at or above `folder` that is a workspace's top.
fn top_above(folder: &Path) -> Option<&Path> {
    folder.ancestors().find(|folder| ["Cargo.toml", "xtask/Cargo.toml"].iter().all(|file| folder.join(file).is_file()))
}

/// The folder of build outputs.
pub(crate) fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

/// A cargo command that runs at the top of the workspace.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    command
}

/// Builds this program again with the libraries in it and runs the same command there.
#[cfg(not(feature = "engine"))]
pub(crate) fn run_with_engine(profile: &[&str]) -> Result<()> {
    let mut command = cargo(&["run", "--quiet", "--package", "xtask", "--features", "engine"]);
    command.args(profile).arg("--").args(std::env::args_os().skip(1));
    let status = command.status().context("cannot start cargo")?;
    // What went wrong has been said there.
    std::process::exit(status.code().unwrap_or(1));
}

/// What a git command prints, without the last line's end.
pub(crate) fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").args(arguments).current_dir(root()).output().context("cannot start git")?;
    if !output.status.success() {
        bail!("git {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout).context("git printed text that is not UTF-8")?.trim_end().to_owned())
}

/// The commit that this program works on: what `IRONLOOM_COMMIT` says, on a machine whose copy has no repository or one
/// of its own; else the one that is checked out, with `+` behind it when files have changed since; else `unknown`.
#[cfg(feature = "engine")]
pub(crate) fn commit() -> String {
    named_commit(std::env::var("IRONLOOM_COMMIT").ok()).or_else(checked_out).unwrap_or_else(|| "unknown".to_owned())
}

/// A commit that was named for this program, if one was.
#[cfg(feature = "engine")]
fn named_commit(variable: Option<String>) -> Option<String> {
    variable.map(|commit| commit.trim().to_owned()).filter(|commit| !commit.is_empty())
}

/// The commit that git has checked out.
#[cfg(feature = "engine")]
fn checked_out() -> Option<String> {
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).ok()?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_ok_and(|status| !status.is_empty());
    Some(if changed { commit + "+" } else { commit })
}

/// Every file of the workspace that git tracks or would track, relative to [`root`], sorted.
pub(crate) fn files() -> Result<Vec<PathBuf>> {
    let listed = git(&["ls-files", "--cached", "--others", "--exclude-standard", "-z"])?;
    let mut files: Vec<PathBuf> = listed.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect();
    // A tracked file that was deleted is still listed.
    files.retain(|file| root().join(file).is_file());
    files.sort();
    files.dedup();
    Ok(files)
}

/// One crate of the workspace.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) targets: Vec<Target>,
    /// Registries it may be published to: `None` is any, an empty list is none.
    pub(crate) publish: Option<Vec<String>>,
}

/// One entry of a crate's dependency tables.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// The folder, for a crate of this workspace.
    pub(crate) path: Option<PathBuf>,
}

/// One thing a crate builds.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Target {
    pub(crate) kind: Vec<String>,
    pub(crate) src_path: PathBuf,
}

impl Package {
    /// The crate's folder, relative to [`root`].
    pub(crate) fn folder(&self) -> PathBuf {
        let folder = self.manifest_path.parent().unwrap_or(&self.manifest_path);
        folder.strip_prefix(root()).unwrap_or(folder).to_owned()
    }

    /// Whether it is made for others to depend on.
    pub(crate) fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|registries| !registries.is_empty())
    }
}

/// The crates of this workspace.
pub(crate) fn packages() -> Result<Vec<Package>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let output = cargo(&["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .output()
        .context("cannot start cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cargo metadata printed something new")?;
    Ok(metadata.packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_is_found_from_below() {
        assert_eq!(top_above(&root().join("crates/ironloom-core/src")), Some(root()));
        assert_eq!(top_above(Path::new("/")), None);
    }

    #[test]
    #[cfg(feature = "engine")]
    fn a_commit_is_what_was_named() {
        assert_eq!(named_commit(Some("0123abc\n".to_owned())).as_deref(), Some("0123abc"));
        assert_eq!([None, Some(" ".to_owned())].map(named_commit), [None, None]);
    }

    #[test]
    fn this_crate_is_found_with_its_files() {
        let packages = packages().unwrap();
        let xtask = packages.iter().find(|package| package.name == "xtask").unwrap();
        assert_eq!(xtask.folder(), Path::new("xtask"));
        assert!(!xtask.is_published());
        assert!(files().unwrap().contains(&PathBuf::from("xtask/src/main.rs")));
    }
}
