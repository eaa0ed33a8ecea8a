//! `cargo xtask sweep`: how fast models of several shapes train on a graphics card.
//!
//! A line for each configuration: tokens a second of whole AdamW steps, MFU, how long 50 billion tokens would take, memory in use. Each
//! runs in a process of its own (this program again, with `--one`), so that none starts with what another left in memory or with a
//! router that it trained.

/// What `sweep` takes.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Steps that are timed together; the best of three such runs counts
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Measure this configuration in this process and print what came of it
    #[arg(long, hide = true, value_name = "NUMBER")]
    one: Option<usize>,
}

/// Measures all configurations and prints their table.
#[cfg(feature = "engine")]
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    configurations::run(arguments)
}

/// Measures in the build that has the engine, with optimizations.
#[cfg(not(feature = "engine"))]
pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    crate::workspace::run_with_engine(&["--release"])
}

#[cfg(feature = "engine")]
mod configurations {
    use std::process::{Command, Stdio};

    use anyhow::{Context, Result, bail};
    use ironloom_lm::{Config, DenseShape, ExpertsConfig};
    use serde::{Deserialize, Serialize};

    use super::Arguments;
    use crate::{
        bench::{Card, TrainingRun, training_options},
        table::{Table, grouped},
    };

    /// A model and the documents of a step. Heads are 64 wide.
    struct Configuration {
        vocabulary: usize,
        width: usize,
        layers: usize,
        kv_heads: usize,
        /// Of dense layers.
        inner: usize,
        /// Of each of the 8 experts of routed layers, which are all but the first two.
        expert_inner: Option<usize>,
        documents: usize,
        length: usize,
    }

    const DENSE_102M: Configuration = Configuration {
        vocabulary: 32_000,
        width: 768,
        layers: 16,
        kv_heads: 4,
        inner: 1408,
        expert_inner: None,
        documents: 4,
        length: 1024,
    };

    const MOE_55M: Configuration =
        Configuration { width: 512, layers: 8, kv_heads: 2, expert_inner: Some(352), ..DENSE_102M };

    const CONFIGURATIONS: [Configuration; 10] = [
        DENSE_102M,
        Configuration { documents: 32, ..DENSE_102M },
        Configuration { documents: 8, length: 4096, ..DENSE_102M },
        Configuration { vocabulary: 8192, documents: 32, ..DENSE_102M },
        Configuration { width: 512, layers: 8, kv_heads: 2, documents: 32, ..DENSE_102M },
        Configuration { width: 1024, layers: 24, inner: 2816, documents: 16, ..DENSE_102M },
        Configuration { width: 2048, kv_heads: 8, inner: 8192, documents: 8, length: 2048, ..DENSE_102M },
        MOE_55M,
        Configuration { documents: 32, ..MOE_55M },
        Configuration {
            width: 1024,
            layers: 16,
            kv_heads: 4,
            inner: 2816,
            expert_inner: Some(704),
            documents: 16,
            ..MOE_55M
        },
    ];

    /// What came of a configuration.
    #[derive(Serialize, Deserialize)]
    struct Outcome {
        parameters: u64,
        active_parameters: u64,
        tokens_per_second: f64,
        /// Of a card whose rate is known.
        utilization: Option<f64>,
        memory_mib: f64,
    }

    const RUNS: usize = 3;
    const TOKENS: f64 = 50e9;
    const SECONDS_OF_A_DAY: f64 = 86_400.0;

    pub(super) fn run(arguments: &Arguments) -> Result<()> {
        if let Some(number) = arguments.one {
            let configuration = CONFIGURATIONS.get(number).context("there is no such configuration")?;
            println!("{}", serde_json::to_string(&configuration.measure(arguments.steps)?)?);
            return Ok(());
        }
        let mut table = Table::new(&[
            "vocabulary",
            "width",
            "layers",
            "experts",
            "step",
            "M parameters",
            "M active",
            "tokens/s",
            "MFU",
            "days for 50B",
            "MiB",
        ]);
        let mut failures = Vec::new();
        for (number, configuration) in CONFIGURATIONS.iter().enumerate() {
            let Configuration { vocabulary, width, layers, expert_inner, documents, length, .. } = *configuration;
            let step = format!("{documents} x {length}");
            let outcome = match in_process(number, arguments.steps) {
                Ok(outcome) => outcome,
                Err(error) => {
                    failures.push(format!("{width} x {layers}, {step}: {error:#}"));
                    continue;
                }
            };
            let millions = |count: u64| format!("{:.1}", count as f64 / 1e6);
            let rate = outcome.tokens_per_second;
            eprintln!("{width} x {layers}, {step}: {rate:.0} tokens/s");
            table.row([
                vocabulary.to_string(),
                width.to_string(),
                layers.to_string(),
                expert_inner.map_or(String::new(), |inner| format!("8 x {inner}")),
                step,
                millions(outcome.parameters),
                millions(outcome.active_parameters),
                grouped(rate as u64),
                outcome.utilization.map_or(String::new(), |share| format!("{:.1}%", 100.0 * share)),
                format!("{:.2}", TOKENS / rate / SECONDS_OF_A_DAY),
                format!("{:.0}", outcome.memory_mib),
            ]);
        }
        print!("{table}");
        if failures.is_empty() { Ok(()) } else { bail!("failed:\n  {}", failures.join("\n  ")) }
    }

    /// Measures a configuration in a process of its own.
    fn in_process(number: usize, steps: usize) -> Result<Outcome> {
        let program = std::env::current_exe().context("this program's own path is unknown")?;
        let mut command = Command::new(program);
        command.args(["sweep", "--one", &number.to_string(), "--steps", &steps.to_string()]);
        command.stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().context("cannot start its process")?;
        if !output.status.success() {
            bail!("its process ended ({})", output.status);
        }
        serde_json::from_slice(&output.stdout).context("its process printed something else")
    }

    impl Configuration {
        fn config(&self) -> Config {
            let dense = Config::dense(DenseShape {
                vocab_size: self.vocabulary,
                width: self.width,
                layers: self.layers,
                heads: self.width / 64,
                kv_heads: self.kv_heads,
                head_width: 64,
                inner_width: self.inner,
            });
            let Some(inner) = self.expert_inner else { return dense };
            let moe = Config::moe_55m();
            let experts = moe.experts.map(|experts| ExpertsConfig {
                width: inner,
                shared: experts.shared.map(|shared| ironloom_lm::SharedExpertConfig { width: inner, ..shared }),
                ..experts
            });
            let mut layers = dense.layers.clone();
            layers.iter_mut().skip(2).for_each(|layer| layer.feed_forward = ironloom_lm::FeedForwardConfig::Routed);
            Config { architecture: moe.architecture, experts, layers, ..dense }
        }

        fn measure(&self, steps: usize) -> Result<Outcome> {
            let config = self.config();
            let card = Card::open()?;
            let mut run = TrainingRun::new(&card, &config, self.documents, self.length, training_options())?;
            run.steps(steps)?;
            let tokens = (steps * run.tokens()) as f64;
            let mut tokens_per_second = 0.0f64;
            for _ in 0..RUNS {
                tokens_per_second = tokens_per_second.max(tokens / run.steps(steps)?);
            }
            run.losses()?;
            Ok(Outcome {
                parameters: config.parameters(),
                active_parameters: config.active_parameters(),
                tokens_per_second,
                utilization: run.utilization(tokens_per_second),
                memory_mib: card.used_mib()?,
            })
        }
    }

    #[test]
    fn known_shapes_are_among_them() {
        let counts = CONFIGURATIONS.map(|configuration| configuration.config().parameters());
        for known in [Config::dense_102m(), Config::moe_55m()] {
            assert!(counts.contains(&known.parameters()));
        }
        let moe = CONFIGURATIONS[7].config();
        assert_eq!(moe.active_parameters(), Config::moe_55m().active_parameters());
    }
}
