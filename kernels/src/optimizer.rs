//! Optimizers whose states are single precision, and the moving average of weights: the launchers of `cuda/optimizer.cu`.
//!
//! Parameters lie one after another, at the same places in each of four arenas: weights, gradients, and up to two states. A
//! launch moves a range of them that has one set of options; what changes from step to step it reads on the device. The bits
//! are those of the processor's optimizers.

use bytemuck::{Pod, Zeroable};

use crate::{
    Form, Gpu, Result, Slice, StepValues,
    checks::{aligned, aligned_to},
    launch::{Arguments, Launch},
};

/// Parameters that follow each other, as an optimizer moves them. Slices start at multiples of 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct ParameterRange<'a> {
    /// `[count]` in F32.
    pub weights: Slice<'a>,
    /// `[count]` in F32.
    pub gradient: Slice<'a>,
    /// `[count]` in bfloat16: receives the weights, rounded, for products to take.
    pub rounded: Option<Slice<'a>>,
    /// [`StepValues`]. Where its `apply` is 0, nothing is written.
    pub step: Slice<'a>,
    /// Elements.
    pub count: usize,
}

/// The addresses of a range.
pub(crate) struct RangeAddresses {
    pub(crate) weights: u64,
    pub(crate) gradient: u64,
    /// 0 where there is no rounded copy.
    pub(crate) rounded: u64,
    pub(crate) step: u64,
}

impl ParameterRange<'_> {
    pub(crate) fn addresses(&self, operation: &'static str) -> Result<RangeAddresses> {
        let bytes = Form::F32.bytes(1, self.count)?;
        let weights = aligned(operation, "the weights in bytes", self.weights, bytes)?;
        let gradient = aligned(operation, "the gradient in bytes", self.gradient, bytes)?;
        let (what, bytes) = ("the rounded weights in bytes", Form::Bf16.bytes(1, self.count)?);
        let rounded = aligned_to(16, operation, what, Slice::expect_optional(self.rounded, operation, what, bytes)?)?;
        let step = step_values(operation, self.step)?;
        Ok(RangeAddresses { weights, gradient, rounded, step })
    }

    /// The address of a state of the range.
    pub(crate) fn state(&self, operation: &'static str, what: &'static str, state: Slice<'_>) -> Result<u64> {
        aligned(operation, what, state, Form::F32.bytes(1, self.count)?)
    }
}

/// The address of a step's values.
pub(crate) fn step_values(operation: &'static str, step: Slice<'_>) -> Result<u64> {
    step.expect(operation, "the step's values in bytes", size_of::<StepValues>())
}

const THREADS: usize = 256;
/// Elements of a thread at a time.
const VECTOR: usize = 4;
/// Several rounds of blocks for each multiprocessor, so that all end together, and enough work for each to be worth its start.
const BLOCKS_OF_MULTIPROCESSOR: usize = 32;

/// A launch for `count` elements. Elements do not depend on each other, so the card may decide.
pub(crate) fn element_launch(gpu: &Gpu, count: usize) -> Launch {
    let most = gpu.properties().multiprocessors as usize * BLOCKS_OF_MULTIPROCESSOR;
    let blocks = count.div_ceil(THREADS * VECTOR).min(most);
    Launch { grid: [blocks as u32, 1, 1], threads: THREADS as u32, shared_bytes: 0 }
}

/// How AdamW is set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWRule {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Weight decay per unit of learning rate; 0 for parameters that do not decay.
    pub weight_decay: f64,
}

/// [`AdamWRule`] as kernels take it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AdamWOptions {
    weight_decay: f64,
    first_part: f32,
    second_decay: f32,
    second_part: f32,
    epsilon: f32,
}

// SAFETY: all its fields are numbers for which zeros are a value.
unsafe impl Zeroable for AdamWOptions {}
// SAFETY: plain numbers in C's layout, one of 8 bytes before four of 4, so there is no padding.
unsafe impl Pod for AdamWOptions {}

impl From<AdamWRule> for AdamWOptions {
    fn from(rule: AdamWRule) -> Self {
        Self {
            weight_decay: rule.weight_decay,
            first_part: (1.0 - rule.beta1) as f32,
            second_decay: rule.beta2 as f32,
            second_part: (1.0 - rule.beta2) as f32,
            epsilon: rule.epsilon as f32,
        }
    }
}

/// What [`adamw`] works on.
#[derive(Clone, Copy, Debug)]
pub struct AdamW<'a> {
    /// The parameters.
    pub range: ParameterRange<'a>,
    /// `[count]` in F32: first moments, zeros before the first step.
    pub first: Slice<'a>,
    /// `[count]` in F32: second moments, zeros before the first step.
    pub second: Slice<'a>,
    /// How it is set.
    pub rule: AdamWRule,
}

/// Adam with decoupled weight decay: with `g` the gradient times the step's factor,
///
/// ```text
/// m ← m + (1 - β₁)(g - m),   v ← β₂ v + (1 - β₂) g²
/// w ← w - η ( m̂ / (√v̂ + ε) + λ w )         m̂ = m / (1 - β₁ᵗ), v̂ = v / (1 - β₂ᵗ)
/// ```
///
/// # Errors
/// A slice is too small or not aligned, or the launch fails.
pub fn adamw(gpu: &Gpu, call: &AdamW<'_>) -> Result<()> {
    const NAME: &str = "AdamW";
    let AdamW { range, rule, .. } = *call;
    let at = range.addresses(NAME)?;
    let first = range.state(NAME, "the first moments in bytes", call.first)?;
    let second = range.state(NAME, "the second moments in bytes", call.second)?;
    let arguments = Arguments::new()
        .u64(at.weights)
        .u64(at.gradient)
        .u64(first)
        .u64(second)
        .u64(at.rounded)
        .u64(at.step)
        .value(AdamWOptions::from(rule))
        .u64(range.count as u64);
    gpu.launch(&gpu.function("optimizer", "adamw")?, element_launch(gpu, range.count), arguments)
}

/// What [`sgd`] works on.
#[derive(Clone, Copy, Debug)]
pub struct Sgd<'a> {
    /// The parameters.
    pub range: ParameterRange<'a>,
    /// `[count]` in F32, zeros before the first step; none where `mu` is 0.
    pub momentum: Option<Slice<'a>>,
    /// Decay of the momentum.
    pub mu: f64,
    /// Whether the step looks ahead along the momentum.
    pub nesterov: bool,
    /// Weight decay, as a part of the gradient; 0 for parameters that do not decay.
    pub weight_decay: f64,
}

/// Stochastic gradient descent: with `g` the gradient times the step's factor,
///
/// ```text
/// g ← g + λ w,   b ← μ b + g
/// w ← w - η b        or, with `nesterov`,   w ← w - η (g + μ b)        or, without momentum,   w ← w - η g
/// ```
///
/// # Errors
/// A slice is too small or not aligned, or the launch fails.
pub fn sgd(gpu: &Gpu, call: &Sgd<'_>) -> Result<()> {
    const NAME: &str = "SGD";
    let range = call.range;
    let at = range.addresses(NAME)?;
    let (decay, arguments) = (call.weight_decay as f32, Arguments::new().u64(at.weights).u64(at.gradient));
    let (name, arguments) = match call.momentum {
        None => ("sgd", arguments.u64(at.rounded).u64(at.step)),
        Some(momentum) => {
            let momentum = range.state(NAME, "the momentum in bytes", momentum)?;
            let arguments = arguments.u64(momentum).u64(at.rounded).u64(at.step);
            ("sgd_momentum", arguments.f32(call.mu as f32).i32(i32::from(call.nesterov)))
        }
    };
    let arguments = arguments.f32(decay).u64(range.count as u64);
    gpu.launch(&gpu.function("optimizer", name)?, element_launch(gpu, range.count), arguments)
}

/// What [`lion`] works on.
#[derive(Clone, Copy, Debug)]
pub struct Lion<'a> {
    /// The parameters.
    pub range: ParameterRange<'a>,
    /// `[count]` in F32, zeros before the first step.
    pub momentum: Slice<'a>,
    /// The momentum's part in the step's direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Weight decay per unit of learning rate; 0 for parameters that do not decay.
    pub weight_decay: f64,
}

/// Steps of one size along the sign of a moving mean: with `g` the gradient times the step's factor,
///
/// ```text
/// c = m + (1 - β₁)(g - m),   w ← w - η ( sign(c) + λ w ),   m ← m + (1 - β₂)(g - m)
/// ```
///
/// # Errors
/// A slice is too small or not aligned, or the launch fails.
pub fn lion(gpu: &Gpu, call: &Lion<'_>) -> Result<()> {
    const NAME: &str = "Lion";
    let range = call.range;
    let at = range.addresses(NAME)?;
    let momentum = range.state(NAME, "the momentum in bytes", call.momentum)?;
    let arguments = Arguments::new()
        .u64(at.weights)
        .u64(at.gradient)
        .u64(momentum)
        .u64(at.rounded)
        .u64(at.step)
        .f32((1.0 - call.beta1) as f32)
        .f32((1.0 - call.beta2) as f32)
        .value(call.weight_decay)
        .u64(range.count as u64);
    gpu.launch(&gpu.function("optimizer", "lion")?, element_launch(gpu, range.count), arguments)
}

/// What [`weight_average`] works on. Slices start at multiples of 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct WeightAverage<'a> {
    /// `[count]` in F32. The weights after the first step that moved them are the first average: the host copies them there.
    pub average: Slice<'a>,
    /// `[count]` in F32.
    pub weights: Slice<'a>,
    /// [`StepValues`]. Where its `apply` is 0, nothing is written.
    pub step: Slice<'a>,
    /// About the last `1 / (1 - decay)` steps count.
    pub decay: f64,
    /// Elements.
    pub count: usize,
}

/// `average ← average + (1 - decay) · (weights - average)`.
///
/// # Errors
/// A slice is too small or not aligned, or the launch fails.
pub fn weight_average(gpu: &Gpu, call: &WeightAverage<'_>) -> Result<()> {
    const NAME: &str = "weight average";
    let bytes = Form::F32.bytes(1, call.count)?;
    let average = aligned(NAME, "the average in bytes", call.average, bytes)?;
    let weights = aligned(NAME, "the weights in bytes", call.weights, bytes)?;
    let step = step_values(NAME, call.step)?;
    let part = (1.0 - call.decay) as f32;
    let arguments = Arguments::new().u64(average).u64(weights).u64(step).f32(part).u64(call.count as u64);
    gpu.launch(&gpu.function("optimizer", "weight_average")?, element_launch(gpu, call.count), arguments)
}
