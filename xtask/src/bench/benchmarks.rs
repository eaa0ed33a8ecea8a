//! What a benchmark is, and those of the processor by name; `cuda` has the card's.

use anyhow::{Context, Result};

use super::{
    Device, cuda, language_models,
    measurement::{Measurement, Work},
    probes, text, training,
};

/// One benchmark.
pub(super) struct Benchmark {
    pub(super) name: &'static str,
    /// What it measures, for a list.
    pub(super) about: &'static str,
    pub(super) unit: &'static str,
    pub(super) higher_is_better: bool,
    /// The figures of peers' reports it is compared with.
    pub(super) peer_figures: &'static [&'static str],
    task: Task,
}

/// What measures.
#[derive(Clone, Copy)]
enum Task {
    Host(fn() -> Result<Measurement>),
    Card(cuda::Task),
}

/// The probe whose figure bounds whatever reads memory, in GB/s.
pub(super) const BANDWIDTH: &str = "memory-bandwidth";
/// The probe whose figure bounds whatever computes, in GFLOPS or TFLOP/s.
pub(super) const PEAK: &str = "multiply-add-peak";

/// Every benchmark of the processor, the probes first.
const HOST: [Benchmark; 11] = [
    Benchmark::rate(BANDWIDTH, "reading 96 MiB again and again with all threads", "GB/s", probes::memory_bandwidth),
    Benchmark::rate(PEAK, "multiply-adds in registers with all threads", "GFLOPS", probes::multiply_add_peak),
    Benchmark::rate(
        "decode-host",
        "128 tokens after 512, 6 layers of 128, f32",
        "tokens/s",
        language_models::decode_host,
    ),
    Benchmark::rate(
        "decode-host-int8",
        "128 tokens after 512, 8 layers of 1024, int8 rows",
        "tokens/s",
        language_models::decode_host_int8,
    ),
    Benchmark::rate(
        "decode-host-nf4",
        "128 tokens after 512, 8 layers of 1024, NF4 blocks",
        "tokens/s",
        language_models::decode_host_nf4,
    ),
    Benchmark::rate(
        "smollm2-pp512",
        "SmolLM2-135M Q4_1: a prompt of 512 at once",
        "tokens/s",
        language_models::smollm2_prompt,
    )
    .beside(&["pp512"]),
    Benchmark::rate(
        "smollm2-tg128",
        "SmolLM2-135M Q4_1: 128 tokens from an empty context",
        "tokens/s",
        language_models::smollm2_generate,
    )
    .beside(&["tg128"]),
    Benchmark::time("tokenizer-50k", "SmolLM2's tokenizer: 50,000 characters", "ms", text::tokenize_50k),
    Benchmark::time(
        "load-smollm2",
        "SmolLM2-135M Q4_1: from the file to a first token",
        "s",
        language_models::load_smollm2,
    ),
    Benchmark::rate(
        "train-host",
        "AdamW steps of 4 x 256 tokens, 6 layers of 256, f32",
        "tokens/s",
        training::train_host,
    )
    .beside(&["train-host"]),
    Benchmark::rate(
        "train-host-moe",
        "the same with 8 experts in four layers, 2 a token",
        "tokens/s",
        training::train_host_moe,
    )
    .beside(&["train-host-moe"]),
];

impl Device {
    /// Its benchmarks, the probes first.
    pub(super) fn benchmarks(self) -> &'static [Benchmark] {
        match self {
            Self::Cpu => &HOST,
            Self::Cuda => &cuda::ALL,
        }
    }

    /// The benchmark called `name`.
    pub(super) fn benchmark(self, name: &str) -> Result<&'static Benchmark> {
        let names = || self.benchmarks().iter().map(|benchmark| benchmark.name).collect::<Vec<_>>().join(", ");
        let found = self.benchmarks().iter().find(|benchmark| benchmark.name == name);
        found.with_context(|| format!("no benchmark `{name}` of this device; there are: {}", names()))
    }
}

impl Benchmark {
    const fn rate(
        name: &'static str,
        about: &'static str,
        unit: &'static str,
        measure: fn() -> Result<Measurement>,
    ) -> Self {
        Self { name, about, unit, higher_is_better: true, peer_figures: &[], task: Task::Host(measure) }
    }

    const fn time(
        name: &'static str,
        about: &'static str,
        unit: &'static str,
        measure: fn() -> Result<Measurement>,
    ) -> Self {
        Self { higher_is_better: false, ..Self::rate(name, about, unit, measure) }
    }

    pub(super) const fn on_card(name: &'static str, about: &'static str, unit: &'static str, task: cuda::Task) -> Self {
        Self { name, about, unit, higher_is_better: true, peer_figures: &[], task: Task::Card(task) }
    }

    pub(super) const fn beside(self, peer_figures: &'static [&'static str]) -> Self {
        Self { peer_figures, ..self }
    }

    /// Whether it runs in the process of `before`, after it, as some of a card do.
    pub(super) fn shares_process(&self, before: &Self) -> bool {
        match (self.task, before.task) {
            (Task::Card(task), Task::Card(before)) => task.shares_process(before),
            _ => false,
        }
    }

    /// Measures in this process; `card` is opened when one is needed, and kept for the next.
    pub(super) fn measure(&self, card: &mut Option<cuda::Card>) -> Result<Measurement> {
        match self.task {
            Task::Host(measure) => measure(),
            Task::Card(task) => {
                let card = match card {
                    Some(card) => card,
                    None => card.insert(cuda::Card::open()?),
                };
                task.measure(card)
            }
        }
    }

    /// The best figure that the machine allows, and why, from the probes' figures in GB/s and GFLOPS.
    pub(super) fn bound(&self, work: Work, bandwidth: f64, peak: f64) -> (f64, String) {
        let (rate, kind) = match work {
            Work::Bytes(bytes) => (bandwidth * 1e9 / bytes, format!("bytes over {bandwidth:.1} GB/s")),
            Work::Operations(operations) if peak >= 1e5 => {
                (peak * 1e9 / operations, format!("operations over {:.0} TFLOP/s", peak / 1e3))
            }
            Work::Operations(operations) => (peak * 1e9 / operations, format!("operations over {peak:.0} GFLOPS")),
            Work::Unbounded => return (0.0, "none".to_owned()),
        };
        (if self.higher_is_better { rate } else { 1.0 / rate }, kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for device in [Device::Cpu, Device::Cuda] {
            for benchmark in device.benchmarks() {
                let same = device.benchmarks().iter().filter(|other| other.name == benchmark.name);
                assert_eq!(same.count(), 1);
                assert!(device.benchmark(benchmark.name).is_ok());
            }
            assert!([BANDWIDTH, PEAK].iter().all(|name| device.benchmark(name).is_ok()));
        }
        assert!(Device::Cpu.benchmark("decode").is_err_and(|error| error.to_string().contains("decode-host")));
        assert!(Device::Cpu.benchmark("decode-3b-bf16-1").is_err());
    }

    #[test]
    fn those_of_one_model_share_a_process() {
        let shares = |name: &str, before: &str| {
            Device::Cuda.benchmark(name).unwrap().shares_process(Device::Cuda.benchmark(before).unwrap())
        };
        assert!(shares("decode-3b-bf16-16", "decode-3b-bf16-1"));
        assert!(shares("gemv-nf4", "gemm"));
        assert!(!shares("decode-3b-nf4-1", "decode-3b-bf16-1"));
        assert!(!shares("decode-3b-nf4-1", "gemm"));
        assert!(!shares("train-dense-102m-32x1024", "train-dense-102m-4x1024"));
        assert!(!Device::Cpu.benchmark("decode-host").unwrap().shares_process(&HOST[0]));
    }

    #[test]
    fn bounds_of_rates_and_times() {
        let rate = Device::Cpu.benchmark("smollm2-tg128").unwrap();
        assert_eq!(rate.bound(Work::Bytes(1e8), 20.0, 0.0).0, 200.0);
        let time = Device::Cpu.benchmark("load-smollm2").unwrap();
        assert_eq!(time.bound(Work::Bytes(1e8), 20.0, 0.0).0, 0.005);
        assert_eq!(rate.bound(Work::Unbounded, 20.0, 1.0).0, 0.0);
        let attention = Device::Cuda.benchmark("attention-forward-64").unwrap();
        assert_eq!(
            attention.bound(Work::Operations(1e12), 0.0, 790e3),
            (790.0, "operations over 790 TFLOP/s".to_owned())
        );
    }
}
