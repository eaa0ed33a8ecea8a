//! Other programs on the same inputs: the scripts of `benches/peers`, each of which prints one JSON object.

use std::{collections::HashMap, path::Path, process::Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::benchmarks::Benchmark;
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
}

impl Report {
    /// The best of the figure called `name`.
    pub(super) fn best(&self, name: &str) -> Option<f64> {
        self.figures.get(name).map(|figure| figure.best)
    }
}

/// Runs every peer that has a figure for one of the benchmarks.
pub(super) fn run_for(benchmarks: &[&Benchmark]) -> Result<Vec<Report>> {
    if benchmarks.iter().all(|benchmark| benchmark.peer_figure.is_none()) {
        return Ok(Vec::new());
    }
    let model = smollm2::fetch()?;
    Ok(vec![run(&workspace::root().join("benches").join("peers").join("llama_cpp.py"), &model)?])
}

fn run(script: &Path, model: &Path) -> Result<Report> {
    let python = python::python().context("no Python 3 found to run the peers with")?;
    let mut command = python.command();
    command.arg(script).arg("--model").arg(model).args(["--threads", &machine::threads().to_string()]);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start {python}"))?;
    if !output.status.success() {
        bail!("{} failed ({})", script.display(), output.status);
    }
    serde_json::from_slice(&output.stdout).with_context(|| format!("{} printed no report", script.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read() {
        let text =
            r#"{"name": "a", "version": "1", "figures": {"tg128": {"values": [1.0, 2.0], "best": 2.0, "mean": 1.5}}}"#;
        let report: Report = serde_json::from_str(text).unwrap();
        assert_eq!((report.best("tg128"), report.best("pp512")), (Some(2.0), None));
    }
}
