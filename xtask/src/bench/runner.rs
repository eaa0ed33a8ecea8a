//! The process that compares: starts the processes that measure, and holds what they measured against the rows.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::{
    Arguments, Device,
    benchmarks::{BANDWIDTH, Benchmark, PEAK},
    cuda::Card,
    measurement::{Kernel, Measurement},
    peers::{Peers, Report},
    place::Place,
    record::{Circumstances, Peer, Record, ratio, rounded},
};
use crate::{machine, table::Table};

/// A share of the processor taken by other processes that makes a measurement doubtful.
const DISTURBED: f64 = 0.05;

/// Measures what was named, prints a table, and fails below the rows.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device;
    if !arguments.process.is_empty() {
        return measure_here(device, &arguments.process);
    }
    if arguments.list {
        device.benchmarks().iter().for_each(|benchmark| println!("{:<25} {}", benchmark.name, benchmark.about));
        return Ok(());
    }
    let chosen = chosen(device, &arguments.names)?;
    let load_average = machine::load_average();
    let say = |text: &str| {
        if !arguments.json {
            println!("{text}");
        }
    };
    say(&format!("{}, load average {load_average:.2} before the first run", machine::device_name()));
    if load_average > 0.25 * machine::threads() as f64 {
        say("THE MACHINE IS BUSY: these figures are lower than they should be");
    }

    // The probes that set the bounds come first.
    let mut order: Vec<&Benchmark> = vec![device.benchmark(BANDWIDTH)?, device.benchmark(PEAK)?];
    order.extend(chosen.iter().filter(|benchmark| ![BANDWIDTH, PEAK].contains(&benchmark.name)));
    let mut session = Session::new(&chosen, load_average);
    let mut peers = Peers::new(device);
    let mut outcomes = Vec::new();
    let mut failures = Vec::new();
    for group in order.chunk_by(|before, benchmark| benchmark.shares_process(before)) {
        session.add(measure_in_process(device, group, &mut failures)?);
        if arguments.peers {
            peers.run_for(group.iter().copied().filter(|benchmark| session.is_waiting(benchmark.name)))?;
        }
        // What a later group does, or that it is cut off, takes nothing from these.
        for record in session.records(peers.reports()) {
            let place = session.place();
            let row = Record::row(&record.bench, &place)?;
            if arguments.record {
                say(&format!("recorded {}", record.write(&place)?.display()));
            }
            outcomes.push(Outcome { record, row });
        }
    }
    for probe in [BANDWIDTH, PEAK] {
        ensure!(session.best(probe).is_some(), "{probe} gave no figure: {}", failures.join("; "));
    }

    if arguments.json {
        let records: Vec<&Record> = outcomes.iter().map(|outcome| &outcome.record).collect();
        println!("{}", serde_json::to_string_pretty(&records)?);
    } else {
        let place = session.place();
        say(&format!("on {} ({})", place.device, place.driver));
        print!("{}", table(&outcomes));
        let records = || outcomes.iter().map(|outcome| &outcome.record);
        records()
            .filter(|record| !record.notes.is_empty())
            .for_each(|record| println!("{}: {}", record.bench, record.notes));
        if arguments.profile {
            records().filter(|record| !record.kernels.is_empty()).for_each(print_profile);
        }
    }
    if !arguments.record {
        failures.extend(outcomes.iter().filter_map(Outcome::below_row));
    }
    if failures.is_empty() {
        Ok(())
    } else {
        bail!("failed, or below 97% of the recorded rows:\n  {}", failures.join("\n  "))
    }
}

/// What has been measured so far.
struct Session<'a> {
    chosen: &'a [&'a Benchmark],
    load_average: f64,
    measured: Vec<(&'a Benchmark, Measurement)>,
    /// Of `measured`, those that have their records.
    recorded: usize,
}

impl<'a> Session<'a> {
    fn new(chosen: &'a [&'a Benchmark], load_average: f64) -> Self {
        Self { chosen, load_average, measured: Vec::new(), recorded: 0 }
    }

    fn add(&mut self, group: Vec<(&'a Benchmark, Measurement)>) {
        self.measured.extend(group);
    }

    /// Whether it was measured and shall have a record, which has not been made.
    fn is_waiting(&self, name: &str) -> bool {
        self.waiting().any(|(benchmark, _)| benchmark.name == name)
    }

    fn waiting(&self) -> impl Iterator<Item = &(&'a Benchmark, Measurement)> {
        let is_chosen = |name: &str| self.chosen.iter().any(|benchmark| benchmark.name == name);
        self.measured[self.recorded..].iter().filter(move |(benchmark, _)| is_chosen(benchmark.name))
    }

    /// The best figure of a probe, in GB/s or GFLOPS.
    fn best(&self, name: &str) -> Option<f64> {
        let (probe, measurement) = self.measured.iter().find(|(benchmark, _)| benchmark.name == name)?;
        let best = measurement.values.iter().copied().fold(0.0, f64::max);
        Some(if probe.unit == "TFLOP/s" { 1e3 * best } else { best })
    }

    /// The card, once one was measured on, else this machine's processor.
    fn place(&self) -> Place {
        let card = self.measured.iter().find_map(|(_, measurement)| measurement.card.as_ref());
        card.map_or_else(Place::host, Place::card)
    }

    /// The records of what was chosen and has none yet; none before both probes have their figures.
    fn records(&mut self, reports: &[Report]) -> Vec<Record> {
        let (Some(bandwidth), Some(peak)) = (self.best(BANDWIDTH), self.best(PEAK)) else { return Vec::new() };
        let around = Circumstances { bandwidth, peak, load_average: self.load_average };
        let place = self.place();
        let of = |(benchmark, measurement): &(&Benchmark, Measurement)| {
            record(benchmark, measurement.clone(), around, &place, reports)
        };
        let records = self.waiting().map(of).collect();
        self.recorded = self.measured.len();
        records
    }
}

/// A record, and the row of this device as it was before this run.
struct Outcome {
    record: Record,
    row: Option<Record>,
}

impl Outcome {
    /// What is to be said of it where it is below 97% of its row.
    fn below_row(&self) -> Option<String> {
        let Self { record, row } = self;
        let row = row.as_ref().filter(|row| !record.keeps(row))?;
        let Record { bench, best, unit, .. } = record;
        Some(format!("{bench}: {best} {unit}, and its row of {} has {}", row.date, row.best))
    }
}

fn chosen(device: Device, names: &[String]) -> Result<Vec<&'static Benchmark>> {
    if names.is_empty() {
        return Ok(device.benchmarks().iter().collect());
    }
    let mut chosen = names.iter().map(|name| device.benchmark(name)).collect::<Result<Vec<_>>>()?;
    // In the table's order, in which those that share a process are neighbours.
    let place = |name| device.benchmarks().iter().position(|benchmark| benchmark.name == name);
    chosen.sort_by_key(|benchmark| place(benchmark.name));
    chosen.dedup_by_key(|benchmark| benchmark.name);
    Ok(chosen)
}

/// A line that a measuring process prints.
#[derive(Serialize, Deserialize)]
struct Line {
    bench: String,
    /// None where it failed.
    measurement: Option<Measurement>,
    failure: String,
}

/// Measures in this process, one after the other. One that fails is said, and the next one runs.
fn measure_here(device: Device, names: &[String]) -> Result<()> {
    let mut card: Option<Card> = None;
    for name in names {
        let line = match device.benchmark(name)?.measure(&mut card) {
            Ok(measurement) => Line { bench: name.clone(), measurement: Some(measurement), failure: String::new() },
            Err(error) => Line { bench: name.clone(), measurement: None, failure: format!("{error:#}") },
        };
        println!("{}", serde_json::to_string(&line)?);
    }
    Ok(())
}

/// Measures benchmarks in a process of their own.
fn measure_in_process<'a>(
    device: Device,
    group: &[&'a Benchmark],
    failures: &mut Vec<String>,
) -> Result<Vec<(&'a Benchmark, Measurement)>> {
    let program = std::env::current_exe().context("this program's own path is unknown")?;
    let names = group.iter().map(|benchmark| benchmark.name).collect::<Vec<_>>().join(",");
    let mut command = Command::new(program);
    command.args(["bench", "--device", device.name(), "--process", &names]).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).spawn();
    let mut child = child.with_context(|| format!("cannot start the process of {names}"))?;
    let output = child.stdout.take().context("a process without an output")?;
    let (mut waiting, mut measured) = (group.to_vec(), Vec::new());
    for line in BufReader::new(output).lines() {
        // What a download says is printed, too, and is no measurement.
        let Ok(line) = serde_json::from_str::<Line>(&line?) else { continue };
        let Some(index) = waiting.iter().position(|benchmark| benchmark.name == line.bench) else { continue };
        let benchmark = waiting.remove(index);
        match line.measurement {
            Some(measurement) => {
                let best = measurement.values.iter().copied().fold(f64::NAN, f64::max);
                eprintln!("{}: {} {}", benchmark.name, rounded(best), benchmark.unit);
                measured.push((benchmark, measurement));
            }
            None => failures.push(format!("{}: {}", benchmark.name, line.failure)),
        }
    }
    let status = child.wait()?;
    failures.extend(waiting.iter().map(|benchmark| format!("{}: its process ended ({status})", benchmark.name)));
    Ok(measured)
}

fn record(
    benchmark: &Benchmark,
    measurement: Measurement,
    around: Circumstances,
    place: &Place,
    reports: &[Report],
) -> Record {
    let others = measurement.others;
    let mut record = Record::new(benchmark, measurement, around, place);
    if others > DISTURBED {
        let separator = if record.notes.is_empty() { "" } else { "; " };
        record.notes += &format!("{separator}other processes took {:.0}% of the processor meanwhile", 100.0 * others);
    }
    for report in reports {
        for figure in benchmark.peer_figures {
            let Some(best) = report.best(figure) else { continue };
            let memory_mib = report.memory_mib(figure).map(rounded);
            let ratio = rounded(ratio(record.best, best, record.higher_is_better));
            let (name, version) = (report.name.clone(), report.version.clone());
            record.peers.push(Peer { name, version, best: rounded(best), ratio, memory_mib });
        }
    }
    record
}

fn table(outcomes: &[Outcome]) -> Table {
    let mut table =
        Table::new(&["bench", "best", "unit", "spread", "bound", "of bound", "kernels", "peak MiB", "of row", "peers"]);
    for Outcome { record, row } in outcomes {
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        let peers = record.peers.iter().map(|Peer { name, best, ratio, memory_mib, .. }| {
            let memory = memory_mib.map_or(String::new(), |mib| format!(", {mib:.0} MiB"));
            format!("{ratio:.2}x {name} ({best}{memory})")
        });
        table.row([
            record.bench.clone(),
            record.best.to_string(),
            record.unit.clone(),
            percent(record.spread()),
            if record.bound == 0.0 { String::new() } else { record.bound.to_string() },
            if record.bound == 0.0 { String::new() } else { percent(record.of_bound) },
            record.shape.get("kernels_per_step").map_or(String::new(), ToString::to_string),
            format!("{:.0}", record.peak_mib),
            row.as_ref().map_or(String::new(), |row| percent(record.of_row(row))),
            peers.collect::<Vec<_>>().join(", "),
        ]);
    }
    table
}

/// The time of each kind of kernel in one pass.
fn print_profile(record: &Record) {
    let (launches, total) = Kernel::sum(&record.kernels);
    println!("\n{}: {launches} kernels one by one, {total:.0} us\n{}", record.bench, Kernel::table(&record.kernels));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(name: &str, value: f64) -> (&'static Benchmark, Measurement) {
        (Device::Cpu.benchmark(name).unwrap(), Measurement::of(&[value]))
    }

    fn names(records: &[Record]) -> Vec<&str> {
        records.iter().map(|record| record.bench.as_str()).collect()
    }

    #[test]
    fn each_group_has_its_records_once_the_probes_are_measured() {
        let chosen = chosen(Device::Cpu, &["smollm2-tg128", "decode-host", BANDWIDTH].map(str::to_owned)).unwrap();
        let mut session = Session::new(&chosen, 0.5);
        session.add(vec![measured(BANDWIDTH, 20.0)]);
        assert!(session.is_waiting(BANDWIDTH) && session.records(&[]).is_empty());
        session.add(vec![measured(PEAK, 100.0)]);
        assert!(!session.is_waiting(PEAK), "it was not chosen");
        assert_eq!(names(&session.records(&[])), [BANDWIDTH]);
        session.add(vec![measured("decode-host", 7.0)]);
        let records = session.records(&[]);
        assert_eq!(names(&records), ["decode-host"]);
        assert_eq!((records[0].bound, records[0].load_average), (200.0, 0.5));
        assert!(!session.is_waiting("decode-host") && session.records(&[]).is_empty());
        session.add(vec![measured("smollm2-tg128", 8.0)]);
        assert_eq!(names(&session.records(&[])), ["smollm2-tg128"]);
    }

    #[test]
    fn a_record_is_held_against_the_row_of_before() {
        let mut session = Session::new(&[], 0.0);
        session.add(vec![measured(BANDWIDTH, 20.0), measured(PEAK, 100.0)]);
        let around = Circumstances { bandwidth: 20.0, peak: 100.0, load_average: 0.0 };
        let of = |value: f64| {
            let (benchmark, measurement) = measured("decode-host", value);
            record(benchmark, measurement, around, &session.place(), &[])
        };
        let below = |ours: f64, row: Option<f64>| Outcome { record: of(ours), row: row.map(of) }.below_row();
        assert!(below(96.0, Some(100.0)).unwrap().starts_with("decode-host: 96 tokens/s"));
        assert_eq!((below(97.0, Some(100.0)), below(1.0, None)), (None, None));
    }
}
