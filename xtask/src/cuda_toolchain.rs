//! `cargo xtask cuda-toolchain`: the CUDA compiler from Python packages into `.cuda/`, for machines that have none.
//!
//! `kernels/build.rs` looks for nvcc in `NVCC`, `CUDA_HOME`, `CUDA_PATH`, the search path, and then here. Five packages hold what it takes
//! to compile kernels (compiler, its optimizer, headers of the language, of the runtime, of the C++ library), 280 MB on disk
//! where a whole CUDA installation is several GB; nothing is installed outside of `.cuda/`, and no driver or GPU is needed.
//! A second call finds everything in place. The versions are exact, so that `kernels/RESOURCES.md` speaks of one compiler.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use anyhow::{Context, Result, anyhow, bail};

use crate::{
    pip::{self, WorkFolder},
    workspace,
};

/// What `cuda-toolchain` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Fetch it again, whatever is there
    #[arg(long)]
    again: bool,
}

/// What is fetched: compiler and assembler, optimizer, language headers, runtime headers, C++ library headers.
const PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];
/// What pip downloads and then unpacks, for the progress bar only.
const BYTES: u64 = 400_000_000;
/// Where the compiler is below `.cuda/`, and below the folder that pip installs into.
const NVCC: &str = "nvidia/cu13/bin/nvcc";
/// Names the packages that are in place, for the next call.
const INSTALLED: &str = "installed.txt";
/// The folders whose files are programs: a wheel does not always say so.
const PROGRAMS: [&str; 2] = ["nvidia/cu13/bin", "nvidia/cu13/nvvm/bin"];

/// Fetches the compiler where it is missing, and says which one builds will use.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let folder = folder();
    if arguments.again || !is_installed(&folder) {
        install()?;
    }
    println!("{} is in place: {}", folder.join(NVCC).display(), version(&folder.join(NVCC))?);
    match find() {
        Some(first) if first != folder.join(NVCC) => {
            println!("builds use {}, which NVCC, CUDA_HOME, CUDA_PATH or the search path names", first.display());
        }
        _ => println!("builds of ironloom-kernels find it by themselves"),
    }
    Ok(())
}

/// Fetches the compiler into `.cuda/`, replacing what is there; gives its path.
///
/// # Errors
/// It cannot be fetched or does not run; the error says what to install by hand.
pub(crate) fn install() -> Result<PathBuf> {
    install_into(&folder()).map_err(|error| by_hand(&error))?;
    Ok(folder().join(NVCC))
}

/// The nvcc that a build of the kernels uses, found in the order in which `kernels/build.rs` looks.
pub(crate) fn find() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let name = format!("nvcc{}", std::env::consts::EXE_SUFFIX);
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable);
    let places = homes
        .map(|home| home.join("bin").join(&name))
        .chain(std::env::split_paths(&on_path).map(|folder| folder.join(&name)))
        .chain([folder().join(NVCC)]);
    // What `NVCC` names is taken at its word: a build with a wrong one fails and says so.
    variable("NVCC").or_else(|| places.into_iter().find(|place| place.is_file()))
}

/// What a compiler says of its version: `release 13.0, V13.0.88`.
pub(crate) fn version(nvcc: &Path) -> Result<String> {
    let output =
        Command::new(nvcc).arg("--version").output().with_context(|| format!("cannot start {}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.lines().find_map(|line| line.split_once("release ")).map(|(_, version)| version.trim());
    version.map(|version| format!("release {version}")).with_context(|| format!("{} has no version", nvcc.display()))
}

fn folder() -> PathBuf {
    workspace::root().join(".cuda")
}

fn is_installed(folder: &Path) -> bool {
    folder.join(NVCC).is_file()
        && fs::read_to_string(folder.join(INSTALLED)).is_ok_and(|text| text == PACKAGES.join("\n"))
}

fn install_into(folder: &Path) -> Result<()> {
    let work = WorkFolder::make(folder)?;
    println!("fetching {} (280 MB on disk) into {}", PACKAGES.join(", "), folder.display());
    let site = work.path().join("site");
    let arguments = ["install", "--no-deps", "--only-binary=:all:", "--target"].map(OsStr::new);
    let packages = PACKAGES.map(OsStr::new);
    pip::run(&[&arguments[..], &[site.as_os_str()], &packages[..]].concat(), &work, BYTES)?;
    for programs in PROGRAMS {
        make_executable(&site.join(programs))?;
    }
    try_out(&site.join(NVCC), work.path())?;
    let place = folder.join("nvidia");
    if place.exists() {
        fs::remove_dir_all(&place).with_context(|| format!("cannot remove the old {}", place.display()))?;
    }
    fs::rename(site.join("nvidia"), &place)
        .with_context(|| format!("cannot move the compiler to {}", place.display()))?;
    fs::write(folder.join(INSTALLED), PACKAGES.join("\n")).context("cannot note what is installed")?;
    // Cargo does not know that the build script would now find a compiler: a newer script it runs again.
    let script = workspace::root().join("kernels").join("build.rs");
    let touched = fs::File::options().append(true).open(&script).and_then(|file| file.set_modified(SystemTime::now()));
    touched.with_context(|| format!("cannot mark {} as changed", script.display()))
}

/// Compiles an empty kernel: nvcc starts programs of its own, and the machine's C++ compiler.
fn try_out(nvcc: &Path, work: &Path) -> Result<()> {
    let source = work.join("empty.cu");
    fs::write(&source, "extern \"C\" __global__ void empty() {}\n").context("cannot write a kernel to try")?;
    let mut command = Command::new(nvcc);
    command.args(["-cubin", "-arch=sm_80", "-o"]).arg(work.join("empty.cubin")).arg(&source);
    let output = command.output().with_context(|| format!("cannot start {}", nvcc.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!(
            "nvcc cannot compile an empty kernel; it needs a C++ compiler (Debian: install g++). It said: {}",
            said.trim()
        );
    }
    Ok(())
}

#[cfg(unix)]
fn make_executable(folder: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;

    for entry in fs::read_dir(folder).with_context(|| format!("the packages left no {}", folder.display()))? {
        let path = entry?.path();
        if path.is_file() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("cannot make {} a program", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(not(unix))]
fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}

/// The refusal with its way out: what to install, and how builds find it.
fn by_hand(error: &anyhow::Error) -> anyhow::Error {
    anyhow!(
        "cannot fetch the CUDA compiler: {error:#}\n\n\
         Install CUDA 12 or 13 by hand (developer.nvidia.com/cuda-downloads) and name its \
         folder with CUDA_HOME or its compiler with NVCC, or, on a machine with pip and a network:\n  \
         pip install --no-deps --target .cuda {}\n\
         Everything but the CUDA path builds and runs without it.",
        PACKAGES.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refusal_says_what_to_install_and_where() {
        let text = by_hand(&anyhow!("no pip found")).to_string();
        for part in ["no pip found", "CUDA_HOME", "NVCC", "--target .cuda", PACKAGES[0], PACKAGES[4]] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn only_these_packages_count_as_installed() {
        let folder = std::env::temp_dir().join(format!("ironloom-cuda-toolchain-{}", std::process::id()));
        fs::create_dir_all(folder.join(NVCC).parent().unwrap()).unwrap();
        fs::write(folder.join(NVCC), "").unwrap();
        assert!(!is_installed(&folder));
        fs::write(folder.join(INSTALLED), "nvidia-cuda-nvcc==12.8.93").unwrap();
        assert!(!is_installed(&folder));
        fs::write(folder.join(INSTALLED), PACKAGES.join("\n")).unwrap();
        assert!(is_installed(&folder));
        fs::remove_dir_all(folder).unwrap();
    }
}
