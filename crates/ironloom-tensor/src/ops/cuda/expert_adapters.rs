//! Low-rank adapters beside a kind of routed experts' matrices: `y[p] += scale * dropout(x[p]) A_e^T B_e^T`, e the expert of
//! place p.
//!
//! The factors of all experts lie at equal distances in their arena, so each product is one launch, as those of the experts' own
//! matrices are.

use std::cell::OnceCell;

use ironloom_kernels::{self as kernels, Form, Gpu, Output, Slice};

use super::{
    super::{Projection, linear::LowRank},
    experts::{NAME, distance, twin},
    linear::{Dropout, check_rank, sum_of},
};
use crate::{Context, Error, Gradients, Result, Tensor, Weight, tape::Slot};

/// The places of a layer's rows, by expert.
#[derive(Clone, Copy)]
pub(super) struct Places<'a> {
    pub gpu: &'a Gpu,
    /// i32 `[places]`: the row of each.
    pub sources: Slice<'a>,
    /// i32 `[experts + 1]`: the first place of each expert.
    pub offsets: Slice<'a>,
    pub places: usize,
    pub experts: usize,
}

/// Matrices `[outputs, inputs]` of all experts, one for each, in bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Grouped<'a> {
    pub weight: Slice<'a>,
    /// Elements from one row of a matrix to the next.
    pub stride: usize,
    /// Elements from one expert's matrix to the next.
    pub expert_stride: usize,
    pub outputs: usize,
    pub inputs: usize,
}

impl Places<'_> {
    /// `out[p] (+)= x[p] W_e^T`, of the rows `x` themselves where they are `by_row`.
    pub(super) fn product(
        &self,
        x: &Tensor,
        by_row: bool,
        matrices: &Grouped<'_>,
        out: &Tensor,
        add: bool,
    ) -> Result<()> {
        let (form, to) = (out.form().unwrap_or(Form::Bf16), out.cuda_rows(NAME)?);
        let call = kernels::GroupedProduct {
            x: x.cuda(NAME, Form::Bf16)?,
            x_rows: x.rows(),
            x_stride: x.width(),
            sources: by_row.then_some(self.sources),
            offsets: self.offsets,
            weight: matrices.weight,
            weight_stride: matrices.stride,
            expert_stride: matrices.expert_stride,
            out: to.slice,
            form,
            add,
            out_stride: to.stride,
            places: self.places,
            experts: self.experts,
            outputs: matrices.outputs,
            inputs: matrices.inputs,
        };
        Ok(kernels::grouped_product(self.gpu, &call)?)
    }

    /// `dx[p] (+)= dy[p] W_e`.
    pub(super) fn input_gradient(&self, dy: &Tensor, matrices: &Grouped<'_>, dx: &Tensor, add: bool) -> Result<()> {
        let (form, dy) = (dx.form().unwrap_or(Form::Bf16), dy.cuda_rows(NAME)?);
        let call = kernels::GroupedInputGradient {
            dy: dy.slice,
            dy_stride: dy.stride,
            offsets: self.offsets,
            weight: matrices.weight,
            weight_stride: matrices.stride,
            expert_stride: matrices.expert_stride,
            dx: dx.cuda(NAME, form)?,
            form,
            add,
            dx_stride: dx.width(),
            places: self.places,
            experts: self.experts,
            outputs: matrices.outputs,
            inputs: matrices.inputs,
        };
        Ok(kernels::grouped_input_gradient(self.gpu, &call)?)
    }

    /// `dW_e (+)= sum over places p of expert e of dy[p] x[p]^T`, from the first expert's gradient `place` on, over those of the
    /// others; set where it is the `first`.
    pub(super) fn weight_gradient(
        &self,
        dy: &Tensor,
        x: &Tensor,
        (place, first): (&Tensor, bool),
        expert_stride: usize,
    ) -> Result<()> {
        let (outputs, inputs) = (dy.width(), x.width());
        let (places, experts) = (self.places, self.experts);
        let bytes = kernels::grouped_weight_gradient_workspace(self.gpu, places, experts, outputs, inputs)?;
        let workspace = self.gpu.allocate(bytes, NAME)?;
        let dy = dy.cuda_rows(NAME)?;
        let call = kernels::GroupedWeightGradient {
            dy: dy.slice,
            dy_stride: dy.stride,
            x: x.cuda(NAME, Form::Bf16)?,
            x_stride: inputs,
            offsets: self.offsets,
            gradient: place.cuda(NAME, Form::F32)?,
            gradient_stride: inputs,
            expert_stride,
            output: if first { Output::F32 } else { Output::AddF32 },
            workspace: workspace.slice(),
            places,
            experts,
            outputs,
            inputs,
        };
        Ok(kernels::grouped_weight_gradient(self.gpu, &call)?)
    }

    /// The rows `x` by place.
    pub(super) fn pick(&self, x: &Tensor) -> Result<Tensor> {
        let picked = Tensor::allocate(self.gpu, Form::Bf16, [self.places, x.width()], NAME)?;
        // Two numbers in bfloat16 move as one of the kernel's.
        let gather = kernels::GatherRows {
            x: x.cuda(NAME, Form::Bf16)?,
            x_rows: x.rows(),
            rows: self.sources,
            out: picked.cuda(NAME, Form::Bf16)?,
            count: self.places,
            width: x.width() / 2,
        };
        kernels::gather_rows(self.gpu, &gather)?;
        Ok(picked)
    }
}

/// The adapters of one kind of matrix of all experts.
pub(super) struct ExpertAdapters {
    /// A `[rank, inputs]` and B `[outputs, rank]` of each expert.
    factors: Vec<[Weight; 2]>,
    slots: Vec<[Option<Slot>; 2]>,
    /// Elements from one expert's factor to the next one's.
    distance: usize,
    scale: f32,
    dropout: Dropout,
    /// `scale * dropout(x) A^T` by place.
    inner: OnceCell<Tensor>,
}

impl ExpertAdapters {
    /// Those beside `projections`, one for each expert, if there are any.
    pub(super) fn new<'a>(cx: &Context, projections: impl Iterator<Item = Projection<'a>>) -> Result<Option<Self>> {
        let adapters: Vec<Option<LowRank<'_>>> = projections.map(|projection| projection.adapter).collect();
        let misplaced = |expected, found| Err(Error::Device { operation: NAME, expected, found });
        let held: Vec<LowRank<'_>> = adapters.iter().flatten().copied().collect();
        let Some(first) = held.first() else { return Ok(None) };
        if held.len() < adapters.len() {
            return misplaced("adapters of all experts of a layer or of none", "some experts without");
        }
        check_rank(first)?;
        let alike = |adapter: &LowRank<'_>| {
            let sides =
                |adapter: &LowRank<'_>| (adapter.a.rows(), adapter.a.cols(), adapter.b.rows(), adapter.b.cols());
            sides(adapter) == sides(first) && (adapter.scale, adapter.dropout) == (first.scale, first.dropout)
        };
        if !held.iter().all(alike) {
            return misplaced("adapters of one rank and scale", "different ones");
        }
        let factors: Vec<[Weight; 2]> = held.iter().map(|adapter| [adapter.a.clone(), adapter.b.clone()]).collect();
        let Some(distance) = distance(&factors)? else {
            return misplaced("adapters at equal distances in one arena", "elsewhere");
        };
        let slot = |weight: &Weight| weight.as_dense().and_then(|values| cx.slot(values));
        Ok(Some(Self {
            slots: factors.iter().map(|[a, b]| [slot(a), slot(b)]).collect(),
            factors,
            distance,
            scale: first.scale,
            dropout: Dropout::new(cx, first)?,
            inner: OnceCell::new(),
        }))
    }

    /// A of all experts, or B.
    fn factor(&self, number: usize) -> Result<Grouped<'_>> {
        let first = &self.factors[0][number];
        let (outputs, inputs) = (first.rows(), first.cols());
        Ok(Grouped { weight: twin(first)?, stride: inputs, expert_stride: self.distance, outputs, inputs })
    }

    /// Numbers by place and element of the rank, made by `fill` in single precision: `scale` times them in bfloat16.
    fn scaled(&self, places: &Places<'_>, fill: impl FnOnce(&Tensor) -> Result<()>) -> Result<Tensor> {
        let rank = self.factors[0][0].rows();
        let wide = Tensor::allocate(places.gpu, Form::F32, [places.places, rank], NAME)?;
        fill(&wide)?;
        kernels::scale(places.gpu, wide.cuda(NAME, Form::F32)?, self.scale, places.places * rank)?;
        wide.operand(places.gpu, NAME)
    }

    /// Adds to the matrices' outputs `out` for `x`, rows themselves where they are `by_row`. Without `out` it only keeps what the
    /// way back needs.
    pub(super) fn forward(&self, places: &Places<'_>, x: &Tensor, by_row: bool, out: Option<&Tensor>) -> Result<()> {
        let picked;
        // What is left out is drawn by place.
        let (x, by_row) = match (by_row, self.dropout.is_none()) {
            (true, false) => {
                picked = places.pick(x)?;
                (&picked, false)
            }
            (by_row, _) => (x, by_row),
        };
        let masked = self.dropout.mask(places.gpu, x)?;
        let inner = self.scaled(places, |wide| places.product(&masked, by_row, &self.factor(0)?, wide, false))?;
        if let Some(out) = out {
            places.product(&inner, false, &self.factor(1)?, out, true)?;
        }
        let _ = self.inner.set(inner);
        Ok(())
    }

    /// Writes the gradients of B from those of the outputs, and gives those of the numbers between A and B.
    pub(super) fn back(&self, places: &Places<'_>, dy: &Tensor, gradients: &mut Gradients) -> Result<Tensor> {
        let Some(inner) = self.inner.get() else { return Err(Error::NoGradient { operation: NAME }) };
        self.write(places, 1, dy, inner, gradients)?;
        self.scaled(places, |wide| places.input_gradient(dy, &self.factor(1)?, wide, false))
    }

    /// Writes the gradients of A from what [`ExpertAdapters::back`] gave and the inputs by place.
    pub(super) fn back_to_a(
        &self,
        places: &Places<'_>,
        d_inner: &Tensor,
        x: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<()> {
        self.write(places, 0, d_inner, &self.dropout.mask(places.gpu, x)?, gradients)
    }

    /// `dx` by place plus what comes through the adapters.
    pub(super) fn add_input_gradient(&self, places: &Places<'_>, d_inner: &Tensor, dx: Tensor) -> Result<Tensor> {
        if self.dropout.is_none() {
            places.input_gradient(d_inner, &self.factor(0)?, &dx, true)?;
            return Ok(dx);
        }
        let (gpu, shape) = (places.gpu, [dx.rows(), dx.width()]);
        let through = Tensor::allocate(gpu, Form::Bf16, shape, NAME)?;
        places.input_gradient(d_inner, &self.factor(0)?, &through, false)?;
        let through = self.dropout.mask(gpu, &through)?;
        sum_of(gpu, [&dx, &through], shape)
    }

    /// The gradients of A or B of all experts, which are written together: all of them are learnt, or none.
    fn write(
        &self,
        places: &Places<'_>,
        number: usize,
        dy: &Tensor,
        x: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let mut first_place = None;
        for slots in &self.slots {
            let Some(slot) = &slots[number] else { return Ok(()) };
            let place = gradients.weight_place(slot)?;
            first_place.get_or_insert(place);
        }
        match first_place {
            Some((place, first)) => places.weight_gradient(dy, x, (&place, first), self.distance),
            None => Ok(()),
        }
    }
}
