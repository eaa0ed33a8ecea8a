//! The loss: logits in bfloat16, some rows at a time, that become their own gradient in place.
//!
//! Where something is learnt, all of it is done on the way back: the logits of a piece become slopes, and these give the gradients
//! of the head and of the rows at once. So no logits are kept, and none are made twice; the loss is counted there, and whoever
//! reads the figures does so after [`Tape::backward`](crate::Tape::backward).

use std::ops::Range;

use ironloom_kernels::{self as kernels, Form, LogitsBecome, Multiply, Operand, Output};

use super::{
    super::{CrossEntropy, CrossEntropyOptions},
    figures::Figures,
    linear::{Rows, rows_of, weight_gradient},
};
use crate::{Context, CudaDevice, Error, Gradients, Indices, Result, Tensor, Weight, error::expect_count, tape::Slot};

const NAME: &str = "cross entropy";

/// Bytes of logits that are held at a time at most.
const MOST_LOGITS: usize = 2 << 30;
/// Rows of a piece at least: fewer leave a card idle.
const LEAST_ROWS: usize = 2048;
/// Pieces that larger passes are cut into, unless [`MOST_LOGITS`] asks for more.
const PIECES: usize = 4;
/// Rows of a piece are a multiple of this, as products cut them.
const TILE: usize = 128;

/// Rows whose logits are held at a time in the loss of `rows` rows on a graphics card.
pub fn logits_rows(rows: usize, vocabulary: usize) -> usize {
    let most = MOST_LOGITS / (2 * stride(vocabulary)).max(1) / TILE * TILE;
    rows.div_ceil(PIECES).max(LEAST_ROWS).next_multiple_of(TILE).min(most).clamp(1, rows.max(1))
}

/// Elements from one row of logits to the next.
fn stride(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(8)
}

struct Job {
    cuda: CudaDevice,
    hidden: Tensor,
    head: Weight,
    targets: Indices,
    figures: Figures,
    z_loss: f32,
    /// Elements from one row of logits to the next.
    stride: usize,
}

/// The loss of `hidden`, added to `figures`; `targets` are i32, negative where none is asked for.
pub(in crate::ops) fn cross_entropy(
    cx: &Context,
    cuda: &CudaDevice,
    hidden: &Tensor,
    head: &Weight,
    (targets, figures): (&Indices, &Figures),
    options: &CrossEntropyOptions,
) -> Result<CrossEntropy> {
    let n = hidden.rows();
    expect_count(NAME, "the number of targets", n, targets.len())?;
    let (to_hidden, to_head) = (cx.slot(hidden), head.as_dense().and_then(|head| cx.slot(head)));
    let job = Job {
        cuda: cuda.clone(),
        hidden: hidden.operand(cuda.gpu(), NAME)?,
        head: head.clone(),
        targets: targets.clone(),
        figures: figures.clone(),
        z_loss: options.z_loss,
        stride: stride(head.rows()),
    };
    let loss = Tensor::zeros([1])?;
    match cx.tape {
        Some(tape) if to_hidden.is_some() || to_head.is_some() => tape.record(&loss, move |gradient, gradients| {
            let factor = gradient.as_f32()?.first().copied().unwrap_or_default();
            if factor != 1.0 {
                let (what, expected) = ("the gradient of a loss on a graphics card", "1");
                return Err(Error::Setting { operation: NAME, what, expected, found: factor.into() });
            }
            job.learn(to_hidden.as_ref(), to_head.as_ref(), gradients)
        }),
        _ => {
            let head = rows_of(cuda.gpu(), &job.head)?;
            for rows in job.pieces() {
                job.logits(&rows, &head, LogitsBecome::Logits)?;
            }
        }
    }
    Ok(CrossEntropy { loss, nll_sum: 0.0, counted: 0, correct: 0 })
}

impl Job {
    fn pieces(&self) -> impl Iterator<Item = Range<usize>> {
        let n = self.hidden.rows();
        let piece = logits_rows(n, self.head.rows());
        (0..n).step_by(piece).map(move |start| start..(start + piece).min(n))
    }

    /// The logits of some rows, or their gradients. Counts the rows' part of the loss.
    fn logits(&self, rows: &Range<usize>, head: &Rows<'_>, logits_become: LogitsBecome) -> Result<Tensor> {
        let (gpu, width, vocabulary) = (self.cuda.gpu(), self.hidden.width(), self.head.rows());
        let count = rows.len();
        let logits = Tensor::allocate(gpu, Form::Bf16, [count, self.stride], NAME)?;
        let (weight, weight_stride) = head.slice();
        let hidden = self.hidden.rows_view(rows.clone())?;
        let product = Multiply {
            a: Operand::rows(hidden.cuda(NAME, Form::Bf16)?, width),
            b: Operand::columns(weight, weight_stride),
            out: logits.cuda(NAME, Form::Bf16)?,
            out_stride: self.stride,
            output: Output::Bf16,
            start: None,
            size: [count, vocabulary, width],
        };
        self.cuda.multiply(&product)?;
        let figures = gpu.allocate(16 * count, NAME)?;
        let call = kernels::CrossEntropy {
            logits: logits.cuda(NAME, Form::Bf16)?,
            logits_stride: self.stride,
            targets: self.targets.cuda(NAME)?.part(4 * rows.start, 4 * count)?,
            scale: self.figures.scale()?,
            z_loss: self.z_loss,
            logits_become,
            row_figures: figures.slice(),
            totals: self.figures.loss()?,
            rows: count,
            vocabulary,
        };
        kernels::cross_entropy(gpu, &call)?;
        Ok(logits)
    }

    /// The loss and its gradients.
    fn learn(&self, to_hidden: Option<&Slot>, to_head: Option<&Slot>, gradients: &mut Gradients) -> Result<()> {
        let (gpu, width, vocabulary) = (self.cuda.gpu(), self.hidden.width(), self.head.rows());
        let to_hidden = to_hidden.map(|slot| gradients.place(gpu, slot, NAME)).transpose()?;
        let mut to_head = to_head.map(|slot| gradients.weight_place(slot)).transpose()?;
        let head = rows_of(gpu, &self.head)?;
        for rows in self.pieces() {
            let slopes = self.logits(&rows, &head, LogitsBecome::Slopes)?;
            let (slopes, hidden) = (slopes.cuda(NAME, Form::Bf16)?, self.hidden.rows_view(rows.clone())?);
            if let Some((place, first)) = &mut to_head {
                let operands =
                    [Operand::columns(slopes, self.stride), Operand::rows(hidden.cuda(NAME, Form::Bf16)?, width)];
                weight_gradient(&self.cuda, (place, *first), operands, [vocabulary, width, rows.len()])?;
                *first = false;
            }
            if let Some(place) = &to_hidden {
                let (weight, weight_stride) = head.slice();
                let place = place.rows_view(rows.clone())?;
                let product = Multiply {
                    a: Operand::rows(slopes, self.stride),
                    b: Operand::rows(weight, weight_stride),
                    out: place.cuda(NAME, Form::Bf16)?,
                    out_stride: width,
                    output: Output::Bf16,
                    start: None,
                    size: [rows.len(), width, vocabulary],
                };
                self.cuda.multiply(&product)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_a_quarter_of_a_large_pass_and_never_more_than_the_limit() {
        assert_eq!(logits_rows(100, 32_768), 100);
        assert_eq!(logits_rows(4096, 32_768), 2048);
        assert_eq!(logits_rows(16_384 - 128, 32_768), 4096);
        assert_eq!(logits_rows(32_768, 32_768), 8192);
        assert_eq!(logits_rows(32_768, 262_144), MOST_LOGITS / (2 * 262_144));
        assert_eq!(logits_rows(32_768, 151_936), 7040);
    }
}
