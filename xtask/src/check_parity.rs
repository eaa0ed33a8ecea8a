//! `cargo xtask check-parity`: every operation against a reference in double precision, every golden model against the
//! tensors another implementation wrote.
//!
//! A case is one operation at one shape. It yields three results for the same inputs: the reference (f64), a plain
//! low-precision version, and ours. With the relative error `e(x) = ‖x − reference‖ / ‖reference‖`, it passes when
//! `e(ours) ≤ 2 · e(plain)` (or a bound of its own, with the reason beside it). `--mutate` shows that each case can fail: it
//! runs ours with one input in four dropped and demands that every case sees it.
//!
//! On a graphics card the plain version rounds what the kernels' contract rounds ([`place`]), and there are cases of
//! exactness: the same bits whatever runs beside a sequence and however its rows are cut into passes. SmolLM2's greedy ids are
//! checked there where its file lies whole in the cache ([`crate::smollm2`]): on a machine without a network, in the folder that
//! `IRONLOOM_CACHE` names.

#[cfg(feature = "engine")]
mod case;
#[cfg(feature = "engine")]
mod exact;
#[cfg(feature = "engine")]
mod greedy;
#[cfg(feature = "engine")]
mod inputs;
#[cfg(feature = "engine")]
mod models;
#[cfg(feature = "engine")]
mod operations;
#[cfg(feature = "engine")]
mod place;
#[cfg(feature = "engine")]
mod real;
#[cfg(feature = "engine")]
mod record;
mod sources;
#[cfg(feature = "engine")]
mod suite;

pub(crate) use sources::stale_records;
#[cfg(feature = "engine")]
pub(crate) use suite::run;

/// Runs the cases in the build that has the operations.
#[cfg(not(feature = "engine"))]
pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    crate::workspace::run_with_engine(&[])
}

/// What `check-parity` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Operations to check, by the start of their name; all when none is named
    names: Vec<String>,
    /// Where ours runs
    #[arg(long, value_enum, default_value_t)]
    device: Device,
    /// Run a wrong kernel (one input in four dropped) and demand that every case fails
    #[arg(long)]
    mutate: bool,
    /// Write benches/records/DEVICE/parity.json
    #[arg(long, conflicts_with_all = ["mutate", "names"])]
    record: bool,
    /// Print every case, not only a line for each operation
    #[arg(long)]
    verbose: bool,
    /// Write the logits of a model of the exactness cases, and nothing else
    #[arg(long, hide = true, value_name = "MODEL")]
    logits_of: Option<String>,
}

/// Where ours runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// This machine's processor
    #[default]
    Cpu,
    /// The first graphics card
    Cuda,
}
