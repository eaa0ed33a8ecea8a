//! `cargo xtask kernels`: registers, shared memory and spills of every CUDA kernel on every architecture.
//!
//! `kernels/build.rs` keeps what the assembler says of each `kernels/cuda/NAME.cu` as `NAME.report.txt` in its output folder, which
//! cargo names. [`ptxas`] reads those, and the table here goes to the terminal or, with `--record`, to `kernels/RESOURCES.md`:
//! a change that costs registers or begins to spill then shows in the diff. The file carries the hash of the sources it is
//! of, and `tidy` says when they have changed since.

mod ptxas;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::{cuda_toolchain, source_hash::hash_of, table::Table, workspace};
use ptxas::Resources;

/// What `kernels` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Write kernels/RESOURCES.md
    #[arg(long)]
    record: bool,
    /// Fail unless kernels/RESOURCES.md says the same
    #[arg(long, conflicts_with = "record")]
    check: bool,
}

/// The record, relative to the top of the workspace.
pub(crate) const RECORD: &str = "kernels/RESOURCES.md";
/// The sources that decide what it says.
const SOURCES: [&str; 1] = ["kernels/cuda"];
/// What stands before the hash in the record.
const HASH_LINE: &str = "Sources (SHA-256 over `kernels/cuda`): ";
/// The architectures that a record has; a build for fewer is for the developer's own machine.
const ARCHITECTURES: [u32; 3] = [80, 86, 90];
const COLUMNS: [&str; 5] = ["kernel", "registers", "shared", "stack", "spilled"];

/// The kernels of each image, by the name of the image.
type Report = BTreeMap<String, Vec<Resources>>;

/// Prints the table of all kernels, and keeps or checks the record.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let report = read_report(&build_output()?, &workspace::root().join(SOURCES[0]))?;
    let all: Vec<&Resources> = report.values().flatten().collect();
    ensure!(
        !all.is_empty(),
        "no kernel was compiled: no nvcc was found (NVCC, CUDA_HOME, CUDA_PATH, the search path, .cuda/); \
         `cargo xtask cuda-toolchain` fetches one"
    );
    let mut table = Table::new(&[&["image"], &COLUMNS[..]].concat());
    for (image, kernels) in &report {
        for [kernel, registers, shared, stack, spilled] in rows(kernels) {
            table.row([image.clone(), kernel, registers, shared, stack, spilled]);
        }
    }
    print!("{table}");
    let spilling = all.iter().filter(|kernel| kernel.spilled != [0, 0]).count();
    println!("{} kernels for {}, {spilling} of them spill", all.len(), names_of(&architectures(&report)));
    let path = workspace::root().join(RECORD);
    if arguments.record || arguments.check {
        ensure!(
            ARCHITECTURES.iter().all(|architecture| architectures(&report).contains(architecture)),
            "a record has {}: build without IRONLOOM_CUDA_ARCHS",
            names_of(&ARCHITECTURES.into())
        );
        let text = record(&report)?;
        if arguments.record {
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            println!("recorded {RECORD}");
        } else if !std::fs::read_to_string(&path).is_ok_and(|found| found == text) {
            bail!("{RECORD} says something else: run `cargo xtask kernels --record` and look at what changed");
        }
    }
    Ok(())
}

/// What is wrong with the record below `root`, if it does not speak of the sources there.
pub(crate) fn stale_record(root: &Path) -> Option<String> {
    let sources = hash_of(root, &SOURCES).ok()?;
    let without_kernels = !root.join(SOURCES[0]).exists();
    let recorded = std::fs::read_to_string(root.join(RECORD)).ok();
    let recorded = recorded.as_deref().map(|text| text.lines().find_map(|line| line.strip_prefix(HASH_LINE)));
    match recorded {
        None if without_kernels => None,
        None => Some("is missing: run `cargo xtask kernels --record`".to_owned()),
        Some(Some(hash)) if hash == sources => None,
        Some(_) => Some("is of other kernels: run `cargo xtask kernels --record`".to_owned()),
    }
}

/// The folder that the kernels' build script wrote to: cargo names it once the crate is built.
fn build_output() -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        reason: String,
        #[serde(default)]
        package_id: String,
        out_dir: Option<PathBuf>,
    }
    let mut check = workspace::cargo(&["check", "--quiet", "--package", "ironloom-kernels", "--all-features"]);
    check.arg("--message-format=json-render-diagnostics").stderr(std::process::Stdio::inherit());
    let output = check.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "the kernels do not build ({})", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let mut messages = text.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok());
    // The identifier is the folder's address with the name behind `#`, and the package's version behind `@`.
    let ran = |message: &Message| {
        message.reason == "build-script-executed" && message.package_id.contains("#ironloom-kernels@")
    };
    messages.find(ran).and_then(|message| message.out_dir).context("cargo ran no build script of ironloom-kernels")
}

/// The reports in `folder` on the files of `sources`: a file that was renamed leaves its old report behind.
fn read_report(folder: &Path, sources: &Path) -> Result<Report> {
    let mut report = Report::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(image) = name.strip_suffix(".report.txt") else { continue };
        if !sources.join(format!("{image}.cu")).is_file() {
            continue;
        }
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut kernels = ptxas::read(&text);
        kernels.sort_by(|a, b| (&a.kernel, a.architecture).cmp(&(&b.kernel, b.architecture)));
        report.insert(image.to_owned(), kernels);
    }
    Ok(report)
}

fn architectures(report: &Report) -> BTreeSet<u32> {
    report.values().flatten().map(|kernel| kernel.architecture).collect()
}

fn names_of(architectures: &BTreeSet<u32>) -> String {
    architectures.iter().map(|number| format!("sm_{number}")).collect::<Vec<_>>().join(", ")
}

/// A row for each kernel of one image: its figures, one where all architectures agree, else one each.
fn rows(kernels: &[Resources]) -> Vec<[String; COLUMNS.len()]> {
    let groups = kernels.chunk_by(|a, b| a.kernel == b.kernel);
    let cell = |group: &[Resources], figure: fn(&Resources) -> u32| {
        let figures: Vec<String> = group.iter().map(|kernel| figure(kernel).to_string()).collect();
        if figures.iter().all(|figure| *figure == figures[0]) { figures[0].clone() } else { figures.join(" / ") }
    };
    let row = |group: &[Resources]| {
        [
            group[0].kernel.clone(),
            cell(group, |kernel| kernel.registers),
            cell(group, |kernel| kernel.shared),
            cell(group, |kernel| kernel.stack),
            cell(group, |kernel| kernel.spilled.iter().sum()),
        ]
    };
    groups.map(row).collect()
}

fn record(report: &Report) -> Result<String> {
    let compiler = cuda_toolchain::find().context("the nvcc of this build is gone")?;
    let mut text = format!(
        "# What the CUDA kernels take\n\n\
         Written by `cargo xtask kernels --record`. Registers are a thread's, `shared` the static shared memory of a block in bytes, \
         `stack` a thread's\nlocal memory in bytes, `spilled` the bytes stored and loaded for want of registers. Where architectures \
         differ, the figures are those of {}.\nImages whose names end in `_hopper` are for sm_90 alone; there, warps hand \
         registers on to each other.\n\n\
         Compiler: nvcc {}\n{HASH_LINE}{}\n",
        names_of(&architectures(report)),
        cuda_toolchain::version(&compiler)?,
        hash_of(workspace::root(), &SOURCES)?
    );
    for (image, kernels) in report {
        write!(text, "\n## {image}\n\n| {} |\n|{}\n", COLUMNS.join(" | "), "---|".repeat(COLUMNS.len()))?;
        for row in rows(kernels) {
            writeln!(text, "| {} |", row.join(" | "))?;
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(kernel: &str, architecture: u32, registers: u32) -> Resources {
        Resources { kernel: kernel.to_owned(), architecture, registers, spilled: [4, 8], ..Resources::default() }
    }

    #[test]
    fn figures_that_agree_are_said_once() {
        let kernels = [kernel("a", 80, 32), kernel("a", 90, 40), kernel("b", 80, 16), kernel("b", 90, 16)];
        assert_eq!(rows(&kernels), [["a", "32 / 40", "0", "0", "12"], ["b", "16", "0", "0", "12"]]);
        assert_eq!(names_of(&architectures(&Report::from([("image".to_owned(), kernels.into())]))), "sm_80, sm_90");
    }

    #[test]
    fn a_record_is_stale_when_a_kernel_has_changed() {
        let root = std::env::temp_dir().join(format!("ironloom-kernels-{}", std::process::id()));
        assert_eq!(stale_record(&root), None);
        std::fs::create_dir_all(root.join("kernels/cuda")).unwrap();
        std::fs::write(root.join("kernels/cuda/a.cu"), "// One.").unwrap();
        assert!(stale_record(&root).is_some_and(|message| message.contains("missing")));
        let text = format!("# Head\n{HASH_LINE}{}\n", hash_of(&root, &SOURCES).unwrap());
        std::fs::write(root.join(RECORD), text).unwrap();
        assert_eq!(stale_record(&root), None);
        std::fs::write(root.join("kernels/cuda/a.cu"), "// Two.").unwrap();
        assert!(stale_record(&root).is_some_and(|message| message.contains("other kernels")));
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_folder_of_reports_is_read_by_image() {
        let folder = std::env::temp_dir().join(format!("ironloom-ptxas-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("rope.fatbin"), [0, 255]).unwrap();
        std::fs::write(folder.join("rope.cu"), "// Head.\n").unwrap();
        let text = "ptxas info    : Compiling entry function 'rope' for 'sm_80'\n";
        for name in ["rope.report.txt", "renamed.report.txt"] {
            std::fs::write(folder.join(name), text).unwrap();
        }
        let report = read_report(&folder, &folder).unwrap();
        assert_eq!(report.keys().collect::<Vec<_>>(), ["rope"]);
        assert_eq!(report["rope"][0].kernel, "rope");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
