//! Attention within documents: heads normed where the family does so, turned by their positions, and attended to.
//!
//! Without norms q and k are turned where they lie, and their gradients are turned back where the attention wrote them, in the
//! columns of the product that made them.

use ironloom_kernels::{self as kernels, Form, Gpu};

use super::{
    super::{DocumentAttentionOptions, RotatedAttention},
    figures::DocumentBounds,
    rows::destination,
};
use crate::{
    Context, Error, Gradients, Result, Tensor,
    error::{expect_count, expect_shape},
    tape::Slot,
};

const NAME: &str = "document attention";

/// What a closure keeps of a head's way from the product to the attention.
struct Turned {
    /// The product's output: what was normed.
    input: Tensor,
    /// Normed and turned.
    output: Tensor,
    norm: Option<(Tensor, f32)>,
    slot: Option<Slot>,
    to_norm: Option<Slot>,
    heads: usize,
}

/// The attention of columns `q`, `k`, `v` of one piece of memory, `[n, heads * head width]`.
pub(in crate::ops) fn rotated(
    cx: &Context,
    gpu: &Gpu,
    [q, k, v]: [&Tensor; 3],
    rotation: &RotatedAttention<'_>,
    bounds: &DocumentBounds,
) -> Result<Tensor> {
    let RotatedAttention { head_width, norms, phases, options, .. } = *rotation;
    let DocumentAttentionOptions { heads, kv_heads, scale, mask } = *options;
    let n = q.rows();
    if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
        let what = "the number of query heads, a multiple of that of kv heads,";
        return Err(Error::Count { operation: NAME, what, expected: kv_heads.max(1), found: heads });
    }
    expect_shape(NAME, "the queries", [n, heads * head_width], q.shape())?;
    expect_shape(NAME, "the keys", [n, kv_heads * head_width], k.shape())?;
    expect_shape(NAME, "the values", *k.shape(), v.shape())?;
    expect_count(NAME, "the rows of the documents", n, bounds.rows())?;
    // Heads of q and k that lie side by side are turned by one kernel, there and back.
    let together = norms.is_none() && side_by_side(q, k)?;
    if together {
        turn(gpu, q, q, heads + kv_heads, head_width, None, phases)?;
    }
    let mut sides = Vec::with_capacity(2);
    for (number, (x, heads)) in [(q, heads), (k, kv_heads)].into_iter().enumerate() {
        let norm = norms.map(|(weights, epsilon)| (weights[number], epsilon));
        let output = match norm {
            Some(_) => Tensor::allocate(gpu, Form::Bf16, [n, heads * head_width], NAME)?,
            None => x.clone(),
        };
        if !together {
            turn(gpu, x, &output, heads, head_width, norm, phases)?;
        }
        sides.push(Turned {
            input: x.clone(),
            output,
            norm: norm.map(|(weight, epsilon)| (weight.clone(), epsilon)),
            slot: cx.slot(x),
            to_norm: norm.and_then(|(weight, _)| cx.slot(weight)),
            heads,
        });
    }
    let out = Tensor::allocate(gpu, Form::Bf16, [n, heads * head_width], NAME)?;
    let log_sum_exp = Tensor::allocate(gpu, Form::F32, [heads, n], NAME)?;
    let call = Call { n, head_width, scale, heads, kv_heads };
    let rows = [&sides[0].output, &sides[1].output, v];
    let bounds = bounds.of(mask)?;
    kernels::attention_training(gpu, &call.forward(rows, &out, &log_sum_exp, bounds.slices()?)?)?;
    let to_v = cx.slot(v);
    let learns = |side: &Turned| side.slot.is_some() || side.to_norm.is_some();
    if let (Some(tape), true) = (cx.tape, to_v.is_some() || sides.iter().any(learns)) {
        let (gpu, v, kept, phases) = (gpu.clone(), v.clone(), out.clone(), phases.clone());
        tape.record(&out, move |gradient, gradients| {
            let g = gradient.operand(&gpu, NAME)?;
            let mut made = Vec::with_capacity(2);
            for side in &sides {
                let shape = [n, side.heads * head_width];
                made.push(match side.norm {
                    Some(_) => Tensor::allocate(&gpu, Form::Bf16, shape, NAME)?,
                    None => destination(&gpu, side.slot.as_ref(), shape, gradients, NAME)?,
                });
            }
            let d_v = destination(&gpu, to_v.as_ref(), [n, kv_heads * head_width], gradients, NAME)?;
            let delta = Tensor::allocate(&gpu, Form::F32, [heads, n], NAME)?;
            let [dq, dk, dv] = [made[0].cuda_rows(NAME)?, made[1].cuda_rows(NAME)?, d_v.cuda_rows(NAME)?];
            let rows = [&sides[0].output, &sides[1].output, &v];
            let backward = kernels::AttentionTrainingBackward {
                forward: call.forward(rows, &kept, &log_sum_exp, bounds.slices()?)?,
                gradient: g.cuda(NAME, Form::Bf16)?,
                gradient_stride: g.width(),
                delta: delta.cuda(NAME, Form::F32)?,
                dq: dq.slice,
                dq_stride: dq.stride,
                dk: dk.slice,
                dk_stride: dk.stride,
                dv: dv.slice,
                dv_stride: dv.stride,
            };
            kernels::attention_training_backward(&gpu, &backward)?;
            if together && side_by_side(&made[0], &made[1])? {
                return turn_back(&gpu, &made[0], heads + kv_heads, head_width, &phases);
            }
            for (side, made) in sides.iter().zip(&made) {
                side.turn_back(&gpu, made, &phases, head_width, gradients)?;
            }
            Ok(())
        });
    }
    Ok(out)
}

/// The sizes of a call.
#[derive(Clone, Copy)]
struct Call {
    n: usize,
    head_width: usize,
    scale: f32,
    heads: usize,
    kv_heads: usize,
}

impl Call {
    fn forward<'a>(
        &self,
        [q, k, v]: [&'a Tensor; 3],
        out: &'a Tensor,
        log_sum_exp: &'a Tensor,
        bounds: kernels::AttentionBounds<'a>,
    ) -> Result<kernels::AttentionTraining<'a>> {
        let [q, k, v] = [q.cuda_rows(NAME)?, k.cuda_rows(NAME)?, v.cuda_rows(NAME)?];
        Ok(kernels::AttentionTraining {
            q: q.slice,
            q_stride: q.stride,
            k: k.slice,
            k_stride: k.stride,
            v: v.slice,
            v_stride: v.stride,
            out: out.cuda(NAME, Form::Bf16)?,
            out_stride: out.width(),
            log_sum_exp: log_sum_exp.cuda(NAME, Form::F32)?,
            bounds,
            rows: self.n,
            keys: self.n,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_width: self.head_width,
            scale: self.scale,
        })
    }
}

/// Whether the columns of `second` follow those of `first` in the same rows.
fn side_by_side(first: &Tensor, second: &Tensor) -> Result<bool> {
    let (a, b) = (first.cuda_rows(NAME)?, second.cuda_rows(NAME)?);
    Ok(a.stride == b.stride && a.slice.address() + 2 * first.width() as u64 == b.slice.address())
}

/// Turns back, in its place, the gradient of heads that had no norm.
fn turn_back(gpu: &Gpu, gradient: &Tensor, heads: usize, head_width: usize, phases: &Tensor) -> Result<()> {
    let rows = gradient.cuda_rows(NAME)?;
    let call = kernels::RopeTrainingBackward {
        gradient: rows.slice,
        gradient_stride: rows.stride,
        norm: None,
        phases: phases.cuda(NAME, Form::F32)?,
        out: rows.slice,
        out_stride: rows.stride,
        rows: gradient.rows(),
        heads,
        head_width,
        half: phases.width() / 2,
    };
    Ok(kernels::rope_training_backward(gpu, &call)?)
}

/// Norms, where there is a norm, and turns `heads` heads from the first one of `x` on.
fn turn(
    gpu: &Gpu,
    x: &Tensor,
    out: &Tensor,
    heads: usize,
    head_width: usize,
    norm: Option<(&Tensor, f32)>,
    phases: &Tensor,
) -> Result<()> {
    let (from, to) = (x.cuda_rows(NAME)?, out.cuda_rows(NAME)?);
    let norm = match norm {
        Some((weight, epsilon)) => Some(kernels::HeadNorm { weight: weight.cuda(NAME, Form::F32)?, epsilon }),
        None => None,
    };
    let call = kernels::RopeTraining {
        x: from.slice,
        x_stride: from.stride,
        out: to.slice,
        out_stride: to.stride,
        norm,
        phases: phases.cuda(NAME, Form::F32)?,
        rows: x.rows(),
        heads,
        head_width,
        half: phases.width() / 2,
    };
    Ok(kernels::rope_training(gpu, &call)?)
}

impl Turned {
    /// From the gradient of what the attention read to that of what the product made.
    fn turn_back(
        &self,
        gpu: &Gpu,
        made: &Tensor,
        phases: &Tensor,
        head_width: usize,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let n = made.rows();
        let Some((weight, epsilon)) = &self.norm else { return turn_back(gpu, made, self.heads, head_width, phases) };
        let out = destination(gpu, self.slot.as_ref(), [n, made.width()], gradients, NAME)?;
        let place = self.to_norm.as_ref().map(|slot| gradients.weight_place(slot)).transpose()?;
        let partials = gpu.allocate(kernels::rope_training_workspace(head_width)?, NAME)?;
        let (g, x, to) = (made.cuda_rows(NAME)?, self.input.cuda_rows(NAME)?, out.cuda_rows(NAME)?);
        let norm = kernels::HeadNormBackward {
            norm: kernels::HeadNorm { weight: weight.cuda(NAME, Form::F32)?, epsilon: *epsilon },
            x: x.slice,
            x_stride: x.stride,
            weight_gradient: match &place {
                Some((place, first)) => Some(kernels::NormWeightGradient {
                    out: place.cuda(NAME, Form::F32)?,
                    add: !first,
                    partials: partials.slice(),
                }),
                None => None,
            },
        };
        let call = kernels::RopeTrainingBackward {
            gradient: g.slice,
            gradient_stride: g.stride,
            norm: Some(norm),
            phases: phases.cuda(NAME, Form::F32)?,
            out: to.slice,
            out_stride: to.stride,
            rows: n,
            heads: self.heads,
            head_width,
            half: phases.width() / 2,
        };
        Ok(kernels::rope_training_backward(gpu, &call)?)
    }
}
