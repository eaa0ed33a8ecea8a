//! A [`Model`] of the weights of a source: every one that the configuration names is asked for, packed and put where its layer has
//! it. The source is a checkpoint (`load.rs`) or a stream of random numbers (`random.rs`).

use ironloom_core::DType;
use ironloom_nn::{Attention, Embedding, FeedForward, Linear, RmsNorm};
use ironloom_quant::WeightFormat;
use ironloom_tensor::{Device, Tensor, Weight, ops::AttentionOptions};

use crate::{
    Architecture, Config, Error, Experts, FeedForwardConfig, LoadOptions, Model, Result,
    filled_up::{MatrixShape, feed_forward_shapes},
    memory::{ExpertForm, ExpertForms},
    model::{Block, BlockFeedForward},
    names::{Naming, Part, interleaved_rows},
    passes::Passes,
};

/// Which rows of a stored tensor make a matrix.
pub(crate) enum Rows {
    /// All, in order.
    All,
    /// All, in this order.
    Order(Vec<u32>),
    /// These, of a tensor with `of` rows.
    Pick { rows: Vec<u32>, of: usize },
    /// The block `index` of a tensor of `of` such matrices.
    Block { index: usize, of: usize },
}

/// Where weights come from.
pub(crate) trait Source {
    fn matrix(
        &mut self,
        name: &str,
        shape: MatrixShape,
        rows: Rows,
        format: WeightFormat,
        device: &Device,
    ) -> Result<Weight>;
    fn vector(&mut self, name: &str, length: usize, order: Option<&[u32]>) -> Result<Vec<f32>>;
    /// The stored type of a matrix; none where it is missing.
    fn dtype(&self, name: &str) -> Option<DType>;
    /// Called after every layer: what was read is packed.
    fn release(&self);
    /// Bytes done and all bytes.
    fn progress(&self) -> (u64, u64);
}

/// Makes a model of a source's weights.
pub(crate) struct Builder<'a, S> {
    pub(crate) config: &'a Config,
    pub(crate) device: &'a Device,
    pub(crate) options: &'a LoadOptions<'a>,
    pub(crate) source: S,
    /// The types of experts that were held as bfloat16 for their kernels.
    widened: Vec<&'static str>,
}

impl<'a, S: Source> Builder<'a, S> {
    pub(crate) fn new(config: &'a Config, device: &'a Device, options: &'a LoadOptions<'a>, source: S) -> Self {
        Self { config, device, options, source, widened: Vec::new() }
    }

    pub(crate) fn model(&mut self, naming: Naming) -> Result<Model> {
        let config = self.config;
        let ropes = config
            .ropes
            .iter()
            .map(|rope| {
                let (frequencies, factor) = rope.inverse_frequencies()?;
                let half = frequencies.len();
                Ok((Tensor::from_f32(frequencies, [half])?.to_device(self.device)?, factor))
            })
            .collect::<Result<Vec<_>>>()?;
        let table = [config.vocab_size, config.width];
        let embedding = self.weight(naming.name(Part::Embedding, 0), table, Rows::All)?;
        let head = match config.tied_embeddings {
            true => embedding.clone(),
            false => self.weight(naming.name(Part::Head, 0), table, Rows::All)?,
        };
        let mut blocks = Vec::with_capacity(config.layers.len());
        for layer in 0..config.layers.len() {
            blocks.push(self.block(naming, layer)?);
            self.source.release();
        }
        Ok(Model {
            embedding: Embedding { weight: embedding, scale: config.embedding_scale },
            blocks,
            output_norm: self.norm(naming.name(Part::OutputNorm, 0), config.width)?,
            head: Linear::new(head, None),
            ropes,
            unused: Vec::new(),
            widened_experts: std::mem::take(&mut self.widened),
            config: config.clone(),
            device: self.device.clone(),
            passes: Passes::default(),
        })
    }

    fn block(&mut self, naming: Naming, layer: usize) -> Result<Block> {
        let (config, name) = (self.config, |part| naming.name(part, layer));
        let options = &config.layers[layer];
        let (width, head_width) = (config.width, config.head_width);
        let (q_rows, kv_rows) = (config.heads * head_width, config.kv_heads * head_width);
        let qkv = match (naming, config.architecture) {
            (Naming::HuggingFace { .. }, Architecture::InternLm2) => self.fused_qkv(&name(Part::FusedQkv))?,
            _ => {
                let interleaved = match naming {
                    Naming::Gguf => matches!(
                        config.architecture,
                        Architecture::Llama | Architecture::Mixtral | Architecture::InternLm2
                    ),
                    Naming::HuggingFace { architecture, .. } => architecture == Architecture::Ernie45Moe,
                };
                let order = |heads| interleaved.then(|| interleaved_rows(heads, head_width));
                [
                    self.linear(name(Part::Q), [q_rows, width], order(config.heads), config.qkv_bias)?,
                    self.linear(name(Part::K), [kv_rows, width], order(config.kv_heads), config.qkv_bias)?,
                    self.linear(name(Part::V), [kv_rows, width], None, config.qkv_bias)?,
                ]
            }
        };
        let [q, k, v] = ironloom_nn::join(self.device, qkv)?;
        let qk_norm = match config.qk_norm {
            true => Some([self.norm(name(Part::QNorm), head_width)?, self.norm(name(Part::KNorm), head_width)?]),
            false => None,
        };
        let post_norm = |builder: &mut Self, part| match config.post_norms {
            true => builder.norm(name(part), width).map(Some),
            false => Ok(None),
        };
        let feed_forward = match options.feed_forward {
            FeedForwardConfig::Dense { width: inner } => {
                let names = [name(Part::Gate), name(Part::Up), name(Part::Down)];
                let block = Box::new(self.gated(names, inner, config.feed_forward_bias)?);
                BlockFeedForward::Dense(block, post_norm(self, Part::FeedForwardPostNorm)?)
            }
            FeedForwardConfig::Routed => BlockFeedForward::Routed(Box::new(self.experts(naming, layer)?)),
        };
        Ok(Block {
            attention_norm: self.norm(name(Part::AttentionNorm), width)?,
            attention: Attention {
                q,
                k,
                v,
                out: self.linear(name(Part::AttentionOut), [width, q_rows], None, config.output_bias)?,
                qk_norm,
                head_width,
                options: AttentionOptions {
                    heads: config.heads,
                    scale: config.attention_scale,
                    window: options.window,
                },
            },
            attention_post_norm: post_norm(self, Part::AttentionPostNorm)?,
            feed_forward_norm: self.norm(name(Part::FeedForwardNorm), width)?,
            feed_forward,
            rope: options.rope,
        })
    }

    /// InternLM2's one matrix: for each kv head its query heads, then its key, then its value.
    fn fused_qkv(&mut self, name: &str) -> Result<[Linear; 3]> {
        let config = self.config;
        let (group, head_width) = (config.heads / config.kv_heads, config.head_width);
        let of = config.kv_heads * (group + 2) * head_width;
        let mut part = |heads: std::ops::Range<usize>| -> Result<Linear> {
            let picked: Vec<u32> = (0..config.kv_heads)
                .flat_map(|kv_head| heads.clone().map(move |head| kv_head * (group + 2) + head))
                .flat_map(|head| head * head_width..(head + 1) * head_width)
                .map(|row| row as u32)
                .collect();
            let shape = [picked.len(), config.width];
            let bias = match config.qkv_bias {
                true => Some(self.vector(&format!("{name}.bias"), of, Some(&picked))?),
                false => None,
            };
            Ok(Linear::new(self.weight(name.to_owned(), shape, Rows::Pick { rows: picked, of })?, bias))
        };
        Ok([part(0..group)?, part(group..group + 1)?, part(group + 1..group + 2)?])
    }

    fn experts(&mut self, naming: Naming, layer: usize) -> Result<Experts> {
        let Some(experts) = &self.config.experts else {
            return Err(Error::MissingKey {
                key: "num_experts".into(),
                architecture: self.config.architecture.name().into(),
            });
        };
        let (name, device) = (|part| naming.name(part, layer), self.device);
        let mut all = match device {
            Device::Cuda(_) => self.readable_experts(naming, layer)?,
            _ => self.gated_experts(naming, layer, [self.options.format; 3])?,
        };
        stack(device, &mut all, |expert| &mut expert.gate.weight)?;
        stack(device, &mut all, |expert| &mut expert.up.weight)?;
        stack(device, &mut all, |expert| &mut expert.down.weight)?;
        let shared = match experts.shared {
            None => None,
            Some(shared) => {
                let names = [name(Part::SharedGate), name(Part::SharedUp), name(Part::SharedDown)];
                let gate = match shared.gated {
                    true => Some(self.router(name(Part::SharedRouter), 1)?),
                    false => None,
                };
                Some((self.gated(names, shared.width, false)?, gate))
            }
        };
        Ok(Experts {
            router: self.router(name(Part::Router), experts.count)?,
            experts: all,
            per_row: experts.per_row,
            normalize: experts.normalize,
            shared,
        })
    }

    /// The experts of a layer in forms that their kernels on a graphics card read.
    fn readable_experts(&mut self, naming: Naming, layer: usize) -> Result<Vec<FeedForward>> {
        let count = self.config.experts.as_ref().map_or(0, |experts| experts.count);
        let stored = |name: &str| self.source.dtype(name);
        let forms = ExpertForms::stored(naming, layer, count, self.options.format, stored)?;
        let formats = self.readable(&forms);
        let experts = self.gated_experts(naming, layer, formats)?;
        // A matrix of Q8_0 with a code that has no tile is known once it is read.
        let parts: [fn(&FeedForward) -> &Linear; 3] =
            [|expert| &expert.gate, |expert| &expert.up, |expert| &expert.down];
        let form = |weight: &Weight| ExpertForm { name: weight.format(), has_tiles: !weight.is_slow() };
        let forms = ExpertForms(parts.map(|part| experts.iter().map(|expert| form(&part(expert).weight)).collect()));
        if forms.readable() == [true; 3] {
            return Ok(experts);
        }
        drop(experts);
        let formats = self.readable(&forms);
        self.gated_experts(naming, layer, formats)
    }

    /// What gate, up and down of such experts are loaded as; notes which types are held otherwise for it.
    fn readable(&mut self, forms: &ExpertForms) -> [WeightFormat; 3] {
        for name in forms.widened() {
            if !self.widened.contains(&name) {
                self.widened.push(name);
            }
        }
        forms.readable().map(|readable| if readable { self.options.format } else { WeightFormat::Bf16 })
    }

    /// The experts of a layer, their gate, up and down packed as `formats`.
    fn gated_experts(&mut self, naming: Naming, layer: usize, formats: [WeightFormat; 3]) -> Result<Vec<FeedForward>> {
        let Some(experts) = &self.config.experts else { return Ok(Vec::new()) };
        let [inner_shape, down_shape] = feed_forward_shapes(self.device, self.config.width, experts.width);
        let mut all = Vec::with_capacity(experts.count.min(1024));
        for expert in 0..experts.count {
            let mut matrix = |part, shape, format| -> Result<Linear> {
                let rows = match naming {
                    Naming::Gguf => Rows::Block { index: expert, of: experts.count },
                    Naming::HuggingFace { .. } => Rows::All,
                };
                Ok(Linear::new(self.matrix(naming.name(part, layer), shape, rows, format)?, None))
            };
            all.push(FeedForward {
                gate: matrix(Part::ExpertGate(expert), inner_shape, formats[0])?,
                up: matrix(Part::ExpertUp(expert), inner_shape, formats[1])?,
                down: matrix(Part::ExpertDown(expert), down_shape, formats[2])?,
                activation: self.config.activation,
            });
        }
        Ok(all)
    }

    /// A router is small and decides much: it is never quantized on load.
    fn router(&mut self, name: String, rows: usize) -> Result<Linear> {
        let shape = [rows, self.config.width];
        Ok(Linear::new(self.matrix(name, shape.into(), Rows::All, WeightFormat::Keep)?, None))
    }

    fn gated(&mut self, [gate, up, down]: [String; 3], inner: usize, bias: bool) -> Result<FeedForward> {
        let [inner_shape, down_shape] = feed_forward_shapes(self.device, self.config.width, inner);
        let halves = [self.linear(gate, inner_shape, None, bias)?, self.linear(up, inner_shape, None, bias)?];
        let [gate, up] = ironloom_nn::join(self.device, halves)?;
        Ok(FeedForward {
            gate,
            up,
            down: self.linear(down, down_shape, None, bias)?,
            activation: self.config.activation,
        })
    }

    fn linear(
        &mut self,
        name: String,
        shape: impl Into<MatrixShape>,
        order: Option<Vec<u32>>,
        bias: bool,
    ) -> Result<Linear> {
        let shape = shape.into();
        let bias = match bias {
            true => {
                let mut values = self.source.vector(&format!("{name}.bias"), shape.stored[0], order.as_deref())?;
                values.resize(shape.held[0], 0.0);
                Some(self.tensor(values)?)
            }
            false => None,
        };
        Ok(Linear::new(self.weight(name, shape, order.map_or(Rows::All, Rows::Order))?, bias))
    }

    fn weight(&mut self, name: String, shape: impl Into<MatrixShape>, rows: Rows) -> Result<Weight> {
        self.matrix(name, shape.into(), rows, self.options.format)
    }

    fn matrix(&mut self, name: String, shape: MatrixShape, rows: Rows, format: WeightFormat) -> Result<Weight> {
        let weight = self.source.matrix(&format!("{name}.weight"), shape, rows, format, self.device)?;
        if let Some(progress) = self.options.progress {
            let (done, total) = self.source.progress();
            progress(done, total);
        }
        Ok(weight)
    }

    fn vector(&mut self, name: &str, length: usize, order: Option<&[u32]>) -> Result<Tensor> {
        let values = self.source.vector(name, length, order)?;
        self.tensor(values)
    }

    fn tensor(&self, values: Vec<f32>) -> Result<Tensor> {
        let length = values.len();
        Ok(Tensor::from_f32(values, [length])?.to_device(self.device)?)
    }

    fn norm(&mut self, name: String, width: usize) -> Result<RmsNorm> {
        let mut weight = self.source.vector(&format!("{name}.weight"), width, None)?;
        if self.config.norms_less_one {
            weight.iter_mut().for_each(|weight| *weight += 1.0);
        }
        let weight = Tensor::from_f32(weight, [width])?.to_device(self.device)?;
        Ok(RmsNorm { weight, epsilon: self.config.rms_epsilon })
    }
}

/// Puts one matrix of every expert into one piece of the device's memory.
fn stack(
    device: &Device,
    experts: &mut [FeedForward],
    weight: impl for<'a> Fn(&'a mut FeedForward) -> &'a mut Weight,
) -> Result<()> {
    let alone = experts.iter_mut().map(|expert| weight(expert).clone()).collect();
    for (expert, stacked) in experts.iter_mut().zip(Weight::stack(device, alone)?) {
        *weight(expert) = stacked;
    }
    Ok(())
}
