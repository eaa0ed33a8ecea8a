//! Shapes that Ironloom trains and measures, its own and others', as descriptions without a checkpoint.

use ironloom_nn::{Activation, RopeOptions, RopeScaling};

use super::{Architecture, Config, ExpertsConfig, FeedForwardConfig, LayerConfig, SharedExpertConfig};

/// The dimensions of a plain decoder: tied embedding, SwiGLU, one rotary embedding of base 10,000.
#[derive(Clone, Copy, Debug)]
pub struct DenseShape {
    /// Entries of the embedding.
    pub vocab_size: usize,
    /// Elements of a hidden row.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_width: usize,
    /// The feed-forward block's inner width.
    pub inner_width: usize,
}

impl Config {
    /// A plain decoder of these dimensions, made for 4,096 positions.
    pub fn dense(shape: DenseShape) -> Self {
        let feed_forward = FeedForwardConfig::Dense { width: shape.inner_width };
        Self {
            architecture: Architecture::IronloomDense,
            vocab_size: shape.vocab_size,
            width: shape.width,
            context_length: 4096,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_width: shape.head_width,
            attention_scale: 1.0 / (shape.head_width as f32).sqrt(),
            rms_epsilon: 1e-5,
            tied_embeddings: true,
            embedding_scale: 1.0,
            activation: Activation::Silu,
            qkv_bias: false,
            output_bias: false,
            feed_forward_bias: false,
            qk_norm: false,
            post_norms: false,
            norms_less_one: false,
            ropes: vec![RopeOptions { base: 10_000.0, width: shape.head_width, scaling: RopeScaling::None }],
            layers: vec![LayerConfig { window: None, rope: 0, feed_forward }; shape.layers],
            experts: None,
        }
    }

    /// `dense-102m`: 101,671,680 parameters.
    pub fn dense_102m() -> Self {
        Self::dense(DenseShape {
            vocab_size: 32_000,
            width: 768,
            layers: 16,
            heads: 12,
            kv_heads: 4,
            head_width: 64,
            inner_width: 1408,
        })
    }

    /// The shape of Qwen2.5-3B: 3,085,938,688 parameters.
    pub fn qwen2_5_3b() -> Self {
        Self::qwen2_5(DenseShape {
            vocab_size: 151_936,
            width: 2048,
            layers: 36,
            heads: 16,
            kv_heads: 2,
            head_width: 128,
            inner_width: 11_008,
        })
    }

    /// The shape of Qwen2.5-14B: 14,770,033,664 parameters, the head apart from the embedding.
    pub fn qwen2_5_14b() -> Self {
        let config = Self::qwen2_5(DenseShape {
            vocab_size: 152_064,
            width: 5120,
            layers: 48,
            heads: 40,
            kv_heads: 8,
            head_width: 128,
            inner_width: 13_824,
        });
        Self { tied_embeddings: false, ..config }
    }

    fn qwen2_5(shape: DenseShape) -> Self {
        let rope = RopeOptions { base: 1_000_000.0, width: shape.head_width, scaling: RopeScaling::None };
        Self {
            architecture: Architecture::Qwen2,
            context_length: 32_768,
            rms_epsilon: 1e-6,
            qkv_bias: true,
            ropes: vec![rope],
            ..Self::dense(shape)
        }
    }

    /// The plain decoder `dense` with routed experts in all but its first `dense_layers`: of ERNIE's family, which transformers
    /// runs, where that can say it (probabilities divided by their sum, a shared expert without a gate and as wide as some whole
    /// number of experts), else of this project's own.
    pub fn routed(dense: Self, dense_layers: usize, mut experts: ExpertsConfig) -> Self {
        experts.shared = experts.shared.filter(|shared| shared.width > 0);
        let fits = |shared: SharedExpertConfig| !shared.gated && shared.width.is_multiple_of(experts.width);
        let is_ernie = experts.normalize && experts.shared.is_none_or(fits);
        let architecture = if is_ernie { Architecture::Ernie45Moe } else { Architecture::IronloomMoe };
        let mut config = Self { architecture, experts: Some(experts), ..dense };
        config.layers.iter_mut().skip(dense_layers).for_each(|layer| layer.feed_forward = FeedForwardConfig::Routed);
        config
    }

    /// `moe-55m`: 55,181,824 parameters, 35,717,632 of them active: two dense layers, then six of 8 experts (2 a row) with a
    /// shared expert.
    pub fn moe_55m() -> Self {
        let dense = Self::dense(DenseShape {
            vocab_size: 32_000,
            width: 512,
            layers: 8,
            heads: 8,
            kv_heads: 2,
            head_width: 64,
            inner_width: 1408,
        });
        let shared = Some(SharedExpertConfig { width: 352, gated: false });
        Self::routed(dense, 2, ExpertsConfig { count: 8, per_row: 2, width: 352, normalize: true, shared })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_of_others_have_their_published_parameter_counts() {
        assert_eq!(Config::qwen2_5_3b().parameters(), 3_085_938_688);
        assert_eq!(Config::qwen2_5_14b().parameters(), 14_770_033_664);
    }
}
