//! Norms, gated activations and look-ups.

use ironloom_kernels::{self as kernels, Form, Gpu};

use super::super::Activation;
use crate::{Context, Gradients, Indices, Result, Tensor, kept::Recipe, tape::Slot, tensor::CudaRows};

/// `rmsnorm(x)`, recorded. Where whole rows are normed a rounded copy of them is what stays until the way back, and the norm of
/// that copy is made there for whoever needs it.
pub(in crate::ops) fn rmsnorm(cx: &Context, gpu: &Gpu, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
    let (form, shape) = (cx.operand_form(), *x.shape());
    // Its rows may lie apart.
    if x.form() != Some(Form::F32) {
        x.cuda("rmsnorm", Form::F32)?;
    }
    let Some((tape, [to_x, to_weight])) = cx.slots([x, weight]) else {
        return normed(gpu, [x, weight], epsilon, form, None)?.reshape(shape);
    };
    let (gpu, weight) = (gpu.clone(), weight.clone());
    let (x, out) = if x.width() == weight.width() {
        let copy = Tensor::allocate(&gpu, Form::Bf16, [x.rows(), x.width()], "rmsnorm")?;
        let out = normed(&gpu, [x, &weight], epsilon, form, Some(&copy))?.reshape(shape)?;
        let (gpu, weight, x) = (gpu.clone(), weight.clone(), copy.clone());
        (copy, out.made_by(Recipe::new(move || normed(&gpu, [&x, &weight], epsilon, form, None))))
    } else {
        (x.clone(), normed(&gpu, [x, &weight], epsilon, form, None)?.reshape(shape)?)
    };
    tape.record(&out, move |gradient, gradients| {
        norm_back(&gpu, gradient, [&x, &weight], epsilon, [to_x.as_ref(), to_weight.as_ref()], gradients)
    });
    Ok(out)
}

fn normed(gpu: &Gpu, [x, weight]: [&Tensor; 2], epsilon: f32, form: Form, copy: Option<&Tensor>) -> Result<Tensor> {
    const NAME: &str = "rmsnorm";
    let (rows, width, place) = (x.rows(), weight.width(), x.cuda_rows(NAME)?);
    let out = Tensor::allocate(gpu, form, [rows, x.width()], NAME)?;
    let call = kernels::RmsNorm {
        x: place.slice,
        x_form: place.form,
        x_stride: place.stride,
        weight: weight.cuda(NAME, Form::F32)?,
        out: out.cuda(NAME, form)?,
        form,
        copy: copy.map(|copy| copy.cuda(NAME, Form::Bf16)).transpose()?,
        rows,
        runs: x.width().checked_div(width).unwrap_or(0),
        width,
        epsilon,
    };
    kernels::rmsnorm(gpu, &call)?;
    Ok(out)
}

/// Records `out = residual + rmsnorm(x)`.
pub(in crate::ops) fn record_rmsnorm_add(
    cx: &Context,
    gpu: &Gpu,
    residual: &Tensor,
    [x, weight]: [&Tensor; 2],
    epsilon: f32,
    out: &Tensor,
) {
    let Some((tape, [to_residual, to_x, to_weight])) = cx.slots([residual, x, weight]) else { return };
    let (gpu, x, weight) = (gpu.clone(), x.clone(), weight.clone());
    tape.record(out, move |gradient, gradients| {
        if let Some(slot) = &to_residual {
            gradients.add(slot, gradient.clone())?;
        }
        norm_back(&gpu, gradient, [&x, &weight], epsilon, [to_x.as_ref(), to_weight.as_ref()], gradients)
    });
}

/// Records `out = residual + y / (1 + e^-gate)`, row by row.
pub(in crate::ops) fn record_gated_rows(cx: &Context, gpu: &Gpu, [residual, y, gate]: [&Tensor; 3], out: &Tensor) {
    const NAME: &str = "add gated rows";
    let Some((tape, [to_residual, to_y, to_gate])) = cx.slots([residual, y, gate]) else { return };
    let (gpu, y, gate) = (gpu.clone(), y.clone(), gate.clone());
    tape.record(out, move |gradient, gradients| {
        if let Some(slot) = &to_residual {
            gradients.add(slot, gradient.clone())?;
        }
        let (rows, width) = (y.rows(), y.width());
        let d_y = Tensor::allocate(&gpu, Form::Bf16, [rows, width], NAME)?;
        // A product reads eight columns at a time.
        let d_gate = Tensor::allocate(&gpu, Form::Bf16, [rows, 8], NAME)?;
        let call = kernels::GatedRowsBackward {
            gradient: gradient.cuda(NAME, Form::F32)?,
            y: y.cuda(NAME, Form::F32)?,
            gate: gate.cuda(NAME, Form::F32)?,
            y_gradient: d_y.cuda(NAME, Form::Bf16)?,
            gate_gradient: d_gate.cuda(NAME, Form::Bf16)?,
            rows,
            width,
        };
        kernels::gated_rows_backward(&gpu, &call)?;
        if let Some(slot) = &to_y {
            gradients.put(slot, d_y);
        }
        if let Some(slot) = &to_gate {
            gradients.put(slot, d_gate.columns(0..1)?);
        }
        Ok(())
    });
}

fn norm_back(
    gpu: &Gpu,
    gradient: &Tensor,
    [x, weight]: [&Tensor; 2],
    epsilon: f32,
    [to_x, to_weight]: [Option<&Slot>; 2],
    gradients: &mut Gradients,
) -> Result<()> {
    const NAME: &str = "rmsnorm";
    let (rows, row_width, width) = (x.rows(), x.width(), weight.width());
    let (from, g) = (x.cuda_rows(NAME)?, gradient.cuda_rows(NAME)?);
    let before = to_x.and_then(|slot| gradients.take_slot(slot));
    // In place where nothing else reads what there was.
    let out = match &before {
        Some(before) if before.is_unique() => before.clone(),
        _ => Tensor::allocate(gpu, Form::F32, [rows, row_width], NAME)?,
    };
    let rounded = Tensor::allocate(gpu, Form::Bf16, [rows, row_width], NAME)?;
    let partials = gpu.allocate(kernels::rmsnorm_backward_workspace(rows, row_width / width.max(1), width)?, NAME)?;
    let place = to_weight.map(|slot| gradients.weight_place(slot)).transpose()?;
    let weight_gradient = match &place {
        Some((place, first)) => Some(kernels::NormWeightGradient {
            out: place.cuda(NAME, Form::F32)?,
            add: !first,
            partials: partials.slice(),
        }),
        None => None,
    };
    let call = kernels::RmsNormBackward {
        x: from.slice,
        x_form: from.form,
        x_stride: from.stride,
        weight: weight.cuda(NAME, Form::F32)?,
        gradient: g.slice,
        gradient_form: g.form,
        gradient_stride: g.stride,
        residual: before.as_ref().map(|before| before.cuda(NAME, Form::F32)).transpose()?,
        out: out.cuda(NAME, Form::F32)?,
        out_form: Form::F32,
        out_stride: row_width,
        operand: Some(rounded.cuda(NAME, Form::Bf16)?),
        weight_gradient,
        rows,
        runs: row_width / width.max(1),
        width,
        epsilon,
    };
    kernels::rmsnorm_backward(gpu, &call)?;
    if let Some(slot) = to_x {
        gradients.put(slot, out.rounded_by(&rounded)?.reshape(slot.shape())?);
    }
    Ok(())
}

/// `act(gate) * up` in `form`.
pub(in crate::ops) fn gated_activation(
    gpu: &Gpu,
    [gate, up]: [&Tensor; 2],
    activation: Activation,
    form: Form,
) -> Result<Tensor> {
    const NAME: &str = "gated activation";
    let (rows, width) = (gate.rows(), gate.width());
    let (gate_rows, up_rows) = (gate.cuda_rows(NAME)?, up.cuda_rows(NAME)?);
    let out = Tensor::allocate(gpu, form, [rows, width], NAME)?;
    if gate_rows.form != up_rows.form {
        up.cuda(NAME, gate_rows.form)?;
    }
    let call = kernels::GatedActivation {
        gate: gate_rows.slice,
        gate_stride: gate_rows.stride,
        up: up_rows.slice,
        up_stride: up_rows.stride,
        input_form: gate_rows.form,
        out: out.cuda(NAME, form)?,
        form,
        rows,
        width,
        activation,
    };
    kernels::gated_activation(gpu, &call)?;
    Ok(out)
}

/// Records `out = act(gate) * up`, which is made again from both.
pub(in crate::ops) fn record_gated_activation(
    cx: &Context,
    gpu: &Gpu,
    [gate, up]: [&Tensor; 2],
    activation: Activation,
    out: Tensor,
) -> Tensor {
    const NAME: &str = "gated activation";
    let Some((tape, [to_gate, to_up])) = cx.slots([gate, up]) else { return out };
    let (gpu, gate, up) = (gpu.clone(), gate.clone(), up.clone());
    let form = cx.operand_form();
    let recipe = {
        let (gpu, gate, up) = (gpu.clone(), gate.clone(), up.clone());
        Recipe::new(move || gated_activation(&gpu, [&gate, &up], activation, form))
    };
    // Where the way back follows at once, what is there may stay.
    let out = if tape.runs_again() { out } else { out.made_by(recipe) };
    tape.record(&out, move |gradient, gradients| {
        let (rows, width) = (gate.rows(), gate.width());
        let g = gradient.operand(&gpu, NAME)?;
        // Both are columns of one piece of memory, which takes their gradients once they are all that hold it.
        if let (Some(slot), Some(whole)) = (&to_gate, Tensor::whole_of([&gate, &up])) {
            gradients.write_over(slot, whole);
        }
        let d_gate = destination(&gpu, to_gate.as_ref(), [rows, width], gradients, NAME)?;
        let d_up = destination(&gpu, to_up.as_ref(), [rows, width], gradients, NAME)?;
        let (gate, up) = (gate.cuda_rows(NAME)?, up.cuda_rows(NAME)?);
        let (d_gate, d_up) = (d_gate.cuda_rows(NAME)?, d_up.cuda_rows(NAME)?);
        let call = kernels::GatedActivationBackward {
            gate: columns(gate),
            up: columns(up),
            gradient: columns(g.cuda_rows(NAME)?),
            gate_gradient: columns(d_gate),
            up_gradient: columns(d_up),
            product: None,
            rows,
            width,
            activation,
        };
        Ok(kernels::gated_activation_backward(&gpu, &call)?)
    });
    out
}

pub(super) fn columns(rows: CudaRows<'_>) -> kernels::Columns<'_> {
    kernels::Columns { slice: rows.slice, stride: rows.stride }
}

/// Where a gradient in bfloat16 goes; memory that nobody reads where none is asked for.
pub(super) fn destination(
    gpu: &Gpu,
    slot: Option<&Slot>,
    [rows, width]: [usize; 2],
    gradients: &mut Gradients,
    operation: &'static str,
) -> Result<Tensor> {
    match slot {
        Some(slot) => gradients.place(gpu, slot, operation),
        None => Tensor::allocate(gpu, Form::Bf16, [rows, width], operation),
    }
}

/// Records `out[i] = table[ids[i]] * scale`.
pub(in crate::ops) fn record_embedding(
    cx: &Context,
    gpu: &Gpu,
    table: &Tensor,
    ids: &Indices,
    scale: f32,
    out: &Tensor,
) {
    const NAME: &str = "embedding";
    let Some((tape, [Some(slot)])) = cx.slots([table]) else { return };
    let (gpu, ids, vocabulary, width) = (gpu.clone(), ids.clone(), table.rows(), table.width());
    tape.record(out, move |gradient, gradients| {
        let (place, first) = gradients.weight_place(&slot)?;
        let workspace = gpu.allocate(kernels::embedding_backward_workspace(ids.len(), width)?, NAME)?;
        let g = gradient.cuda_rows(NAME)?;
        let call = kernels::EmbeddingBackward {
            ids: ids.cuda(NAME)?,
            gradient: g.slice,
            form: g.form,
            scale,
            table_gradient: place.cuda(NAME, Form::F32)?,
            clear: first,
            workspace: workspace.slice(),
            rows: ids.len(),
            vocabulary,
            width,
        };
        Ok(kernels::embedding_backward(&gpu, &call)?)
    });
}
