//! What a run takes in memory, before anything is allocated.
//!
//! Of a layer the tape keeps, per token, the rows before both norms and after them, queries, keys, values and what attention
//! gives, and of each gated block the gate, the other half and their product; with checkpointing the layer's first row, and one
//! layer's all at a time. The output keeps two rows; logits are made in pieces.

use ironloom_core::MemoryPlan;
use ironloom_lm::{Config, FeedForwardConfig};

use crate::{TrainerOptions, optimizer::OptimizerOptions};

/// The memory of training all of a model in single precision, with batches of `tokens` tokens.
pub fn training_memory(config: &Config, options: &TrainerOptions, tokens: usize) -> MemoryPlan {
    let parameters = config.parameters();
    let mut plan = MemoryPlan::new()
        .with("weights", FLOAT * parameters)
        .with("gradients", FLOAT * parameters)
        .with("moments", moments(config, options));
    if options.average_decay.is_some() {
        plan = plan.with("averaged weights", FLOAT * parameters);
    }
    plan.with(format!("activations of {tokens} tokens"), activations(config, options.checkpointing, tokens as u64))
}

const FLOAT: u64 = 4;

fn moments(config: &Config, options: &TrainerOptions) -> u64 {
    let parameters = config.parameters();
    match &options.optimizer {
        OptimizerOptions::AdamW(_) => 2 * FLOAT * parameters,
        // A byte an element and moment, and a scale for each block of 256.
        OptimizerOptions::AdamW8bit(_) => 2 * (parameters + FLOAT * parameters / 256),
        OptimizerOptions::Sgd(sgd) if sgd.momentum == 0.0 => 0,
        OptimizerOptions::Sgd(_) | OptimizerOptions::Lion(_) => FLOAT * parameters,
        // One moment of a matrix, two of the embedding and the head.
        OptimizerOptions::Muon(_) => {
            let tables = if config.tied_embeddings { 1 } else { 2 };
            FLOAT * (parameters + tables * (config.vocab_size * config.width) as u64)
        }
    }
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

    #[test]
    fn checkpointing_and_small_moments_take_less() {
        let config = Config::moe_55m();
        let bytes = |options: &TrainerOptions, part: &str| {
            let plan = training_memory(&config, options, 4096);
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
    }
}
