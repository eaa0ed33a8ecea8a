//! What optimizers can be told. In a configuration: `kind = "adamw"`, with the fields beside it.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Which optimizer, and how it is set.
///
/// ```
/// use ironloom_train::optimizer::{OptimizerOptions, AdamWOptions};
/// let options: OptimizerOptions = serde_json::from_str(r#"{"kind": "adamw", "weight_decay": 0.0}"#)?;
/// assert_eq!(options, OptimizerOptions::AdamW(AdamWOptions { weight_decay: 0.0, ..Default::default() }));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
pub enum OptimizerOptions {
    /// Adam with decoupled weight decay.
    #[serde(rename = "adamw")]
    AdamW(AdamWOptions),
    /// AdamW whose moments take a byte each.
    #[serde(rename = "adamw8bit", alias = "adamw-8bit", alias = "adamw_8bit")]
    AdamW8bit(AdamWOptions),
    /// Stochastic gradient descent.
    #[serde(rename = "sgd")]
    Sgd(SgdOptions),
    /// The sign of a moving mean.
    #[serde(rename = "lion")]
    Lion(LionOptions),
    /// Orthogonalized momentum for matrices, AdamW for the rest.
    #[serde(rename = "muon")]
    Muon(MuonOptions),
}

/// How AdamW is set. The defaults are those of language-model pretraining since GPT-3.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWOptions {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Weight decay per unit of learning rate, decoupled from the gradient.
    pub weight_decay: f64,
}

/// How SGD is set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SgdOptions {
    /// Decay of the momentum; 0 keeps none.
    pub momentum: f64,
    /// Whether the step looks ahead along the momentum.
    pub nesterov: bool,
    /// Weight decay, as a part of the gradient.
    pub weight_decay: f64,
}

/// How Lion is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LionOptions {
    /// The momentum's part in the step's direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Weight decay per unit of learning rate; three to ten times AdamW's, as the rate is smaller.
    pub weight_decay: f64,
}

/// How Muon is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MuonOptions {
    /// Decay of the momentum.
    pub momentum: f64,
    /// Whether the step looks ahead along the momentum.
    pub nesterov: bool,
    /// Weight decay per unit of learning rate, of matrices.
    pub weight_decay: f64,
    /// How AdamW is set, which moves all but the matrices.
    pub adamw: AdamWOptions,
}

impl Default for OptimizerOptions {
    fn default() -> Self {
        Self::AdamW(AdamWOptions::default())
    }
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 }
    }
}

impl Default for LionOptions {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.99, weight_decay: 0.3 }
    }
}

impl Default for MuonOptions {
    fn default() -> Self {
        Self { momentum: 0.95, nesterov: true, weight_decay: 0.1, adamw: AdamWOptions::default() }
    }
}

impl OptimizerOptions {
    /// The name of the kind, as a configuration has it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AdamW(_) => "adamw",
            Self::AdamW8bit(_) => "adamw8bit",
            Self::Sgd(_) => "sgd",
            Self::Lion(_) => "lion",
            Self::Muon(_) => "muon",
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::AdamW(options) | Self::AdamW8bit(options) => options.check(),
            Self::Sgd(options) => {
                fraction("momentum", options.momentum)?;
                if options.nesterov && options.momentum == 0.0 {
                    return Err(Error::InvalidOption {
                        option: "momentum",
                        value: 0.0,
                        limits: "above 0 with nesterov",
                    });
                }
                at_least_zero("weight_decay", options.weight_decay)
            }
            Self::Lion(options) => {
                fraction("beta1", options.beta1)?;
                fraction("beta2", options.beta2)?;
                at_least_zero("weight_decay", options.weight_decay)
            }
            Self::Muon(options) => {
                fraction("momentum", options.momentum)?;
                at_least_zero("weight_decay", options.weight_decay)?;
                options.adamw.check()
            }
        }
    }
}

impl AdamWOptions {
    fn check(&self) -> Result<()> {
        fraction("beta1", self.beta1)?;
        fraction("beta2", self.beta2)?;
        if !self.epsilon.is_finite() || self.epsilon <= 0.0 {
            return Err(Error::InvalidOption { option: "epsilon", value: self.epsilon, limits: "above 0" });
        }
        at_least_zero("weight_decay", self.weight_decay)
    }
}

fn fraction(option: &'static str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    Err(Error::InvalidOption { option, value, limits: "from 0 to below 1" })
}

fn at_least_zero(option: &'static str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(Error::InvalidOption { option, value, limits: "0 or more" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_read_by_its_name_and_strictly() {
        for kind in ["adamw", "adamw8bit", "sgd", "lion", "muon"] {
            let options: OptimizerOptions = serde_json::from_str(&format!(r#"{{"kind": "{kind}"}}"#)).unwrap();
            assert_eq!(options.name(), kind);
            options.check().unwrap();
            let text = serde_json::to_string(&options).unwrap();
            assert_eq!(serde_json::from_str::<OptimizerOptions>(&text).unwrap(), options);
            let unknown = format!(r#"{{"kind": "{kind}", "beta3": 0.1}}"#);
            assert!(serde_json::from_str::<OptimizerOptions>(&unknown).unwrap_err().to_string().contains("beta3"));
        }
        assert!(serde_json::from_str::<OptimizerOptions>(r#"{"kind": "adagrad"}"#).is_err());
        let muon = r#"{"kind": "muon", "adamw": {"beta2": 0.999}}"#;
        let OptimizerOptions::Muon(muon) = serde_json::from_str(muon).unwrap() else { panic!() };
        assert_eq!(muon.adamw.beta2, 0.999);
    }

    #[test]
    fn options_out_of_range_are_refused_by_name() {
        let refused = |options: OptimizerOptions, name: &str| match options.check() {
            Err(Error::InvalidOption { option, .. }) => assert_eq!(option, name),
            other => panic!("{name}: {other:?}"),
        };
        let adamw = AdamWOptions::default;
        refused(OptimizerOptions::AdamW(AdamWOptions { beta1: 1.0, ..adamw() }), "beta1");
        refused(OptimizerOptions::AdamW8bit(AdamWOptions { beta2: f64::NAN, ..adamw() }), "beta2");
        refused(OptimizerOptions::AdamW(AdamWOptions { epsilon: 0.0, ..adamw() }), "epsilon");
        refused(OptimizerOptions::AdamW(AdamWOptions { weight_decay: -0.1, ..adamw() }), "weight_decay");
        refused(OptimizerOptions::Sgd(SgdOptions { nesterov: true, ..Default::default() }), "momentum");
        refused(OptimizerOptions::Lion(LionOptions { beta2: 1.5, ..Default::default() }), "beta2");
        let muon = MuonOptions { adamw: AdamWOptions { beta1: -1.0, ..adamw() }, ..Default::default() };
        refused(OptimizerOptions::Muon(muon), "beta1");
    }
}
