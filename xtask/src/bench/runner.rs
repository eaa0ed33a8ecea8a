//! The process that compares: starts the processes that measure, and holds what they measured against the rows.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::{
    Arguments, Device,
    benchmarks::{BANDWIDTH, Benchmark, PEAK},
    cuda::Card,
    measurement::{Kernel, Measurement},
    peers,
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
    let mut measured = Vec::new();
    let mut failures = Vec::new();
    for group in order.chunk_by(|before, benchmark| benchmark.shares_process(before)) {
        measure_in_process(device, group, &mut measured, &mut failures)?;
    }
    let found = |name: &str| measured.iter().find(|(benchmark, _)| benchmark.name == name);
    let best = |name: &str| {
        let (probe, measurement) = found(name).with_context(|| format!("{name} gave no figure"))?;
        let best = measurement.values.iter().copied().fold(0.0, f64::max);
        anyhow::Ok(if probe.unit == "TFLOP/s" { 1e3 * best } else { best })
    };
    let around = Circumstances { bandwidth: best(BANDWIDTH)?, peak: best(PEAK)?, load_average };
    let place = measured.iter().find_map(|(_, measurement)| measurement.card.as_ref()).map(Place::card);
    let place = place.unwrap_or_else(Place::host);

    let reports = if arguments.peers { peers::run_for(device, &chosen)? } else { Vec::new() };
    let records: Vec<Record> = chosen
        .iter()
        .filter_map(|benchmark| found(benchmark.name))
        .map(|(benchmark, measurement)| record(benchmark, measurement.clone(), around, &place, &reports))
        .collect();

    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&records)?);
    } else {
        say(&format!("on {} ({})", place.device, place.driver));
        print!("{}", table(&records, &place)?);
        records
            .iter()
            .filter(|record| !record.notes.is_empty())
            .for_each(|record| println!("{}: {}", record.bench, record.notes));
        if arguments.profile {
            records.iter().filter(|record| !record.kernels.is_empty()).for_each(print_profile);
        }
    }
    if arguments.record {
        for record in &records {
            say(&format!("recorded {}", record.write(&place)?.display()));
        }
    } else {
        failures.extend(below_rows(&records, &place)?);
    }
    if failures.is_empty() {
        Ok(())
    } else {
        bail!("failed, or below 97% of the recorded rows:\n  {}", failures.join("\n  "))
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
    measured: &mut Vec<(&'a Benchmark, Measurement)>,
    failures: &mut Vec<String>,
) -> Result<()> {
    let program = std::env::current_exe().context("this program's own path is unknown")?;
    let names = group.iter().map(|benchmark| benchmark.name).collect::<Vec<_>>().join(",");
    let mut command = Command::new(program);
    command.args(["bench", "--device", device.name(), "--process", &names]).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).spawn();
    let mut child = child.with_context(|| format!("cannot start the process of {names}"))?;
    let output = child.stdout.take().context("a process without an output")?;
    let mut waiting = group.to_vec();
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
    Ok(())
}

fn record(
    benchmark: &Benchmark,
    measurement: Measurement,
    around: Circumstances,
    place: &Place,
    reports: &[peers::Report],
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

fn table(records: &[Record], place: &Place) -> Result<Table> {
    let mut table =
        Table::new(&["bench", "best", "unit", "spread", "bound", "of bound", "kernels", "peak MiB", "of row", "peers"]);
    for record in records {
        let row = Record::row(&record.bench, place)?;
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
            row.map_or(String::new(), |row| percent(record.of_row(&row))),
            peers.collect::<Vec<_>>().join(", "),
        ]);
    }
    Ok(table)
}

/// The time of each kind of kernel in one pass.
fn print_profile(record: &Record) {
    let (launches, total) = Kernel::sum(&record.kernels);
    println!("\n{}: {launches} kernels one by one, {total:.0} us\n{}", record.bench, Kernel::table(&record.kernels));
}

/// What is below 97% of its row.
fn below_rows(records: &[Record], place: &Place) -> Result<Vec<String>> {
    let mut below = Vec::new();
    for record in records {
        if let Some(row) = Record::row(&record.bench, place)?
            && !record.keeps(&row)
        {
            below.push(format!(
                "{}: {} {}, and its row of {} has {}",
                record.bench, record.best, record.unit, row.date, row.best
            ));
        }
    }
    Ok(below)
}
