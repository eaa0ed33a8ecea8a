//! `cargo xtask bench`: measures, compares with the recorded rows, and records new ones.

use anyhow::Result;

/// What `bench` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {}

/// Measures in the build that has the engine.
#[cfg(not(feature = "engine"))]
pub(crate) fn run(_: &Arguments) -> Result<()> {
    crate::workspace::run_with_engine(&["--release"])
}
