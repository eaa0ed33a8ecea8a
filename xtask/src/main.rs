//! The workspace's own commands, run as `cargo xtask NAME`.
//!
//! Each command is a module of that name: [`demo`] runs a real model, `test` is every check there is, [`tidy`] holds the
//! house rules, [`check_parity`] holds each operation and model against a reference, `bench` measures and keeps the
//! records, [`profile_train`] shows the kernels of a training step, [`sweep`] trains models of several shapes, [`golden`]
//! makes the reference tensors again, [`cuda_toolchain`] fetches the compiler of the CUDA kernels and [`kernels`] keeps what
//! it says of them. Nothing here is needed to use the libraries or the program.
//!
//! This program is built twice: without the libraries, so that a fresh clone is one short build away from `demo`; and with
//! the feature `engine` for the commands that run models themselves, which the short build starts by itself.

mod bench;
mod check_parity;
mod cuda_toolchain;
mod demo;
mod golden;
mod kernels;
#[cfg(feature = "engine")]
mod machine;
mod pip;
mod profile_train;
mod python;
mod smollm2;
mod source_hash;
mod sweep;
mod table;
mod test;
mod tidy;
mod workspace;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Ironloom's own commands", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Fetch a small real model and stream its answer to a prompt
    Demo(demo::Arguments),
    /// Run every check: format, tidy, clippy, documentation, parity, all tests
    Test(test::Arguments),
    /// Check the house rules and count lines per crate
    Tidy(tidy::Arguments),
    /// Hold every operation and golden model against its reference
    CheckParity(check_parity::Arguments),
    /// Measure, compare with the recorded rows, and record new ones
    Bench(bench::Arguments),
    /// Show the kernels of a training step on a graphics card
    ProfileTrain(profile_train::Arguments),
    /// Measure how fast models of several shapes train on a graphics card
    Sweep(sweep::Arguments),
    /// Make the golden tensors of tests/golden again with the reference implementations
    Golden(golden::Arguments),
    /// Fetch the CUDA compiler into .cuda/ from Python packages
    CudaToolchain(cuda_toolchain::Arguments),
    /// Show registers, shared memory and spills of every CUDA kernel, and record them
    Kernels(kernels::Arguments),
}

fn main() -> std::process::ExitCode {
    let result = match Arguments::parse().command {
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Test(arguments) => test::run(&arguments),
        Command::Tidy(arguments) => tidy::run(&arguments),
        Command::CheckParity(arguments) => check_parity::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::ProfileTrain(arguments) => profile_train::run(&arguments),
        Command::Sweep(arguments) => sweep::run(&arguments),
        Command::Golden(arguments) => golden::run(&arguments),
        Command::CudaToolchain(arguments) => cuda_toolchain::run(&arguments),
        Command::Kernels(arguments) => kernels::run(&arguments),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
