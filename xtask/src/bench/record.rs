//! `benches/records/<device>/<name>.json`: the row a benchmark is held against.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    benchmarks::Benchmark,
    measurement::{Kernel, Measurement},
    place::Place,
};
use crate::{machine, workspace};

/// A benchmark below this share of its row fails.
const KEPT: f64 = 0.97;

/// One row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) bench: String,
    pub(super) device: String,
    /// As [`Place`] has it.
    pub(super) driver: String,
    pub(super) commit: String,
    pub(super) date: String,
    pub(super) unit: String,
    pub(super) higher_is_better: bool,
    pub(super) values: Vec<f64>,
    pub(super) best: f64,
    pub(super) median: f64,
    /// The best figure this machine allows; 0 where none is known.
    pub(super) bound: f64,
    pub(super) bound_kind: String,
    pub(super) of_bound: f64,
    pub(super) peak_mib: f64,
    pub(super) load_average: f64,
    pub(super) peers: Vec<Peer>,
    pub(super) shape: Map<String, Value>,
    pub(super) notes: String,
    /// The kernels of one pass on a card.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) kernels: Vec<Kernel>,
}

/// Another program's figure from the same run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Peer {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) best: f64,
    /// Ours over theirs, turned so that more than 1 means that ours is better.
    pub(super) ratio: f64,
    /// Its memory in use, where its script tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) memory_mib: Option<f64>,
}

/// The bounds measured in this run, and how busy the machine was before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Circumstances {
    pub(super) bandwidth: f64,
    pub(super) peak: f64,
    pub(super) load_average: f64,
}

impl Record {
    pub(super) fn new(benchmark: &Benchmark, measurement: Measurement, around: Circumstances, place: &Place) -> Self {
        let mut sorted = measurement.values.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[sorted.len() / 2];
        let best = if benchmark.higher_is_better { sorted[sorted.len() - 1] } else { sorted[0] };
        let (bound, bound_kind) = benchmark.bound(measurement.work, around.bandwidth, around.peak);
        let of_bound = match (bound == 0.0, benchmark.higher_is_better) {
            (true, _) => 0.0,
            (false, true) => best / bound,
            (false, false) => bound / best,
        };
        Self {
            bench: benchmark.name.to_owned(),
            device: place.device.clone(),
            driver: place.driver.clone(),
            commit: workspace::commit(),
            date: machine::date(),
            unit: benchmark.unit.to_owned(),
            higher_is_better: benchmark.higher_is_better,
            values: measurement.values.iter().copied().map(rounded).collect(),
            best: rounded(best),
            median: rounded(median),
            bound: rounded(bound),
            bound_kind,
            of_bound: rounded(of_bound),
            peak_mib: rounded(measurement.peak_mib),
            load_average: around.load_average,
            peers: Vec::new(),
            shape: measurement.shape,
            notes: measurement.notes,
            kernels: measurement.kernels.into_iter().map(Kernel::rounded).collect(),
        }
    }

    /// The row of a device, if there is one.
    pub(super) fn row(name: &str, place: &Place) -> Result<Option<Self>> {
        let path = place.record(name);
        if !path.exists() {
            return Ok(None);
        }
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Some(serde_json::from_slice(&bytes).with_context(|| format!("{} is not a record", path.display()))?))
    }

    /// Writes it as the row of a device.
    pub(super) fn write(&self, place: &Place) -> Result<PathBuf> {
        let path = place.record(&self.bench);
        machine::write_record(&path, self)?;
        Ok(path)
    }

    /// How it stands to `row`: more than 1 is better.
    pub(super) fn of_row(&self, row: &Self) -> f64 {
        ratio(self.best, row.best, self.higher_is_better)
    }

    /// Whether it is good enough beside `row`.
    pub(super) fn keeps(&self, row: &Self) -> bool {
        self.of_row(row) >= KEPT
    }

    /// Distance of the worst run from the best, as a share of the best.
    pub(super) fn spread(&self) -> f64 {
        let worst = if self.higher_is_better {
            self.values.iter().copied().fold(f64::MAX, f64::min)
        } else {
            self.values.iter().copied().fold(0.0, f64::max)
        };
        (worst - self.best).abs() / self.best
    }
}

impl Kernel {
    fn rounded(self) -> Self {
        Self {
            microseconds: rounded(self.microseconds),
            share: rounded(self.share),
            teraflops: self.teraflops.map(rounded),
            ..self
        }
    }
}

/// Ours over theirs, turned so that more than 1 means that ours is better.
pub(super) fn ratio(ours: f64, theirs: f64, higher_is_better: bool) -> f64 {
    if higher_is_better { ours / theirs } else { theirs / ours }
}

/// Four digits: what a measurement has at most.
pub(super) fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::{super::Device, *};

    fn record(name: &str, values: &[f64]) -> Record {
        let around = Circumstances { bandwidth: 20.0, peak: 100.0, load_average: 0.0 };
        Record::new(Device::Cpu.benchmark(name).unwrap(), Measurement::of(values), around, &Place::host())
    }

    #[test]
    fn the_best_run_counts_and_97_percent_are_kept() {
        let row = record("smollm2-tg128", &[90.0, 100.0, 95.0]);
        assert_eq!((row.best, row.median, row.of_bound, row.spread()), (100.0, 95.0, 0.5, 0.1));
        assert!(record("smollm2-tg128", &[97.0]).keeps(&row));
        assert!(!record("smollm2-tg128", &[96.9]).keeps(&row));
    }

    #[test]
    fn of_times_the_shortest_counts() {
        let row = record("load-smollm2", &[0.3, 0.2, 0.25]);
        assert_eq!((row.best, row.of_bound), (0.2, 0.025));
        assert!(record("load-smollm2", &[0.206]).keeps(&row));
        assert!(!record("load-smollm2", &[0.207]).keeps(&row));
    }

    #[test]
    fn a_row_survives_its_file() {
        let row = record("smollm2-tg128", &[90.0, 100.0]);
        let read: Record = serde_json::from_str(&serde_json::to_string(&row).unwrap()).unwrap();
        assert_eq!((read.best, read.bench), (row.best, row.bench));
    }

    #[test]
    fn four_digits_are_kept() {
        assert_eq!([149.5234, 0.00123456, 0.0].map(rounded), [149.5, 0.001235, 0.0]);
    }
}
