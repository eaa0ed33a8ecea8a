//! Finding Python and pip, and making virtual environments for reference implementations and peers.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

/// A program with its first arguments, such as `python3 -m pip`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program(Vec<&'static str>);

impl Program {
    /// A command that starts it.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(self.0[0]);
        command.args(&self.0[1..]).stdin(Stdio::null());
        command
    }

    fn answers(&self, question: &str) -> bool {
        let mut command = self.command();
        command.arg(question).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join(" "))
    }
}

/// The first pip that answers, of the ways there are to call one.
pub(crate) fn pip() -> Option<Program> {
    let ways: [&[&str]; 5] =
        [&["python3", "-m", "pip"], &["pip3"], &["pip"], &["python", "-m", "pip"], &["py", "-m", "pip"]];
    ways.into_iter().map(|way| Program(way.to_vec())).find(|program| program.answers("--version"))
}

/// The first Python 3 that answers.
pub(crate) fn python() -> Option<Program> {
    let ways: [&[&str]; 3] = [&["python3"], &["python"], &["py"]];
    ways.into_iter()
        .map(|way| Program(way.to_vec()))
        .find(|program| program.answers("-c=print()") || program.answers("--version"))
}

/// A virtual environment's Python.
#[derive(Debug)]
pub(crate) struct Environment {
    python: PathBuf,
}

impl Environment {
    /// The environment in `folder`, made where missing, with the packages of a requirements file. The file's text is kept
    /// beside them, so that pip runs again only after it has changed.
    pub(crate) fn with_requirements(folder: &Path, requirements: &Path) -> Result<Self> {
        let wanted =
            std::fs::read_to_string(requirements).with_context(|| format!("cannot read {}", requirements.display()))?;
        let installed = folder.join("installed-requirements.txt");
        let environment = Self::make(folder)?;
        if std::fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
            return Ok(environment);
        }
        println!("installing {} into {}", requirements.display(), folder.display());
        let mut command = environment.command();
        command.args(["-m", "pip", "install", "--quiet", "--requirement"]).arg(requirements);
        run(&mut command, "installing the packages")?;
        std::fs::write(&installed, wanted).with_context(|| format!("cannot write {}", installed.display()))?;
        Ok(environment)
    }

    /// A command that starts the environment's Python.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.python);
        command.stdin(Stdio::null());
        command
    }

    fn make(folder: &Path) -> Result<Self> {
        let inside = if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" };
        let environment = Self { python: folder.join(inside) };
        if !environment.python.exists() {
            let python = python().context("no Python 3 found: install it so that `python3` starts it")?;
            let mut command = python.command();
            command.args(["-m", "venv"]).arg(folder);
            run(&mut command, "making the virtual environment (Debian: install python3-venv)")?;
        }
        Ok(environment)
    }
}

/// Runs a command to its end; its failure names `what` was being done.
pub(crate) fn run(command: &mut Command, what: &str) -> Result<()> {
    let status =
        command.status().with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
    if !status.success() {
        bail!("{what} failed ({status})");
    }
    Ok(())
}
