//! The pass that training takes: ids of whole documents to the loss of their next tokens, under a tape.
//!
//! It is the pass of `model.rs` without caches: the rows of a batch belong to documents one after the other, each attending
//! within itself and counting positions from 0, so packed samples never see each other and nothing is padding. What is learnt are
//! dense weights, norms and biases ([`Model::make_trainable`]); packed weights are frozen. A block can be run again in the backward
//! pass instead of keeping what it computed (`checkpoint`): the gradients are the same bits.

mod card;

use ironloom_nn::{AttentionDocuments, Embedding, FeedForward, Linear, RmsNorm};
use ironloom_tensor::{
    Context, Device, Indices, Tape, Tensor, Weight,
    ops::{self, CrossEntropy, CrossEntropyOptions, DocumentBounds, Documents, RouterLosses, Targets},
};

pub use card::CardRows;

use crate::{
    Config, Error, Model, Result,
    model::{Block, BlockFeedForward},
    names::{Naming, Part},
};

/// What a training pass reads.
#[derive(Clone, Copy, Debug)]
pub struct TrainingRows<'a> {
    /// Token ids of all documents, one after the other.
    pub ids: &'a [u32],
    /// The id that each row should give, or -100 where none is asked for.
    pub targets: &'a [i64],
    /// The documents' lengths; their sum is the number of ids.
    pub documents: &'a [usize],
}

/// How a training pass runs and what it adds to the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingPass {
    /// The factor of the loss: 1 over the targets counted in the whole step, so that a step's micro-batches sum to one batch.
    pub scale: f32,
    /// The factor of routers' losses: this pass's share of its step.
    pub share: f32,
    /// The weight of squared log-sum-exps of the output.
    pub z_loss: f32,
    /// The weights of routers' own losses.
    pub router: RouterLosses,
    /// Whether blocks are run again in the backward pass instead of keeping what they computed.
    pub checkpoint: bool,
}

/// The documents of a pass, for as long as a tape keeps them.
#[derive(Clone)]
enum HeldDocuments {
    Lengths(Vec<usize>),
    Card(DocumentBounds),
}

impl HeldDocuments {
    fn documents(&self) -> Documents<'_> {
        match self {
            Self::Lengths(lengths) => Documents::Lengths(lengths),
            Self::Card(bounds) => Documents::Card(bounds),
        }
    }
}

/// What a parameter is, for optimizers that treat kinds differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterRole {
    /// The table of token rows; a tied head too.
    Embedding,
    /// The output head.
    Head,
    /// A matrix inside a block.
    Matrix,
    /// A norm's weight or a bias.
    Vector,
}

/// A trainable tensor of a model.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Its name in a Hugging Face checkpoint, such as `model.layers.0.mlp.up_proj.weight`.
    pub name: String,
    /// What it is.
    pub role: ParameterRole,
    /// Its values, shared with the model.
    pub values: Tensor,
}

impl Model {
    /// A model to be trained from scratch: normal weights of deviation 0.02, those of projections back into the rows divided by
    /// `sqrt(2 layers)` (Radford et al., Language Models are Unsupervised Multitask Learners, 2019), norms of one.
    ///
    /// # Errors
    /// The configuration contradicts itself, the device is not the processor, or the memory does not suffice.
    pub fn untrained(config: &Config, device: &Device, seed: u64) -> Result<Self> {
        if !matches!(device, Device::Cpu(_)) {
            let (operation, device) = ("a model to be trained from scratch", "a graphics card");
            return Err(ironloom_tensor::Error::NoKernel { operation, device }.into());
        }
        let mut model = Self::random_dense(config, device, seed)?;
        let factor = 1.0 / (2.0 * config.layers.len() as f32).sqrt();
        model.update(|parameter, values| {
            let inward = ["o_proj.weight", "down_proj.weight", "wo.weight", "w2.weight"];
            if inward.iter().any(|end| parameter.ends_with(end)) {
                values.as_f32_mut()?.iter_mut().for_each(|value| *value *= factor);
            }
            Ok(())
        })?;
        Ok(model)
    }

    /// Holds every matrix as dense single-precision rows, which have gradients. To be called on a model that was loaded for the
    /// processor; what its matrices were packed to stays in their values.
    ///
    /// # Errors
    /// The model is on another device.
    pub fn make_trainable(&mut self) -> Result<()> {
        self.passes.clear();
        let tied = self.config.tied_embeddings;
        dense(&mut self.embedding.weight)?;
        if tied {
            self.head.weight = self.embedding.weight.clone();
        } else {
            dense(&mut self.head.weight)?;
        }
        self.for_each_linear(|_, linear| dense(&mut linear.weight))
    }

    /// The loss of the next tokens of `rows`. Under a tape it has gradients for what the tape watches.
    ///
    /// # Errors
    /// The documents' lengths or the targets are not the ids', a document is empty or longer than the context, an id or a target is
    /// outside the vocabulary, or the device is not the processor.
    pub fn loss(&self, cx: &Context, rows: &TrainingRows<'_>, pass: &TrainingPass) -> Result<CrossEntropy> {
        self.check_documents(rows)?;
        let positions: Vec<u32> = rows.documents.iter().flat_map(|&length| 0..length as u32).collect();
        let (ids, positions) = (Indices::new(cx.device, rows.ids)?, Indices::new(cx.device, &positions)?);
        let documents = HeldDocuments::Lengths(rows.documents.to_vec());
        let hidden = self.document_rows(cx, &ids, &positions, &documents, pass)?;
        let options = CrossEntropyOptions { z_loss: pass.z_loss, scale: pass.scale, ..CrossEntropyOptions::default() };
        Ok(ops::cross_entropy(cx, &hidden, &self.head.weight, Targets::Host(rows.targets), &options)?)
    }

    /// The loss of the rows that `rows` holds, added to its figures; `pass.scale` and `pass.share` are those it was set with. Under
    /// a tape it has gradients for what the tape watches, and is counted when [`Tape::backward`] has run.
    ///
    /// # Errors
    /// The model is not on the card of the rows, or the card has no room or fails.
    pub fn loss_on_card(&self, cx: &Context, rows: &CardRows, pass: &TrainingPass) -> Result<Tensor> {
        let documents = HeldDocuments::Card(rows.bounds.clone());
        let hidden = self.document_rows(cx, &rows.ids, &rows.positions, &documents, pass)?;
        let options = CrossEntropyOptions { z_loss: pass.z_loss, ..CrossEntropyOptions::default() };
        let targets = Targets::Card(&rows.targets, &rows.figures);
        Ok(ops::cross_entropy(cx, &hidden, &self.head.weight, targets, &options)?.loss)
    }

    fn check_documents(&self, rows: &TrainingRows<'_>) -> Result<()> {
        let total: usize = rows.documents.iter().sum();
        if total != rows.ids.len() {
            let (expected, found) = (rows.ids.len(), total);
            return Err(Error::Count { what: "the sum of the documents' lengths", expected, found });
        }
        for &length in rows.documents {
            if length == 0 {
                return Err(Error::Count { what: "a document's length", expected: 1, found: 0 });
            }
            if length > self.config.context_length {
                return Err(Error::ContextFull { limit: self.config.context_length, found: length });
            }
        }
        Ok(())
    }

    /// The rows after the last norm.
    fn document_rows(
        &self,
        cx: &Context,
        ids: &Indices,
        positions: &Indices,
        documents: &HeldDocuments,
        pass: &TrainingPass,
    ) -> Result<Tensor> {
        let phases = self.rope_phases(cx, positions)?;
        let mut x = self.embedding.forward(cx, ids)?;
        for block in &self.blocks {
            let (phases, losses) = (&phases[block.rope], (pass.router, pass.share));
            x = match cx.tape {
                Some(tape) if pass.checkpoint => {
                    let (block, phases, held) = (block.clone(), phases.clone(), documents.clone());
                    tape.checkpoint(cx, &x, move |cx, x| {
                        let documents = AttentionDocuments { phases: &phases, documents: held.documents() };
                        block.forward_documents(cx, x.clone(), documents, losses).map_err(operation_error)
                    })?
                }
                _ => {
                    let documents = AttentionDocuments { phases, documents: documents.documents() };
                    block.forward_documents(cx, x, documents, losses)?
                }
            };
        }
        Ok(self.output_norm.forward(cx, &x)?)
    }

    /// Everything that can be learnt, in a fixed order: dense matrices and adapters, and the norms and biases of a model whose
    /// embedding is dense. The tensors share the model's memory: let them go before [`Model::update`].
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut found = Vec::new();
        let (mut embedding, mut head) = (self.embedding.clone(), self.head.clone());
        let (mut blocks, mut output_norm) = (self.blocks.clone(), self.output_norm.clone());
        let mut parts = Parts {
            embedding: &mut embedding,
            head: (!self.config.tied_embeddings).then_some(&mut head),
            blocks: &mut blocks,
            output_norm: &mut output_norm,
        };
        let walked = parts.parameters(self.config.trained_naming(), &mut |name, role, values| {
            found.push(Parameter { name, role, values: values.clone() });
            Ok(())
        });
        debug_assert!(walked.is_ok(), "collecting cannot fail");
        found
    }

    /// Asks the tape for the gradient of every parameter.
    pub fn watch(&self, tape: &Tape) {
        self.parameters().iter().for_each(|parameter| tape.watch(&parameter.values));
    }

    /// Lets `change` write to every parameter, in the order of [`Model::parameters`].
    ///
    /// # Errors
    /// `change` fails; then the parameters before are changed.
    pub fn update(&mut self, mut change: impl FnMut(&str, &mut Tensor) -> Result<()>) -> Result<()> {
        self.passes.clear();
        let (naming, tied) = (self.config.trained_naming(), self.config.tied_embeddings);
        if tied {
            // Two holders of one matrix could not write to it.
            self.head.weight = Weight::dense(Tensor::zeros([0, 0])?)?;
        }
        let mut parts = Parts {
            embedding: &mut self.embedding,
            head: (!tied).then_some(&mut self.head),
            blocks: &mut self.blocks,
            output_norm: &mut self.output_norm,
        };
        let changed = parts.parameters(naming, &mut |name, _, values| change(&name, values));
        if tied {
            self.head.weight = self.embedding.weight.clone();
        }
        changed
    }

    /// Whether every matrix is dense, so that all of the model can be learnt and written.
    pub fn is_dense(&self) -> bool {
        let ends = [&self.embedding.weight, &self.head.weight].iter().all(|weight| weight.as_dense().is_some());
        ends && self.linears().iter().all(|(_, linear)| linear.weight.as_dense().is_some())
    }

    /// Whether a layer has an adapter.
    pub fn has_adapters(&self) -> bool {
        self.linears().iter().any(|(_, linear)| linear.adapter.is_some())
    }

    /// Adds every adapter to its weight, `W + scale B A`, and holds all matrices dense. What a packed weight lost stays lost: the sum
    /// is not packed again.
    ///
    /// # Errors
    /// The model is on another device than the processor.
    pub fn merge_adapters(&mut self) -> Result<()> {
        self.passes.clear();
        self.make_trainable()?;
        self.for_each_linear(|_, linear| match (linear.adapter.take(), linear.weight.as_dense_mut()) {
            (Some(adapter), Some(values)) => Ok(adapter.merge_into(values)?),
            _ => Ok(()),
        })
    }

    /// Lets `change` see every linear layer of the blocks with its name, such as `model.layers.0.mlp.up_proj`: to attach adapters.
    ///
    /// # Errors
    /// `change` fails.
    pub fn for_each_linear(&mut self, mut change: impl FnMut(&str, &mut Linear) -> Result<()>) -> Result<()> {
        self.passes.clear();
        let naming = self.config.trained_naming();
        for (layer, block) in self.blocks.iter_mut().enumerate() {
            block.for_each(&mut |part, piece| match piece {
                Piece::Linear(linear) => change(&naming.name(part, layer), linear),
                Piece::Norm(_) => Ok(()),
            })?;
        }
        Ok(())
    }

    /// Every linear layer of the blocks with its name. Weights are shared with the model.
    pub fn linears(&self) -> Vec<(String, Linear)> {
        let (naming, mut found) = (self.config.trained_naming(), Vec::new());
        for (layer, block) in self.blocks.iter().enumerate() {
            let walked = block.clone().for_each(&mut |part, piece| {
                if let Piece::Linear(linear) = piece {
                    found.push((naming.name(part, layer), linear.clone()));
                }
                Ok(())
            });
            debug_assert!(walked.is_ok(), "collecting cannot fail");
        }
        found
    }
}

/// What a block is made of.
enum Piece<'a> {
    Linear(&'a mut Linear),
    Norm(&'a mut RmsNorm),
}

/// The parts of a model that hold parameters; a tied head is the embedding's.
struct Parts<'a> {
    embedding: &'a mut Embedding,
    head: Option<&'a mut Linear>,
    blocks: &'a mut [Block],
    output_norm: &'a mut RmsNorm,
}

impl Parts<'_> {
    fn parameters(
        &mut self,
        naming: Naming,
        see: &mut dyn FnMut(String, ParameterRole, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        let whole = self.embedding.weight.as_dense().is_some();
        if let Some(values) = self.embedding.weight.as_dense_mut() {
            see(format!("{}.weight", naming.name(Part::Embedding, 0)), ParameterRole::Embedding, values)?;
        }
        if let Some(values) = self.head.as_mut().and_then(|head| head.weight.as_dense_mut()) {
            see(format!("{}.weight", naming.name(Part::Head, 0)), ParameterRole::Head, values)?;
        }
        for (layer, block) in self.blocks.iter_mut().enumerate() {
            block.for_each(&mut |part, piece| {
                let name = naming.name(part, layer);
                match piece {
                    Piece::Norm(norm) if whole => {
                        see(format!("{name}.weight"), ParameterRole::Vector, &mut norm.weight)
                    }
                    Piece::Norm(_) => Ok(()),
                    Piece::Linear(linear) => {
                        if let Some(values) = linear.weight.as_dense_mut() {
                            see(format!("{name}.weight"), ParameterRole::Matrix, values)?;
                        }
                        if let (true, Some(bias)) = (whole, &mut linear.bias) {
                            see(format!("{name}.bias"), ParameterRole::Vector, bias)?;
                        }
                        let Some(adapter) = &mut linear.adapter else { return Ok(()) };
                        for (matrix, weight) in [("lora_A", &mut adapter.a), ("lora_B", &mut adapter.b)] {
                            if let Some(values) = weight.as_dense_mut() {
                                see(format!("{name}.{matrix}.weight"), ParameterRole::Matrix, values)?;
                            }
                        }
                        Ok(())
                    }
                }
            })?;
        }
        if whole {
            let name = format!("{}.weight", naming.name(Part::OutputNorm, 0));
            see(name, ParameterRole::Vector, &mut self.output_norm.weight)?;
        }
        Ok(())
    }
}

impl Block {
    /// The rows after the block, each document within itself.
    fn forward_documents(
        &self,
        cx: &Context,
        x: Tensor,
        documents: AttentionDocuments<'_>,
        losses: (RouterLosses, f32),
    ) -> Result<Tensor> {
        let normed = self.attention_norm.forward(cx, &x)?;
        let x = match &self.attention_post_norm {
            Some(norm) => norm.forward_add(cx, x, &self.attention.forward_documents(cx, &normed, documents)?)?,
            None => self.attention.forward_documents_add(cx, x, &normed, documents)?,
        };
        drop(normed);
        let normed = self.feed_forward_norm.forward(cx, &x)?;
        match &self.feed_forward {
            BlockFeedForward::Dense(block, Some(norm)) => Ok(norm.forward_add(cx, x, &block.forward(cx, &normed)?)?),
            BlockFeedForward::Dense(block, None) => Ok(block.forward_add(&cx.last(), x, &normed)?),
            BlockFeedForward::Routed(experts) => experts.forward_training(&cx.last(), x, &normed, losses),
        }
    }

    /// Every linear layer and norm, in a fixed order.
    fn for_each(&mut self, see: &mut dyn FnMut(Part, Piece<'_>) -> Result<()>) -> Result<()> {
        see(Part::AttentionNorm, Piece::Norm(&mut self.attention_norm))?;
        let attention = &mut self.attention;
        see(Part::Q, Piece::Linear(&mut attention.q))?;
        see(Part::K, Piece::Linear(&mut attention.k))?;
        see(Part::V, Piece::Linear(&mut attention.v))?;
        if let Some([q, k]) = &mut attention.qk_norm {
            see(Part::QNorm, Piece::Norm(q))?;
            see(Part::KNorm, Piece::Norm(k))?;
        }
        see(Part::AttentionOut, Piece::Linear(&mut attention.out))?;
        if let Some(norm) = &mut self.attention_post_norm {
            see(Part::AttentionPostNorm, Piece::Norm(norm))?;
        }
        see(Part::FeedForwardNorm, Piece::Norm(&mut self.feed_forward_norm))?;
        let mut gated = |[gate, up, down]: [Part; 3], block: &mut FeedForward| {
            see(gate, Piece::Linear(&mut block.gate))?;
            see(up, Piece::Linear(&mut block.up))?;
            see(down, Piece::Linear(&mut block.down))
        };
        match &mut self.feed_forward {
            BlockFeedForward::Dense(block, norm) => {
                gated([Part::Gate, Part::Up, Part::Down], block)?;
                match norm {
                    Some(norm) => see(Part::FeedForwardPostNorm, Piece::Norm(norm)),
                    None => Ok(()),
                }
            }
            BlockFeedForward::Routed(experts) => {
                for (number, expert) in experts.experts.iter_mut().enumerate() {
                    gated([Part::ExpertGate(number), Part::ExpertUp(number), Part::ExpertDown(number)], expert)?;
                }
                if let Some((shared, _)) = &mut experts.shared {
                    gated([Part::SharedGate, Part::SharedUp, Part::SharedDown], shared)?;
                }
                see(Part::Router, Piece::Linear(&mut experts.router))?;
                match &mut experts.shared {
                    Some((_, Some(gate))) => see(Part::SharedRouter, Piece::Linear(gate)),
                    _ => Ok(()),
                }
            }
        }
    }
}

/// Holds a weight as dense rows.
fn dense(weight: &mut Weight) -> Result<()> {
    if weight.as_dense().is_some() {
        return Ok(());
    }
    *weight = Weight::dense(Tensor::from_f32(weight.unpacked()?, [weight.rows(), weight.cols()])?)?;
    Ok(())
}

/// A failure inside a part that a tape runs again, as the tape hands it on.
fn operation_error(error: Error) -> ironloom_tensor::Error {
    match error {
        Error::Tensor(error) | Error::Nn(ironloom_nn::Error::Tensor(error)) => error,
        other => ironloom_tensor::Error::Part { operation: "a block", reason: other.to_string() },
    }
}
