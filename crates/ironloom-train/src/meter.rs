//! What a run makes of a graphics card: the share of its rate (MFU) and its memory.
//!
//! ```text
//! MFU = tokens/s * (6 * active parameters + 12 * layers * sequence length * heads * head width) / rate
//! ```
//!
//! The operations are a multiply-add of each weight forward and two back, and the scores and values of attention as if none were
//! masked (Chowdhery et al., PaLM, 2022, appendix B). The rate is that of bfloat16 products without sparsity, by the card's data
//! sheet.

use ironloom_lm::{Config, Model};
use ironloom_tensor::Device;

/// Cards by the beginnings of their names, the longer before the shorter, with their TFLOP/s. Data sheets give twice the rate of
/// Hopper's cards, with sparsity; halves are rounded down, as they are usually quoted.
const RATES: [(&str, f64); 6] = [
    // H200 Tensor Core GPU, data sheet: SXM 1,979 and NVL 1,671 with sparsity.
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    // H100 Tensor Core GPU, data sheet: SXM 1,979, NVL 1,671, PCIe 1,513 with sparsity.
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100 80GB HBM3", 989.0),
    // A100 Tensor Core GPU, data sheet: 312 in all forms.
    ("A100", 312.0),
];
/// Ada GPU architecture, appendix A: with sums in single precision. Other cards' names begin so.
const RTX_4090: (&str, f64) = ("GeForce RTX 4090", 165.2);

/// Operations a second of dense bfloat16 products that the data sheet of the card of this name gives; `None` of a card that is not
/// known here, or of a part of a card.
///
/// ```
/// use ironloom_train::card_rate;
/// assert_eq!(card_rate("NVIDIA H200"), Some(989e12));
/// assert_eq!(card_rate("NVIDIA A100-SXM4-80GB"), Some(312e12));
/// assert_eq!(card_rate("NVIDIA A100-SXM4-80GB MIG 3g.40gb"), None);
/// ```
pub fn card_rate(name: &str) -> Option<f64> {
    let name = name.strip_prefix("NVIDIA ").unwrap_or(name);
    if name.contains("MIG ") {
        return None;
    }
    let known = RATES.iter().find(|(beginning, _)| name.starts_with(beginning));
    known.or(Some(&RTX_4090).filter(|(whole, _)| name == *whole)).map(|(_, rate)| rate * 1e12)
}

/// Operations that are counted for a token of training all of a model on rows of `sequence_length` tokens.
pub fn operations_per_token(config: &Config, sequence_length: usize) -> f64 {
    let attention = config.layers.len() * sequence_length * config.heads * config.head_width;
    6.0 * config.active_parameters() as f64 + 12.0 * attention as f64
}

/// Tells what a run makes of the card that it is on.
#[derive(Clone, Debug)]
pub struct Meter {
    device: Device,
    /// MFU for each token a second.
    share_of_token: Option<f64>,
}

impl Meter {
    /// The meter of a run of `model` on rows of `sequence_length` tokens.
    pub fn new(model: &Model, sequence_length: usize) -> Self {
        let device = model.device().clone();
        // Of a frozen weight no gradient is made.
        let counted = (!model.has_adapters()).then(|| operations_per_token(model.config(), sequence_length));
        let rate = match &device {
            Device::Cuda(cuda) => card_rate(&cuda.gpu().properties().name),
            _ => None,
        };
        Self { device, share_of_token: counted.zip(rate).map(|(operations, rate)| operations / rate) }
    }

    /// The share of the card's rate that training at this speed uses, where the rate is known and all weights are trained.
    pub fn utilization(&self, tokens_per_second: f64) -> Option<f64> {
        self.share_of_token.map(|share| share * tokens_per_second).filter(|share| share.is_finite())
    }

    /// The most bytes that this process has had of the card at a time; none without one.
    pub fn memory_bytes(&self) -> Option<u64> {
        match &self.device {
            Device::Cuda(cuda) => Some(cuda.gpu().peak_bytes() as u64),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use ironloom_lm::DenseShape;

    use super::*;

    #[test]
    fn cards_are_known_by_their_names() {
        for (name, rate) in [
            ("NVIDIA H100 80GB HBM3", Some(989.0)),
            ("NVIDIA H100 PCIe", Some(756.0)),
            ("NVIDIA H100 NVL", Some(835.0)),
            ("NVIDIA H200", Some(989.0)),
            ("NVIDIA H200 NVL", Some(835.0)),
            ("NVIDIA A100 80GB PCIe", Some(312.0)),
            ("NVIDIA GeForce RTX 4090", Some(165.2)),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
            ("NVIDIA GeForce RTX 4090 D", None),
            ("NVIDIA GH200 480GB", None),
            ("NVIDIA A10", None),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ] {
            assert_eq!(card_rate(name), rate.map(|rate| rate * 1e12), "{name}");
        }
    }

    #[test]
    fn operations_are_those_of_weights_and_attention() {
        let config = Config::dense_102m();
        let attention = 12 * 16 * 1024 * 12 * 64;
        assert_eq!(operations_per_token(&config, 1024), (6 * config.parameters() + attention) as f64);
        // Of eight experts, a token goes to two.
        let config = Config::moe_55m();
        assert!(operations_per_token(&config, 1) < 6.0 * config.parameters() as f64);
    }

    #[test]
    fn the_processor_has_no_known_rate() {
        let shape =
            DenseShape { vocab_size: 32, width: 16, layers: 1, heads: 2, kv_heads: 1, head_width: 8, inner_width: 16 };
        let model = Model::untrained(&Config::dense(shape), &Device::cpu(1), 0).unwrap();
        let meter = Meter::new(&model, 16);
        assert_eq!((meter.utilization(1.0), meter.memory_bytes()), (None, None));
        let meter = Meter { share_of_token: Some(0.125), ..meter };
        assert_eq!(meter.utilization(4.0), Some(0.5));
        assert_eq!(meter.utilization(f64::INFINITY), None);
    }
}
