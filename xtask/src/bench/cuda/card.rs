//! The card that a process measures on: time by events, memory, random contents, and the model it holds.

use std::sync::Arc;

use anyhow::{Context, Result};
use ironloom_core::Philox;
use ironloom_kernels::{Buffer, CublasLt, Gpu};
use ironloom_lm::{Config, LoadOptions, Model, RandomWeights};
use ironloom_tensor::Device;
use serde_json::Value;

use crate::{
    bench::{
        measurement::{Measurement, RUNS, Work, measure, seconds},
        place::CardName,
    },
    smollm2,
};

/// A model that benchmarks run on. Those of one model share a process, which loads it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Choice {
    /// The shape of Qwen2.5-3B with random weights.
    Qwen3B(RandomWeights),
    /// The shape of Qwen2.5-14B with random weights.
    Qwen14B(RandomWeights),
    /// `moe-55m` with random weights.
    Moe55M(RandomWeights),
    /// The file of SmolLM2-135M.
    SmolLm2,
}

/// A card, and what was loaded on it last.
pub(crate) struct Card {
    pub(super) device: Device,
    pub(super) gpu: Gpu,
    model: Option<(Choice, Arc<Model>)>,
}

/// Elements of random contents before they repeat: no multiple of any row's length.
const DISTINCT: usize = 1_000_003;

impl Card {
    pub(crate) fn open() -> Result<Self> {
        let device = Device::cuda(0, 0)?;
        Ok(Self { gpu: device.card("a benchmark")?.gpu().clone(), device, model: None })
    }

    /// Makes the card hold a model, in place of the one before.
    pub(super) fn load(&mut self, choice: Choice) -> Result<()> {
        if self.model.as_ref().is_some_and(|(held, _)| *held == choice) {
            return Ok(());
        }
        self.model = None;
        self.gpu.trim();
        let random = |config: Config, weights| Ok(Model::random(&config, &self.device, weights, 17)?);
        let (time, model) = seconds(|| match choice {
            Choice::Qwen3B(weights) => random(Config::qwen2_5_3b(), weights),
            Choice::Qwen14B(weights) => random(Config::qwen2_5_14b(), weights),
            Choice::Moe55M(weights) => random(Config::moe_55m(), weights),
            Choice::SmolLm2 => {
                let checkpoint = ironloom_weights::open(smollm2::fetch()?)?;
                Ok(Model::load(&checkpoint, &self.device, &LoadOptions::default())?)
            }
        })?;
        eprintln!("{choice:?}: loaded in {time:.1} s");
        self.model = Some((choice, Arc::new(model)));
        Ok(())
    }

    /// The model it holds.
    pub(super) fn model(&self) -> Result<&Arc<Model>> {
        Ok(&self.model.as_ref().context("no model is loaded")?.1)
    }

    /// cuBLASLt with algorithms for `rows` rows, where it is installed.
    pub(super) fn cublaslt(&self, rows: usize) -> Option<CublasLt> {
        CublasLt::open(&self.gpu, rows).ok()
    }

    /// Times `run` as [`measure`] does; the memory is the card's in use.
    pub(super) fn measure(&self, work: Work, shape: Value, run: impl FnMut() -> Result<f64>) -> Result<Measurement> {
        let measured = measure(work, shape, run)?;
        Ok(Measurement { peak_mib: self.used_mib()?, card: Some(CardName::of(&self.gpu)), ..measured })
    }

    /// MiB of the card in use, by whatever program.
    pub(crate) fn used_mib(&self) -> Result<f64> {
        let (free, total) = self.gpu.memory()?;
        Ok((total - free) as f64 / f64::from(1 << 20))
    }

    /// Seconds of one of `launches` calls of `launch`, which gets their number. They run in a graph, as a step of decoding
    /// does; of some replays the shortest counts.
    pub(super) fn seconds_of(&self, launches: usize, mut launch: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        let mut failure = None;
        let captured = self.gpu.capture(|| -> ironloom_kernels::Result<()> {
            for number in 0..launches {
                if let Err(error) = launch(number) {
                    failure.get_or_insert(error);
                }
            }
            Ok(())
        });
        if let Some(error) = failure {
            return Err(error);
        }
        let (graph, ()) = captured?;
        let mut best = f64::INFINITY;
        for _ in 0..=RUNS {
            let start = self.gpu.record_event()?;
            (0..REPLAYS).try_for_each(|_| graph.replay())?;
            best = best.min(self.gpu.record_event()?.seconds_since(&start)?);
        }
        Ok(best / (REPLAYS * launches) as f64)
    }

    /// How many pieces of `bytes` lie far enough apart that none of them is in the cache when it is read again.
    pub(super) fn rotation(&self, bytes: usize) -> usize {
        (3 * self.gpu.properties().l2_bytes as usize).div_ceil(bytes.max(1)) + 1
    }

    /// Normal numbers in bfloat16, `count` of them.
    pub(super) fn normals(&self, count: usize) -> Result<Buffer> {
        let mut draws = Philox::new(37, 0);
        let normal = |_| {
            let sum: u32 = draws.next_u32().to_le_bytes().iter().map(|byte| u32::from(*byte)).sum();
            half::bf16::from_f32((sum as f32 - 510.0) / 147.8).to_le_bytes()
        };
        let distinct: Vec<[u8; 2]> = (0..DISTINCT.min(count)).map(normal).collect();
        self.repeated(distinct.as_flattened(), 2 * count)
    }

    /// Random bits: the codes and scales of packed weights, whose values no kernel's time depends on.
    pub(super) fn noise(&self, bytes: usize) -> Result<Buffer> {
        let mut draws = Philox::new(41, 0);
        let distinct: Vec<[u8; 4]> =
            (0..DISTINCT.min(bytes.div_ceil(4))).map(|_| draws.next_u32().to_le_bytes()).collect();
        self.repeated(distinct.as_flattened(), bytes)
    }

    fn repeated(&self, distinct: &[u8], bytes: usize) -> Result<Buffer> {
        let buffer = self.gpu.allocate_lasting(bytes, "a benchmark's input")?;
        let mut done = distinct.len().min(bytes);
        self.gpu.write(buffer.slice(), &distinct[..done])?;
        while done < bytes {
            let more = done.min(bytes - done);
            self.gpu.copy(buffer.part(done, more)?, buffer.part(0, more)?)?;
            done += more;
        }
        Ok(buffer)
    }
}

/// Replays of a graph that are timed together.
const REPLAYS: usize = 5;
