//! Which type each tensor of an exported GGUF file gets.
//!
//! Vectors (norms, biases, scaling factors) and routers stay in F32: they're small and decide much, and readers of GGUF expect
//! them so. The head, or the embedding where it's also the head, gets Q6_K when the rest is packed to four or five bits, as llama.cpp's
//! quantizer does: its errors go straight into the logits. A matrix whose rows aren't whole blocks gets the next larger type
//! with blocks that fit: Q4_K becomes Q5_0 and Q6_K Q8_0, as in llama.cpp, and types of 32 become F16.
//!
//! The medium mix of Q4_K (llama.cpp's Q4_K_M) gives Q6_K to the values' and the feed-forward blocks' last projections in the first and
//! the last eighth of the layers and in every third one between: their errors cost the most for their size.

use ironloom_core::{DType, Shape};

use crate::{Error, Result};

/// The type of a tensor, and why it isn't the one asked for where a person would wonder.
pub(super) struct Choice {
    pub(super) dtype: DType,
    pub(super) reason: Option<String>,
}

/// What one export asks for.
#[derive(Clone, Copy)]
pub(super) struct TypePolicy {
    requested: DType,
    /// Whether the embedding is also the head.
    tied: bool,
    /// The number of layers, where some of their matrices get more bits.
    mixed: Option<usize>,
}

impl TypePolicy {
    /// # Errors
    /// GGUF weights aren't written in this type.
    pub(super) fn new(requested: DType, mix: Mix, tied: bool, layers: usize) -> Result<Self> {
        if file_type(requested, Mix::Plain).is_none() {
            return Err(Error::NotExportable {
                what: format!("weights of type {requested}"),
                format: "GGUF",
                reason: "choose one of F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q6_K".into(),
            });
        }
        if mix == Mix::Medium && requested != DType::Q4_K {
            let (what, reason) = (format!("a medium mix of {requested}"), "only Q4_K has one".into());
            return Err(Error::NotExportable { what, format: "GGUF", reason });
        }
        Ok(Self { requested, tied, mixed: (mix == Mix::Medium).then_some(layers) })
    }

    /// The type for the tensor of this GGUF name.
    pub(super) fn choose(self, name: &str, shape: Shape) -> Choice {
        let dims = shape.dims();
        let is_vector = dims.iter().filter(|dim| **dim != 1).count() <= 1 || dims.len() < 2;
        if is_vector || name.contains("ffn_gate_inp") || name.contains("_norm") || name.ends_with(".bias") {
            return Choice { dtype: DType::F32, reason: None };
        }
        let columns = dims.last().copied().unwrap_or(0);
        let is_head = name == "output.weight" || (self.tied && name == "token_embd.weight");
        let wanted = match self.requested {
            DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q4_K if is_head => DType::Q6_K,
            DType::Q4_K if self.has_more_bits(name) => DType::Q6_K,
            requested => requested,
        };
        let next = if wanted == DType::Q4_K { DType::Q5_0 } else { DType::Q8_0 };
        let fitting = [wanted, next, DType::F16];
        let dtype = fitting.into_iter().find(|dtype| columns.is_multiple_of(dtype.block_elements()));
        let dtype = dtype.unwrap_or(DType::F16);
        let reason = if dtype != wanted {
            let block = wanted.block_elements();
            Some(format!("{name}: {dtype}, because its rows of {columns} are not whole blocks of {block} ({wanted})"))
        } else if dtype != self.requested && is_head {
            Some(format!("{name}: {dtype}, because it makes the logits"))
        } else {
            None
        };
        Choice { dtype, reason }
    }
}

impl TypePolicy {
    /// Whether a mix gives this matrix more bits than others.
    fn has_more_bits(self, name: &str) -> bool {
        let Some(layers) = self.mixed else { return false };
        let mut parts = name.strip_prefix("blk.").unwrap_or_default().splitn(2, '.');
        let (layer, part) = (parts.next().and_then(|layer| layer.parse::<usize>().ok()), parts.next());
        let (Some(layer), Some(part)) = (layer, part) else { return false };
        let eighth = layers / 8;
        let is_chosen = layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
        is_chosen && (part == "attn_v.weight" || part.starts_with("ffn_down"))
    }
}

/// Whether all matrices of an export get the type asked for, or some more bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mix {
    /// All the same, but for what makes the logits.
    #[default]
    Plain,
    /// Of Q4_K: more bits where they help the most, as llama.cpp's Q4_K_M has them.
    Medium,
}

/// The number of `general.file_type`, which names the type of most weights.
pub(super) fn file_type(dtype: DType, mix: Mix) -> Option<u32> {
    Some(match dtype {
        DType::Q4_K if mix == Mix::Medium => 15,
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 7,
        DType::Q5_0 => 8,
        DType::Q5_1 => 9,
        // Q4_K in every layer, which the format calls "small".
        DType::Q4_K => 14,
        DType::Q6_K => 18,
        DType::BF16 => 32,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(requested: DType, tied: bool, name: &str, shape: &[usize]) -> (DType, bool) {
        let choice = TypePolicy::new(requested, Mix::Plain, tied, 1).unwrap().choose(name, Shape::new(shape).unwrap());
        (choice.dtype, choice.reason.is_some())
    }

    #[test]
    fn small_and_decisive_tensors_stay_in_f32() {
        for (name, shape) in [
            ("blk.0.attn_norm.weight", &[256][..]),
            ("blk.0.attn_q.bias", &[256]),
            ("blk.0.ffn_gate_inp.weight", &[8, 256]),
            ("blk.0.ffn_gate_inp_shexp.weight", &[256]),
            ("rope_freqs.weight", &[32]),
        ] {
            assert_eq!(choose(DType::Q4_0, false, name, shape), (DType::F32, false), "{name}");
        }
    }

    #[test]
    fn rows_that_are_not_whole_blocks_fall_back() {
        let name = "blk.0.ffn_down.weight";
        assert_eq!(choose(DType::Q4_K, false, name, &[8, 512]), (DType::Q4_K, false));
        assert_eq!(choose(DType::Q4_K, false, name, &[8, 96]), (DType::Q5_0, true));
        assert_eq!(choose(DType::Q6_K, false, name, &[8, 96]), (DType::Q8_0, true));
        assert_eq!(choose(DType::Q4_K, false, name, &[8, 40]), (DType::F16, true));
        assert_eq!(choose(DType::Q4_0, false, name, &[8, 40]), (DType::F16, true));
        assert_eq!(choose(DType::F32, false, name, &[8, 40]), (DType::F32, false));
        assert!(TypePolicy::new(DType::Q3_K, Mix::Plain, false, 1).is_err());
    }

    #[test]
    fn what_makes_the_logits_is_packed_less() {
        assert_eq!(choose(DType::Q4_K, false, "output.weight", &[9, 256]), (DType::Q6_K, true));
        assert_eq!(choose(DType::Q4_K, false, "token_embd.weight", &[9, 256]), (DType::Q4_K, false));
        assert_eq!(choose(DType::Q4_0, true, "token_embd.weight", &[9, 256]), (DType::Q6_K, true));
        assert_eq!(choose(DType::Q4_0, true, "token_embd.weight", &[9, 96]), (DType::Q8_0, true));
        assert_eq!(choose(DType::Q8_0, true, "token_embd.weight", &[9, 256]), (DType::Q8_0, false));
    }

    #[test]
    fn the_medium_mix_is_that_of_llama_cpp() {
        let policy = TypePolicy::new(DType::Q4_K, Mix::Medium, false, 30).unwrap();
        let dtype = |name: &str| policy.choose(name, Shape::new(&[8, 256]).unwrap()).dtype;
        let chosen: Vec<usize> =
            (0..30).filter(|layer| dtype(&format!("blk.{layer}.ffn_down.weight")) == DType::Q6_K).collect();
        // 30 / 8 is 3 and 7 * 30 / 8 is 26 in whole numbers: the first three, every third one, and from the 27th on all.
        assert_eq!(chosen, [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]);
        assert_eq!((dtype("blk.0.attn_v.weight"), dtype("blk.3.attn_v.weight")), (DType::Q6_K, DType::Q4_K));
        assert_eq!((dtype("blk.0.attn_q.weight"), dtype("blk.0.ffn_down_exps.weight")), (DType::Q4_K, DType::Q6_K));
        assert_eq!(dtype("output.weight"), DType::Q6_K);
        assert!(TypePolicy::new(DType::Q8_0, Mix::Medium, false, 30).is_err());
    }
}
