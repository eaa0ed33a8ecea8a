//! What a run takes in memory, before anything is allocated.
//!
//! On the processor, of a layer the tape keeps, per token, the rows before both norms and after them, queries, keys, values and what attention
//! gives, and of each gated block the gate, the other half and their product; with checkpointing the layer's first row, and one
//! layer's all at a time. The output keeps two rows; logits are made in pieces. What a card keeps is told in `plan/card.rs`.

mod card;

use std::collections::HashSet;

use ironloom_core::MemoryPlan;
use ironloom_lm::{Config, FeedForwardConfig, ParameterRole};
use ironloom_tensor::Device;

use crate::{Result, TrainerOptions, lora::LoraOptions};

/// The size of what a run puts through a model. The loss on held-out batches of as many tokens takes no more.
#[derive(Clone, Copy, Debug)]
pub struct RunSize {
    /// Tokens of the largest batch.
    pub tokens: usize,
    /// Batches of a step.
    pub batches: usize,
}

/// The memory that training all of a model takes on `device`.
pub fn training_memory(config: &Config, device: &Device, options: &TrainerOptions, size: RunSize) -> MemoryPlan {
    match device {
        Device::Cuda(_) => card::memory(config, options, size),
        _ => processor_memory(config, options, size.tokens),
    }
}

fn processor_memory(config: &Config, options: &TrainerOptions, tokens: usize) -> MemoryPlan {
    let tables = if config.tied_embeddings { 1 } else { 2 } * (config.vocab_size * config.width) as u64;
    let learnt = learnt(config.parameters(), tables, "weights", options);
    learnt.with(format!("activations of {tokens} tokens"), activations(config, options.checkpointing, tokens as u64))
}

/// The frozen weights beside which adapters are trained.
#[derive(Clone, Copy, Debug)]
pub struct FrozenWeights {
    /// Bytes that they take as they are held.
    pub bytes: u64,
    /// Whether some are held in another form than bfloat16, so that products of many rows on a graphics card unpack them.
    pub unpacked: bool,
}

/// The memory of training adapters on `device` beside a frozen model.
///
/// # Errors
/// The adapters' options don't make sense, or a target names none of the model's layers.
pub fn adapter_memory(
    config: &Config,
    device: &Device,
    frozen: FrozenWeights,
    lora: &LoraOptions,
    options: &TrainerOptions,
    size: RunSize,
) -> Result<MemoryPlan> {
    let adapted = adapted_layers(config, lora)?;
    Ok(match device {
        Device::Cuda(_) => card::adapters::memory(config, frozen, lora, &adapted, options, size),
        _ => adapters_on_processor(config, frozen.bytes, lora, &adapted, options, size.tokens),
    })
}

/// The shapes of the layers that get an adapter, `[outputs, inputs]` each.
/// A layer with an adapter: its name, outputs and inputs.
type Adapted = (String, [usize; 2]);

fn adapted_layers(config: &Config, lora: &LoraOptions) -> Result<Vec<Adapted>> {
    let mut layers = config.linear_layers();
    let selected = lora.select(layers.iter().map(|(name, _)| name.as_str()))?;
    let selected: HashSet<String> = selected.into_iter().map(str::to_owned).collect();
    layers.retain(|(name, _)| selected.contains(name));
    Ok(layers)
}

fn adapters_on_processor(
    config: &Config,
    frozen_bytes: u64,
    lora: &LoraOptions,
    adapted: &[Adapted],
    options: &TrainerOptions,
    tokens: usize,
) -> MemoryPlan {
    let (mut parameters, mut rows) = (0, 0);
    for (_, [outputs, inputs]) in adapted {
        parameters += lora.rank * (outputs + inputs);
        // The rows between the two matrices before and after the scale, and the row that dropout left.
        rows += 2 * lora.rank + if lora.dropout > 0.0 { *inputs } else { 0 };
    }
    let rows = if options.checkpointing { rows.div_ceil(config.layers.len().max(1)) } else { rows };
    let activations = activations(config, options.checkpointing, tokens as u64) + FLOAT * (tokens * rows) as u64;
    let plan = MemoryPlan::new().with("frozen weights", frozen_bytes);
    let learnt = learnt(parameters as u64, 0, "adapters", options);
    let plan = learnt.parts().iter().fold(plan, |plan, (part, bytes)| plan.with(part.clone(), *bytes));
    plan.with(format!("activations of {tokens} tokens"), activations)
}

const FLOAT: u64 = 4;

/// What `parameters` take that are learnt, of them `tables` in the embedding and the head.
fn learnt(parameters: u64, tables: u64, name: &str, options: &TrainerOptions) -> MemoryPlan {
    let plan = MemoryPlan::new()
        .with(name, FLOAT * parameters)
        .with("gradients", FLOAT * parameters)
        .with("moments", moments(parameters, tables, options));
    match options.average_decay {
        Some(_) => plan.with("averaged weights", FLOAT * parameters),
        None => plan,
    }
}

/// Tables count apart: Muon remembers more of them than of the matrices inside.
fn moments(parameters: u64, tables: u64, options: &TrainerOptions) -> u64 {
    let of = |role, elements: u64| options.optimizer.state_kind(role, elements as usize).bytes(elements as usize);
    of(ParameterRole::Matrix, parameters - tables) + of(ParameterRole::Embedding, tables)
}

fn activations(config: &Config, checkpointing: bool, tokens: u64) -> u64 {
    let width = config.width as u64;
    let layer = |feed_forward: FeedForwardConfig| {
        let heads = (2 * config.head_width * (config.heads + config.kv_heads)) as u64;
        let inner = match (feed_forward, &config.experts) {
            (FeedForwardConfig::Dense { width }, _) => 3 * width as u64,
            (FeedForwardConfig::Routed, Some(experts)) => {
                let shared = experts.shared.map_or(0, |shared| 3 * shared.width as u64);
                experts.per_row as u64 * (3 * experts.width as u64 + width) + shared
            }
            (FeedForwardConfig::Routed, None) => 0,
        };
        4 * width + heads + inner
    };
    let layers = config.layers.iter().map(|options| layer(options.feed_forward));
    let largest = layers.clone().max().unwrap_or(0);
    let kept = if checkpointing { config.layers.len() as u64 * width + largest } else { layers.sum() };
    // On the way back, gradients of a layer's rows stand beside what is kept.
    FLOAT * tokens * (kept + largest + 2 * width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::OptimizerOptions;

    #[test]
    fn checkpointing_and_small_moments_take_less() {
        let config = Config::moe_55m();
        let bytes = |options: &TrainerOptions, part: &str| {
            let plan = processor_memory(&config, options, 4096);
            plan.parts().iter().find(|(name, _)| name.starts_with(part)).map(|(_, bytes)| *bytes)
        };
        let options = TrainerOptions::default();
        assert_eq!(bytes(&options, "weights"), Some(4 * 55_181_824));
        assert_eq!(bytes(&options, "moments"), Some(8 * 55_181_824));
        assert_eq!(bytes(&options, "averaged"), None);
        let optimizer = OptimizerOptions::AdamW8bit(Default::default());
        let small = TrainerOptions { checkpointing: true, average_decay: Some(0.99), optimizer, ..options.clone() };
        assert_eq!(bytes(&small, "averaged"), Some(4 * 55_181_824));
        assert!(bytes(&small, "moments").unwrap() * 3 < bytes(&options, "moments").unwrap());
        assert!(bytes(&small, "activations").unwrap() * 2 < bytes(&options, "activations").unwrap());
        let muon = TrainerOptions { optimizer: OptimizerOptions::Muon(Default::default()), ..options };
        let tables = if config.tied_embeddings { 1 } else { 2 } * (config.vocab_size * config.width) as u64;
        assert_eq!(bytes(&muon, "moments"), Some(4 * (55_181_824 + tables)));
    }
    #[test]
    fn adapters_take_what_their_matrices_take() {
        let config = Config::dense_102m();
        let lora =
            LoraOptions { rank: 8, targets: vec!["q_proj".into(), "mlp.down_proj".into()], ..Default::default() };
        let plan = |lora: &LoraOptions| {
            let size = RunSize { tokens: 512, batches: 1 };
            let frozen = FrozenWeights { bytes: 1000, unpacked: true };
            adapter_memory(&config, &Device::cpu(1), frozen, lora, &TrainerOptions::default(), size)
        };
        let wrong = LoraOptions { targets: vec!["lm_head".into()], ..lora.clone() };
        assert!(plan(&wrong).is_err());
        let plan = plan(&lora).unwrap();
        let bytes = |part: &str| plan.parts().iter().find(|(name, _)| name == part).map(|(_, bytes)| *bytes);
        let elements: usize = config
            .linear_layers()
            .iter()
            .filter(|(name, _)| name.ends_with("q_proj") || name.ends_with("down_proj"))
            .map(|(_, [outputs, inputs])| 8 * (outputs + inputs))
            .sum();
        assert_eq!((bytes("frozen weights"), bytes("adapters")), (Some(1000), Some(4 * elements as u64)));
        assert_eq!(bytes("moments"), Some(8 * elements as u64));
        assert!(plan.total() < processor_memory(&config, &TrainerOptions::default(), 512).total() / 4);
    }
}
