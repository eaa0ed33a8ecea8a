//! Operations of training on a graphics card, in the parts of a model that they make: a part's output and the gradient of
//! everything that it reads, against the processor's.
//!
//! ```text
//! feed-forward   x + down (act(gate n) * up n)                          n = rmsnorm(x)
//! attention      x + out attention(turned(q n), turned(k n), v n)       within documents, heads normed or not
//! experts        x + what the experts that router n chooses make of n, and the router's own losses
//! head           cross entropy of head rmsnorm(table[ids]), with squares of log-sum-exps
//! ```
//!
//! The plain version is the processor's with weights, rows and gradients rounded to seven bits, one less than bfloat16 has:
//! between the operations of a part a card rounds as often as before them. Each result counts as much as any other, whatever its
//! size. Rows on the card are filled up with padding, which is left out of everything.

mod parts;

use std::rc::Rc;

use anyhow::{Context as _, Result, ensure};
use ironloom_tensor::{
    Arena, Context, Device, Gradients, Indices, Tape, Tensor, Weight,
    ops::{self, Activation, DocumentBounds, Documents, Figures, Mask, PassNumbers, Targets},
};

use self::parts::{AttentionShape, attention, experts, feed_forward, head};
use crate::check_parity::{
    case::{Bound, Case, Kernel, Results},
    place::{Precision, is_cpu},
};

/// Rows of padding.
const PADDING: usize = 13;

const ATTENTIONS: [AttentionShape; 7] = [
    (&[37, 1, 62], [4, 2, 64], None, false),
    (&[300], [2, 1, 128], None, true),
    (&[130, 5], [4, 4, 64], Some(24), true),
    (&[2, 129], [8, 1, 64], None, false),
    (&[50, 9], [3, 1, 96], None, false),
    (&[20, 45], [4, 2, 32], None, true),
    (&[70], [2, 1, 256], Some(16), true),
];
/// Rows, width, inner width.
const FEED_FORWARDS: [[usize; 3]; 4] = [[1, 64, 96], [37, 256, 384], [200, 136, 72], [129, 512, 1408]];
/// Rows, experts, experts of a row, width, inner width.
const EXPERTS: [[usize; 5]; 4] = [[100, 8, 2, 256, 96], [33, 4, 1, 64, 32], [200, 16, 4, 128, 64], [5, 8, 8, 64, 64]];
/// Rows, vocabulary, width.
const HEADS: [[usize; 3]; 3] = [[40, 1000, 128], [100, 1003, 64], [3, 50, 256]];

/// On a card; gradients of single operations are the processor's cases.
pub(super) fn cases(device: &Device) -> Vec<Case> {
    if is_cpu(device) {
        return Vec::new();
    }
    let mut cases = Vec::new();
    let mut add = |operation: &str, shape: String, part: Part| {
        let (part, device) = (Rc::new(part), device.clone());
        let name = format!("training {operation}");
        cases.push(Case::new(name, shape, Bound::ThricePlain, move |kernel| part.results(&device, kernel)));
    };
    for (number, shape) in FEED_FORWARDS.into_iter().enumerate() {
        let activation = if number % 2 == 0 { Activation::Silu } else { Activation::GeluTanh };
        add("feed-forward", format!("{activation:?} {shape:?}"), feed_forward(shape, activation));
    }
    for (documents, sizes, window, extras) in ATTENTIONS {
        let extra = if extras { ", norms and biases" } else { "" };
        let shape = format!("{documents:?}, heads {sizes:?}, window {window:?}{extra}");
        add("attention", shape, attention((documents, sizes, window, extras)));
    }
    for (number, shape) in EXPERTS.into_iter().enumerate() {
        let normalize = number % 2 == 0 && shape[2] > 1;
        for rank in [None, Some(8)] {
            let normalized = if normalize { ", normalized" } else { "" };
            let adapters = if rank.is_some() { ", adapters" } else { "" };
            add("experts", format!("{shape:?}{normalized}{adapters}"), experts(shape, normalize, rank));
        }
    }
    for shape in HEADS {
        for tied in [true, false] {
            add("head", format!("{shape:?}{}", if tied { ", tied" } else { "" }), head(shape, tied));
        }
    }
    cases
}

/// A part of a model with all that it reads.
struct Part {
    /// Values and shapes: matrices, then vectors.
    weights: Vec<(Vec<f32>, Vec<usize>)>,
    /// `[rows, width]`; or the ids of rows.
    rows: Rows,
    documents: Vec<usize>,
    /// What follows each row, where the part ends in a loss.
    targets: Vec<i64>,
    mask: Mask,
    /// Pairs of a head that turn.
    half: usize,
    /// The gradient of the output.
    gradient: Vec<f32>,
    forward: Box<Forward>,
}

enum Rows {
    Values(Vec<f32>),
    Ids(Vec<u32>),
}

type Forward = dyn Fn(&Pass<'_>) -> Result<Tensor>;

/// One run of a part.
struct Pass<'a> {
    cx: Context<'a>,
    weights: &'a [Tensor],
    x: Option<&'a Tensor>,
    ids: &'a Indices,
    phases: &'a Tensor,
    documents: Documents<'a>,
    targets: Targets<'a>,
    counted: usize,
}

impl Pass<'_> {
    fn x(&self) -> Result<&Tensor> {
        self.x.context("a part without rows")
    }

    fn weight(&self, number: usize) -> Result<Weight> {
        Ok(Weight::dense(self.weights[number].clone())?)
    }
}

/// Seven bits of a number.
fn coarse(value: f32) -> f32 {
    f32::from_bits((value.to_bits() + (1 << 16)) & !((1 << 17) - 1))
}

impl Part {
    fn results(&self, device: &Device, kernel: Kernel) -> Result<Results> {
        let processor = Device::cpu(0);
        let exact = self.run(&processor, |value| value, Kernel::Ours)?;
        let plain = self.run(&processor, coarse, Kernel::Ours)?;
        let ours = self.run(device, |value| value, kernel)?;
        ensure!(exact.len() == ours.len(), "other results");
        let size = |values: &Vec<f32>| values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        let sizes: Vec<f64> = exact.iter().map(size).collect();
        let of_their_size = |results: &[Vec<f32>]| -> Vec<f32> {
            let scaled = |(values, size): (&Vec<f32>, &f64)| {
                let factor = if *size > 0.0 { 1.0 / size } else { 1.0 };
                values.iter().map(|value| (f64::from(*value) * factor) as f32).collect::<Vec<_>>()
            };
            results.iter().zip(&sizes).flat_map(scaled).collect()
        };
        let reference = of_their_size(&exact).into_iter().map(f64::from).collect();
        Ok(Results::new(reference, of_their_size(&plain), of_their_size(&ours)).in_precision(Precision::Bf16))
    }

    /// The output and the gradients of rows and weights.
    fn run(&self, device: &Device, round: fn(f32) -> f32, kernel: Kernel) -> Result<Vec<Vec<f32>>> {
        let rounded = |values: &[f32]| values.iter().map(|&value| round(value)).collect::<Vec<f32>>();
        let rows: usize = self.documents.iter().sum();
        let held = if is_cpu(device) { rows } else { rows + PADDING };
        // As long as the rows on the device are; padding is ones.
        let filled = |values: &[f32], with: f32| -> Result<Tensor> {
            let (width, mut values) = (values.len() / rows, values.to_vec());
            values.resize(held * width, with);
            Ok(Tensor::from_f32(values, [held, width])?.to_device(device)?)
        };
        let mut gradients = Gradients::new();
        let weights = self.weights_on(device, &rounded, kernel, &mut gradients)?;
        let (mut ids, x) = match &self.rows {
            Rows::Values(values) => (vec![0; rows], Some(filled(&kernel.inputs(&rounded(values)), 1.0)?)),
            Rows::Ids(ids) => (ids.clone(), None),
        };
        ids.resize(held, 0);
        let ids = Indices::new(device, &ids)?;
        let positions: Vec<u32> = self.documents.iter().flat_map(|&length| 0..length as u32).collect();
        let counted = self.targets.iter().filter(|target| **target >= 0).count();
        let card = match device {
            Device::Cpu(_) => None,
            _ => Some(OnCard::new(device, self, &positions, counted)?),
        };
        let host_positions;
        let positions = match &card {
            Some(card) => &card.positions,
            None => {
                host_positions = Indices::new(device, &positions)?;
                &host_positions
            }
        };
        let frequency = |pair: usize| 1e4f32.powf(-(pair as f32) / self.half as f32);
        let frequencies = Tensor::from_f32((0..self.half).map(frequency).collect(), [self.half])?.to_device(device)?;
        let phases = ops::rope_phases(&Context::inference(device), &frequencies, 1.0, positions)?;
        let tape = card.as_ref().map_or_else(Tape::new, |card| Tape::on_card(card.figures.clone()));
        weights.iter().chain(&x).for_each(|input| tape.watch(input));
        let pass = Pass {
            cx: Context::training(device, &tape),
            weights: &weights,
            x: x.as_ref(),
            ids: &ids,
            phases: &phases,
            documents: card.as_ref().map_or(Documents::Lengths(&self.documents), |card| Documents::Card(&card.bounds)),
            targets: card
                .as_ref()
                .map_or(Targets::Host(&self.targets), |card| Targets::Card(&card.targets, &card.figures)),
            counted,
        };
        let out = (self.forward)(&pass)?;
        let mut results = Vec::new();
        let gradient = if self.targets.is_empty() {
            results.push(out.clone().into_f32()?[..self.gradient.len()].to_vec());
            filled(&rounded(&self.gradient), 0.0)?
        } else {
            Tensor::from_f32(vec![1.0], [1])?
        };
        tape.backward(&out, gradient, &mut gradients)?;
        for input in x.iter().chain(&weights) {
            let elements = input.rows() * input.width();
            let found = match gradients.get(input.id()) {
                Some(gradient) => gradient.clone().into_f32()?,
                // Nothing reached it: an expert without rows.
                None => vec![0.0; elements],
            };
            ensure!(found.len() == elements, "a gradient of another size");
            let real = if x.as_ref().is_some_and(|x| x.id() == input.id()) { rows * input.width() } else { elements };
            results.push(found[..real].to_vec());
        }
        Ok(results)
    }

    /// The weights, on a card in an arena. A kernel that drops inputs drops those of the first weight where there are no rows.
    fn weights_on(
        &self,
        device: &Device,
        rounded: &dyn Fn(&[f32]) -> Vec<f32>,
        kernel: Kernel,
        gradients: &mut Gradients,
    ) -> Result<Vec<Tensor>> {
        let mut weights = Vec::new();
        for (number, (values, shape)) in self.weights.iter().enumerate() {
            let values = match (&self.rows, number) {
                (Rows::Ids(_), 0) => kernel.inputs(&rounded(values)),
                _ => rounded(values),
            };
            weights.push(match shape[..] {
                [rows, width] => Tensor::from_f32(values, [rows, width])?,
                _ => {
                    let length = values.len();
                    Tensor::from_f32(values, [length])?
                }
            });
        }
        if is_cpu(device) {
            return Ok(weights);
        }
        let shapes: Vec<_> = weights.iter().map(|weight| (*weight.shape(), weight.shape().rank() > 1)).collect();
        let arena = Arena::new(device, &shapes)?;
        for (number, weight) in weights.iter().enumerate() {
            arena.set(number, weight.as_f32()?)?;
        }
        arena.round()?;
        arena.attach(gradients);
        (0..weights.len()).map(|number| Ok(arena.parameter(number)?.clone())).collect()
    }
}

/// What a pass on a card has beside its rows.
struct OnCard {
    positions: Indices,
    bounds: DocumentBounds,
    targets: Indices,
    figures: Figures,
}

impl OnCard {
    fn new(device: &Device, part: &Part, positions: &[u32], counted: usize) -> Result<Self> {
        let rows = positions.len() + PADDING;
        let indices = |values: Vec<i32>| -> Result<Indices> {
            let mut values = values;
            values.resize(rows, -1);
            let indices = Indices::lasting(device, rows)?;
            indices.set(device, &values)?;
            Ok(indices)
        };
        let positions = indices(positions.iter().map(|&position| position as i32).collect())?;
        let targets = indices(part.targets.iter().map(|&target| target.max(-1) as i32).collect())?;
        let bounds = DocumentBounds::new(device, rows, &[part.mask])?;
        bounds.set(&part.documents)?;
        let figures = Figures::new(device)?.of_rows(positions.clone());
        figures.set(PassNumbers { seed: 0, scale: 1.0 / counted.max(1) as f32, share: 1.0 })?;
        Ok(Self { positions, bounds, targets, figures })
    }
}
