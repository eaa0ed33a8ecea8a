//! What a model's weights are called in checkpoints: Hugging Face's names and GGUF's.

use ironloom_weights::{Checkpoint, Format};

use crate::config::Architecture;

/// One weight of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Embedding,
    OutputNorm,
    Head,
    AttentionNorm,
    Q,
    K,
    V,
    /// q, k and v in one matrix, grouped by kv head (InternLM2).
    FusedQkv,
    AttentionOut,
    QNorm,
    KNorm,
    AttentionPostNorm,
    FeedForwardNorm,
    FeedForwardPostNorm,
    Gate,
    Up,
    Down,
    Router,
    /// What is added to the probabilities by which experts are chosen; its name is whole.
    RouterBias,
    SharedGate,
    SharedUp,
    SharedDown,
    SharedRouter,
    /// One expert's matrices; in GGUF all experts' are one tensor.
    ExpertGate(usize),
    ExpertUp(usize),
    ExpertDown(usize),
}

/// How a checkpoint names its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    Gguf,
    HuggingFace { architecture: Architecture, prefix: &'static str },
}

impl Naming {
    /// How `checkpoint`, whose model is of the family `architecture`, names its tensors.
    pub(crate) fn of(checkpoint: &Checkpoint, architecture: Architecture) -> Self {
        match checkpoint.format() {
            Format::Gguf { .. } => Self::Gguf,
            _ => Self::hugging_face(architecture, |name| checkpoint.contains(name)),
        }
    }

    /// Hugging Face names; `contains` asks the checkpoint which prefix it uses (multimodal ones nest the language model).
    pub(crate) fn hugging_face(architecture: Architecture, contains: impl Fn(&str) -> bool) -> Self {
        let prefixes = ["model.", "language_model.model.", "model.language_model.", ""];
        let embedding = |prefix: &&str| {
            let naming = Self::HuggingFace { architecture, prefix: "" };
            contains(&format!("{prefix}{}.weight", naming.tail(Part::Embedding)))
        };
        let prefix = prefixes.iter().copied().find(|prefix| embedding(prefix)).unwrap_or("model.");
        Self::HuggingFace { architecture, prefix }
    }

    /// The tensor's name without `.weight` or `.bias`.
    pub(crate) fn name(self, part: Part, layer: usize) -> String {
        match self {
            Self::Gguf => match part {
                Part::Embedding | Part::OutputNorm | Part::Head => self.tail(part),
                _ => format!("blk.{layer}.{}", self.tail(part)),
            },
            Self::HuggingFace { architecture, prefix } => match part {
                Part::Head if architecture == Architecture::InternLm2 => "output".to_owned(),
                Part::Head if prefix == "language_model.model." => "language_model.lm_head".to_owned(),
                Part::Head => "lm_head".to_owned(),
                Part::Embedding | Part::OutputNorm => format!("{prefix}{}", self.tail(part)),
                _ => format!("{prefix}layers.{layer}.{}", self.tail(part)),
            },
        }
    }

    fn tail(self, part: Part) -> String {
        let architecture = match self {
            Self::Gguf => return gguf_tail(part).to_owned(),
            Self::HuggingFace { architecture, .. } => architecture,
        };
        match architecture {
            Architecture::InternLm2 => internlm2_tail(part).to_owned(),
            Architecture::Mixtral => match part {
                Part::Router => "block_sparse_moe.gate".to_owned(),
                Part::ExpertGate(expert) => format!("block_sparse_moe.experts.{expert}.w1"),
                Part::ExpertUp(expert) => format!("block_sparse_moe.experts.{expert}.w3"),
                Part::ExpertDown(expert) => format!("block_sparse_moe.experts.{expert}.w2"),
                _ => llama_tail(part),
            },
            Architecture::Gemma3 => match part {
                Part::AttentionPostNorm => "post_attention_layernorm".to_owned(),
                Part::FeedForwardNorm => "pre_feedforward_layernorm".to_owned(),
                _ => llama_tail(part),
            },
            Architecture::Ernie45Moe => match part {
                Part::SharedGate => "mlp.shared_experts.gate_proj".to_owned(),
                Part::SharedUp => "mlp.shared_experts.up_proj".to_owned(),
                Part::SharedDown => "mlp.shared_experts.down_proj".to_owned(),
                _ => llama_tail(part),
            },
            _ => llama_tail(part),
        }
    }
}

fn llama_tail(part: Part) -> String {
    let name = match part {
        Part::Embedding => "embed_tokens",
        Part::OutputNorm => "norm",
        Part::Head => "lm_head",
        Part::AttentionNorm => "input_layernorm",
        Part::Q => "self_attn.q_proj",
        Part::K => "self_attn.k_proj",
        Part::V => "self_attn.v_proj",
        Part::FusedQkv => "self_attn.qkv_proj",
        Part::AttentionOut => "self_attn.o_proj",
        Part::QNorm => "self_attn.q_norm",
        Part::KNorm => "self_attn.k_norm",
        Part::AttentionPostNorm => "post_self_attn_layernorm",
        Part::FeedForwardNorm => "post_attention_layernorm",
        Part::FeedForwardPostNorm => "post_feedforward_layernorm",
        Part::Gate => "mlp.gate_proj",
        Part::Up => "mlp.up_proj",
        Part::Down => "mlp.down_proj",
        Part::Router => "mlp.gate",
        Part::RouterBias => "mlp.moe_statics.e_score_correction_bias",
        Part::SharedGate => "mlp.shared_expert.gate_proj",
        Part::SharedUp => "mlp.shared_expert.up_proj",
        Part::SharedDown => "mlp.shared_expert.down_proj",
        Part::SharedRouter => "mlp.shared_expert_gate",
        Part::ExpertGate(expert) => return format!("mlp.experts.{expert}.gate_proj"),
        Part::ExpertUp(expert) => return format!("mlp.experts.{expert}.up_proj"),
        Part::ExpertDown(expert) => return format!("mlp.experts.{expert}.down_proj"),
    };
    name.to_owned()
}

fn internlm2_tail(part: Part) -> String {
    let name = match part {
        Part::Embedding => "tok_embeddings",
        Part::AttentionNorm => "attention_norm",
        Part::FusedQkv => "attention.wqkv",
        Part::AttentionOut => "attention.wo",
        Part::FeedForwardNorm => "ffn_norm",
        Part::Gate => "feed_forward.w1",
        Part::Up => "feed_forward.w3",
        Part::Down => "feed_forward.w2",
        _ => return llama_tail(part),
    };
    name.to_owned()
}

fn gguf_tail(part: Part) -> &'static str {
    match part {
        Part::Embedding => "token_embd",
        Part::OutputNorm => "output_norm",
        Part::Head => "output",
        Part::AttentionNorm => "attn_norm",
        Part::Q => "attn_q",
        Part::K => "attn_k",
        Part::V => "attn_v",
        Part::FusedQkv => "attn_qkv",
        Part::AttentionOut => "attn_output",
        Part::QNorm => "attn_q_norm",
        Part::KNorm => "attn_k_norm",
        Part::AttentionPostNorm => "post_attention_norm",
        Part::FeedForwardNorm => "ffn_norm",
        Part::FeedForwardPostNorm => "post_ffw_norm",
        Part::Gate => "ffn_gate",
        Part::Up => "ffn_up",
        Part::Down => "ffn_down",
        Part::Router => "ffn_gate_inp",
        Part::RouterBias => "exp_probs_b.bias",
        Part::SharedGate => "ffn_gate_shexp",
        Part::SharedUp => "ffn_up_shexp",
        Part::SharedDown => "ffn_down_shexp",
        Part::SharedRouter => "ffn_gate_inp_shexp",
        Part::ExpertGate(_) => "ffn_gate_exps",
        Part::ExpertUp(_) => "ffn_up_exps",
        Part::ExpertDown(_) => "ffn_down_exps",
    }
}

/// For each of `heads * head_width` rows in the half-split rotation order, the row that holds it in the interleaved order
/// of GGUF's Llama family and of ERNIE's checkpoints: row `2i + j` of a head there is row `j * half + i` here.
pub(crate) fn interleaved_rows(heads: usize, head_width: usize) -> Vec<u32> {
    let half = head_width / 2;
    (0..heads * head_width)
        .map(|row| {
            let (head, element) = (row / head_width, row % head_width);
            // An odd width has no halves, and is refused before it gets here.
            let (j, i) = (element / half.max(1), element % half.max(1));
            (head * head_width + 2 * i + j) as u32
        })
        .collect()
}

/// Where each row of a reordered matrix was before.
pub(crate) fn inverse(order: &[u32]) -> Vec<u32> {
    let mut inverse = vec![0; order.len()];
    (0..).zip(order).for_each(|(row, place): (u32, _)| inverse[*place as usize] = row);
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaving_is_undone_head_by_head() {
        assert_eq!(interleaved_rows(2, 6), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }

    #[test]
    fn prefixes_are_found() {
        let naming =
            Naming::hugging_face(Architecture::Gemma3, |name| name == "language_model.model.embed_tokens.weight");
        assert_eq!(naming.name(Part::Q, 3), "language_model.model.layers.3.self_attn.q_proj");
        let naming = Naming::hugging_face(Architecture::InternLm2, |name| name == "model.tok_embeddings.weight");
        assert_eq!(naming.name(Part::FusedQkv, 0), "model.layers.0.attention.wqkv");
        assert_eq!(naming.name(Part::Head, 0), "output");
        assert_eq!(Naming::Gguf.name(Part::ExpertUp(3), 1), "blk.1.ffn_up_exps");
    }
}
