//! Other programs on the same inputs: the scripts of `benches/peers`, each of which prints JSON objects, one a line.

use std::{
    collections::{HashMap, HashSet},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::{Device, benchmarks::Benchmark};
use crate::{machine, python, smollm2, workspace};

/// What a peer's script prints.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Report {
    /// The program and what it ran, such as `llama.cpp Q4_1`.
    pub(super) name: String,
    pub(super) version: String,
    /// Its figures by name, the higher the better.
    figures: HashMap<String, Figure>,
}

#[derive(Clone, Debug, Deserialize)]
struct Figure {
    best: f64,
    /// The most of the card's memory in use, where the script tells it.
    memory_mib: Option<f64>,
}

impl Report {
    /// The best of the figure called `name`.
    pub(super) fn best(&self, name: &str) -> Option<f64> {
        self.figures.get(name).map(|figure| figure.best)
    }

    /// The memory in use for the figure called `name`, in MiB.
    pub(super) fn memory_mib(&self, name: &str) -> Option<f64> {
        self.figures.get(name)?.memory_mib
    }
}

/// The scripts for a card: what the names of their figures begin with, and the option that takes what follows (or, of
/// whole names, the names), with commas between.
const CARD_SCRIPTS: [(&str, &str, &str, Wanted); 5] = [
    ("torch_decode.py", "decode-", "--cases", Wanted::Names),
    ("torch_prefill.py", "prefill-3b-bf16-", "--lengths", Wanted::Endings),
    ("torch_attention.py", "attention-forward-", "--widths", Wanted::Endings),
    ("torch_attention.py", "attention-backward-", "--backward-widths", Wanted::Endings),
    ("torch_train.py", "train-", "--cases", Wanted::Names),
];

/// What a script is told of the figures it shall measure.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Names,
    Endings,
}

/// The peers' reports of one command. A figure that several benchmarks are compared with is measured once.
pub(super) struct Peers {
    device: Device,
    /// The figures that were asked for, whether or not a report has them.
    asked: HashSet<&'static str>,
    reports: Vec<Report>,
}

impl Peers {
    pub(super) fn new(device: Device) -> Self {
        Self { device, asked: HashSet::new(), reports: Vec::new() }
    }

    /// What peers have reported so far.
    pub(super) fn reports(&self) -> &[Report] {
        &self.reports
    }

    /// Runs every peer that has a figure for one of the benchmarks and was not asked for it before. On a card one that fails
    /// is said and left out: not every machine has PyTorch.
    pub(super) fn run_for<'a>(&mut self, benchmarks: impl IntoIterator<Item = &'a Benchmark>) -> Result<()> {
        let figures = self.new_figures(benchmarks);
        match self.device {
            Device::Cpu => {
                let (training, decoding): (Vec<&str>, Vec<&str>) =
                    figures.iter().partition(|figure| figure.starts_with("train-"));
                let threads = machine::threads().to_string();
                if !decoding.is_empty() {
                    let model = smollm2::fetch()?;
                    self.reports.extend(run("llama_cpp.py", |command| {
                        command.arg("--model").arg(&model).args(["--threads", &threads]);
                    })?);
                }
                if !training.is_empty() {
                    let cases = training.join(",");
                    self.reports.extend(run("torch_train_host.py", |command| {
                        command.args(["--json", "--cases", &cases, "--threads", &threads]);
                    })?);
                }
            }
            Device::Cuda => {
                for (script, option, value) in card_calls(&figures) {
                    match run(script, |command| {
                        command.args(["--json", option, &value]);
                    }) {
                        Ok(more) => self.reports.extend(more),
                        Err(error) => eprintln!("no figures of {script}: {error:#}"),
                    }
                }
            }
        }
        Ok(())
    }

    /// The figures that benchmarks are compared with, that were not asked for before and that no report has: a script may
    /// tell more than it was asked for.
    fn new_figures<'a>(&mut self, benchmarks: impl IntoIterator<Item = &'a Benchmark>) -> Vec<&'static str> {
        let Self { asked, reports, .. } = self;
        let figures = benchmarks.into_iter().flat_map(|benchmark| benchmark.peer_figures).copied();
        let is_new =
            |figure: &&'static str| reports.iter().all(|report| report.best(figure).is_none()) && asked.insert(figure);
        let mut new: Vec<&str> = figures.filter(is_new).collect();
        new.sort_unstable();
        new
    }
}

/// The scripts to run for these figures, each with its option.
fn card_calls(figures: &[&str]) -> Vec<(&'static str, &'static str, String)> {
    let mut calls = Vec::new();
    for (script, beginning, option, wanted) in CARD_SCRIPTS {
        let of_script = figures.iter().filter_map(|figure| {
            let ending = figure.strip_prefix(beginning)?;
            Some(if wanted == Wanted::Names { *figure } else { ending })
        });
        let value = of_script.collect::<Vec<_>>().join(",");
        if !value.is_empty() {
            calls.push((script, option, value));
        }
    }
    calls
}

fn run(script: &str, add_arguments: impl FnOnce(&mut Command)) -> Result<Vec<Report>> {
    let python = python::python().context("no Python 3 found to run the peers with")?;
    let mut command = python.command();
    command.arg(workspace::root().join("benches").join("peers").join(script));
    add_arguments(&mut command);
    let output = command.stderr(std::process::Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot start {python}"))?;
    if !output.status.success() {
        bail!("{script} failed ({})", output.status);
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    reports(&printed).with_context(|| format!("{script} printed no report"))
}

/// The reports among the lines that a script printed.
fn reports(printed: &str) -> Result<Vec<Report>> {
    let lines = printed.lines().filter(|line| line.starts_with('{'));
    let reports = lines.map(serde_json::from_str).collect::<Result<Vec<Report>, _>>()?;
    if reports.is_empty() { bail!("there is no line with an object") } else { Ok(reports) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read() {
        let text = r#"{"name": "a", "version": "1", "figures": {"tg128": {"values": [1.0, 2.0], "best": 2.0, "mean": 1.5, "memory_mib": 3.0}}}"#;
        let found = reports(&format!("a warning\n{text}\n{text}\n")).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].best("tg128"), found[0].best("pp512")), (Some(2.0), None));
        assert_eq!((found[0].memory_mib("tg128"), found[0].memory_mib("pp512")), (Some(3.0), None));
        assert!(reports("nothing").is_err());
    }

    #[test]
    fn a_figure_is_asked_for_once() {
        let mut peers = Peers::new(Device::Cuda);
        let mut of = |names: &[&str]| peers.new_figures(names.iter().map(|name| Device::Cuda.benchmark(name).unwrap()));
        assert_eq!(of(&["decode-3b-bf16-16", "decode-3b-bf16-1", "gemm"]), ["decode-3b-bf16-1", "decode-3b-bf16-16"]);
        assert_eq!(of(&["decode-3b-nf4-1", "decode-3b-q4k-1"]), ["decode-3b-nf4-1"]);
        assert!(of(&["decode-3b-nf4-1"]).is_empty());

        let mut peers = Peers::new(Device::Cpu);
        let both = r#"{"name": "a", "version": "1", "figures": {"tg128": {"best": 2.0}, "pp512": {"best": 3.0}}}"#;
        peers.reports = reports(both).unwrap();
        assert!(peers.new_figures([Device::Cpu.benchmark("smollm2-tg128").unwrap()]).is_empty());
        assert_eq!(peers.new_figures([Device::Cpu.benchmark("train-host").unwrap()]), ["train-host"]);
    }

    #[test]
    fn scripts_get_the_figures_they_have() {
        let figures = [
            "decode-3b-bf16-1",
            "decode-3b-nf4-1",
            "prefill-3b-bf16-512",
            "prefill-3b-bf16-4096",
            "attention-backward-64",
            "train-moe-55m-4x1024",
        ];
        assert_eq!(
            card_calls(&figures),
            [
                ("torch_decode.py", "--cases", "decode-3b-bf16-1,decode-3b-nf4-1".to_owned()),
                ("torch_prefill.py", "--lengths", "512,4096".to_owned()),
                ("torch_attention.py", "--backward-widths", "64".to_owned()),
                ("torch_train.py", "--cases", "train-moe-55m-4x1024".to_owned()),
            ]
        );
    }
}
