//! One benchmark's figures, as its process hands them to the one that compares.

use std::time::Instant;

use anyhow::Result;
use ironloom_lm::KernelTime;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::place::CardName;
use crate::{machine, table::Table};

/// Timed runs of a benchmark.
pub(super) const RUNS: usize = 5;

/// What a run is bounded by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Work {
    /// Bytes that must come from memory for one unit of work (or, for a time, in all).
    Bytes(f64),
    /// Multiply-adds, each counted as two operations: in single precision on a processor, of bfloat16 on a card.
    Operations(f64),
    /// No bound is known.
    Unbounded,
}

/// What came of one benchmark.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Measurement {
    /// The figure of each timed run.
    pub(super) values: Vec<f64>,
    pub(super) work: Work,
    /// The most memory held, of the device measured on.
    pub(super) peak_mib: f64,
    /// The share of the processor that other processes took while it was measured.
    pub(super) others: f64,
    pub(super) shape: Map<String, Value>,
    pub(super) notes: String,
    /// The kernels of one pass, where it ran on a card.
    #[serde(default)]
    pub(super) kernels: Vec<Kernel>,
    /// The card it ran on.
    #[serde(default)]
    pub(super) card: Option<CardName>,
}

#[cfg(test)]
impl Measurement {
    /// A host's, of so many bytes.
    pub(super) fn of(values: &[f64]) -> Self {
        Self {
            values: values.to_vec(),
            work: Work::Bytes(1e8),
            peak_mib: 0.0,
            others: 0.0,
            shape: Map::new(),
            notes: String::new(),
            kernels: Vec::new(),
            card: None,
        }
    }
}

/// One kind of kernel in a pass.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Kernel {
    pub(super) name: String,
    pub(super) launches: usize,
    /// Of all launches, without overlap.
    pub(super) microseconds: f64,
    /// Of the sum of all kernels.
    pub(super) share: f64,
    /// TFLOP/s, where the operations are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) teraflops: Option<f64>,
}

impl Kernel {
    /// The rows of a profile.
    pub(crate) fn of_profile(times: &[KernelTime]) -> Vec<Self> {
        let total: f64 = times.iter().map(|kernel| kernel.seconds).sum();
        let row = |kernel: &KernelTime| Self {
            name: kernel.label(),
            launches: kernel.launches,
            microseconds: 1e6 * kernel.seconds,
            share: if total > 0.0 { kernel.seconds / total } else { 0.0 },
            teraflops: kernel.operations().map(|operations| operations / kernel.seconds / 1e12),
        };
        times.iter().map(row).collect()
    }

    /// Launches and microseconds of all.
    pub(crate) fn sum(kernels: &[Self]) -> (usize, f64) {
        let launches = kernels.iter().map(|kernel| kernel.launches).sum();
        (launches, kernels.iter().map(|kernel| kernel.microseconds).sum())
    }

    /// A line for each.
    pub(crate) fn table(kernels: &[Self]) -> Table {
        let mut table = Table::new(&["kernel", "launches", "us", "us each", "share", "TFLOP/s"]);
        for kernel in kernels {
            table.row([
                kernel.name.clone(),
                kernel.launches.to_string(),
                format!("{:.1}", kernel.microseconds),
                format!("{:.2}", kernel.microseconds / kernel.launches.max(1) as f64),
                format!("{:.1}%", 100.0 * kernel.share),
                kernel.teraflops.map_or(String::new(), |rate| format!("{rate:.0}")),
            ]);
        }
        table
    }
}

/// Times `run` [`RUNS`] times after one run that is not counted; a run returns its figure.
pub(super) fn measure(work: Work, shape: Value, mut run: impl FnMut() -> Result<f64>) -> Result<Measurement> {
    run()?;
    let busy = machine::ProcessorTime::now();
    let values = (0..RUNS).map(|_| run()).collect::<Result<Vec<f64>>>()?;
    let shape = match shape {
        Value::Object(shape) => shape,
        _ => Map::new(),
    };
    let (others, peak_mib) = (busy.share_of_others(), machine::peak_mib());
    Ok(Measurement { values, work, peak_mib, others, shape, notes: String::new(), kernels: Vec::new(), card: None })
}

/// The seconds `work` takes, with its result.
pub(super) fn seconds<T>(work: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let start = Instant::now();
    let result = work()?;
    Ok((start.elapsed().as_secs_f64(), result))
}
