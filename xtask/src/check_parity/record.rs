//! `benches/records/<device>/parity.json`: what was checked, how it went, and on which sources.

use std::path::PathBuf;

use anyhow::Result;
use ironloom_tensor::Device;
use serde::Serialize;

use super::{
    case::{Case, Outcome},
    sources::hash_of_sources,
};
use crate::{machine, workspace};

#[derive(Serialize)]
struct Record {
    device: String,
    commit: String,
    date: String,
    cases: usize,
    passed: usize,
    failed: usize,
    worst_case: Worst,
    /// SHA-256 of the operations' sources.
    sources: String,
}

#[derive(Default, Serialize)]
struct Worst {
    operation: String,
    shape: String,
    error: f64,
    bound: f64,
}

/// Writes the record of `device`.
pub(super) fn write(device: &Device, outcomes: &[(Case, Outcome)]) -> Result<PathBuf> {
    let passed = outcomes.iter().filter(|(_, outcome)| outcome.passes()).count();
    let worst = outcomes.iter().max_by(|a, b| a.1.of_bound().total_cmp(&b.1.of_bound()));
    let worst_case = worst.map(|(case, outcome)| Worst {
        operation: case.operation.clone(),
        shape: case.shape.clone(),
        // JSON has no infinity.
        error: outcome.error.min(f64::MAX),
        bound: outcome.bound,
    });
    let record = Record {
        device: machine::name_of(device),
        commit: workspace::commit(),
        date: machine::date(),
        cases: outcomes.len(),
        passed,
        failed: outcomes.len() - passed,
        worst_case: worst_case.unwrap_or_default(),
        sources: hash_of_sources(workspace::root())?,
    };
    let path = machine::records_of(device).join("parity.json");
    machine::write_record(&path, &record)?;
    Ok(path)
}
