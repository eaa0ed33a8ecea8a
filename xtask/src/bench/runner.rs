//! The process that compares: starts a process for each benchmark, and holds what it measured against the row.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::{
    Arguments, Device,
    benchmarks::{ALL, BANDWIDTH, Benchmark, PEAK},
    measurement::Measurement,
    peers,
    record::{Circumstances, Peer, Record, ratio, rounded},
};
use crate::{machine, table::Table};

/// A share of the processor taken by other processes that makes a measurement doubtful.
const DISTURBED: f64 = 0.05;

/// Measures what was named, prints a table, and fails below the rows.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let Device::Cpu = arguments.device;
    if let Some(name) = &arguments.process {
        println!("{}", serde_json::to_string(&Benchmark::named(name)?.measure()?)?);
        return Ok(());
    }
    if arguments.list {
        ALL.iter().for_each(|benchmark| println!("{:<18} {}", benchmark.name, benchmark.about));
        return Ok(());
    }
    let chosen = chosen(&arguments.names)?;
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

    let [bandwidth, peak] = [BANDWIDTH, PEAK].map(|name| Ok::<_, anyhow::Error>((name, measure_in_process(name)?)));
    let probes = [bandwidth?, peak?];
    let best = |measurement: &Measurement| measurement.values.iter().copied().fold(0.0, f64::max);
    let around = Circumstances { bandwidth: best(&probes[0].1), peak: best(&probes[1].1), load_average };

    let reports = if arguments.peers { peers::run_for(&chosen)? } else { Vec::new() };
    let mut records = Vec::new();
    for benchmark in chosen {
        let probe = probes.iter().find(|(name, _)| *name == benchmark.name);
        let measurement = match probe {
            Some((_, measurement)) => measurement.clone(),
            None => measure_in_process(benchmark.name)?,
        };
        records.push(record(benchmark, measurement, around, &reports));
    }

    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&records)?);
    } else {
        print!("{}", table(&records)?);
        records
            .iter()
            .filter(|record| !record.notes.is_empty())
            .for_each(|record| println!("{}: {}", record.bench, record.notes));
    }
    if arguments.record {
        for record in &records {
            say(&format!("recorded {}", record.write()?.display()));
        }
        return Ok(());
    }
    fail_below_rows(&records)
}

fn chosen(names: &[String]) -> Result<Vec<&'static Benchmark>> {
    if names.is_empty() {
        return Ok(ALL.iter().collect());
    }
    names.iter().map(|name| Benchmark::named(name)).collect()
}

/// Measures one benchmark in a process of its own.
fn measure_in_process(name: &str) -> Result<Measurement> {
    let program = std::env::current_exe().context("this program's own path is unknown")?;
    let mut command = Command::new(program);
    command.args(["bench", "--process", name]).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start the process of {name}"))?;
    if !output.status.success() {
        bail!("{name} failed ({})", output.status);
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    let last = printed.lines().last().unwrap_or_default();
    serde_json::from_str(last).with_context(|| format!("{name} printed no measurement"))
}

fn record(benchmark: &Benchmark, measurement: Measurement, around: Circumstances, reports: &[peers::Report]) -> Record {
    let others = measurement.others;
    let mut record = Record::new(benchmark, measurement, around);
    if others > DISTURBED {
        let separator = if record.notes.is_empty() { "" } else { "; " };
        record.notes += &format!("{separator}other processes took {:.0}% of the processor meanwhile", 100.0 * others);
    }
    for report in reports {
        let Some(best) = benchmark.peer_figure.and_then(|figure| report.best(figure)) else { continue };
        let ratio = rounded(ratio(record.best, best, record.higher_is_better));
        record.peers.push(Peer {
            name: report.name.clone(),
            version: report.version.clone(),
            best: rounded(best),
            ratio,
        });
    }
    record
}

fn table(records: &[Record]) -> Result<Table> {
    let mut table =
        Table::new(&["bench", "best", "unit", "spread", "bound", "of bound", "peak MiB", "of row", "peers"]);
    for record in records {
        let row = Record::of_this_device(&record.bench)?;
        let percent = |share: f64| format!("{:.1}%", 100.0 * share);
        let peers = record.peers.iter().map(|peer| format!("{:.2}x {} ({})", peer.ratio, peer.name, peer.best));
        table.row([
            record.bench.clone(),
            record.best.to_string(),
            record.unit.clone(),
            percent(record.spread()),
            if record.bound == 0.0 { String::new() } else { record.bound.to_string() },
            if record.bound == 0.0 { String::new() } else { percent(record.of_bound) },
            format!("{:.0}", record.peak_mib),
            row.map_or(String::new(), |row| percent(record.of_row(&row))),
            peers.collect::<Vec<_>>().join(", "),
        ]);
    }
    Ok(table)
}

fn fail_below_rows(records: &[Record]) -> Result<()> {
    let mut below = Vec::new();
    for record in records {
        if let Some(row) = Record::of_this_device(&record.bench)?
            && !record.keeps(&row)
        {
            below.push(format!(
                "{}: {} {}, and its row of {} has {}",
                record.bench, record.best, record.unit, row.date, row.best
            ));
        }
    }
    if !below.is_empty() {
        bail!("below 97% of the recorded rows:\n  {}", below.join("\n  "));
    }
    Ok(())
}
