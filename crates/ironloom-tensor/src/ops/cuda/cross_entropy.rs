//! The loss: logits in bfloat16, some rows at a time, that become their own gradient in place.
//!
//! Where all logits of a pass fit [`KEPT_LOGITS`] bytes they stay until the backward pass; else each piece is computed again there,
//! so that a long pass or a large vocabulary never holds more than that.

use std::ops::Range;

use ironloom_kernels::{self as kernels, Form, LogitsBecome, LossTotals, Multiply, Operand, Output, Slice};

use super::{
    super::{CrossEntropy, CrossEntropyOptions},
    figures::Figures,
    linear::{rows_of, weight_gradient},
};
use crate::{Context, CudaDevice, Error, Gradients, Indices, Result, Tensor, Weight, error::expect_count, tape::Slot};

const NAME: &str = "cross entropy";

/// Bytes of logits that are held at a time on a graphics card.
pub const KEPT_LOGITS: usize = 2 << 30;

#[derive(Clone)]
struct Job {
    cuda: CudaDevice,
    hidden: Tensor,
    head: Weight,
    targets: Indices,
    figures: Figures,
    z_loss: f32,
    /// Elements from one row of logits to the next.
    stride: usize,
    /// Rows of a piece.
    piece: usize,
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
    let slot = |tensor: &Tensor| cx.tape.and_then(|tape| tape.slot(tensor));
    let (to_hidden, to_head) = (slot(hidden), head.as_dense().and_then(slot));
    let learns = to_hidden.is_some() || to_head.is_some();
    let stride = head.rows().next_multiple_of(8);
    let job = Job {
        cuda: cuda.clone(),
        hidden: hidden.operand(cuda.gpu(), NAME)?,
        head: head.clone(),
        targets: targets.clone(),
        figures: figures.clone(),
        z_loss: options.z_loss,
        stride,
        piece: (KEPT_LOGITS / (2 * stride.max(1))).clamp(1, n.max(1)),
    };
    let keeps = learns && job.piece >= n;
    let mut kept = None;
    for rows in job.pieces() {
        let logits = job.logits(&rows, keeps, figures.loss()?)?;
        kept = keeps.then_some(logits);
    }
    let loss = Tensor::zeros([1])?;
    if let (Some(tape), true) = (cx.tape, learns) {
        tape.record(&loss, move |gradient, gradients| {
            let factor = gradient.as_f32()?.first().copied().unwrap_or_default();
            if factor != 1.0 {
                let (what, expected) = ("the gradient of a loss on a graphics card", "1");
                return Err(Error::Setting { operation: NAME, what, expected, found: factor.into() });
            }
            job.back(kept.as_ref(), to_hidden.as_ref(), to_head.as_ref(), gradients)
        });
    }
    Ok(CrossEntropy { loss, nll_sum: 0.0, counted: 0, correct: 0 })
}

impl Job {
    fn pieces(&self) -> impl Iterator<Item = Range<usize>> {
        let (n, piece) = (self.hidden.rows(), self.piece);
        (0..n).step_by(piece).map(move |start| start..(start + piece).min(n))
    }

    /// The logits of some rows, or with `slopes` their gradients; what they add to the loss goes to `totals`.
    fn logits(&self, rows: &Range<usize>, slopes: bool, totals: Slice<'_>) -> Result<Tensor> {
        let (gpu, width, vocabulary) = (self.cuda.gpu(), self.hidden.width(), self.head.rows());
        let count = rows.len();
        let logits = Tensor::allocate(gpu, Form::Bf16, [count, self.stride], NAME)?;
        let head = rows_of(gpu, &self.head)?;
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
            logits_become: if slopes { LogitsBecome::Slopes } else { LogitsBecome::Logits },
            row_figures: figures.slice(),
            totals,
            rows: count,
            vocabulary,
        };
        kernels::cross_entropy(gpu, &call)?;
        Ok(logits)
    }

    fn back(
        &self,
        kept: Option<&Tensor>,
        to_hidden: Option<&Slot>,
        to_head: Option<&Slot>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let (gpu, width, vocabulary) = (self.cuda.gpu(), self.hidden.width(), self.head.rows());
        let to_hidden = to_hidden.map(|slot| gradients.place(gpu, slot, NAME)).transpose()?;
        let mut to_head = to_head.map(|slot| gradients.weight_place(slot)).transpose()?;
        // The loss of a piece that is computed again has been counted.
        let unread = gpu.allocate(size_of::<LossTotals>(), NAME)?;
        gpu.clear(unread.slice())?;
        for rows in self.pieces() {
            let slopes = match kept {
                Some(kept) => kept.clone(),
                None => self.logits(&rows, true, unread.slice())?,
            };
            let (slopes, hidden) = (slopes.cuda(NAME, Form::Bf16)?, self.hidden.rows_view(rows.clone())?);
            if let Some((place, first)) = &mut to_head {
                let operands =
                    [Operand::columns(slopes, self.stride), Operand::rows(hidden.cuda(NAME, Form::Bf16)?, width)];
                weight_gradient(&self.cuda, (place, *first), operands, [vocabulary, width, rows.len()])?;
                *first = false;
            }
            if let Some(place) = &to_hidden {
                let head = rows_of(gpu, &self.head)?;
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
