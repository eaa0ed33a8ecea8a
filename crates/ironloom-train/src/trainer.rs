//! Steps of training: batches through the model and back, and an optimizer's move.
//!
//! ```text
//! batches of a step ─ loss ─ gradients summed over the batches ─ norm ─ guard ─ optimizer ─ average
//! ```
//!
//! A batch's loss is scaled by 1 over the predictions that count in the whole step, so any way of cutting a step into batches gives
//! the same step. Weights, gradients and moments are single precision. What decides how a run goes on is the weights, the
//! optimizer's moments, the weights' average and [`TrainerState`].

use std::collections::HashMap;

use ironloom_lm::{Architecture, KernelTime, Model, ParameterRole, TrainingPass, TrainingRows};
use ironloom_tensor::{Context, Device, Gradients, Tape, Tensor, ops::RouterLosses};
use serde::{Deserialize, Serialize};

use crate::{
    Error, GradientNorm, Result, SavedTensor, SavedValues, Schedule, SpikeGuard, SpikeGuardOptions, SpikeGuardState,
    Verdict, WeightAverage,
    card::{CardStep, CardTrainer},
    clip_factor,
    data::{Batch, counted},
    lora::{LoraAdapter, LoraOptions, check_for_card},
    optimizer::{Optimizer, OptimizerOptions, Parameter, Step},
};

/// How steps are taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainerOptions {
    /// Steps of the whole run.
    pub steps: u64,
    /// The peak learning rate.
    pub learning_rate: f64,
    /// Its course over the run.
    pub schedule: Schedule,
    /// The optimizer.
    pub optimizer: OptimizerOptions,
    /// The largest norm of the whole gradient: a larger one is scaled down to it. `None`, in a configuration `inf`, takes it as it is.
    #[serde(deserialize_with = "limit")]
    pub max_gradient_norm: Option<f64>,
    /// The weight of squared log-sum-exps of the output.
    pub z_loss: f32,
    /// The weight of the balance of routed experts' loads.
    pub balance_loss: f32,
    /// The weight of squared log-sum-exps of routers.
    pub router_z_loss: f32,
    /// Whether blocks are run again in the backward pass instead of keeping what they computed: less memory, a third more time.
    pub checkpointing: bool,
    /// When a step's loss is refused.
    pub spike_guard: SpikeGuardOptions,
    /// The decay of a moving average of the weights, which is then what is evaluated and exported.
    pub average_decay: Option<f64>,
    /// Decides the first weights of a new model, and what dropout leaves out.
    pub seed: u64,
}

impl Default for TrainerOptions {
    fn default() -> Self {
        Self {
            steps: 1000,
            learning_rate: 3e-4,
            schedule: Schedule::default(),
            optimizer: OptimizerOptions::default(),
            max_gradient_norm: Some(1.0),
            z_loss: 0.0,
            balance_loss: 0.01,
            router_z_loss: 0.001,
            checkpointing: false,
            spike_guard: SpikeGuardOptions::default(),
            average_decay: None,
            seed: 0,
        }
    }
}

/// A limit, or none where it is infinite: what has no null (TOML) has infinity, and what has no infinity (JSON) has null.
fn limit<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<f64>, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.filter(|&limit| limit != f64::INFINITY))
}

impl TrainerOptions {
    /// Whether each option means something. [`Trainer::new`] asks the same, when a model is there already.
    ///
    /// # Errors
    /// One is out of its range, or the schedule is longer than the run.
    pub fn check(&self) -> Result<()> {
        if !(self.learning_rate.is_finite() && self.learning_rate > 0.0) {
            let (option, value) = ("learning_rate", self.learning_rate);
            return Err(Error::InvalidOption { option, value, limits: "above 0" });
        }
        let weights =
            [("z_loss", self.z_loss), ("balance_loss", self.balance_loss), ("router_z_loss", self.router_z_loss)];
        if let Some(&(option, value)) = weights.iter().find(|(_, weight)| !(weight.is_finite() && *weight >= 0.0)) {
            return Err(Error::InvalidOption { option, value: value.into(), limits: "a finite number from 0 on" });
        }
        self.schedule.check(self.steps)?;
        if let Some(norm) = self.max_gradient_norm {
            clip_factor(0.0, norm)?;
        }
        self.optimizer.check()?;
        self.average_decay.map(WeightAverage::new).transpose()?;
        SpikeGuard::new(self.spike_guard.clone()).map(drop)
    }
}

/// What a step did.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// The step's number, from 1.
    pub step: u64,
    /// The mean of `-log p` of the predictions that count.
    pub loss: f64,
    /// The losses beside it, as they are added to it: of routers and of the output's log-sum-exp.
    pub side_loss: f64,
    /// The norm of the whole gradient before clipping.
    pub gradient_norm: f64,
    /// The learning rate used.
    pub learning_rate: f64,
    /// Whether the weights moved.
    pub moved: bool,
    /// Whether the guard asks for the last checkpoint.
    pub rolls_back: bool,
    /// Tokens that went through the model.
    pub tokens: usize,
    /// The share of predictions that each expert of each routed layer got, the mean over the step's batches.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expert_loads: Vec<Vec<f32>>,
}

/// Where a trainer stands, beside its tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerState {
    /// Steps done.
    pub step: u64,
    /// What the guard has seen.
    pub guard: SpikeGuardState,
}

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    model: Model,
    options: TrainerOptions,
    optimizer: Optimizer,
    average: Option<WeightAverage>,
    guard: SpikeGuard,
    gradients: Gradients,
    step: u64,
    /// What moves the weights of a model on a graphics card.
    card: Option<Box<CardTrainer>>,
    /// How the adapters are set that are trained, and what their base is called.
    adapters: Option<(LoraOptions, Option<String>)>,
}

impl Trainer {
    /// A trainer of adapters beside a frozen model, which is held packed, on the device where it is.
    ///
    /// # Errors
    /// The adapters are another model's or such as the device does not train, or an option is out of its range.
    pub fn with_adapters(mut model: Model, adapter: &LoraAdapter, options: TrainerOptions) -> Result<Self> {
        if let Device::Cuda(_) = model.device() {
            let layers = adapter.layers.iter().map(|matrices| matrices.layer.as_str());
            check_for_card(adapter.options.rank, layers, model.config())?;
        }
        adapter.attach(&mut model)?;
        let trainer = Self::new(model, options)?;
        Ok(Self { adapters: Some((adapter.options.clone(), adapter.base_model.clone())), ..trainer })
    }

    /// The adapters as they stand, where they are what is trained.
    ///
    /// # Errors
    /// The device fails.
    pub fn adapter(&self) -> Result<Option<LoraAdapter>> {
        let Some((options, base)) = &self.adapters else { return Ok(None) };
        LoraAdapter::of(&self.model, options.clone(), base.clone()).map(Some)
    }

    /// A trainer of what is trainable in `model`: all of a model of dense weights, the adapters of one with packed ones. It trains
    /// where the model is; see [`Trainer::to_device`].
    ///
    /// # Errors
    /// Nothing in the model is trainable, its router could learn nothing, or an option is out of its range.
    pub fn new(model: Model, options: TrainerOptions) -> Result<Self> {
        if model.parameters().is_empty() {
            return Err(Error::NothingToTrain);
        }
        // Of one expert with a normalized weight, the weight is 1 whatever the router says.
        if model.is_dense()
            && model.config().experts.as_ref().is_some_and(|experts| experts.normalize && experts.per_row == 1)
        {
            return Err(Error::RouterWithoutGradient);
        }
        options.check()?;
        let device = model.device().clone();
        let trainer = Self {
            card: None,
            optimizer: Optimizer::new(options.optimizer.clone())?,
            average: options.average_decay.map(WeightAverage::new).transpose()?,
            guard: SpikeGuard::new(options.spike_guard.clone())?,
            gradients: Gradients::new(),
            step: 0,
            adapters: None,
            model,
            options,
        };
        trainer.to_device(&device)
    }

    /// The same on `device`: parameters go to a graphics card, where steps are captured whole and run with products in bfloat16;
    /// packed weights have to be there. To be called before the first step and before [`Trainer::restore`].
    ///
    /// # Errors
    /// A matrix is not as wide as products there take them, or of sides that Muon does not take there, or there is no room.
    pub fn to_device(mut self, device: &Device) -> Result<Self> {
        if let (Device::Cuda(_), None) = (device, &self.card) {
            let Self { model, options, .. } = &mut self;
            let card = CardTrainer::new(model, device, &options.optimizer, options.average_decay)?;
            self.card = Some(Box::new(card));
        }
        Ok(self)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model, done with.
    pub fn into_model(self) -> Model {
        self.model
    }

    /// The options.
    pub fn options(&self) -> &TrainerOptions {
        &self.options
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// One step on all of `batches` together.
    ///
    /// # Errors
    /// No prediction of the batches counts, an id is outside of the vocabulary, or a document is longer than the context. The
    /// weights are then as they were.
    pub fn step(&mut self, batches: &[Batch]) -> Result<StepReport> {
        let total = counted(batches);
        if total == 0 {
            return Err(Error::NothingCounts);
        }
        let tokens: usize = batches.iter().map(|batch| batch.ids.len()).sum();
        let mut report = StepReport {
            step: self.step + 1,
            loss: 0.0,
            side_loss: 0.0,
            gradient_norm: 0.0,
            learning_rate: self.options.schedule.learning_rate(
                self.options.learning_rate,
                self.step,
                self.options.steps,
            ),
            moved: false,
            rolls_back: false,
            tokens,
            expert_loads: Vec::new(),
        };
        if self.card.is_some() {
            self.step_on_card(batches, total, &mut report)?;
            return Ok(report);
        }
        self.gradients.begin_step();
        let device = self.model.device().clone();
        for (number, batch) in batches.iter().enumerate() {
            let share = batch.ids.len() as f32 / tokens as f32;
            // Each batch of each step draws its own dropout.
            let tape = Tape::with_seed(self.options.seed ^ ((self.step << 20) + number as u64 + 1));
            self.model.watch(&tape);
            let pass = TrainingPass { scale: 1.0 / total as f32, share, ..self.pass() };
            let result = self.model.loss(&Context::training(&device, &tape), &rows(batch), &pass)?;
            tape.backward(&result.loss, Tensor::from_f32(vec![1.0], [1])?, &mut self.gradients)?;
            let nll = result.nll_sum / total as f64;
            report.loss += nll;
            report.side_loss += tape.side_loss();
            if pass.z_loss != 0.0 {
                report.side_loss += f64::from(result.loss.as_f32()?[0]) - nll;
            }
            add_loads(&mut report.expert_loads, tape.expert_loads(), share);
        }
        let parameters = self.model.parameters();
        let mut norm = GradientNorm::default();
        for parameter in &parameters {
            if let Some(gradient) = self.gradients.get(parameter.values.id()) {
                norm.add(device.threads(), gradient.as_f32()?);
            }
        }
        report.gradient_norm = norm.norm();
        let verdict = self.guard.judge(report.loss + report.side_loss, report.gradient_norm);
        self.step += 1;
        report.rolls_back = verdict == Verdict::RollBack;
        if verdict != Verdict::Accept {
            return Ok(report);
        }
        report.moved = true;
        let gradient_factor = match self.options.max_gradient_norm {
            Some(limit) => clip_factor(report.gradient_norm, limit)?,
            None => 1.0,
        };
        let step = Step { number: self.step, learning_rate: report.learning_rate as f32, gradient_factor };
        let roles: Vec<ParameterRole> = parameters.iter().map(|parameter| parameter.role).collect();
        drop(parameters);
        self.update(&step, &roles)?;
        Ok(report)
    }

    fn step_on_card(&mut self, batches: &[Batch], total: usize, report: &mut StepReport) -> Result<()> {
        let pass = self.pass();
        let Self { model, options, guard, card: Some(card), .. } = self else { return Err(Error::NothingToTrain) };
        let step = CardStep {
            number: self.step + 1,
            learning_rate: report.learning_rate,
            seed: options.seed,
            loss_limit: guard.limit(),
            max_gradient_norm: options.max_gradient_norm.unwrap_or(f64::INFINITY),
        };
        let rows: Vec<TrainingRows<'_>> = batches.iter().map(rows).collect();
        let done = card.step(model, &rows, total, pass, &step)?;
        report.loss = done.result.loss;
        report.side_loss = done.result.side_loss;
        report.gradient_norm = done.result.gradient_norm;
        report.expert_loads = done.expert_loads;
        report.moved = done.result.applied == 1;
        // The card has judged by the same rule; this is to remember it.
        let verdict = guard.judge(report.loss + report.side_loss, report.gradient_norm);
        report.rolls_back = verdict == Verdict::RollBack;
        self.step += 1;
        Ok(())
    }

    /// The time of each kernel of a step on a graphics card, the longest first. The kernels run one by one, so that their sum is
    /// more than the step takes when it is replayed. The weights move as in some steps, of which one is counted.
    ///
    /// # Errors
    /// As [`Trainer::step`]; the model is on the processor.
    pub fn profile(&mut self, batches: &[Batch]) -> Result<Vec<KernelTime>> {
        self.step(batches)?;
        let pass = self.pass();
        let Self { model, card, .. } = self;
        let card = card.as_mut().ok_or(ironloom_tensor::Error::NeedsCard { operation: "a profile of a step" })?;
        card.profile(model, pass)
    }

    /// Moves every parameter that has a gradient.
    fn update(&mut self, step: &Step, roles: &[ParameterRole]) -> Result<()> {
        let Self { model, optimizer, average, gradients, .. } = self;
        let threads = model.device().threads().clone();
        let (mut roles, mut failure) = (roles.iter(), None);
        model.update(|name, values| {
            let role = roles.next().copied().unwrap_or(ParameterRole::Vector);
            if failure.is_some() {
                return Ok(());
            }
            let (id, shape) = (values.id(), *values.shape());
            let weights = values.as_f32_mut()?;
            if let Some(gradient) = gradients.get(id) {
                let parameter = Parameter::new(name, shape.dims(), role);
                failure = optimizer.update(&threads, step, &parameter, weights, gradient.as_f32()?).err();
            }
            if let (Some(average), None) = (average.as_mut(), &failure) {
                failure = average.update(&threads, name, weights).err();
            }
            Ok(())
        })?;
        failure.map_or(Ok(()), Err)
    }

    /// The mean of `-log p` over batches that are not learnt from, by the weights' average where there is one.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn evaluate(&mut self, batches: &[Batch]) -> Result<f64> {
        let total = counted(batches);
        if total == 0 {
            return Err(Error::NothingCounts);
        }
        self.swap_average()?;
        if let Some(card) = &self.card {
            let rows: Vec<TrainingRows<'_>> = batches.iter().map(rows).collect();
            let sum = card.evaluate(&self.model, &rows, &self.pass());
            self.swap_average()?;
            return Ok(sum? / total as f64);
        }
        let device = self.model.device().clone();
        let mut sum = 0.0;
        let mut failure = None;
        for batch in batches {
            match self.model.loss(&Context::inference(&device), &rows(batch), &self.pass()) {
                Ok(result) => sum += result.nll_sum,
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        self.swap_average()?;
        match failure {
            Some(error) => Err(error.into()),
            None => Ok(sum / total as f64),
        }
    }

    /// Exchanges the weights and their average, where there is one: to evaluate or export it, and back.
    ///
    /// # Errors
    /// The average is of another model.
    pub fn swap_average(&mut self) -> Result<()> {
        if let Some(card) = &mut self.card {
            return card.swap_average();
        }
        let Self { model, average: Some(average), .. } = self else { return Ok(()) };
        let mut failure = None;
        model.update(|name, values| {
            if failure.is_none() {
                failure = average.swap(name, values.as_f32_mut()?).err();
            }
            Ok(())
        })?;
        failure.map_or(Ok(()), Err)
    }

    fn pass(&self) -> TrainingPass {
        TrainingPass {
            scale: 1.0,
            share: 1.0,
            z_loss: self.options.z_loss,
            router: RouterLosses { balance: self.options.balance_loss, z: self.options.router_z_loss },
            checkpoint: self.options.checkpointing,
        }
    }

    /// Where it stands, for a checkpoint.
    pub fn state(&self) -> TrainerState {
        TrainerState { step: self.step, guard: self.guard.state().clone() }
    }

    /// What the optimizer and the average remember, for a checkpoint.
    ///
    /// # Errors
    /// They are on a graphics card that fails.
    pub fn saved_tensors(&self) -> Result<Vec<SavedTensor<'_>>> {
        let (moments, averages) = match &self.card {
            Some(card) => (card.save()?, card.save_average()?),
            None => (self.optimizer.save(), self.average.iter().flat_map(WeightAverage::save).collect()),
        };
        let moments = moments.into_iter().map(|tensor| prefixed(OPTIMIZER, tensor));
        let averages = averages.into_iter().map(|tensor| prefixed(AVERAGE, tensor));
        Ok(moments.chain(averages).chain(self.exact_norms()).collect())
    }

    /// Weights that a model's files hold less one, which can't be undone to the bit: they are in a checkpoint as they are, too.
    fn exact_norms(&self) -> Vec<SavedTensor<'static>> {
        if self.model.config().architecture != Architecture::Gemma3 || self.adapters.is_some() {
            return Vec::new();
        }
        let vectors = self.model.parameters().into_iter().filter(|parameter| parameter.role == ParameterRole::Vector);
        let saved = vectors.filter_map(|parameter| {
            let values = SavedValues::F32(parameter.values.into_f32().ok()?.into());
            Some(SavedTensor { name: format!("{NORM}{}", parameter.name), values })
        });
        saved.collect()
    }

    /// Goes on where a trainer of the same model and options stood; the model's weights must be those of then.
    ///
    /// # Errors
    /// The tensors are those of another optimizer.
    pub fn restore<'a>(
        &mut self,
        state: &TrainerState,
        tensors: impl IntoIterator<Item = SavedTensor<'a>>,
    ) -> Result<()> {
        let (mut averages, mut moments, mut norms) = (Vec::new(), Vec::new(), HashMap::new());
        for SavedTensor { name, values } in tensors {
            if let Some(name) = name.strip_prefix(AVERAGE) {
                averages.push(SavedTensor { name: name.to_owned(), values });
            } else if let (Some(name), SavedValues::F32(values)) = (name.strip_prefix(NORM), &values) {
                norms.insert(name.to_owned(), values.clone().into_owned());
            } else if let Some(name) = name.strip_prefix(OPTIMIZER) {
                moments.push(SavedTensor { name: name.to_owned(), values });
            } else {
                return Err(Error::ForeignState { tensor: name, owner: "a training run" });
            }
        }
        self.step = state.step;
        self.guard = SpikeGuard::new(self.options.spike_guard.clone())?.with_state(state.guard.clone());
        if let Some(card) = &mut self.card {
            card.restore(moments)?;
            card.restore_average(averages)?;
            return card.set_weights(&norms);
        }
        self.optimizer.restore(moments)?;
        self.model.update(|name, values| {
            if let Some(exact) = norms.remove(name) {
                *values = Tensor::from_f32(exact, *values.shape())?;
            }
            Ok(())
        })?;
        if let Some(average) = &mut self.average {
            average.restore(averages)?;
        }
        Ok(())
    }
}

/// Names of the optimizer's tensors in a checkpoint begin with this, and those of the average with the next.
const OPTIMIZER: &str = "optimizer.";
const AVERAGE: &str = "average.";
/// And those of norms that the model's own file can't hold exactly.
const NORM: &str = "norm.";

fn prefixed<'a>(prefix: &str, tensor: SavedTensor<'a>) -> SavedTensor<'a> {
    SavedTensor { name: format!("{prefix}{}", tensor.name), ..tensor }
}

fn rows(batch: &Batch) -> TrainingRows<'_> {
    TrainingRows { ids: &batch.ids, targets: &batch.targets, documents: &batch.documents }
}

/// Adds a batch's part to a step's mean loads.
pub(crate) fn add_loads(sums: &mut Vec<Vec<f32>>, loads: Vec<Vec<f32>>, share: f32) {
    if sums.is_empty() {
        sums.extend(loads.iter().map(|layer| vec![0.0; layer.len()]));
    }
    for (sums, loads) in sums.iter_mut().zip(loads) {
        sums.iter_mut().zip(loads).for_each(|(sum, load)| *sum += share * load);
    }
}
