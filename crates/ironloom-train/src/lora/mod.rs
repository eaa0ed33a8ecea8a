//! Low-rank adapters: which layers get one, how it begins, and files in PEFT's layout.
//!
//! A frozen layer `y = x Wᵀ`, `W [out, in]`, becomes `y = x Wᵀ + s · x Aᵀ Bᵀ` with `A [rank, in]` and `B [out, rank]`, which are what
//! is learnt. `B` begins at zero, so the first step starts from the model as it was. The scale `s` is `alpha / rank`, or
//! `alpha / √rank` when stabilized for large ranks.
//!
//! Hu et al., "LoRA: low-rank adaptation of large language models", 2021; Kalajdzievski, "A rank stabilization scaling factor
//! for fine-tuning with LoRA", 2023.
//!
//! The layers themselves belong to a model: [`LoraOptions::select`] names those that get an adapter, [`LoraMatrices`] holds the numbers
//! of one, and [`LoraAdapter`] is all of them with their options, read and written in [PEFT's layout](peft).

mod attach;
mod card;
mod error;
pub mod peft;
mod targets;

use ironloom_core::Philox;
use serde::{Deserialize, Serialize};

pub(crate) use card::check_for_card;
pub use error::LoraError;

/// The target that stands for every linear layer, in PEFT's word.
pub const ALL_LINEAR: &str = "all-linear";

/// How adapters are set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraOptions {
    /// Rows of `A` and columns of `B`.
    pub rank: usize,
    /// The scale, times the rank (or its root).
    pub alpha: f64,
    /// The part of `x` that is left out at random on its way into `A` in training.
    pub dropout: f64,
    /// Whether the scale is `alpha / √rank` instead of `alpha / rank`.
    pub rank_stabilized: bool,
    /// Which linear layers get an adapter: the end of a name, such as `q_proj` or `mlp.up_proj`; a pattern with `*` for the whole name, such as
    /// `model.layers.1*.mlp.*`; or `all-linear`.
    pub targets: Vec<String>,
}

impl Default for LoraOptions {
    fn default() -> Self {
        Self { rank: 16, alpha: 32.0, dropout: 0.0, rank_stabilized: false, targets: vec![ALL_LINEAR.to_owned()] }
    }
}

impl LoraOptions {
    /// The factor of an adapter's output.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        (self.alpha / if self.rank_stabilized { rank.sqrt() } else { rank }) as f32
    }

    /// Whether the options make sense.
    ///
    /// # Errors
    /// One is out of its range, or there is no target.
    pub fn check(&self) -> Result<(), LoraError> {
        let invalid = |option, value, limits| Err(LoraError::InvalidOption { option, value, limits });
        if self.rank == 0 {
            return invalid("rank", 0.0, "1 or more");
        }
        if !self.alpha.is_finite() || self.alpha <= 0.0 {
            return invalid("alpha", self.alpha, "above 0");
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return invalid("dropout", self.dropout, "from 0 to below 1");
        }
        if self.targets.iter().all(|target| target.is_empty()) {
            return Err(LoraError::NoTargets);
        }
        Ok(())
    }

    /// Those of a model's linear layers that get an adapter, in the model's order.
    ///
    /// # Errors
    /// The options don't make sense, or a target names none of the layers: training would go on without what was asked for.
    pub fn select<'a>(&self, layers: impl IntoIterator<Item = &'a str>) -> Result<Vec<&'a str>, LoraError> {
        self.check()?;
        targets::select(&self.targets, layers.into_iter().collect())
    }
}

/// The two matrices of one layer's adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraMatrices {
    /// The layer's name, such as `model.layers.0.self_attn.q_proj`.
    pub layer: String,
    /// The layer's inputs: columns of `A`.
    pub inputs: usize,
    /// The layer's outputs: rows of `B`.
    pub outputs: usize,
    /// `A [rank, inputs]`, row-major.
    pub a: Vec<f32>,
    /// `B [outputs, rank]`, row-major.
    pub b: Vec<f32>,
}

impl LoraMatrices {
    /// How an adapter begins: `A` uniform within `1 / √inputs`, as a linear layer usually begins, and `B` zero. The numbers depend on
    /// the seed and the layer's name alone, not on which other layers have adapters.
    pub fn new(layer: &str, outputs: usize, inputs: usize, rank: usize, seed: u64) -> Self {
        let (mut philox, bound) = (Philox::new(seed, layer_stream(layer)), 1.0 / (inputs.max(1) as f32).sqrt());
        let a = (0..rank.saturating_mul(inputs)).map(|_| bound * (2.0 * philox.next_f32() - 1.0)).collect();
        Self { layer: layer.to_owned(), inputs, outputs, a, b: vec![0.0; outputs.saturating_mul(rank)] }
    }
}

/// All adapters of a model with their options.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraAdapter {
    /// How they are set.
    pub options: LoraOptions,
    /// The model they belong to, as its user names it: a folder or a name on the Hugging Face Hub.
    pub base_model: Option<String>,
    /// One for each adapted layer.
    pub layers: Vec<LoraMatrices>,
}

/// The number of a layer's stream of random numbers (FNV-1a of its name): of `A`'s first values, and of its dropout.
pub fn layer_stream(layer: &str) -> u64 {
    layer.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_is_that_of_the_papers() {
        let options = LoraOptions { rank: 16, alpha: 32.0, ..Default::default() };
        assert_eq!(options.scale(), 2.0);
        assert_eq!(LoraOptions { rank_stabilized: true, ..options }.scale(), 8.0);
    }

    #[test]
    fn an_adapter_begins_by_adding_nothing() {
        let matrices = LoraMatrices::new("model.layers.0.mlp.up_proj", 24, 64, 4, 7);
        assert_eq!((matrices.a.len(), matrices.b.len()), (4 * 64, 24 * 4));
        assert!(matrices.b.iter().all(|&value| value == 0.0));
        assert!(matrices.a.iter().all(|value| value.abs() <= 0.125));
        let square = matrices.a.iter().map(|value| value * value).sum::<f32>() / 256.0;
        // Uniform within 1/8: a mean square of 1/64/3.
        assert!((square * 192.0 - 1.0).abs() < 0.2, "{square}");

        assert_eq!(matrices, LoraMatrices::new("model.layers.0.mlp.up_proj", 24, 64, 4, 7));
        assert_ne!(matrices.a, LoraMatrices::new("model.layers.1.mlp.up_proj", 24, 64, 4, 7).a);
        assert_ne!(matrices.a, LoraMatrices::new("model.layers.0.mlp.up_proj", 24, 64, 4, 8).a);
    }

    #[test]
    fn options_out_of_range_are_refused_by_name() {
        let refused = |change: fn(&mut LoraOptions)| {
            let mut options = LoraOptions::default();
            change(&mut options);
            options.check().unwrap_err().to_string()
        };
        assert!(refused(|options| options.rank = 0).contains("rank"));
        assert!(refused(|options| options.alpha = f64::NAN).contains("alpha"));
        assert!(refused(|options| options.dropout = 1.0).contains("dropout"));
        assert!(refused(|options| options.targets.clear()).contains("target"));
        assert!(serde_json::from_str::<LoraOptions>(r#"{"rank": 8, "r": 8}"#).is_err());
    }
}
