//! Benchmarks of training on the processor: whole steps, forward, backward and AdamW; and what those on a card share with them.

use anyhow::{Result, ensure};
use ironloom_lm::{Config, DenseShape, ExpertsConfig, FeedForwardConfig, LayerConfig, Model, SharedExpertConfig};
use ironloom_tensor::Device;
use ironloom_train::{Schedule, Trainer, TrainerOptions, data::Batch, operations_per_token};
use serde_json::json;

use super::{
    inputs::random_ids,
    measurement::{Measurement, Work, measure, seconds},
};
use crate::machine;

/// Documents of a step and their length.
const ROWS: usize = 4;
const LENGTH: usize = 256;
/// Steps of a timed run.
const STEPS: usize = 3;

/// The model of `train-host` and `train-host-moe`, 5.5M weights dense.
const SHAPE: DenseShape =
    DenseShape { vocab_size: 4096, width: 256, layers: 6, heads: 4, kv_heads: 2, head_width: 64, inner_width: 704 };

pub(super) fn train_host() -> Result<Measurement> {
    train(&Config::dense(SHAPE))
}

/// The same with the routed layers of `moe-55m`: 8 experts of 176, two a row, and a shared one, in all but the first two layers.
pub(super) fn train_host_moe() -> Result<Measurement> {
    let moe = Config::moe_55m();
    let dense = Config::dense(SHAPE);
    let experts = moe.experts.map(|experts| {
        let shared = experts.shared.map(|shared| SharedExpertConfig { width: 176, ..shared });
        ExpertsConfig { width: 176, shared, ..experts }
    });
    let layers = dense.layers.iter().zip(&moe.layers).map(|(layer, moe)| match moe.feed_forward {
        FeedForwardConfig::Routed => LayerConfig { feed_forward: moe.feed_forward, ..layer.clone() },
        FeedForwardConfig::Dense { .. } => layer.clone(),
    });
    let layers = layers.collect();
    train(&Config { architecture: moe.architecture, experts, layers, ..dense })
}

/// Tokens/s of whole steps.
fn train(config: &Config) -> Result<Measurement> {
    let model = Model::untrained(config, &Device::cpu(0), 7)?;
    let mut trainer = Trainer::new(model, options())?;
    let tokens = ROWS * LENGTH;
    let ids = random_ids(config.vocab_size, tokens + 1);
    let batch = Batch {
        ids: ids[..tokens].to_vec(),
        targets: ids[1..].iter().map(|&id| i64::from(id)).collect(),
        documents: vec![LENGTH; ROWS],
    };
    let shape = json!({
        "rows": ROWS,
        "length": LENGTH,
        "parameters": config.parameters(),
        "active_parameters": config.active_parameters(),
        "threads": machine::threads(),
    });
    let batches = [batch];
    measure(Work::Operations(operations_per_token(config, LENGTH)), shape, || {
        let (time, ()) = seconds(|| {
            for _ in 0..STEPS {
                let report = trainer.step(&batches)?;
                ensure!(report.moved, "step {} was refused: its loss is {}", report.step, report.loss);
            }
            Ok(())
        })?;
        Ok((STEPS * tokens) as f64 / time)
    })
}

/// AdamW at a constant rate.
pub(crate) fn options() -> TrainerOptions {
    TrainerOptions {
        steps: 1_000_000,
        learning_rate: 3e-4,
        schedule: Schedule::Constant { warmup_steps: 0 },
        ..TrainerOptions::default()
    }
}
