//! `cargo xtask profile-train`: the kernels of a training step on a graphics card.
//!
//! A line for each kernel, and for each size of a product: its launches, its time, its share of the sum, and its rate where its
//! operations are known. The kernels run one by one; the step's own time, replayed as one graph, stands below.

use crate::bench::TrainingShape;

/// What `profile-train` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The model
    #[arg(value_enum, default_value = "dense-102m")]
    shape: TrainingShape,
    /// Documents of a step
    #[arg(long, default_value_t = 4)]
    documents: usize,
    /// Ids of a document
    #[arg(long, default_value_t = 1024)]
    length: usize,
    /// Run blocks again on the way back instead of keeping what they computed
    #[arg(long)]
    checkpointing: bool,
}

/// Profiles a step and prints its table.
#[cfg(feature = "engine")]
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    use crate::bench::{Card, Kernel, TrainingRun, training_options};

    let Arguments { shape, documents, length, checkpointing } = *arguments;
    let card = Card::open()?;
    let options = ironloom_train::TrainerOptions { checkpointing, ..training_options() };
    let mut run = TrainingRun::new(&card, &shape.config(), documents, length, options)?;
    run.steps(shape.steps())?;
    let count = shape.steps();
    let step = run.steps(count)? / count as f64;
    let rate = run.tokens() as f64 / step;
    let kernels = run.profile()?;
    let (launches, total) = Kernel::sum(&kernels);
    print!("{}", Kernel::table(&kernels));
    println!("{launches} kernels one by one: {:.3} ms", total / 1e3);
    let mfu = run.utilization(rate).map_or(String::new(), |share| format!(", MFU {:.1}%", 100.0 * share));
    println!("a step of {} tokens: {:.3} ms, {rate:.0} tokens/s{mfu}", run.tokens(), 1e3 * step);
    Ok(())
}

/// Profiles in the build that has the engine, with optimizations.
#[cfg(not(feature = "engine"))]
pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    crate::workspace::run_with_engine(&["--release"])
}
