//! `ironloom bench MODEL`: speed in the rows of llama-bench.
//!
//! `pp512` is a prompt of 512 random ids, `tg128` are 128 passes of one id each; `@ d4096` is the same behind 4,096 ids that
//! were computed before. Every test is warmed up as llama-bench does it (the whole prompt; one pass), then run `-r` times; a row
//! gives mean and standard deviation of tokens per second. No sampling and no text is in the time, logits are.
//!
//! On a graphics card `tg128` are the steps of any generation: the card takes the largest logit for the next id and goes on
//! from it. `--profile` adds the time of every kind of kernel in one pass of each test, run one by one.

use std::{path::PathBuf, sync::Arc, time::Instant};

use anyhow::Result;
use clap::value_parser;
use ironloom_core::{Philox, format_bytes};
use ironloom_decode::{Sampler, Session, SessionOptions};
use ironloom_lm::{KernelTime, Model};
use ironloom_nn::Span;
use ironloom_tensor::Device;
use serde::Serialize;

use crate::{
    console::{Console, Unit},
    failure::{Outcome, Usage},
    figures::short_count,
    interrupt,
    loading::{Opened, Weights},
    machine::DeviceOption,
    memory::advice,
};

const EXAMPLES: &str = "\
Examples:
  ironloom bench model.gguf
  ironloom bench model.gguf -p 512 -n 128 -d 0,4096 -r 5 -t 2
  ironloom bench model.gguf -p 0 -n 64 --weights nf4 --json
  ironloom bench model.gguf --device cuda --profile";

const ADVICE: &str = advice!("give smaller -p, -n or -d");

/// Measure the speed of prompts and of generation
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// A GGUF file or a Hugging Face folder
    model: PathBuf,
    /// Lengths of prompts; 0 for none
    #[arg(short = 'p', long = "prompt", value_name = "N", value_delimiter = ',', default_value = "512")]
    prompts: Vec<usize>,
    /// Numbers of generated tokens; 0 for none
    #[arg(short = 'n', long = "generate", value_name = "N", value_delimiter = ',', default_value = "128")]
    generations: Vec<usize>,
    /// Tokens that are in the context before
    #[arg(short = 'd', long = "depth", value_name = "N", value_delimiter = ',', default_value = "0")]
    depths: Vec<usize>,
    /// Times each test runs
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Numbers of threads [default: all of this process]
    #[arg(short, long, value_name = "N", value_delimiter = ',', value_parser = value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    /// Rows of a prompt that go through the model at a time
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = value_parser!(u32).range(1..=65536))]
    batch: u32,
    /// How weights are held for computing; `keep` computes on what the file has
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t)]
    weights: Weights,
    /// Show the time of every kind of kernel in a pass; on a graphics card
    #[arg(long)]
    profile: bool,
    /// Print JSON: one object for each row, in a list
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceOption,
}

/// One test: `pp` runs a prompt, `tg` single passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    Prompt(usize),
    Generation(usize),
}

/// A measured row.
#[derive(Serialize)]
struct Row<'a> {
    model: &'a str,
    size_bytes: u64,
    parameters: u64,
    backend: &'static str,
    device: &'a str,
    threads: usize,
    test: String,
    prompt: usize,
    generate: usize,
    depth: usize,
    batch: usize,
    tokens_per_second: f64,
    standard_deviation: f64,
    samples: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    kernels: Vec<Kernel>,
}

/// One kind of kernel in a pass.
#[derive(Serialize)]
struct Kernel {
    name: String,
    launches: usize,
    microseconds: f64,
    share: f64,
}

/// Measures and prints the rows.
pub(crate) fn run(arguments: &Arguments, console: &Console) -> Result<Outcome> {
    interrupt::install()?;
    let opened = Opened::new(&arguments.model)?;
    let tests = tests(arguments, opened.config.context_length)?;
    let threads: Vec<Option<u16>> =
        if arguments.threads.is_empty() { vec![None] } else { arguments.threads.iter().copied().map(Some).collect() };
    let device = arguments.device.open(threads[0])?;
    if arguments.profile && !matches!(device, Device::Cuda(_)) {
        return Err(Usage("--profile shows kernels of a graphics card: add --device cuda".to_owned()).into());
    }
    let longest = tests.iter().map(|test| test.tokens()).max().unwrap_or(0);
    let positions = longest + arguments.depths.iter().max().unwrap_or(&0);
    let (available, rows) = (arguments.device.available(&device)?, arguments.batch as usize);
    opened.check_memory(&device, available, arguments.weights, (positions, rows), ADVICE, console)?;
    let loaded = opened.load(device, 1, arguments.weights, console)?;
    let model = &loaded.model;
    let parameters = model.config().parameters();
    let (architecture, format) = (model.config().architecture, model.weight_format());
    let name = format!("{architecture} {} {format}", short_count(parameters));
    let mut rows = Vec::new();
    if !arguments.json {
        console.print(TABLE_HEAD)?;
    }
    for threads in threads {
        let device = match loaded.device {
            // The weights are on the card it was opened as.
            Device::Cuda(_) => loaded.device.clone(),
            _ => arguments.device.open(threads)?,
        };
        let description = device.describe();
        for &depth in &arguments.depths {
            let mut bench = Bench::new(model.clone(), device.clone(), depth, arguments, console)?;
            for &test in &tests {
                let samples = bench.samples(test, console)?;
                let (tokens_per_second, standard_deviation) = mean_and_deviation(&samples);
                let (prompt, generate) = match test {
                    Test::Prompt(length) => (length, 0),
                    Test::Generation(length) => (0, length),
                };
                let row = Row {
                    model: &name,
                    size_bytes: model.weight_bytes(),
                    parameters,
                    backend: arguments.device.name(),
                    device: &description,
                    threads: device.threads().count(),
                    test: test.name(depth),
                    prompt,
                    generate,
                    depth,
                    batch: arguments.batch as usize,
                    tokens_per_second,
                    standard_deviation,
                    samples,
                    kernels: if arguments.profile { bench.profile(test, arguments)? } else { Vec::new() },
                };
                if arguments.json {
                    rows.push(serde_json::to_value(&row)?);
                } else {
                    console.print(row.line())?;
                    row.kernels.iter().try_for_each(|kernel| console.print(kernel.line()))?;
                }
            }
        }
    }
    if arguments.json {
        console.print_json(&rows)?;
    }
    Ok(Outcome::Done)
}

/// The tests, after making sure that each fits in the context.
fn tests(arguments: &Arguments, context: usize) -> Result<Vec<Test>> {
    let prompts = arguments.prompts.iter().copied().map(Test::Prompt);
    let generations = arguments.generations.iter().copied().map(Test::Generation);
    let tests: Vec<Test> = prompts.chain(generations).filter(|test| test.tokens() > 0).collect();
    if tests.is_empty() {
        return Err(Usage("there is nothing to measure: give -p or -n a number above 0".to_owned()).into());
    }
    for &depth in &arguments.depths {
        if let Some(test) = tests.iter().find(|test| depth.saturating_add(test.tokens()) > context) {
            let message = format!(
                "{} does not fit in the model's context of {context}: give smaller -p, -n or -d",
                test.name(depth)
            );
            return Err(Usage(message).into());
        }
    }
    Ok(tests)
}

/// A session of random ids at one depth.
struct Bench {
    model: Arc<Model>,
    device: Device,
    session: Session,
    depth: usize,
    ids: Philox,
    vocabulary: u32,
    repetitions: u32,
}

impl Bench {
    fn new(model: Arc<Model>, device: Device, depth: usize, arguments: &Arguments, console: &Console) -> Result<Self> {
        let vocabulary = u32::try_from(model.config().vocab_size)?;
        let options = SessionOptions { prefill_rows: arguments.batch as usize, ..SessionOptions::default() };
        let session = Session::new(model.clone(), device.clone(), options)?;
        let repetitions = arguments.repetitions;
        let mut bench = Self { model, device, session, depth, ids: Philox::new(0, 0), vocabulary, repetitions };
        let ids = bench.random_ids(depth);
        let progress = console.progress("filling the context", Unit::Tokens);
        bench.session.feed_with(&ids, &mut |fed| {
            progress.set(fed.done as u64, fed.total as u64);
            std::ops::ControlFlow::Continue(())
        })?;
        Ok(bench)
    }

    fn on_card(&self) -> bool {
        matches!(self.device, Device::Cuda(_))
    }

    fn random_ids(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.ids.next_u32() % self.vocabulary).collect()
    }

    /// Tokens per second of each repetition.
    fn samples(&mut self, test: Test, console: &Console) -> Result<Vec<f64>> {
        let progress = console.progress("measuring", Unit::Tests);
        let warm_up = match test {
            // From its second pass on, a card makes the passes by itself.
            Test::Generation(tokens) => Test::Generation(tokens.min(if self.on_card() { 2 } else { 1 })),
            Test::Prompt(_) => test,
        };
        self.seconds(warm_up)?;
        let mut samples = Vec::with_capacity(self.repetitions as usize);
        for repetition in 0..self.repetitions {
            progress.set(u64::from(repetition), u64::from(self.repetitions));
            samples.push(test.tokens() as f64 / self.seconds(test)?);
        }
        Ok(samples)
    }

    fn seconds(&mut self, test: Test) -> Result<f64> {
        self.session.truncate(self.depth)?;
        let ids = self.random_ids(test.tokens());
        // A card may still be at passes that the last test has let go.
        self.device.synchronize()?;
        let start = Instant::now();
        match test {
            Test::Prompt(_) => self.session.feed(&ids)?,
            Test::Generation(tokens) if self.on_card() => self.generate(&ids[..1], tokens)?,
            Test::Generation(_) => ids.iter().try_for_each(|id| self.session.feed(std::slice::from_ref(id)))?,
        }
        Ok(start.elapsed().as_secs_f64())
    }

    /// Passes of one id each, which the card makes by itself. A session without ids has to be given the first.
    fn generate(&mut self, first: &[u32], tokens: usize) -> Result<()> {
        let mut sampler = Sampler::greedy();
        let mut left = tokens;
        if self.session.is_empty() {
            self.session.feed(first)?;
            left -= 1;
        }
        for _ in 0..left {
            self.session.step(&mut sampler)?;
        }
        Ok(())
    }

    /// The kernels of a pass of the test: the first of a prompt, or one generated token.
    fn profile(&mut self, test: Test, arguments: &Arguments) -> Result<Vec<Kernel>> {
        let rows = match test {
            Test::Prompt(length) => length.min(arguments.batch as usize),
            Test::Generation(_) => 1,
        };
        let ids = self.random_ids(rows);
        // What the positions before hold does not matter to the time.
        let mut cache = self.model.new_cache();
        cache.reserve(self.depth)?;
        cache.advance(self.depth)?;
        let times = self.model.profile(&ids, &mut [Span { cache: &mut cache, rows }])?;
        let total: f64 = times.iter().map(|kernel| kernel.seconds).sum();
        Ok(times.iter().map(|time| Kernel::new(time, total)).collect())
    }
}

impl Test {
    fn tokens(self) -> usize {
        match self {
            Self::Prompt(tokens) | Self::Generation(tokens) => tokens,
        }
    }

    fn name(self, depth: usize) -> String {
        let kind = if let Self::Prompt(_) = self { "pp" } else { "tg" };
        let depth = if depth > 0 { format!(" @ d{depth}") } else { String::new() };
        format!("{kind}{}{depth}", self.tokens())
    }
}

const TABLE_HEAD: &str = "\
| model                          |       size |     params | backend    | threads |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | ------: | --------------: | -------------------: |";

impl Row<'_> {
    fn line(&self) -> String {
        format!(
            "| {:<30} | {:>10} | {:>10} | {:<10} | {:>7} | {:>15} | {:>20} |",
            self.model,
            format_bytes(self.size_bytes),
            short_count(self.parameters),
            self.backend,
            self.threads,
            self.test,
            format!("{:.2} ± {:.2}", self.tokens_per_second, self.standard_deviation)
        )
    }
}

impl Kernel {
    fn new(time: &KernelTime, total_seconds: f64) -> Self {
        let KernelTime { launches, seconds, .. } = *time;
        Self {
            name: time.label(),
            launches,
            microseconds: 1e6 * seconds,
            share: seconds / total_seconds.max(f64::MIN_POSITIVE),
        }
    }

    fn line(&self) -> String {
        format!(
            "|   {:<40} {:>6} launches {:>10.1} us {:>7.2} us each {:>5.1}% |",
            self.name,
            self.launches,
            self.microseconds,
            self.microseconds / self.launches.max(1) as f64,
            100.0 * self.share
        )
    }
}

/// The mean and the sample's standard deviation; 0 for a single sample.
fn mean_and_deviation(samples: &[f64]) -> (f64, f64) {
    let count = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / count;
    let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
    (mean, if samples.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_named_as_llama_bench_names_them() {
        assert_eq!(Test::Prompt(512).name(0), "pp512");
        assert_eq!(Test::Generation(128).name(4096), "tg128 @ d4096");
    }

    #[test]
    fn deviation_is_the_samples() {
        assert_eq!(mean_and_deviation(&[3.0]), (3.0, 0.0));
        assert_eq!(mean_and_deviation(&[2.0, 4.0, 6.0]), (4.0, 2.0));
    }
}
