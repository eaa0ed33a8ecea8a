//! `cargo xtask golden`: makes the reference tensors of `tests/golden` again.
//!
//! The scripts in `tests/golden/*.py` run the reference implementations at the versions pinned in
//! `tests/golden/requirements.txt`, in a virtual environment under the target folder, and write beside themselves.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{python, workspace};

/// What `golden` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Scripts to run, by name without `.py`; all when none is named
    names: Vec<String>,
    /// Only list the scripts
    #[arg(long)]
    list: bool,
}

/// Runs the named scripts, or all.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let folder = workspace::root().join("tests").join("golden");
    let scripts = scripts(&folder)?;
    let known: Vec<String> = scripts.iter().map(|script| name(script)).collect();
    if arguments.list {
        known.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    if let Some(unknown) = arguments.names.iter().find(|name| !known.contains(name)) {
        anyhow::bail!("no script tests/golden/{unknown}.py; there are: {}", known.join(", "));
    }
    let place = workspace::target().join("golden-venv");
    let environment = python::Environment::with_requirements(&place, &folder.join("requirements.txt"))?;
    for script in scripts.iter().filter(|script| arguments.names.is_empty() || arguments.names.contains(&name(script)))
    {
        println!("running {}", script.display());
        let mut command = environment.command();
        command.arg(script).current_dir(&folder);
        python::run(&mut command, &format!("{}", script.display()))?;
    }
    Ok(())
}

/// The scripts that run by themselves, in order: those with a `__main__` whose head does not exclude them.
fn scripts(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut scripts: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    scripts.retain(|path| is_run(path));
    scripts.sort();
    ensure!(!scripts.is_empty(), "no scripts in {}", folder.display());
    Ok(scripts)
}

fn is_run(path: &Path) -> bool {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let is_python = path.extension().is_some_and(|extension| extension == "py");
    is_python && text.contains("__main__") && !text.contains("Not run by `cargo xtask golden`")
}

fn name(script: &Path) -> String {
    script.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}
