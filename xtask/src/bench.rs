//! `cargo xtask bench`: measures, compares with the recorded rows, and records new ones.
//!
//! Each benchmark runs in a process of its own (this program again, with `--process`), so that one leaves nothing in the
//! caches, the allocator or the thread pool of the next: warm-up, then five timed runs, whose best counts. The memory's
//! bandwidth and the processor's peak are measured first, in the same call: they are the bounds. Without `--record` a
//! benchmark below 97% of this device's row fails.

#[cfg(feature = "engine")]
mod benchmarks;
#[cfg(feature = "engine")]
mod inputs;
#[cfg(feature = "engine")]
mod language_models;
#[cfg(feature = "engine")]
mod measurement;
#[cfg(feature = "engine")]
mod peers;
#[cfg(feature = "engine")]
mod probes;
#[cfg(feature = "engine")]
mod record;
#[cfg(feature = "engine")]
mod runner;
#[cfg(feature = "engine")]
mod text;

#[cfg(feature = "engine")]
pub(crate) use runner::run;

/// What `bench` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Benchmarks to run, by name; all when none is named
    names: Vec<String>,
    /// What to measure on
    #[arg(long, value_enum, default_value_t)]
    device: Device,
    /// Write the rows of this device: benches/records/DEVICE/NAME.json
    #[arg(long)]
    record: bool,
    /// Run the peers of benches/peers on the same inputs and print the ratios
    #[arg(long)]
    peers: bool,
    /// Print the records as JSON
    #[arg(long)]
    json: bool,
    /// Only list the benchmarks
    #[arg(long)]
    list: bool,
    /// Measure one benchmark in this process and print its measurement
    #[arg(long, hide = true, value_name = "NAME")]
    process: Option<String>,
}

/// What to measure on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// This machine's processor
    #[default]
    Cpu,
}

/// Measures in the build that has the engine, with optimizations.
#[cfg(not(feature = "engine"))]
pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    crate::workspace::run_with_engine(&["--release"])
}
