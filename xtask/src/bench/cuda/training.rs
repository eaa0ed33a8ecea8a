//! Training on a card: whole steps, from ids on the host to moved weights and their loss back on the host.
//!
//! Ids are random and other ones in each step, from a pool; every document is as long as the others. The memory is what the card
//! has in use, the driver's own part included, so each of these benchmarks has a process of its own. MFU is the share of the
//! card's dense bfloat16 rate by its data sheet that a step's counted operations are.

use anyhow::{Context as _, Result, ensure};
use ironloom_lm::{Config, Model, RandomWeights};
use ironloom_train::{
    Trainer, TrainerOptions, card_rate,
    data::Batch,
    lora::{LoraAdapter, LoraOptions},
    operations_per_token,
    optimizer::{AdamWOptions, OptimizerOptions},
};
use serde_json::json;

use super::card::Card;
use crate::bench::{
    inputs::random_ids,
    measurement::{Kernel, Measurement, Work, seconds},
    training::options,
    training_shape::TrainingShape,
};

/// A model and the documents of its steps.
#[derive(Clone, Copy, Debug)]
pub(in crate::bench) struct Case {
    pub(in crate::bench) shape: TrainingShape,
    pub(in crate::bench) documents: usize,
    pub(in crate::bench) length: usize,
}

/// Batches of the pool that steps take in turn.
const POOL: usize = 8;

/// Tokens/s of steps of a case, with the kernels of one.
pub(in crate::bench) fn train(card: &Card, case: Case) -> Result<Measurement> {
    let mut run = TrainingRun::new(card, &case.shape.config(), case.documents, case.length, options())?;
    let measured = run.measure(card, case.shape.steps())?;
    let kernels = run.profile()?;
    let (launches, one_by_one) = Kernel::sum(&kernels);
    let notes = format!("{}; its kernels one by one {:.2} ms", measured.notes, one_by_one / 1e3);
    let mut shape = measured.shape;
    shape.insert("kernels_per_step".to_owned(), launches.into());
    Ok(Measurement { kernels, notes, shape, ..measured })
}

/// Tokens/s of 16 x 512 with blocks run again on the way back; the notes say what steps without take.
pub(in crate::bench) fn checkpointing(card: &Card) -> Result<Measurement> {
    beside_plain(card, 16, 512, &TrainerOptions { checkpointing: true, ..options() })
}

/// Tokens/s of 4 x 1,024 with moments of a byte; the notes say what steps with those of four take.
pub(in crate::bench) fn adamw_8bit(card: &Card) -> Result<Measurement> {
    let optimizer = OptimizerOptions::AdamW8bit(AdamWOptions::default());
    beside_plain(card, 4, 1024, &TrainerOptions { optimizer, ..options() })
}

/// Tokens/s of adapters of rank 16 beside frozen weights of `moe-55m`, on the projections of attention, at 4 x 512. Experts are held
/// as the other weights, but in bfloat16 where those are in single precision.
pub(in crate::bench) fn adapters(card: &Card, weights: RandomWeights) -> Result<Measurement> {
    let options = TrainerOptions { learning_rate: 1e-3, ..options() };
    let mut run = TrainingRun::with_adapters(card, &Config::moe_55m(), 4, 512, weights, options)?;
    run.measure(card, 20)
}

/// Tokens/s of `moe-55m` with `options`; the notes have the same with plain options, and both of `dense-102m`.
fn beside_plain(card: &Card, documents: usize, length: usize, chosen: &TrainerOptions) -> Result<Measurement> {
    let measure = |shape: TrainingShape, options: TrainerOptions| {
        card.gpu.trim();
        TrainingRun::new(card, &shape.config(), documents, length, options)?.measure(card, 10)
    };
    let best = |measured: &Measurement| measured.values.iter().copied().fold(0.0, f64::max);
    let mut notes = Vec::new();
    let mut compare = |name: &str, shape: TrainingShape| {
        let (plain, other) = (measure(shape, options())?, measure(shape, chosen.clone())?);
        let milliseconds = |measured: &Measurement| 1e3 * (documents * length) as f64 / best(measured);
        notes.push(format!(
            "{name}: {:.2} ms a step and {:.0} MiB, plain {:.2} ms and {:.0} MiB ({:+.1}% time, {:+.0} MiB)",
            milliseconds(&other),
            other.peak_mib,
            milliseconds(&plain),
            plain.peak_mib,
            100.0 * (best(&plain) / best(&other) - 1.0),
            other.peak_mib - plain.peak_mib,
        ));
        anyhow::Ok(other)
    };
    compare("dense-102m", TrainingShape::Dense102M)?;
    let measured = compare("moe-55m", TrainingShape::Moe55M)?;
    Ok(Measurement { notes: notes.join("; "), ..measured })
}

/// A model in training on a card, with a pool of batches.
pub(crate) struct TrainingRun {
    config: Config,
    documents: usize,
    length: usize,
    /// Counted for a token.
    operations: f64,
    /// Operations a second of the card by its data sheet, where it is known.
    rate: Option<f64>,
    trainer: Trainer,
    pool: Vec<Batch>,
    /// Of each step.
    losses: Vec<f64>,
}

impl TrainingRun {
    /// A new model on `card`, whose steps are on `documents` documents of `length` ids.
    pub(crate) fn new(
        card: &Card,
        config: &Config,
        documents: usize,
        length: usize,
        options: TrainerOptions,
    ) -> Result<Self> {
        let (time, trainer) = seconds(|| {
            let model = Model::untrained(config, &card.device.processor(), 7)?;
            Ok(Trainer::new(model, options)?.to_device(&card.device)?)
        })?;
        eprintln!("a model of {} parameters: made in {time:.1} s", config.parameters());
        Ok(Self::of(card, trainer, config, documents, length, operations_per_token(config, length)))
    }

    /// Adapters beside a frozen model of `weights`. No gradient of frozen weights is taken, so of three products with each two
    /// are counted.
    fn with_adapters(
        card: &Card,
        config: &Config,
        documents: usize,
        length: usize,
        weights: RandomWeights,
        options: TrainerOptions,
    ) -> Result<Self> {
        let model = Model::random(config, &card.device, weights, 7)?;
        let targets = ["q_proj", "k_proj", "v_proj", "o_proj"].map(str::to_owned).to_vec();
        let adapter = LoraAdapter::new(&model, LoraOptions { targets, ..LoraOptions::default() }, None, 7)?;
        let trainer = Trainer::with_adapters(model, &adapter, options)?;
        let operations = operations_per_token(config, length) - 2.0 * config.active_parameters() as f64;
        Ok(Self::of(card, trainer, config, documents, length, operations))
    }

    fn of(card: &Card, trainer: Trainer, config: &Config, documents: usize, length: usize, operations: f64) -> Self {
        let tokens = documents * length;
        let ids = random_ids(config.vocab_size, POOL * tokens + 1);
        let targets: Vec<i64> = ids[1..].iter().map(|&id| i64::from(id)).collect();
        let batches = ids.chunks_exact(tokens).zip(targets.chunks_exact(tokens));
        let pool = batches.map(|(ids, targets)| Batch {
            ids: ids.to_vec(),
            targets: targets.to_vec(),
            documents: vec![length; documents],
        });
        let (pool, rate) = (pool.collect(), card_rate(&card.gpu.properties().name));
        Self { config: config.clone(), documents, length, operations, rate, trainer, pool, losses: Vec::new() }
    }

    /// Tokens of a step.
    pub(crate) fn tokens(&self) -> usize {
        self.documents * self.length
    }

    /// The share of the data sheet's rate at so many tokens a second, where the card is known.
    pub(crate) fn utilization(&self, tokens_per_second: f64) -> Option<f64> {
        self.rate.map(|rate| tokens_per_second * self.operations / rate)
    }

    /// Seconds of `count` steps.
    pub(crate) fn steps(&mut self, count: usize) -> Result<f64> {
        let (time, ()) = seconds(|| {
            for _ in 0..count {
                let batch = &self.pool[self.losses.len() % self.pool.len()];
                let report = self.trainer.step(std::slice::from_ref(batch))?;
                ensure!(report.moved, "step {} was refused: its loss is {}", report.step, report.loss);
                self.losses.push(report.loss);
            }
            Ok(())
        })?;
        Ok(time)
    }

    /// The loss of the last step, and that of the first on the same batch, which has to be the higher.
    pub(crate) fn losses(&self) -> Result<(f64, f64)> {
        let last = self.losses.len().checked_sub(1).context("no step was taken")?;
        let (first, last) = (self.losses[last % self.pool.len()], self.losses[last]);
        ensure!(last < first, "the loss went from {first} to {last} in {} steps", self.losses.len());
        Ok((first, last))
    }

    /// Tokens/s of `count` steps at a time.
    pub(in crate::bench) fn measure(&mut self, card: &Card, count: usize) -> Result<Measurement> {
        let (operations, tokens) = (self.operations, self.tokens());
        let shape = json!({
            "documents": self.documents,
            "length": self.length,
            "steps": count,
            "parameters": self.config.parameters(),
            "active_parameters": self.config.active_parameters(),
            "operations_per_token": operations,
        });
        let measured =
            card.measure(Work::Operations(operations), shape, || Ok((count * tokens) as f64 / self.steps(count)?))?;
        let best = measured.values.iter().copied().fold(0.0, f64::max);
        let (first, last) = self.losses()?;
        let mfu = self.utilization(best).zip(self.rate).map_or(String::new(), |(share, rate)| {
            format!("MFU {:.1}% of {:.0} TFLOP/s, ", 100.0 * share, rate / 1e12)
        });
        let notes = format!(
            "{mfu}{:.2} ms a step; loss {first:.3}, after {} steps {last:.3}",
            1e3 * tokens as f64 / best,
            self.losses.len(),
        );
        Ok(Measurement { notes, ..measured })
    }

    /// The kernels of a step.
    pub(crate) fn profile(&mut self) -> Result<Vec<Kernel>> {
        let mut kernels = Kernel::of_profile(&self.trainer.profile(&self.pool[..1])?);
        // Which documents attention has is known here and not where it is launched.
        let rows = (self.documents * self.config.heads * self.config.head_width) as f64;
        let forward = 4.0 * rows * (self.length as f64).powi(2) / 2.0;
        for kernel in &mut kernels {
            if let Some(products) = attention_products(&kernel.name) {
                let operations = products / 2.0 * forward * kernel.launches as f64;
                kernel.teraflops = Some(operations / kernel.microseconds / 1e6);
            }
        }
        Ok(kernels)
    }
}

/// How many products of the size of the scores a kernel of attention has.
fn attention_products(kernel: &str) -> Option<f64> {
    let is_of_rows = ["delta", "prepare"].iter().any(|kind| kernel.ends_with(kind));
    if !kernel.starts_with("attention_") || is_of_rows {
        return None;
    }
    Some(if kernel.contains("backward") { 5.0 } else { 2.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_attention_are_counted_by_kernel() {
        assert_eq!(attention_products("attention_training_64_rows_128"), Some(2.0));
        assert_eq!(attention_products("attention_training_backward_64_keys_128"), Some(5.0));
        assert_eq!(attention_products("attention_training_delta"), None);
        assert_eq!(attention_products("attention_backward_hopper_prepare"), None);
        assert_eq!(attention_products("rmsnorm"), None);
    }
}
