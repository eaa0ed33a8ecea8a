//! Which adapters a graphics card trains.

use std::collections::{HashMap, HashSet};

use ironloom_lm::Config;

use super::{LoraError, LoraOptions};

/// Products on a card take rows of a multiple of so many elements.
const MULTIPLE: usize = 8;

impl LoraOptions {
    /// Whether a graphics card trains these adapters of a model of `config`.
    ///
    /// # Errors
    /// It does not, for their rank, or since targets are some of a block's routed experts or a layer of odd sides; or see
    /// [`LoraOptions::select`].
    pub fn check_for_card(&self, config: &Config) -> Result<(), LoraError> {
        let layers = config.linear_layers();
        let selected = self.select(layers.iter().map(|(name, _)| name.as_str()))?;
        check_for_card(self.rank, selected, config)
    }
}

/// Whether a graphics card trains adapters of `rank` of the layers `adapted` of a model.
pub(crate) fn check_for_card<'a>(
    rank: usize,
    adapted: impl IntoIterator<Item = &'a str>,
    config: &Config,
) -> Result<(), LoraError> {
    if !rank.is_multiple_of(MULTIPLE) {
        return Err(LoraError::CardRank { rank });
    }
    let adapted: HashSet<&str> = adapted.into_iter().collect();
    // The first of the experts' layers that are one product, and whether it gets an adapter.
    let mut experts: HashMap<(String, String), (String, bool)> = HashMap::new();
    for (layer, sides) in config.linear_layers() {
        let is_adapted = adapted.contains(layer.as_str());
        if let Some(kind) = expert_kind(&layer) {
            let (first, like) = experts.entry(kind).or_insert_with(|| (layer.clone(), is_adapted));
            if *like != is_adapted {
                let (with, without) = if is_adapted { (layer, first.clone()) } else { (first.clone(), layer) };
                return Err(LoraError::CardExperts { with, without });
            }
        }
        if !is_adapted {
            continue;
        }
        // Outputs of a router or a gate stand alone, and may be any number.
        let alone = layer.ends_with("gate");
        if !(sides[1].is_multiple_of(MULTIPLE) && (alone || sides[0].is_multiple_of(MULTIPLE))) {
            return Err(LoraError::CardSides { layer, sides });
        }
    }
    Ok(())
}

/// The block and the part of a routed expert's layer, which the other experts' layers share.
fn expert_kind(layer: &str) -> Option<(String, String)> {
    let (block, expert) = layer.split_once(".experts.")?;
    let (_, part) = expert.split_once('.')?;
    Some((block.to_owned(), part.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_card_does_not_train_is_refused_by_name() {
        let check = |config: &Config, rank: usize, targets: &[&str]| {
            let targets = targets.iter().map(|&target| target.to_owned()).collect();
            LoraOptions { rank, targets, ..LoraOptions::default() }.check_for_card(config)
        };
        let (dense, routed) = (Config::dense_102m(), Config::moe_55m());
        assert!(check(&dense, 16, &["all-linear"]).is_ok());
        for targets in [&["q_proj", "o_proj", "shared_experts.up_proj"][..], &["all-linear"], &["down_proj"]] {
            assert!(check(&routed, 16, targets).is_ok(), "{targets:?}");
        }
        let refused = |config: &Config, rank, targets: &[&str]| check(config, rank, targets).unwrap_err().to_string();
        assert!(refused(&dense, 12, &["q_proj"]).contains("12"));
        let message = refused(&routed, 16, &["experts.3.gate_proj"]);
        assert!(message.contains("layers.2.mlp.experts.3.gate_proj"), "{message}");
        assert!(message.contains("layers.2.mlp.experts.0.gate_proj"), "{message}");
        let mut few = routed;
        few.experts.as_mut().unwrap().count = 12;
        assert!(check(&few, 16, &["all-linear"]).is_ok());
        let mut odd = dense;
        odd.layers[0].feed_forward = ironloom_lm::FeedForwardConfig::Dense { width: 1404 };
        let message = refused(&odd, 16, &["down_proj"]);
        assert!(message.contains("model.layers.0.mlp.down_proj") && message.contains("1404"), "{message}");
        assert!(check(&odd, 16, &["q_proj"]).is_ok());
    }
}
