//! Gated feed-forward blocks of which each row goes through some: `out[i] += sum over e in S_i of p_ie * down_e(act(gate_e
//! x_i) * up_e x_i)`, in ascending order of `e`, so that a row's sum does not depend on the rows beside it.
//!
//! On the processor the rows of an expert are gathered and go through it together. On a graphics card nothing of the routing
//! comes to the host: few rows are products of one row each that look their expert up, many are sorted by expert there.

use ironloom_kernels::{self as kernels, Buffer, Form, Gpu, Slice, WeightLayout};

use super::{
    Activation, Projection, RouterLosses, Routing, RowWeights, add::owned, gated_linear, gather_rows, linear,
    route_experts, route_experts::Place, router_losses, scatter_add_rows,
};
use crate::{
    Context, Error, Path, Result, Tensor, Weight,
    error::{expect_count, expect_shape},
    weight::CudaMatrix,
};

/// The weights of one expert, without biases, and the adapters beside them.
#[derive(Clone, Copy, Debug)]
pub struct ExpertWeights<'a> {
    /// `[inner width, width]`.
    pub gate: Projection<'a>,
    /// `[inner width, width]`.
    pub up: Projection<'a>,
    /// `[width, inner width]`.
    pub down: Projection<'a>,
}

impl<'a> ExpertWeights<'a> {
    /// Gate, up and down.
    pub(super) fn all(&self) -> [Projection<'a>; 3] {
        [self.gate, self.up, self.down]
    }
}

/// A routed layer of a training pass.
#[derive(Clone, Copy, Debug)]
pub struct RoutedTraining<'a> {
    /// The router's logits, `[n, experts]`.
    pub logits: &'a Tensor,
    /// Experts of a row.
    pub per_row: usize,
    /// Whether the chosen experts' probabilities are divided by their sum.
    pub normalize: bool,
    /// The weights of the router's own losses.
    pub losses: RouterLosses,
    /// Their factor; on a graphics card that of the tape's figures.
    pub scale: f32,
    /// The experts.
    pub experts: &'a [ExpertWeights<'a>],
    /// The gate's activation.
    pub activation: Activation,
}

/// `residual [n, width]` plus what the experts that the logits choose make of `x [n, width]`; the router's losses go to the tape.
/// Has a gradient for all of them, the experts' weights and their adapters.
///
/// Adapters leave out elements of the rows by expert, drawn from the stream of the first expert's adapter where it has one.
///
/// # Errors
/// A shape does not fit, or on a graphics card experts are neither of one arena nor stacks ([`Weight::stack`]), or some of them
/// have an adapter that others lack.
pub fn routed_training(cx: &Context, residual: Tensor, x: &Tensor, layer: &RoutedTraining<'_>) -> Result<Tensor> {
    if let Some(gpu) = cx.gpu() {
        return super::cuda::experts::routed(cx, gpu, &residual, x, layer);
    }
    let RoutedTraining { logits, per_row, normalize, losses, scale, experts, activation } = *layer;
    let routing = route_experts(cx, logits, per_row, normalize)?;
    router_losses(cx, logits, &routing, losses, scale)?;
    routed_experts(cx, residual, x, &routing, experts, activation)
}

const NAME: &str = "routed experts";

/// `out [n, width]` plus what the experts of `routing` make of `x [n, width]`; writes into `out` when nothing else shares it. On a
/// graphics card the experts' weights are stacks, see [`Weight::stack`].
///
/// # Errors
/// A shape does not fit, the routing names an expert that is not there, or experts on a graphics card have adapters.
pub fn routed_experts(
    cx: &Context,
    out: Tensor,
    x: &Tensor,
    routing: &Routing,
    experts: &[ExpertWeights<'_>],
    activation: Activation,
) -> Result<Tensor> {
    expect_count(NAME, "the number of routed rows", x.rows(), routing.rows())?;
    match (routing.place(), cx.gpu()) {
        (Place::Cpu { experts: chosen, weights }, None) => {
            on_cpu(cx, out, x, routing.per_row(), chosen, weights, experts, activation)
        }
        (Place::Cuda { experts: chosen, weights, .. }, Some(gpu)) => {
            cx.without_gradient(NAME)?;
            if experts.iter().flat_map(ExpertWeights::all).any(|projection| projection.adapter.is_some()) {
                let operation = "adapters of routed experts outside of a training pass";
                return Err(Error::NoKernel { operation, device: "a graphics card" });
            }
            let layer = Layer {
                gpu,
                x,
                rows: x.rows(),
                per_row: routing.per_row(),
                chosen: chosen.slice(),
                weights: weights.slice(),
                count: experts.len(),
                gate: Stack::new(experts.iter().map(|expert| expert.gate.weight))?,
                up: Stack::new(experts.iter().map(|expert| expert.up.weight))?,
                down: Stack::new(experts.iter().map(|expert| expert.down.weight))?,
                activation,
            };
            layer.check(&out)?;
            let out = owned(gpu, out, NAME)?;
            match cx.path {
                Path::Few => layer.few(&out)?,
                Path::Many => layer.many(&out)?,
            }
            Ok(out)
        }
        (Place::Cpu { .. }, Some(_)) => {
            Err(Error::Device { operation: NAME, expected: "a graphics card", found: "a routing on the processor" })
        }
        (Place::Cuda { .. }, None) => {
            Err(Error::Device { operation: NAME, expected: "the processor", found: "a routing on a graphics card" })
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn on_cpu(
    cx: &Context,
    mut out: Tensor,
    x: &Tensor,
    per_row: usize,
    chosen: &[u32],
    weights: &Tensor,
    experts: &[ExpertWeights<'_>],
    activation: Activation,
) -> Result<Tensor> {
    let streams = experts.first().map(|first| first.all().map(|projection| projection.adapter.map(|low| low.stream)));
    let mut rows_before = 0;
    for (number, expert) in experts.iter().enumerate() {
        let slots = chosen.iter().enumerate().filter(|(_, chosen)| **chosen as usize == number);
        let (rows, places): (Vec<u32>, Vec<u32>) =
            slots.map(|(slot, _)| ((slot / per_row) as u32, slot as u32)).unzip();
        if rows.is_empty() {
            continue;
        }
        let gathered;
        let input = match rows.len() == x.rows() {
            true => x,
            false => {
                gathered = gather_rows(cx, x, &rows)?;
                &gathered
            }
        };
        let [mut gate, mut up, mut down] = expert.all();
        for (projection, stream) in [&mut gate, &mut up, &mut down].into_iter().zip(streams.unwrap_or_default()) {
            if let Some(adapter) = &mut projection.adapter {
                adapter.stream = stream.unwrap_or(adapter.stream);
                adapter.rows_before = rows_before;
            }
        }
        rows_before += rows.len();
        let inner = gated_linear(cx, input, [gate, up], activation)?;
        let y = linear(cx, &inner, down)?;
        out = scatter_add_rows(cx, out, &rows, &y, RowWeights { weights, places: &places })?;
    }
    Ok(out)
}

/// Matrices of equal shape and format, one after the other.
pub(super) struct Stack<'a> {
    first: &'a CudaMatrix,
    pub(super) whole: Slice<'a>,
}

impl<'a> Stack<'a> {
    pub(super) fn new(weights: impl Iterator<Item = &'a Weight>) -> Result<Self> {
        let matrices = weights.map(|weight| weight.as_cuda(NAME)).collect::<Result<Vec<_>>>()?;
        let Some(first) = matrices.first().copied() else {
            return Err(Error::Count { operation: NAME, what: "the number of experts", expected: 1, found: 0 });
        };
        let address = first.slice()?.address();
        for (number, matrix) in matrices.iter().enumerate() {
            let follows = matrix.slice()?.address() == address + (number * first.bytes) as u64;
            if !follows || (matrix.layout, matrix.rows, matrix.cols) != (first.layout, first.rows, first.cols) {
                return Err(Error::Device {
                    operation: NAME,
                    expected: "one piece of memory, made by `Weight::stack`",
                    found: "elsewhere",
                });
            }
        }
        Ok(Self { first, whole: first.buffer.part(first.offset, first.bytes * matrices.len())? })
    }

    /// All matrices as rows of bfloat16, and the elements from one to the next; no buffer where they lie so already.
    pub(super) fn bf16(&self, gpu: &Gpu, count: usize) -> Result<(Option<Buffer>, usize)> {
        let CudaMatrix { layout, rows, cols, bytes, .. } = *self.first;
        let stride = rows * WeightLayout::padded_cols(cols);
        if bf16_layout(layout) {
            return Ok((None, stride));
        }
        let out = gpu.allocate(Form::Bf16.bytes(count, stride)?, "unpacked weights of experts")?;
        for expert in 0..count {
            let call = kernels::Dequantize {
                matrix: self.whole.part(expert * bytes, bytes)?,
                layout,
                rows,
                cols,
                first_row: 0,
                count: rows,
                out: out.part(expert * stride * 2, stride * 2)?,
            };
            kernels::dequantize(gpu, &call)?;
        }
        Ok((Some(out), stride))
    }
}

fn bf16_layout(layout: WeightLayout) -> bool {
    layout == WeightLayout::Tiles(kernels::TileFormat::Bf16)
}

/// One call on a graphics card.
struct Layer<'a> {
    gpu: &'a Gpu,
    x: &'a Tensor,
    rows: usize,
    per_row: usize,
    chosen: Slice<'a>,
    weights: Slice<'a>,
    count: usize,
    gate: Stack<'a>,
    up: Stack<'a>,
    down: Stack<'a>,
    activation: Activation,
}

impl Layer<'_> {
    fn check(&self, out: &Tensor) -> Result<()> {
        let (inner, width) = (self.gate.first.rows, self.gate.first.cols);
        expect_shape(NAME, "the input", [self.rows, width], self.x.shape())?;
        expect_shape(NAME, "the sum", [self.rows, self.down.first.rows], out.shape())?;
        expect_count(NAME, "the rows of up", inner, self.up.first.rows)?;
        expect_count(NAME, "the columns of up", width, self.up.first.cols)?;
        expect_count(NAME, "the columns of down", inner, self.down.first.cols)
    }

    fn few(&self, out: &Tensor) -> Result<()> {
        let (inner, width) = (self.gate.first.rows, self.gate.first.cols);
        let (WeightLayout::Tiles(format), WeightLayout::Tiles(down_format)) =
            (self.gate.first.layout, self.down.first.layout)
        else {
            return Err(Error::NoKernel { operation: "routed experts of this type", device: "a graphics card" });
        };
        if self.up.first.layout != self.gate.first.layout {
            return Err(Error::NoKernel {
                operation: "experts with gate and up of two types",
                device: "a graphics card",
            });
        }
        let slots = self.rows * self.per_row;
        let between = Tensor::allocate(self.gpu, Form::Split, [slots, inner], NAME)?;
        let gated = kernels::LinearRoutedGated {
            x: self.x.cuda(NAME, Form::Split)?,
            n: self.rows,
            cols: width,
            format,
            gate: self.gate.whole,
            up: self.up.whole,
            experts: self.count,
            rows: inner,
            ids: self.chosen,
            per_row: self.per_row,
            activation: self.activation,
            out: between.cuda(NAME, Form::Split)?,
        };
        kernels::linear_routed_gated(self.gpu, &gated)?;
        let down = kernels::LinearRoutedDown {
            x: between.cuda(NAME, Form::Split)?,
            n: self.rows,
            cols: inner,
            format: down_format,
            down: self.down.whole,
            experts: self.count,
            rows: self.down.first.rows,
            ids: self.chosen,
            gates: self.weights,
            per_row: self.per_row,
            add: true,
            out: out.cuda(NAME, Form::F32)?,
        };
        Ok(kernels::linear_routed_down(self.gpu, &down)?)
    }

    fn many(&self, out: &Tensor) -> Result<()> {
        let (gpu, rows, per_row, experts) = (self.gpu, self.rows, self.per_row, self.count);
        let (inner, width) = (self.gate.first.rows, self.gate.first.cols);
        let slots = rows * per_row;
        let numbers = |count: usize| gpu.allocate(4 * count, NAME);
        let (places, sources, offsets) = (numbers(slots)?, numbers(slots)?, numbers(experts + 1)?);
        let sort = kernels::RoutedSort {
            ids: self.chosen,
            places: places.slice(),
            sources: sources.slice(),
            offsets: offsets.slice(),
            rows,
            per_row,
            experts,
        };
        kernels::routed_sort(gpu, &sort)?;
        let between = Tensor::allocate(gpu, Form::Bf16, [slots, inner], NAME)?;
        let (gate, expert_stride) = self.gate.bf16(gpu, experts)?;
        let (up, _) = self.up.bf16(gpu, experts)?;
        let gated = kernels::RoutedGated {
            x: self.x.cuda(NAME, Form::Bf16)?,
            x_stride: width,
            sources: sources.slice(),
            offsets: offsets.slice(),
            gate: gate.as_ref().map_or(self.gate.whole, Buffer::slice),
            up: up.as_ref().map_or(self.up.whole, Buffer::slice),
            weight_stride: WeightLayout::padded_cols(width),
            expert_stride,
            out: between.cuda(NAME, Form::Bf16)?,
            out_stride: inner,
            activation: self.activation,
            rows,
            per_row,
            experts,
            outputs: inner,
            inputs: width,
        };
        kernels::routed_gated(gpu, &gated)?;
        drop((gate, up));
        let y = Tensor::allocate(gpu, Form::F32, [slots, width], NAME)?;
        let (down, expert_stride) = self.down.bf16(gpu, experts)?;
        let call = kernels::RoutedDown {
            x: between.cuda(NAME, Form::Bf16)?,
            x_stride: inner,
            offsets: offsets.slice(),
            weight: down.as_ref().map_or(self.down.whole, Buffer::slice),
            weight_stride: WeightLayout::padded_cols(inner),
            expert_stride,
            out: y.cuda(NAME, Form::F32)?,
            rows,
            per_row,
            experts,
            outputs: width,
            inputs: inner,
        };
        kernels::routed_down(gpu, &call)?;
        let combine = kernels::RoutedCombine {
            y: y.cuda(NAME, Form::F32)?,
            places: places.slice(),
            gates: self.weights,
            out: out.cuda(NAME, Form::F32)?,
            rows,
            per_row,
            width,
        };
        Ok(kernels::routed_combine(gpu, &combine)?)
    }
}
