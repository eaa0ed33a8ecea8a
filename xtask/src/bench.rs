//! `cargo xtask bench`: measures, compares with the recorded rows, and records new ones.
//!
//! Each benchmark runs in a process of its own (this program again, with `--process`), so that one leaves nothing in the
//! caches, the allocator or the thread pool of the next: warm-up, then five timed runs, whose best counts. The memory's
//! bandwidth and the device's peak are measured first, in the same call: they are the bounds. Without `--record` a
//! benchmark below 97% of this device's row fails.
//!
//! On a graphics card benchmarks of one model share a process, and each comes with a profile: the time of every kind of
//! kernel in one pass, which `--profile` prints and the record keeps.

#[cfg(feature = "engine")]
mod benchmarks;
#[cfg(feature = "engine")]
mod cuda;
#[cfg(feature = "engine")]
mod inputs;
#[cfg(feature = "engine")]
mod language_models;
#[cfg(feature = "engine")]
mod measurement;
#[cfg(feature = "engine")]
mod peers;
#[cfg(feature = "engine")]
mod place;
#[cfg(feature = "engine")]
mod probes;
#[cfg(feature = "engine")]
mod record;
#[cfg(feature = "engine")]
mod runner;
#[cfg(feature = "engine")]
mod text;
#[cfg(feature = "engine")]
mod training;
mod training_shape;

#[cfg(feature = "engine")]
pub(crate) use cuda::{Card, TrainingRun};
#[cfg(feature = "engine")]
pub(crate) use measurement::Kernel;
#[cfg(feature = "engine")]
pub(crate) use runner::run;
#[cfg(feature = "engine")]
pub(crate) use training::options as training_options;
pub(crate) use training_shape::TrainingShape;

/// What `bench` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Benchmarks to run, by name; all when none is named
    names: Vec<String>,
    /// What to measure on
    #[arg(long, value_enum, default_value_t)]
    device: Device,
    /// Write the rows of this device, each as soon as it and its peers are measured: benches/records/DEVICE/NAME.json
    #[arg(long)]
    record: bool,
    /// Run the peers of benches/peers on the same inputs, after each group of benchmarks, and print the ratios
    #[arg(long)]
    peers: bool,
    /// Print the time of every kind of kernel, of benchmarks on a graphics card
    #[arg(long)]
    profile: bool,
    /// Print the records as JSON
    #[arg(long)]
    json: bool,
    /// Only list the benchmarks
    #[arg(long)]
    list: bool,
    /// Measure these benchmarks in this process and print what came of each
    #[arg(long, hide = true, value_name = "NAMES", value_delimiter = ',')]
    process: Vec<String>,
}

/// What to measure on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// This machine's processor
    #[default]
    Cpu,
    /// A graphics card of NVIDIA
    Cuda,
}

#[cfg(feature = "engine")]
impl Device {
    /// Its name as an argument.
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// Measures in the build that has the engine, with optimizations.
#[cfg(not(feature = "engine"))]
pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    crate::workspace::run_with_engine(&["--release"])
}
