//! Training on a graphics card: a whole step, from ids to moved weights, captured once and replayed.
//!
//! ```text
//! the host:  rows, learning rate, limits  →  the card's memory
//! the card:  passes forward and back ─ norm of the gradient ─ judgement ─ optimizer ─ average      one graph
//! the host:  loss, norm, whether the weights moved  ←  the card's memory
//! ```
//!
//! Parameters lie in one [`Arena`]; what an optimizer remembers of them lies the same way, in runs of parameters that are
//! treated alike, so that a run is one kernel. A step that is refused leaves every byte of both as it was, without the host
//! having been asked. Batches of uneven sizes are filled up with rows that change nothing.

mod state;

use std::collections::HashMap;

use ironloom_kernels::{self as kernels, Buffer, Gpu, Graph, JudgeStep, StepLimits, StepResult, StepValues};
use ironloom_lm::{CardRows, FeedForwardConfig, KernelTime, Model, TrainingPass, TrainingRows};
use ironloom_tensor::{
    Arena, Context, Device, Gradients, Tape, Tensor,
    ops::{Figures, PassNumbers},
};

use self::state::{PartKind, StateRun};
use crate::{
    Error, Result, SavedTensor, SavedValues,
    optimizer::{OptimizerOptions, ParameterRole},
};

/// What changes from step to step.
pub(crate) struct CardStep {
    /// The step's number, from 1.
    pub(crate) number: u64,
    pub(crate) learning_rate: f64,
    /// Decides what dropout leaves out.
    pub(crate) seed: u64,
    pub(crate) loss_limit: f64,
    pub(crate) max_gradient_norm: f64,
}

/// What a step came to.
pub(crate) struct CardReport {
    pub(crate) result: StepResult,
    pub(crate) expert_loads: Vec<Vec<f32>>,
}

/// A model's parameters on a card, and all that moves them.
#[derive(Debug)]
pub(crate) struct CardTrainer {
    device: Device,
    gpu: Gpu,
    arena: Arena,
    parameters: Vec<Named>,
    optimizer: OptimizerOptions,
    runs: Vec<StateRun>,
    average: Option<Average>,
    gradients: Gradients,
    figures: Figures,
    passes: Vec<CardRows>,
    /// Routed layers, and experts of each.
    routed: [usize; 2],
    /// Where a step leaves the share of rows of each expert: F32 `[passes][layers][experts]`.
    loads: Buffer,
    captured: Option<Captured>,
    values: Buffer,
    limits: Buffer,
    result: Buffer,
    partial: Buffer,
}

#[derive(Debug)]
struct Named {
    name: String,
    shape: Vec<usize>,
    role: ParameterRole,
}

#[derive(Debug)]
struct Average {
    values: Buffer,
    decay: f64,
    /// Whether a step has moved the weights: those after the first are the first average.
    begun: bool,
}

#[derive(Debug)]
struct Captured {
    graph: Graph,
    of_step: TrainingPass,
}

const NAME: &str = "training";
/// Rows of a pass are filled up to a multiple of this, so that batches of about one size are one captured step.
pub(crate) const ROWS: usize = 128;

impl CardTrainer {
    /// Moves `model`'s parameters to `device`.
    pub(crate) fn new(
        model: &mut Model,
        device: &Device,
        optimizer: &OptimizerOptions,
        average_decay: Option<f64>,
    ) -> Result<Self> {
        let gpu = device.card(NAME)?.gpu().clone();
        let parameters: Vec<Named> = model
            .parameters()
            .iter()
            .map(|parameter| Named {
                name: parameter.name.clone(),
                shape: parameter.values.shape().dims().to_vec(),
                role: parameter.role,
            })
            .collect();
        let arena = model.move_parameters(device)?;
        let mut gradients = Gradients::new();
        arena.attach(&mut gradients);
        let runs = state::runs(&gpu, &arena, &parameters, optimizer)?;
        let average = match average_decay {
            Some(decay) => Some(Average { values: cleared(&gpu, 4 * arena.elements())?, decay, begun: false }),
            None => None,
        };
        let pieces = kernels::sum_of_squares_pieces(arena.elements());
        let config = model.config();
        let routed = config.layers.iter().filter(|layer| layer.feed_forward == FeedForwardConfig::Routed).count();
        Ok(Self {
            routed: [routed, config.experts.as_ref().map_or(0, |experts| experts.count)],
            loads: cleared(&gpu, 0)?,
            figures: Figures::new(device)?,
            values: cleared(&gpu, size_of::<StepValues>())?,
            limits: cleared(&gpu, size_of::<StepLimits>())?,
            result: cleared(&gpu, size_of::<StepResult>())?,
            partial: cleared(&gpu, 8 * pieces)?,
            passes: Vec::new(),
            captured: None,
            device: device.clone(),
            optimizer: optimizer.clone(),
            gpu,
            arena,
            parameters,
            runs,
            average,
            gradients,
        })
    }

    /// One step on `batches`, in which `counted` predictions count.
    pub(crate) fn step(
        &mut self,
        model: &Model,
        batches: &[TrainingRows<'_>],
        counted: usize,
        of_step: TrainingPass,
        step: &CardStep,
    ) -> Result<CardReport> {
        self.make_room(model, batches)?;
        let tokens: usize = batches.iter().map(|batch| batch.ids.len()).sum();
        for (number, (pass, batch)) in self.passes.iter().zip(batches).enumerate() {
            let numbers = PassNumbers {
                seed: step.seed ^ (((step.number - 1) << 20) + number as u64 + 1),
                scale: 1.0 / counted as f32,
                share: batch.ids.len() as f32 / tokens as f32,
            };
            pass.set(model, batch, numbers)?;
        }
        let (adam_rate, adam_root_factor) = self.optimizer.adam_numbers(step.learning_rate, step.number);
        let values = StepValues {
            learning_rate: step.learning_rate as f32,
            adam_rate,
            adam_root_factor,
            gradient_factor: 1.0,
            apply: 0,
        };
        let limits = StepLimits {
            loss_scale: 1.0 / counted as f64,
            z_loss: f64::from(of_step.z_loss),
            loss_limit: step.loss_limit,
            max_gradient_norm: step.max_gradient_norm,
        };
        let write = |to: &Buffer, bytes: &[u8]| self.gpu.write(to.slice(), bytes);
        write(&self.values, bytemuck::bytes_of(&values))?;
        write(&self.limits, bytemuck::bytes_of(&limits))?;
        match &self.captured {
            Some(captured) if captured.of_step == of_step => captured.graph.replay()?,
            _ => self.capture(model, of_step)?,
        }
        let mut result = StepResult::default();
        self.gpu.read(self.result.slice(), bytemuck::bytes_of_mut(&mut result))?;
        if let (Some(average), true) = (&mut self.average, result.applied == 1) {
            if !average.begun {
                self.gpu.copy(average.values.slice(), self.arena.values())?;
            }
            average.begun = true;
        }
        Ok(CardReport { result, expert_loads: self.expert_loads(batches, tokens)? })
    }

    /// Memory for as many passes as there are batches, each with room for the largest.
    fn make_room(&mut self, model: &Model, batches: &[TrainingRows<'_>]) -> Result<()> {
        let rows = batches.iter().map(|batch| batch.ids.len()).max().unwrap_or(0).next_multiple_of(ROWS);
        let held = self.passes.first().map_or(0, CardRows::capacity);
        if self.passes.len() == batches.len() && held >= rows {
            return Ok(());
        }
        // The captured step reads what is let go.
        self.captured = None;
        self.passes.clear();
        for _ in batches {
            let figures = self.figures.another_pass()?;
            self.passes.push(CardRows::new(model, rows.max(held), figures)?);
        }
        let [layers, experts] = self.routed;
        self.loads = cleared(&self.gpu, 4 * batches.len() * layers * experts)?;
        Ok(())
    }

    /// Does a step, and captures it.
    fn capture(&mut self, model: &Model, of_step: TrainingPass) -> Result<()> {
        self.captured = None;
        let gpu = self.gpu.clone();
        let (graph, ()) = gpu.capture(|| self.launch(model, of_step))?;
        self.captured = Some(Captured { graph, of_step });
        Ok(())
    }

    /// The time of each kernel of a step on what the last step was on. The weights move as in some steps.
    pub(crate) fn profile(&mut self, model: &Model, of_step: TrainingPass) -> Result<Vec<KernelTime>> {
        let gpu = self.gpu.clone();
        gpu.profile(|| self.launch(model, of_step))
    }

    /// Puts a step into the stream: passes, judgement, optimizer, average.
    fn launch(&mut self, model: &Model, of_step: TrainingPass) -> Result<()> {
        let Self { gpu, device, arena, gradients, figures, passes, .. } = self;
        let (partial, values, limits, result) = (&self.partial, &self.values, &self.limits, &self.result);
        let (runs, average, optimizer, cuda) = (&self.runs, &self.average, &self.optimizer, device.card(NAME)?);
        gradients.begin_step();
        figures.clear()?;
        let ([layers, experts], loads) = (self.routed, &self.loads);
        for (number, pass) in passes.iter().enumerate() {
            let tape = Tape::on_card(pass.figures().clone());
            model.watch(&tape);
            let loss = model.loss_on_card(&Context::training(device, &tape), pass, &of_step)?;
            tape.backward(&loss, Tensor::from_f32(vec![1.0], [1])?, gradients)?;
            for (layer, shares) in tape.expert_shares().iter().enumerate() {
                shares.copy_to(loads.part(4 * experts * (number * layers + layer), 4 * experts)?)?;
            }
        }
        arena.clear_unwritten(gradients)?;
        kernels::sum_of_squares(gpu, arena.gradients(), partial.slice(), arena.elements())?;
        let judge = JudgeStep {
            partial: partial.slice(),
            pieces: kernels::sum_of_squares_pieces(arena.elements()),
            totals: figures.loss()?,
            side_losses: Some(figures.side_loss()?),
            limits: limits.slice(),
            step: values.slice(),
            result: result.slice(),
        };
        kernels::judge_step(gpu, &judge)?;
        for run in runs {
            run.update(cuda, arena, optimizer, values.slice())?;
        }
        if let Some(average) = average {
            let call = kernels::WeightAverage {
                average: average.values.slice(),
                weights: arena.values(),
                step: values.slice(),
                decay: average.decay,
                count: arena.elements(),
            };
            kernels::weight_average(gpu, &call)?;
        }
        Ok(())
    }

    /// The share of rows of each expert, the mean over the passes.
    fn expert_loads(&self, batches: &[TrainingRows<'_>], tokens: usize) -> Result<Vec<Vec<f32>>> {
        let [layers, experts] = self.routed;
        let mut loads: Vec<Vec<f32>> = Vec::new();
        if layers * experts == 0 {
            return Ok(loads);
        }
        let mut held = vec![0.0f32; batches.len() * layers * experts];
        self.gpu.read(self.loads.slice(), bytemuck::cast_slice_mut(&mut held))?;
        for (pass, batch) in held.chunks_exact(layers * experts).zip(batches) {
            let of_layers = pass.chunks_exact(experts).map(<[f32]>::to_vec).collect();
            crate::trainer::add_loads(&mut loads, of_layers, batch.ids.len() as f32 / tokens as f32);
        }
        Ok(loads)
    }

    /// The sum of `-log p` over batches that are not learnt from.
    pub(crate) fn evaluate(&self, model: &Model, batches: &[TrainingRows<'_>], pass: &TrainingPass) -> Result<f64> {
        let rows = batches.iter().map(|batch| batch.ids.len()).max().unwrap_or(0).next_multiple_of(ROWS);
        let figures = Figures::new(&self.device)?;
        let held = CardRows::new(model, rows, figures.clone())?;
        let pass_each = || -> Result<()> {
            for batch in batches {
                held.set(model, batch, PassNumbers { seed: 0, scale: 1.0, share: 1.0 })?;
                model.loss_on_card(&Context::inference(&self.device), &held, pass)?;
            }
            Ok(())
        };
        match &self.captured {
            Some(captured) => captured.graph.lend(pass_each)?,
            None => pass_each()?,
        }
        let nll = figures.read()?.loss.nll;
        drop(held);
        // A step that is captured later has memory of its own.
        self.gpu.trim();
        Ok(nll)
    }

    /// Exchanges the weights and their average, where there is one.
    pub(crate) fn swap_average(&mut self) -> Result<()> {
        let Some(average) = self.average.as_ref().filter(|average| average.begun) else { return Ok(()) };
        let bytes = 4 * self.arena.elements();
        let between = self.gpu.allocate(bytes, NAME)?;
        self.gpu.copy(between.slice(), self.arena.values())?;
        self.gpu.copy(self.arena.values(), average.values.slice())?;
        self.gpu.copy(average.values.slice(), between.slice())?;
        Ok(self.arena.round()?)
    }

    /// What the optimizer remembers, by the names that [`Optimizer::save`](crate::optimizer::Optimizer::save) gives.
    pub(crate) fn save(&self) -> Result<Vec<SavedTensor<'static>>> {
        let mut saved = Vec::new();
        for (parameter, place) in self.parameters.iter().zip(self.arena.places()) {
            let Some(run) = self.runs.iter().find(|run| run.holds(place.start)) else { continue };
            for (name, buffer, kind) in run.state.parts() {
                let (start, count) = kind.range(place.start - run.start, place.elements);
                let mut bytes = vec![0; count * kind.bytes()];
                let from = buffer.part(start * kind.bytes(), bytes.len())?;
                self.gpu.read(from, &mut bytes)?;
                let values = match kind {
                    PartKind::Codes => SavedValues::U8(bytes.into()),
                    _ => SavedValues::F32(numbers(&bytes).into()),
                };
                saved.push(SavedTensor { name: format!("{}.{name}", parameter.name), values });
            }
        }
        Ok(saved)
    }

    /// The averages, each by its parameter's name.
    pub(crate) fn save_average(&self) -> Result<Vec<SavedTensor<'static>>> {
        let Some(average) = self.average.as_ref().filter(|average| average.begun) else { return Ok(Vec::new()) };
        let saved = self.parameters.iter().zip(self.arena.places()).map(|(parameter, place)| {
            let mut bytes = vec![0; 4 * place.elements];
            let from = average.values.part(4 * place.start, bytes.len())?;
            self.gpu.read(from, &mut bytes)?;
            Ok(SavedTensor { name: parameter.name.clone(), values: SavedValues::F32(numbers(&bytes).into()) })
        });
        saved.collect()
    }

    /// Takes what [`CardTrainer::save`] or the processor's optimizer gave.
    pub(crate) fn restore(&mut self, tensors: Vec<SavedTensor<'_>>) -> Result<()> {
        let owner = self.optimizer.name();
        for SavedTensor { name, values } in tensors {
            let foreign = || Error::ForeignState { tensor: name.clone(), owner };
            let (parameter, part) = name.rsplit_once('.').ok_or_else(foreign)?;
            let number = self.parameters.iter().position(|known| known.name == parameter).ok_or_else(foreign)?;
            let place = self.arena.places()[number];
            let run = self.runs.iter().find(|run| run.holds(place.start)).ok_or_else(foreign)?;
            let parts = run.state.parts();
            let (_, buffer, kind) = parts.iter().find(|(known, ..)| *known == part).ok_or_else(foreign)?;
            let (start, count) = kind.range(place.start - run.start, place.elements);
            let (bytes, found) = match (&values, kind) {
                (SavedValues::U8(codes), PartKind::Codes) => (codes.to_vec(), codes.len()),
                (SavedValues::F32(values), PartKind::Numbers | PartKind::Largest) => {
                    (bytemuck::cast_slice(values).to_vec(), values.len())
                }
                _ => return Err(foreign()),
            };
            if found != count {
                return Err(Error::StateLength { tensor: name.clone(), expected: count, found });
            }
            let to = buffer.part(start * kind.bytes(), bytes.len())?;
            self.gpu.write(to, &bytes)?;
        }
        Ok(())
    }

    /// Takes averages by their parameters' names.
    pub(crate) fn restore_average(&mut self, tensors: Vec<SavedTensor<'_>>) -> Result<()> {
        let Some(average) = &mut self.average else { return Ok(()) };
        average.begun = !tensors.is_empty();
        for SavedTensor { name, values } in tensors {
            let number = self.parameters.iter().position(|known| known.name == name);
            let (Some(number), SavedValues::F32(values)) = (number, &values) else {
                return Err(Error::ForeignState { tensor: name, owner: "the average of weights" });
            };
            let place = self.arena.places()[number];
            if values.len() != place.elements {
                return Err(Error::StateLength { tensor: name, expected: place.elements, found: values.len() });
            }
            let to = average.values.part(4 * place.start, 4 * place.elements)?;
            self.gpu.write(to, bytemuck::cast_slice(values))?;
        }
        Ok(())
    }

    /// Sets the weights of parameters by their names, before steps go on.
    pub(crate) fn set_weights(&self, weights: &HashMap<String, Vec<f32>>) -> Result<()> {
        for (number, parameter) in self.parameters.iter().enumerate() {
            if let Some(values) = weights.get(&parameter.name) {
                self.arena.set(number, values)?;
            }
        }
        Ok(self.arena.round()?)
    }
}

fn cleared(gpu: &Gpu, bytes: usize) -> kernels::Result<Buffer> {
    gpu.allocate_cleared(bytes, NAME)
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}
