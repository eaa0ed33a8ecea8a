//! One benchmark's figures, as its process hands them to the one that compares.

use std::time::Instant;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::machine;

/// Timed runs of a benchmark.
pub(super) const RUNS: usize = 5;

/// What a run is bounded by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Work {
    /// Bytes that must come from memory for one unit of work (or, for a time, in all).
    Bytes(f64),
    /// Multiply-adds in single precision, each counted as two operations.
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
    pub(super) peak_mib: f64,
    /// The share of the processor that other processes took while it was measured.
    pub(super) others: f64,
    pub(super) shape: Map<String, Value>,
    pub(super) notes: String,
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
    let others = busy.share_of_others();
    Ok(Measurement { values, work, peak_mib: machine::peak_mib(), others, shape, notes: String::new() })
}

/// The seconds `work` takes, with its result.
pub(super) fn seconds<T>(work: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let start = Instant::now();
    let result = work()?;
    Ok((start.elapsed().as_secs_f64(), result))
}
