//! The loss of a language model, from the last hidden rows and the output head, without ever holding all logits.
//!
//! For hidden rows `h [n, width]`, head `W [vocabulary, width]` and targets `t [n]`: `logits_i = W h_i`,
//! `lse_i = log sum_j exp(logits_ij)`, `loss = scale * sum_i (lse_i - logits_i,t_i + z_loss * lse_i^2)` over rows whose target is
//! counted. The second term keeps logits from drifting (z-loss; Chowdhery et al., arXiv 2204.02311, section 5).
//!
//! Rows go in chunks whose logits take about 16 MiB. Under a tape a chunk's logits become their own gradient in place,
//! `scale * (p_ij (1 + 2 z_loss lse_i) - [j = t_i])`, and give their part of `dh = g W` and `dW = g^T h` at once; the backward
//! pass only multiplies by the gradient of the loss. Rows that are not counted cost nothing: they are left out before.

use std::{borrow::Cow, sync::OnceLock};

use ironloom_quant::{Product, matmul};

use super::{Disjoint, Figures, for_rows, linear::product_back};
use crate::{
    Context, CpuDevice, Device, Error, Indices, Result, Tensor, Weight,
    error::{expect_count, expect_shape},
    gemm::{Matrix, Write, gemm},
    lanes::{maximum, per_level, softmax_exp, sum},
};

/// What counts in a loss, and how much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropyOptions {
    /// Rows with this target count for nothing.
    pub ignore_index: i64,
    /// The factor of squared log-sum-exps; 0 for none.
    pub z_loss: f32,
    /// The factor of the loss: usually 1 over the number of counted targets of the whole step.
    pub scale: f32,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        Self { ignore_index: -100, z_loss: 0.0, scale: 1.0 }
    }
}

/// What each row should give.
#[derive(Clone, Copy, Debug)]
pub enum Targets<'a> {
    /// Ids of the vocabulary, or the index to ignore, on the processor.
    Host(&'a [i64]),
    /// i32 on a graphics card, negative where none is asked for; and where the loss is scaled and added up.
    Card(&'a Indices, &'a Figures),
}

/// The loss, and figures beside it that have no gradient. On a graphics card all of them go to the [`Figures`] and are zeros here;
/// where something is learnt they are counted in the backward pass.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// `[1]`: scaled, with the z-loss.
    pub loss: Tensor,
    /// The sum of `-log p` of the counted targets, unscaled.
    pub nll_sum: f64,
    /// How many targets counted.
    pub counted: usize,
    /// How many of them had the highest logit, the first of equal ones.
    pub correct: usize,
}

const NAME: &str = "cross entropy";

/// The loss of `hidden [n, width]` through `head [vocabulary, width]` against `targets [n]`. Has a gradient for both; a packed
/// head is frozen. Without a counted target the loss and its gradients are 0.
///
/// # Errors
/// The head is not as wide as the rows, there are not as many targets as rows, a counted target is no id of the vocabulary, or
/// the targets are on another device.
pub fn cross_entropy(
    cx: &Context,
    hidden: &Tensor,
    head: &Weight,
    targets: Targets<'_>,
    options: &CrossEntropyOptions,
) -> Result<CrossEntropy> {
    let (n, width, vocabulary) = (hidden.rows(), head.cols(), head.rows());
    expect_shape(NAME, "the hidden rows", [n, width], hidden.shape())?;
    let (cpu, targets) = match (cx.device, targets) {
        (Device::Cpu(cpu), Targets::Host(targets)) => (cpu, targets),
        (Device::Cuda(cuda), Targets::Card(ids, figures)) => {
            return super::cuda::cross_entropy::cross_entropy(cx, cuda, hidden, head, (ids, figures), options);
        }
        (_, Targets::Host(_)) => {
            let (expected, found) = ("a graphics card", "targets on the processor");
            return Err(Error::Device { operation: NAME, expected, found });
        }
        (_, Targets::Card(..)) => {
            let (expected, found) = ("the processor", "targets on a graphics card");
            return Err(Error::Device { operation: NAME, expected, found });
        }
    };
    expect_count(NAME, "the number of targets", n, targets.len())?;
    let counted = counted(targets, options.ignore_index, vocabulary)?;
    let (to_hidden, to_head) = match cx.tape {
        Some(tape) => (tape.slot(hidden), head.as_dense().and_then(|weight| tape.slot(weight))),
        None => (None, None),
    };
    let values = hidden.as_f32()?;
    // Whole rows when all of them count, else a copy of those that do.
    let rows = match counted.len() == n {
        true => Cow::Borrowed(values),
        false => counted.iter().flat_map(|row| &values[row.index * width..][..width]).copied().collect(),
    };
    let job = Job { cpu, head, options, width, vocabulary };
    let made = job.run(&rows, &counted, to_hidden.is_some(), to_head.is_some())?;

    let sums = made.sums;
    // Without a counted target the usual scale is 1 / 0.
    let scale = if counted.is_empty() { 0.0 } else { f64::from(options.scale) };
    let loss = scale * (sums.nll + f64::from(options.z_loss) * sums.squares);
    let loss = Tensor::from_f32(vec![loss as f32], [1])?;
    if let (Some(tape), true) = (cx.tape, to_hidden.is_some() || to_head.is_some()) {
        let mut kept = Vec::with_capacity(2);
        if let Some(slot) = to_hidden {
            let whole = counted.len() == n;
            let values = if whole { made.hidden } else { spread(&made.hidden, &counted, n, width) };
            kept.push((slot, Tensor::from_f32(values, slot.shape())?));
        }
        if let Some(slot) = to_head {
            kept.push((slot, Tensor::from_f32(made.head, slot.shape())?));
        }
        let cpu = cpu.clone();
        tape.record(&loss, move |gradient, gradients| {
            let factor = gradient.as_f32()?.iter().sum::<f32>();
            kept.iter().try_for_each(|(slot, values)| gradients.add(slot, times(&cpu, values, factor)?))
        });
    }
    Ok(CrossEntropy { loss, nll_sum: sums.nll, counted: counted.len(), correct: sums.correct })
}

/// A row that counts.
#[derive(Clone, Copy)]
struct Row {
    index: usize,
    target: usize,
}

fn counted(targets: &[i64], ignore_index: i64, vocabulary: usize) -> Result<Vec<Row>> {
    let rows = targets.iter().enumerate().filter(|(_, target)| **target != ignore_index);
    rows.map(|(index, &target)| match usize::try_from(target) {
        Ok(id) if id < vocabulary => Ok(Row { index, target: id }),
        _ => Err(Error::TargetOutOfRange { operation: NAME, target, row: index, vocabulary, ignored: ignore_index }),
    })
    .collect()
}

/// Logits of a chunk: 16 MiB.
const CHUNK: usize = 4 << 20;
/// Rows of a chunk at least, so that reading and writing the head's rows pays.
const LEAST_ROWS: usize = 64;
/// Rows of a task between the products.
const TASK_ROWS: usize = 8;

struct Job<'a> {
    cpu: &'a CpuDevice,
    head: &'a Weight,
    options: &'a CrossEntropyOptions,
    width: usize,
    vocabulary: usize,
}

#[derive(Clone, Copy, Default)]
struct Sums {
    nll: f64,
    /// Of the log-sum-exps.
    squares: f64,
    correct: usize,
}

/// The sums, and the gradients that were wanted: `[counted, width]` and `[vocabulary, width]`.
struct Made {
    sums: Sums,
    hidden: Vec<f32>,
    head: Vec<f32>,
}

impl Job<'_> {
    fn run(&self, hidden: &[f32], counted: &[Row], wants_hidden: bool, wants_head: bool) -> Result<Made> {
        let (width, vocabulary) = (self.width, self.vocabulary);
        let chunk = (CHUNK / vocabulary.max(1)).max(LEAST_ROWS);
        let zeros = |wanted: bool, length: usize| vec![0.0; if wanted { length } else { 0 }];
        let mut made = Made {
            sums: Sums::default(),
            hidden: zeros(wants_hidden, hidden.len()),
            head: zeros(wants_head, vocabulary * width),
        };
        let mut logits = vec![0.0; chunk.min(counted.len()) * vocabulary];
        for (number, counted) in counted.chunks(chunk).enumerate() {
            let (rows, first) = (counted.len(), number * chunk * width);
            let hidden = &hidden[first..][..rows * width];
            let logits = &mut logits[..rows * vocabulary];
            self.logits(hidden, rows, logits)?;
            let sums = self.softmax(logits, counted, wants_hidden || wants_head);
            made.sums = made.sums.plus(sums);
            let gradient = Matrix::new(logits, [rows, vocabulary], vocabulary);
            if wants_head {
                let hidden = Matrix::new(hidden, [rows, width], width);
                gemm(self.cpu, &mut made.head, width, gradient.transposed(), hidden, Write::first(number == 0));
            }
            if wants_hidden {
                let out = &mut made.hidden[first..][..rows * width];
                product_back(self.cpu, logits, self.head, out, Write::Set)?;
            }
        }
        Ok(made)
    }

    fn logits(&self, hidden: &[f32], rows: usize, logits: &mut [f32]) -> Result<()> {
        let (width, vocabulary) = (self.width, self.vocabulary);
        let Some(head) = self.head.as_dense() else {
            let products = &mut [Product { matrix: self.head.as_cpu(NAME)?, out: logits }];
            return Ok(matmul(&self.cpu.threads, hidden, rows, products)?);
        };
        let head = Matrix::new(head.as_f32()?, [vocabulary, width], width);
        let hidden = Matrix::new(hidden, [rows, width], width);
        gemm(self.cpu, logits, vocabulary, hidden, head.transposed(), Write::Set);
        Ok(())
    }

    /// The sums of a chunk; with `slopes` its logits become their gradient.
    fn softmax(&self, logits: &mut [f32], counted: &[Row], slopes: bool) -> Sums {
        let vocabulary = self.vocabulary;
        let parts: Vec<OnceLock<Sums>> = counted.chunks(TASK_ROWS).map(|_| OnceLock::new()).collect();
        let shared = Disjoint::new(logits);
        self.cpu.threads.run(parts.len(), |task| {
            let mut sums = Sums::default();
            for (row, &Row { target, .. }) in counted.iter().enumerate().skip(task * TASK_ROWS).take(TASK_ROWS) {
                // SAFETY: each row belongs to one task.
                let logits = unsafe { shared.slice(row * vocabulary..(row + 1) * vocabulary) };
                sums = sums.plus(self.softmax_row(logits, target, slopes));
            }
            let _ = parts[task].set(sums);
        });
        parts.iter().filter_map(OnceLock::get).fold(Sums::default(), |sums, part| sums.plus(*part))
    }

    fn softmax_row(&self, logits: &mut [f32], target: usize, slopes: bool) -> Sums {
        let wanted = logits[target];
        let largest = largest(self.cpu.level, logits);
        let correct = wanted == largest && logits.iter().position(|logit| *logit == largest) == Some(target);
        let total = exponentials(self.cpu.level, logits, largest);
        let log_total = libm::log(f64::from(total));
        let log_sum_exp = f64::from(largest) + log_total;
        if slopes {
            let of_lse = 1.0 + 2.0 * f64::from(self.options.z_loss) * log_sum_exp;
            let scale = f64::from(self.options.scale);
            multiply(self.cpu.level, logits, (scale * of_lse / f64::from(total)) as f32);
            logits[target] -= self.options.scale;
        }
        let nll = log_total + (f64::from(largest) - f64::from(wanted));
        Sums { nll, squares: log_sum_exp * log_sum_exp, correct: usize::from(correct) }
    }
}

impl Sums {
    fn plus(self, other: Self) -> Self {
        Self { nll: self.nll + other.nll, squares: self.squares + other.squares, correct: self.correct + other.correct }
    }
}

/// Rows of counted targets among rows of zeros.
fn spread(of_counted: &[f32], counted: &[Row], n: usize, width: usize) -> Vec<f32> {
    let mut all = vec![0.0; n * width];
    for (row, values) in counted.iter().zip(of_counted.chunks_exact(width.max(1))) {
        all[row.index * width..][..width].copy_from_slice(values);
    }
    all
}

fn times(cpu: &CpuDevice, values: &Tensor, factor: f32) -> Result<Tensor> {
    if factor == 1.0 {
        return Ok(values.clone());
    }
    let mut scaled = values.as_f32()?.to_vec();
    for_rows(cpu, &mut scaled, values.width(), |_, values| multiply(cpu.level, values, factor));
    Tensor::from_f32(scaled, *values.shape())
}

per_level! {
    fn largest(values: &[f32]) -> f32 {
        maximum(values)
    }
}

per_level! {
    /// Logits become exponentials of what they are less than `largest`; their sum.
    fn exponentials(logits: &mut [f32], largest: f32) -> f32 {
        logits.iter_mut().for_each(|logit| *logit = softmax_exp(*logit - largest));
        sum(logits)
    }
}

per_level! {
    fn multiply(values: &mut [f32], factor: f32) {
        values.iter_mut().for_each(|value| *value *= factor);
    }
}

#[cfg(test)]
mod tests;
