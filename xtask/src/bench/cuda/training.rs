//! Training on a card: whole steps, from ids on the host to moved weights and their loss back on the host.
//!
//! Ids are random and other ones in each step, from a pool; every document is as long as the others. The memory is what the card
//! has in use, the driver's own part included, so each of these benchmarks has a process of its own. MFU is the share of the
//! card's dense bfloat16 rate by its data sheet that a step's counted operations are.

use anyhow::{Result, ensure};
use ironloom_lm::{Config, Model};
use ironloom_train::{Trainer, TrainerOptions, data::Batch};
use serde_json::json;

use super::card::Card;
use crate::bench::{
    inputs::random_ids,
    measurement::{Kernel, Measurement, Work, seconds},
    training::{operations_per_token, options},
    training_shape::TrainingShape,
};

/// A model and the documents of its steps.
#[derive(Clone, Copy, Debug)]
pub(in crate::bench) struct Case {
    pub(in crate::bench) shape: TrainingShape,
    pub(in crate::bench) documents: usize,
    pub(in crate::bench) length: usize,
}

/// Operations a second of an H200 in dense bfloat16, by its data sheet.
pub(crate) const DATA_SHEET_RATE: f64 = 989e12;

/// Batches of the pool that steps take in turn.
const POOL: usize = 8;

/// Tokens/s of steps of a case, with the kernels of one.
pub(in crate::bench) fn train(card: &Card, case: Case) -> Result<Measurement> {
    let mut run = TrainingRun::new(card, &case.shape.config(), case.documents, case.length, options())?;
    let measured = run.measure(card, case.shape.steps())?;
    let kernels = run.profile()?;
    let one_by_one: f64 = kernels.iter().map(|kernel| kernel.microseconds).sum();
    let notes = format!("{}; its kernels one by one {:.2} ms", measured.notes, one_by_one / 1e3);
    Ok(Measurement { kernels, notes, ..measured })
}

/// A model in training on a card, with a pool of batches.
pub(crate) struct TrainingRun {
    config: Config,
    documents: usize,
    length: usize,
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
        let tokens = documents * length;
        let ids = random_ids(config.vocab_size, POOL * tokens + 1);
        let targets: Vec<i64> = ids[1..].iter().map(|&id| i64::from(id)).collect();
        let batches = ids.chunks_exact(tokens).zip(targets.chunks_exact(tokens));
        let pool = batches.map(|(ids, targets)| Batch {
            ids: ids.to_vec(),
            targets: targets.to_vec(),
            documents: vec![length; documents],
        });
        let pool = pool.collect();
        Ok(Self { config: config.clone(), documents, length, trainer, pool, losses: Vec::new() })
    }

    /// Tokens of a step.
    pub(crate) fn tokens(&self) -> usize {
        self.documents * self.length
    }

    /// The share of the data sheet's rate at so many tokens a second.
    pub(crate) fn utilization(&self, tokens_per_second: f64) -> f64 {
        tokens_per_second * operations_per_token(&self.config, self.length) / DATA_SHEET_RATE
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

    /// The losses of the first and of the last step, of which the last has to be the lower.
    pub(crate) fn losses(&self) -> Result<(f64, f64)> {
        let (first, last) =
            (self.losses.first().copied().unwrap_or(f64::NAN), self.losses.last().copied().unwrap_or(f64::NAN));
        ensure!(last < first, "the loss went from {first} to {last} in {} steps", self.losses.len());
        Ok((first, last))
    }

    /// Tokens/s of `count` steps at a time.
    pub(in crate::bench) fn measure(&mut self, card: &Card, count: usize) -> Result<Measurement> {
        let operations = operations_per_token(&self.config, self.length);
        let tokens = self.tokens();
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
        let notes = format!(
            "MFU {:.1}% of {:.0} TFLOP/s, {:.2} ms a step; loss {first:.3}, after {} steps {last:.3}",
            100.0 * self.utilization(best),
            DATA_SHEET_RATE / 1e12,
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
    let kind = kernel.strip_prefix("attention_training_")?;
    if kind.starts_with("backward") {
        return Some(5.0);
    }
    kind.starts_with(|first: char| first.is_ascii_digit()).then_some(2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_attention_are_counted_by_kernel() {
        assert_eq!(attention_products("attention_training_64_rows_128"), Some(2.0));
        assert_eq!(attention_products("attention_training_backward_64_keys_128"), Some(5.0));
        assert_eq!(attention_products("attention_training_delta"), None);
        assert_eq!(attention_products("rmsnorm"), None);
    }
}
