//! Optimizers: what a step does to weights.
//!
//! An [`Optimizer`] is given one parameter at a time with its gradient, and keeps what it remembers of each by name. Weights
//! and gradients are single precision: an update is often smaller than half the spacing of 16-bit weights, which would not move.
//!
//! | kind | remembers per weight | for |
//! |---|---|---|
//! | [`AdamW`](OptimizerOptions::AdamW) | 8 bytes | everything |
//! | [`AdamW8bit`](OptimizerOptions::AdamW8bit) | 2 bytes | the same in less memory |
//! | [`Lion`](OptimizerOptions::Lion) | 4 bytes | large batches; a third to a tenth of AdamW's rate |
//! | [`Muon`](OptimizerOptions::Muon) | 4 bytes of matrices, 8 of the rest | matrices inside of a model, with AdamW for the rest |
//! | [`Sgd`](OptimizerOptions::Sgd) | 4 bytes, none without momentum | comparisons |
//!
//! Each element's update depends on that element (a block of 256 elements for 8-bit states, a matrix for Muon), so bits never
//! depend on the number of threads. Which parameters decay is the caller's choice ([`Parameter::decays`]): matrices, usually.

mod adamw;
mod adamw_8bit;
mod dynamic_map;
mod lion;
mod muon;
mod options;
mod sgd;
mod state;

use std::collections::BTreeMap;

use ironloom_core::Threads;
pub use ironloom_lm::ParameterRole;

pub use options::{AdamWOptions, LionOptions, MuonOptions, OptimizerOptions, SgdOptions};

use crate::{Error, Result, SavedTensor};
pub(crate) use state::{FIRST, FIRST_ABSMAX, FIRST_CODES, MOMENTUM, SECOND, SECOND_ABSMAX, SECOND_CODES, StateKind};

use state::State;

/// Parameters with fewer elements keep single-precision states also with 8-bit AdamW: they take no memory worth saving, and norms
/// and biases move a model most.
const SMALLEST_8BIT: usize = 4096;

/// A parameter, as an optimizer needs to know it.
#[derive(Clone, Copy, Debug)]
pub struct Parameter<'a> {
    /// Its name in the model: the key of its state.
    pub name: &'a str,
    /// Its dimensions. Muon takes the last two as rows and columns of a matrix, and those before as a stack of matrices, such
    /// as experts.
    pub shape: &'a [usize],
    /// What it is in the model.
    pub role: ParameterRole,
    /// Whether weight decay applies.
    pub decays: bool,
}

impl<'a> Parameter<'a> {
    /// A parameter that decays unless it's a vector.
    pub fn new(name: &'a str, shape: &'a [usize], role: ParameterRole) -> Self {
        Self { name, shape, role, decays: role != ParameterRole::Vector }
    }
}

/// What is the same for all parameters of a step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// The step's number, from 1.
    pub number: u64,
    /// The learning rate.
    pub learning_rate: f32,
    /// What gradients are multiplied with as they are read: [`clip_factor`](crate::clip_factor), and one over a loss scale.
    pub gradient_factor: f32,
}

/// An optimizer with its states.
///
/// ```
/// use ironloom_train::optimizer::{Optimizer, OptimizerOptions, Parameter, ParameterRole, Step};
/// let threads = ironloom_core::Threads::new(1);
/// let mut optimizer = Optimizer::new(OptimizerOptions::default())?;
/// let parameter = Parameter::new("norm.weight", &[2], ParameterRole::Vector);
/// let mut weights = [1.0, 1.0];
/// let step = Step { number: 1, learning_rate: 0.01, gradient_factor: 1.0 };
/// optimizer.update(&threads, &step, &parameter, &mut weights, &[5.0, -0.5])?;
/// assert_eq!(weights, [0.99, 1.01], "Adam's first step has the size of the learning rate");
/// # Ok::<(), ironloom_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Optimizer {
    options: OptimizerOptions,
    states: BTreeMap<String, State>,
}

impl Optimizer {
    /// An optimizer that remembers nothing yet.
    ///
    /// # Errors
    /// An option is out of its range.
    pub fn new(options: OptimizerOptions) -> Result<Self> {
        options.check()?;
        Ok(Self { options, states: BTreeMap::new() })
    }

    /// The options it was made with.
    pub fn options(&self) -> &OptimizerOptions {
        &self.options
    }

    /// Moves a parameter's weights by its gradient.
    ///
    /// # Errors
    /// Lengths disagree, a matrix has fewer than two dimensions, the restored state is of another model, or the step is 0. The
    /// weights are then as they were.
    pub fn update(
        &mut self,
        threads: &Threads,
        step: &Step,
        parameter: &Parameter<'_>,
        weights: &mut [f32],
        gradient: &[f32],
    ) -> Result<()> {
        let elements = parameter.shape.iter().try_fold(1usize, |product, &dimension| product.checked_mul(dimension));
        if elements != Some(weights.len()) || gradient.len() != weights.len() {
            return Err(Error::ParameterLength {
                name: parameter.name.to_owned(),
                shape: parameter.shape.to_vec(),
                weights: weights.len(),
                gradient: gradient.len(),
            });
        }
        if step.number == 0 {
            return Err(Error::StepZero);
        }
        let kind = self.options.state_kind(parameter.role, weights.len());
        let state = match self.states.get_mut(parameter.name) {
            Some(state) => state,
            None => self.states.entry(parameter.name.to_owned()).or_insert_with(|| State::new(kind, weights.len())),
        };
        state.check(kind, parameter.name, weights.len(), self.options.name())?;
        match (&self.options, state) {
            (OptimizerOptions::AdamW(options) | OptimizerOptions::AdamW8bit(options), State::Moments(moments)) => {
                adamw::update(options, threads, step, parameter, moments, weights, gradient);
            }
            (OptimizerOptions::Muon(options), State::Moments(moments)) => {
                adamw::update(&options.adamw, threads, step, parameter, moments, weights, gradient);
            }
            (OptimizerOptions::AdamW8bit(options), State::Moments8bit(moments)) => {
                adamw_8bit::update(options, threads, step, parameter, moments, weights, gradient);
            }
            (OptimizerOptions::Sgd(options), state) => {
                let momentum = if let State::Momentum(momentum) = state { Some(&mut momentum[..]) } else { None };
                sgd::update(options, threads, step, parameter, momentum, weights, gradient);
            }
            (OptimizerOptions::Lion(options), State::Momentum(momentum)) => {
                lion::update(options, threads, step, parameter, momentum, weights, gradient);
            }
            (OptimizerOptions::Muon(options), State::Momentum(momentum)) => {
                muon::update(options, threads, step, parameter, momentum, weights, gradient)?;
            }
            (_, state) => return Err(state.foreign(parameter.name, self.options.name())),
        }
        Ok(())
    }

    /// The states for a checkpoint: tensors named `<parameter>.first_moment` and so on, in the order of names.
    pub fn save(&self) -> Vec<SavedTensor<'_>> {
        self.states.iter().flat_map(|(name, state)| state.save(name)).collect()
    }

    /// Takes what [`Optimizer::save`] gave in place of every state held. Steps then go on as if there had been no end.
    ///
    /// # Errors
    /// A tensor isn't one of this kind of optimizer, or one is missing beside another. That a state's length is its
    /// parameter's is checked by the first update.
    pub fn restore<'a>(&mut self, tensors: impl IntoIterator<Item = SavedTensor<'a>>) -> Result<()> {
        self.states = state::restore(tensors, self.options.name())?;
        Ok(())
    }
}

impl OptimizerOptions {
    /// What is remembered of a parameter of so many elements.
    pub(crate) fn state_kind(&self, role: ParameterRole, elements: usize) -> StateKind {
        match self {
            Self::AdamW8bit(_) if elements >= SMALLEST_8BIT => StateKind::Moments8bit,
            Self::AdamW(_) | Self::AdamW8bit(_) => StateKind::Moments,
            Self::Sgd(options) if options.momentum == 0.0 => StateKind::None,
            Self::Sgd(_) | Self::Lion(_) => StateKind::Momentum,
            Self::Muon(_) if role == ParameterRole::Matrix => StateKind::Momentum,
            Self::Muon(_) => StateKind::Moments,
        }
    }

    /// For the optimizers that are Adam, in step `number` from 1: `rate / (1 - β₁ᵗ)` and `1 / √(1 - β₂ᵗ)`. Else ones.
    pub(crate) fn adam_numbers(&self, learning_rate: f64, number: u64) -> (f32, f32) {
        match self {
            Self::AdamW(options) | Self::AdamW8bit(options) => adamw::numbers(options, learning_rate as f32, number),
            Self::Muon(options) => adamw::numbers(&options.adamw, learning_rate as f32, number),
            Self::Sgd(_) | Self::Lion(_) => (1.0, 1.0),
        }
    }
}

#[cfg(test)]
mod tests;
