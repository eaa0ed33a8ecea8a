//! Every weight of a model with its names on both sides, and the recipes that take one side's tensors to the other's.
//!
//! What changes on the way from a Hugging Face folder to GGUF, and is undone on the way back:
//!
//! | family | change |
//! |---|---|
//! | Llama, Mistral, Mixtral, InternLM2 | rows of q and k within each head, from rotary halves (i, i + d/2) to neighbours (2i, 2i + 1) |
//! | InternLM2 | the fused `wqkv` (for each kv head its queries, key and value) is taken apart |
//! | Mixtral, Qwen MoE | the experts of a layer become one tensor `[experts, rows, columns]` |
//! | Qwen2-MoE | the shared expert's gate `[1, width]` becomes a vector |
//! | Gemma 3 | one is added to every norm weight |
//!
//! The conventions are those of llama.cpp's converter. Adding one rounds: norm weights of Gemma come back to within half a unit
//! in the last place of one, bit-equal where they were stored in BF16.

use ironloom_core::{DType, Shape};
use ironloom_weights::TensorInfo;

use super::recipe::Recipe;
use crate::{
    Architecture, Config, FeedForwardConfig,
    names::{Naming, Part, interleaved_rows, inverse},
};

/// One weight of a model, as a matrix `[rows, columns]` or a vector `[columns]`.
#[derive(Clone, Copy, Debug)]
struct ModelWeight {
    part: Part,
    layer: usize,
    suffix: &'static str,
    rows: Option<usize>,
    columns: usize,
    /// The heads of q and k, whose rows (or elements) turn.
    heads: Option<usize>,
    is_norm: bool,
}

/// The recipes from a Hugging Face folder, named by `naming`, to GGUF, in the order of the layers. All are to be F32; the
/// caller chooses the types.
pub(super) fn to_gguf(config: &Config, naming: Naming) -> Vec<Recipe> {
    let recipe = |weight: ModelWeight| {
        let name = |part| weight.name(naming, part);
        let shape = weight.shape();
        let rotated = weight.heads.filter(|_| rotates_neighbours(config.architecture));
        let neighbours = rotated.map(|heads| inverse(&interleaved_rows(heads, config.head_width)));
        let (sources, order, shape) = match weight.part {
            Part::ExpertGate(_) | Part::ExpertUp(_) | Part::ExpertDown(_) => {
                let experts = config.experts.as_ref().map_or(0, |experts| experts.count);
                let sources = (0..experts).map(|expert| (name(weight.part.of_expert(expert)), shape)).collect();
                (sources, None, Shape::from([experts, shape.dims()[0], weight.columns]))
            }
            Part::Q | Part::K | Part::V if config.architecture == Architecture::InternLm2 => {
                let fused = FusedQkv::of(config);
                let picked = fused.rows_of(weight.part);
                let order = match neighbours {
                    Some(neighbours) => neighbours.iter().map(|row| picked[*row as usize]).collect(),
                    None => picked,
                };
                (vec![(name(Part::FusedQkv), weight.with_rows(fused.rows()))], Some(order), shape)
            }
            Part::SharedRouter => (vec![(name(weight.part), shape)], None, Shape::from([weight.columns])),
            part => (vec![(name(part), shape)], neighbours, shape),
        };
        Recipe {
            info: TensorInfo { name: weight.name(Naming::Gguf, weight.part), dtype: DType::F32, shape },
            sources,
            order,
            shift: if weight.is_norm && config.norms_less_one { 1.0 } else { 0.0 },
        }
    };
    model_weights(config).into_iter().map(recipe).collect()
}

/// The recipes from GGUF to a Hugging Face folder of this `architecture`, which may be another than the file's (GGUF has
/// none of Mistral's own). All are to be F32; the caller chooses the types.
pub(super) fn to_hugging_face(config: &Config, architecture: Architecture) -> Vec<Recipe> {
    let naming = Naming::HuggingFace { architecture, prefix: "model." };
    let is_fused = architecture == Architecture::InternLm2;
    let mut recipes = Vec::new();
    for weight in model_weights(config) {
        let source = weight.name(Naming::Gguf, weight.part);
        let rotated = weight.heads.filter(|_| rotates_neighbours(architecture));
        let halves = rotated.map(|heads| interleaved_rows(heads, config.head_width));
        let mut push = |part, shape, sources, order| {
            let info = TensorInfo { name: weight.name(naming, part), dtype: DType::F32, shape };
            let shift = if weight.is_norm && architecture == Architecture::Gemma3 { -1.0 } else { 0.0 };
            recipes.push(Recipe { info, sources, order, shift });
        };
        match weight.part {
            Part::ExpertGate(_) | Part::ExpertUp(_) | Part::ExpertDown(_) => {
                let experts = config.experts.as_ref().map_or(0, |experts| experts.count);
                let rows = weight.shape().dims()[0];
                let stacked = Shape::from([experts, rows, weight.columns]);
                for expert in 0..experts {
                    let block = (expert * rows..(expert + 1) * rows).map(|row| row as u32).collect();
                    let sources = vec![(source.clone(), stacked)];
                    push(weight.part.of_expert(expert), weight.shape(), sources, Some(block));
                }
            }
            Part::Q if is_fused => {
                let fused = FusedQkv::of(config);
                let part = |part, rows| (weight.name(Naming::Gguf, part), weight.with_rows(rows));
                let [q, k, v] = fused.part_rows();
                let sources = vec![part(Part::Q, q), part(Part::K, k), part(Part::V, v)];
                push(Part::FusedQkv, weight.with_rows(fused.rows()), sources, Some(fused.order_from_parts()));
            }
            Part::K | Part::V if is_fused => {}
            part => push(part, weight.shape(), vec![(source, weight.shape())], halves),
        }
    }
    recipes
}

/// Whether GGUF files of this family store q and k for rotation over neighbours.
fn rotates_neighbours(architecture: Architecture) -> bool {
    use Architecture::{InternLm2, Llama, Mistral, Mixtral};
    matches!(architecture, Llama | Mistral | Mixtral | InternLm2)
}

/// InternLM2's one matrix for q, k and v.
#[derive(Clone, Copy)]
struct FusedQkv {
    kv_heads: usize,
    /// Query heads of each kv head.
    group: usize,
    head_width: usize,
}

impl FusedQkv {
    fn of(config: &Config) -> Self {
        let group = config.heads / config.kv_heads.max(1);
        Self { kv_heads: config.kv_heads, group, head_width: config.head_width }
    }

    fn rows(self) -> usize {
        self.kv_heads * (self.group + 2) * self.head_width
    }

    /// Rows of q, k and v.
    fn part_rows(self) -> [usize; 3] {
        let one = self.kv_heads * self.head_width;
        [one * self.group, one, one]
    }

    /// Which of its rows are those of `part`, in order.
    fn rows_of(self, part: Part) -> Vec<u32> {
        let heads = match part {
            Part::Q => 0..self.group,
            Part::K => self.group..self.group + 1,
            _ => self.group + 1..self.group + 2,
        };
        (0..self.kv_heads)
            .flat_map(|kv_head| heads.clone().map(move |head| kv_head * (self.group + 2) + head))
            .flat_map(|head| head * self.head_width..(head + 1) * self.head_width)
            .map(|row| row as u32)
            .collect()
    }

    /// Which row each of its rows is, of q, k (both stored for neighbours) and v laid one after the other.
    fn order_from_parts(self) -> Vec<u32> {
        let mut order = vec![0; self.rows()];
        let mut start = 0;
        for (part, rows) in [Part::Q, Part::K, Part::V].into_iter().zip(self.part_rows()) {
            let stored: Vec<u32> = match part {
                Part::V => (0..rows as u32).collect(),
                _ => interleaved_rows(rows / self.head_width.max(1), self.head_width),
            };
            for (place, row) in self.rows_of(part).into_iter().zip(stored) {
                order[place as usize] = start + row;
            }
            start += rows as u32;
        }
        order
    }
}

impl Part {
    fn of_expert(self, expert: usize) -> Self {
        match self {
            Self::ExpertGate(_) => Self::ExpertGate(expert),
            Self::ExpertUp(_) => Self::ExpertUp(expert),
            Self::ExpertDown(_) => Self::ExpertDown(expert),
            other => other,
        }
    }
}

impl ModelWeight {
    fn name(self, naming: Naming, part: Part) -> String {
        format!("{}.{}", naming.name(part, self.layer), self.suffix)
    }

    fn shape(self) -> Shape {
        match self.rows {
            Some(rows) => Shape::from([rows, self.columns]),
            None => Shape::from([self.columns]),
        }
    }

    /// Its shape with another number of rows; a vector's elements are its rows.
    fn with_rows(self, rows: usize) -> Shape {
        match self.rows {
            Some(_) => Shape::from([rows, self.columns]),
            None => Shape::from([rows]),
        }
    }
}

/// Every weight that the configuration names; of the experts of a layer the first stands for all.
fn model_weights(config: &Config) -> Vec<ModelWeight> {
    let mut list = WeightList { layer: 0, weights: Vec::new() };
    let (width, head_width) = (config.width, config.head_width);
    let (q_rows, kv_rows) = (config.heads * head_width, config.kv_heads * head_width);
    list.matrix(Part::Embedding, config.vocab_size, width);
    for (layer, options) in config.layers.iter().enumerate() {
        list.layer = layer;
        list.norm(Part::AttentionNorm, width);
        for (part, rows, heads) in
            [(Part::Q, q_rows, Some(config.heads)), (Part::K, kv_rows, Some(config.kv_heads)), (Part::V, kv_rows, None)]
        {
            list.projection(part, [rows, width], heads, config.qkv_bias);
        }
        list.projection(Part::AttentionOut, [width, q_rows], None, config.output_bias);
        if config.qk_norm {
            list.norm(Part::QNorm, head_width);
            list.norm(Part::KNorm, head_width);
        }
        if config.post_norms {
            list.norm(Part::AttentionPostNorm, width);
        }
        list.norm(Part::FeedForwardNorm, width);
        match (options.feed_forward, &config.experts) {
            (FeedForwardConfig::Routed, Some(experts)) => {
                list.matrix(Part::Router, experts.count, width);
                list.matrix(Part::ExpertGate(0), experts.width, width);
                list.matrix(Part::ExpertUp(0), experts.width, width);
                list.matrix(Part::ExpertDown(0), width, experts.width);
                if let Some(shared) = experts.shared {
                    if shared.gated {
                        list.matrix(Part::SharedRouter, 1, width);
                    }
                    list.matrix(Part::SharedGate, shared.width, width);
                    list.matrix(Part::SharedUp, shared.width, width);
                    list.matrix(Part::SharedDown, width, shared.width);
                }
            }
            (FeedForwardConfig::Dense { width: inner }, _) => {
                list.projection(Part::Gate, [inner, width], None, config.feed_forward_bias);
                list.projection(Part::Up, [inner, width], None, config.feed_forward_bias);
                list.projection(Part::Down, [width, inner], None, config.feed_forward_bias);
            }
            // Refused when the configuration was read.
            (FeedForwardConfig::Routed, None) => {}
        }
        if config.post_norms {
            list.norm(Part::FeedForwardPostNorm, width);
        }
    }
    list.layer = 0;
    list.norm(Part::OutputNorm, width);
    if !config.tied_embeddings {
        list.matrix(Part::Head, config.vocab_size, width);
    }
    list.weights
}

struct WeightList {
    layer: usize,
    weights: Vec<ModelWeight>,
}

impl WeightList {
    fn norm(&mut self, part: Part, columns: usize) {
        let layer = self.layer;
        self.weights.push(ModelWeight {
            part,
            layer,
            suffix: "weight",
            rows: None,
            columns,
            heads: None,
            is_norm: true,
        });
    }

    fn matrix(&mut self, part: Part, rows: usize, columns: usize) {
        self.projection(part, [rows, columns], None, false);
    }

    fn projection(&mut self, part: Part, [rows, columns]: [usize; 2], heads: Option<usize>, bias: bool) {
        let layer = self.layer;
        let weight = ModelWeight { part, layer, suffix: "weight", rows: Some(rows), columns, heads, is_norm: false };
        self.weights.push(weight);
        if bias {
            self.weights.push(ModelWeight { suffix: "bias", rows: None, columns: rows, ..weight });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_and_its_inverse_cancel() {
        let order = interleaved_rows(3, 8);
        let inverse = inverse(&order);
        assert!((0..24).all(|row| order[inverse[row] as usize] as usize == row));
        assert_ne!(order, inverse);
    }

    #[test]
    fn a_fused_matrix_is_taken_apart_and_put_together() {
        let fused = FusedQkv { kv_heads: 2, group: 3, head_width: 4 };
        let [q, k, v] = [Part::Q, Part::K, Part::V].map(|part| fused.rows_of(part));
        assert_eq!((q.len(), k[0], v[0], k[4], v[4]), (24, 12, 16, 32, 36));
        // Taken apart, with q and k for neighbours, as the file holds them.
        let stored =
            |rows: &[u32], heads| inverse(&interleaved_rows(heads, 4)).iter().map(|r| rows[*r as usize]).collect();
        let parts: Vec<u32> = [stored(&q, 6), stored(&k, 2), v].concat();
        let whole: Vec<u32> = fused.order_from_parts().iter().map(|row| parts[*row as usize]).collect();
        assert!(whole.iter().enumerate().all(|(place, row)| place == *row as usize), "{whole:?}");
    }

    /// The parameters counted weight by weight are the configuration's own count.
    #[test]
    fn no_weight_is_left_out() {
        for config in [Config::moe_55m(), Config::dense_102m()] {
            let experts = config.experts.as_ref().map_or(1, |experts| experts.count as u64);
            let elements = |weight: &ModelWeight| {
                let copies = if matches!(weight.part, Part::ExpertGate(_) | Part::ExpertUp(_) | Part::ExpertDown(_)) {
                    experts
                } else {
                    1
                };
                copies * weight.shape().elements().unwrap() as u64
            };
            assert_eq!(model_weights(&config).iter().map(elements).sum::<u64>(), config.parameters());
        }
    }
}
