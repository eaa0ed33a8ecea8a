//! The benchmarks by name.

use anyhow::{Context, Result};

use super::{
    language_models,
    measurement::{Measurement, Work},
    probes, text,
};

/// One benchmark.
pub(super) struct Benchmark {
    pub(super) name: &'static str,
    /// What it measures, for a list.
    pub(super) about: &'static str,
    pub(super) unit: &'static str,
    pub(super) higher_is_better: bool,
    /// The figure of a peer's report it is compared with.
    pub(super) peer_figure: Option<&'static str>,
    measure: fn() -> Result<Measurement>,
}

/// The probe whose figure bounds whatever reads memory, in GB/s.
pub(super) const BANDWIDTH: &str = "memory-bandwidth";
/// The probe whose figure bounds whatever computes, in GFLOPS.
pub(super) const PEAK: &str = "multiply-add-peak";

/// Every benchmark, the probes first.
pub(super) const ALL: [Benchmark; 9] = [
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
    .beside("pp512"),
    Benchmark::rate(
        "smollm2-tg128",
        "SmolLM2-135M Q4_1: 128 tokens from an empty context",
        "tokens/s",
        language_models::smollm2_generate,
    )
    .beside("tg128"),
    Benchmark::time("tokenizer-50k", "SmolLM2's tokenizer: 50,000 characters", "ms", text::tokenize_50k),
    Benchmark::time(
        "load-smollm2",
        "SmolLM2-135M Q4_1: from the file to a first token",
        "s",
        language_models::load_smollm2,
    ),
];

impl Benchmark {
    const fn rate(
        name: &'static str,
        about: &'static str,
        unit: &'static str,
        measure: fn() -> Result<Measurement>,
    ) -> Self {
        Self { name, about, unit, higher_is_better: true, peer_figure: None, measure }
    }

    const fn time(
        name: &'static str,
        about: &'static str,
        unit: &'static str,
        measure: fn() -> Result<Measurement>,
    ) -> Self {
        Self { higher_is_better: false, ..Self::rate(name, about, unit, measure) }
    }

    const fn beside(self, figure: &'static str) -> Self {
        Self { peer_figure: Some(figure), ..self }
    }

    /// The benchmark called `name`.
    pub(super) fn named(name: &str) -> Result<&'static Self> {
        let names = || ALL.iter().map(|benchmark| benchmark.name).collect::<Vec<_>>().join(", ");
        ALL.iter()
            .find(|benchmark| benchmark.name == name)
            .with_context(|| format!("no benchmark `{name}`; there are: {}", names()))
    }

    /// Measures in this process.
    pub(super) fn measure(&self) -> Result<Measurement> {
        (self.measure)()
    }

    /// The best figure that the machine allows, and why, from the probes' figures.
    pub(super) fn bound(&self, work: Work, bandwidth: f64, peak: f64) -> (f64, String) {
        let (rate, kind) = match work {
            Work::Bytes(bytes) => (bandwidth * 1e9 / bytes, format!("bytes over {bandwidth:.1} GB/s")),
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
        for benchmark in &ALL {
            assert_eq!(ALL.iter().filter(|other| other.name == benchmark.name).count(), 1);
            assert!(Benchmark::named(benchmark.name).is_ok());
        }
        assert!(Benchmark::named("decode").is_err_and(|error| error.to_string().contains("decode-host")));
    }

    #[test]
    fn bounds_of_rates_and_times() {
        let rate = Benchmark::named("smollm2-tg128").unwrap();
        assert_eq!(rate.bound(Work::Bytes(1e8), 20.0, 0.0).0, 200.0);
        let time = Benchmark::named("load-smollm2").unwrap();
        assert_eq!(time.bound(Work::Bytes(1e8), 20.0, 0.0).0, 0.005);
        assert_eq!(rate.bound(Work::Unbounded, 20.0, 1.0).0, 0.0);
    }
}
