//! Names and shapes of a model's linear layers by its configuration alone: what adapters are planned by before weights are read.

use crate::{
    Architecture, Config, FeedForwardConfig,
    names::{Naming, Part, interleaved_rows},
};

impl Config {
    /// Every linear layer of the blocks with its shape `[outputs, inputs]`, named and ordered as
    /// [`Model::linears`](crate::Model::linears) has them. The embedding and the head are none of them.
    pub fn linear_layers(&self) -> Vec<(String, [usize; 2])> {
        let naming = self.trained_naming();
        self.linear_parts().into_iter().map(|(part, layer, shape)| (naming.name(part, layer), shape)).collect()
    }

    /// The same, each by what it is and its layer.
    pub(crate) fn linear_parts(&self) -> Vec<(Part, usize, [usize; 2])> {
        let (width, rows, kv_rows) = (self.width, self.heads * self.head_width, self.kv_heads * self.head_width);
        let mut found = Vec::new();
        for (number, layer) in self.layers.iter().enumerate() {
            let mut see = |part, outputs, inputs| found.push((part, number, [outputs, inputs]));
            see(Part::Q, rows, width);
            see(Part::K, kv_rows, width);
            see(Part::V, kv_rows, width);
            see(Part::AttentionOut, width, rows);
            let mut gated = |[gate, up, down]: [Part; 3], inner: usize| {
                see(gate, inner, width);
                see(up, inner, width);
                see(down, width, inner);
            };
            match (layer.feed_forward, &self.experts) {
                (FeedForwardConfig::Dense { width: inner }, _) => gated([Part::Gate, Part::Up, Part::Down], inner),
                (FeedForwardConfig::Routed, None) => {}
                (FeedForwardConfig::Routed, Some(experts)) => {
                    for number in 0..experts.count {
                        let parts = [Part::ExpertGate(number), Part::ExpertUp(number), Part::ExpertDown(number)];
                        gated(parts, experts.width);
                    }
                    if let Some(shared) = experts.shared {
                        gated([Part::SharedGate, Part::SharedUp, Part::SharedDown], shared.width);
                    }
                    see(Part::Router, experts.count, width);
                    if experts.shared.is_some_and(|shared| shared.gated) {
                        see(Part::SharedRouter, 1, width);
                    }
                }
            }
        }
        found
    }

    /// For each row of the matrix of `layer` (a name of [`Config::linear_layers`]), which row holds it in a folder of Hugging
    /// Face's, for the matrix and for an adapter's second factor alike; none where the order is the same.
    pub fn stored_rows(&self, layer: &str) -> Option<Vec<u32>> {
        let heads = match layer.rsplit('.').next() {
            _ if self.architecture != Architecture::Ernie45Moe => return None,
            Some("q_proj") => self.heads,
            Some("k_proj") => self.kv_heads,
            _ => return None,
        };
        Some(interleaved_rows(heads, self.head_width))
    }

    /// Names of a folder of Hugging Face's, as models that were trained are written. InternLM2's fused matrix is held in three, as
    /// Llama's is.
    pub(crate) fn trained_naming(&self) -> Naming {
        let architecture = match self.architecture {
            Architecture::InternLm2 => Architecture::Llama,
            other => other,
        };
        Naming::HuggingFace { architecture, prefix: "model." }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ironloom_tensor::Device;

    use crate::{LoadOptions, Model};

    #[test]
    fn a_configuration_tells_the_layers_that_its_model_has() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models");
        for name in
            ["llama", "gemma3", "internlm2", "mixtral", "qwen2_moe-mixed", "qwen3_moe", "ernie4_5_moe", "ironloom_moe"]
        {
            let stored = ironloom_weights::open(models.join(name)).unwrap();
            let model = Model::load(&stored, &Device::cpu(1), &LoadOptions::default()).unwrap();
            let linears = model.linears().into_iter();
            let held: Vec<_> =
                linears.map(|(name, linear)| (name, [linear.weight.rows(), linear.weight.cols()])).collect();
            assert_eq!(model.config().linear_layers(), held, "{name}");
        }
    }
}
