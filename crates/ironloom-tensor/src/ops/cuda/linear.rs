//! Products: `y = x W^T`, `dx = dy W`, `dW = dy^T x`, by cuBLASLt.
//!
//! Dense weights that lie one behind the other in their arena (q, k, v; gate, up) are one matrix, in all three products.
//! Packed weights are frozen: they are unpacked to bfloat16 for the time of a product, on the way back once more.

use std::{cell::OnceCell, ops::Range};

use ironloom_kernels::{self as kernels, Buffer, Form, Gpu, Multiply, Operand, Output, Slice, WeightLayout};

use super::{
    super::linear::{LowRank, Projection, bf16_rows},
    figures::Figures,
};
use crate::{Context, CudaDevice, Error, Gradients, Result, Tensor, Weight, kept::Kept, tape::Slot};

const NAME: &str = "linear";

/// One `[n, rows]` for each projection, columns of one piece of memory in bfloat16.
pub(in crate::ops) fn many(
    cx: &Context,
    cuda: &CudaDevice,
    x: &Tensor,
    projections: &[Projection<'_>],
) -> Result<Vec<Tensor>> {
    let (gpu, n) = (cuda.gpu(), x.rows());
    let layers = Layers::new(cx, projections)?;
    let input = x.operand(gpu, NAME)?;
    let whole = Tensor::allocate(gpu, Form::Bf16, [n, layers.rows()], NAME)?;
    layers.forward(cuda, &input, &whole, None)?;
    let mut parts = Vec::with_capacity(projections.len());
    for layer in &layers.layers {
        let part = whole.columns(layer.columns.clone())?;
        if let Some(tape) = cx.tape {
            tape.note_columns(&whole, &part, layer.columns.start);
        }
        parts.push(part);
    }
    layers.record(cx, cuda, x, &input, &whole, None);
    Ok(parts)
}

/// The product in single precision, added to `residual` where there is one.
pub(in crate::ops) fn single(
    cx: &Context,
    cuda: &CudaDevice,
    residual: Option<&Tensor>,
    x: &Tensor,
    projection: Projection<'_>,
) -> Result<Tensor> {
    let gpu = cuda.gpu();
    let layers = Layers::new(cx, &[projection])?;
    let input = x.operand(gpu, NAME)?;
    let out = Tensor::allocate(gpu, Form::F32, [x.rows(), layers.rows()], NAME)?;
    if !cx.is_unread() || layers.layers.iter().any(|layer| layer.adapter.is_some()) {
        layers.forward(cuda, &input, &out, residual)?;
    }
    layers.record(cx, cuda, x, &input, &out, residual);
    Ok(out)
}

/// Layers on one input.
struct Layers {
    layers: Vec<Layer>,
}

struct Layer {
    weight: Weight,
    to_weight: Option<Slot>,
    bias: Option<Tensor>,
    to_bias: Option<Slot>,
    adapter: Option<Adapter>,
    /// Of the output.
    columns: Range<usize>,
}

/// A low-rank adapter beside a layer.
struct Adapter {
    a: Weight,
    b: Weight,
    slots: [Option<Slot>; 2],
    scale: f32,
    dropout: Dropout,
    /// `x` and `scale * dropout(x) A^T`, as a recorded product keeps them.
    kept: OnceCell<(Kept, Tensor)>,
}

/// What adapters leave out: the probability, where there is one, the stream, and the numbers of the pass with the seed.
pub(super) struct Dropout(Option<(f32, u64, Figures)>);

impl Dropout {
    pub(super) fn new(cx: &Context, adapter: &LowRank<'_>) -> Result<Self> {
        Ok(Self(match cx.tape {
            Some(tape) if adapter.dropout > 0.0 => Some((adapter.dropout, adapter.stream, tape.figures(NAME)?.clone())),
            _ => None,
        }))
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// `rows` in bfloat16 with elements left out; the same ones each time.
    pub(super) fn mask(&self, gpu: &Gpu, rows: &Tensor) -> Result<Tensor> {
        let Some((probability, stream, figures)) = &self.0 else { return Ok(rows.clone()) };
        let (n, width) = (rows.rows(), rows.width());
        let out = Tensor::allocate(gpu, Form::Bf16, [n, width], NAME)?;
        let call = kernels::Dropout {
            x: rows.cuda(NAME, Form::Bf16)?,
            x_stride: width,
            out: out.cuda(NAME, Form::Bf16)?,
            out_stride: width,
            form: Form::Bf16,
            seed: figures.seed()?,
            stream: *stream,
            probability: *probability,
            rows: n,
            width,
        };
        kernels::dropout(gpu, &call)?;
        Ok(out)
    }
}

/// The sum of tensors in bfloat16, rounded once.
pub(super) fn sum_of<'a>(
    gpu: &Gpu,
    terms: impl IntoIterator<Item = &'a Tensor>,
    [rows, width]: [usize; 2],
) -> Result<Tensor> {
    let wide = Tensor::allocate(gpu, Form::F32, [rows, width], NAME)?;
    let out = wide.cuda(NAME, Form::F32)?;
    gpu.clear(out)?;
    for term in terms {
        kernels::add(gpu, out, term.cuda(NAME, Form::Bf16)?, Form::Bf16, rows * width)?;
    }
    wide.operand(gpu, NAME)
}

/// Refuses a rank that products on a card do not take.
pub(super) fn check_rank(adapter: &LowRank<'_>) -> Result<()> {
    match adapter.a.rows() {
        rank if rank.is_multiple_of(8) => Ok(()),
        found => Err(Error::Width { operation: "an adapter on a graphics card, by its rank,", multiple: 8, found }),
    }
}

impl Adapter {
    fn new(cx: &Context, adapter: &LowRank<'_>) -> Result<Self> {
        check_rank(adapter)?;
        let slot = |weight: &Weight| weight.as_dense().and_then(|values| cx.slot(values));
        Ok(Self {
            a: adapter.a.clone(),
            b: adapter.b.clone(),
            slots: [slot(adapter.a), slot(adapter.b)],
            scale: adapter.scale,
            dropout: Dropout::new(cx, adapter)?,
            kept: OnceCell::new(),
        })
    }

    /// `scale * a b` in bfloat16, `[n, rank]`.
    fn inner(&self, cuda: &CudaDevice, a: Operand<'_>, b: Operand<'_>, [n, summed]: [usize; 2]) -> Result<Tensor> {
        let (gpu, rank) = (cuda.gpu(), self.a.rows());
        let wide = Tensor::allocate(gpu, Form::F32, [n, rank], NAME)?;
        let out = wide.cuda(NAME, Form::F32)?;
        let output = Output::F32;
        cuda.multiply(&Multiply { a, b, out, out_stride: rank, output, start: None, size: [n, rank, summed] })?;
        kernels::scale(gpu, out, self.scale, n * rank)?;
        wide.operand(gpu, NAME)
    }

    /// Adds to the columns `out`, `stride` apart, of a layer's output.
    fn forward(&self, cuda: &CudaDevice, x: &Tensor, (out, stride, output): (Slice<'_>, usize, Output)) -> Result<()> {
        let (gpu, n, rank) = (cuda.gpu(), x.rows(), self.a.rows());
        let masked = self.dropout.mask(gpu, x)?;
        let a = rows_of(gpu, &self.a)?;
        let b = rows_of(gpu, &self.b)?;
        let from = Operand::rows(masked.cuda(NAME, Form::Bf16)?, x.width());
        let inner = self.inner(cuda, from, Operand::columns(a.slice().0, a.slice().1), [n, x.width()])?;
        let outputs = self.b.rows();
        let call = Multiply {
            a: Operand::rows(inner.cuda(NAME, Form::Bf16)?, rank),
            b: Operand::columns(b.slice().0, b.slice().1),
            out,
            out_stride: stride,
            output,
            start: Some(out),
            size: [n, outputs, rank],
        };
        if outputs.is_multiple_of(8) {
            cuda.multiply(&call)?;
        } else if stride == outputs && output == Output::F32 {
            // Of a router or a gate, which a product adds nothing to.
            let added = Tensor::allocate(gpu, Form::F32, [n, outputs], NAME)?;
            let added = added.cuda(NAME, Form::F32)?;
            cuda.multiply(&Multiply { out: added, start: None, ..call })?;
            kernels::add(gpu, out, added, Form::F32, n * outputs)?;
        } else {
            let operation = "an adapter on a graphics card, by the layer's outputs,";
            return Err(Error::Width { operation, multiple: 8, found: outputs });
        }
        let _ = self.kept.set((x.kept(), inner));
        Ok(())
    }

    /// The gradients of A and B from that of the layer's output; that of `x` in bfloat16.
    fn back(&self, cuda: &CudaDevice, (dy, stride): (Slice<'_>, usize), gradients: &mut Gradients) -> Result<Tensor> {
        let (gpu, rank) = (cuda.gpu(), self.a.rows());
        let Some((x, inner)) = self.kept.get() else { return Err(Error::NoGradient { operation: NAME }) };
        let x = self.dropout.mask(gpu, &x.get()?)?;
        let (n, cols) = (x.rows(), x.width());
        let mut write = |slot: &Option<Slot>, a: Operand<'_>, b: Operand<'_>, rows: usize, width: usize| {
            let Some(slot) = slot else { return Ok(()) };
            let (place, first) = gradients.weight_place(slot)?;
            weight_gradient(cuda, (&place, first), [a, b], [rows, width, n])
        };
        let inner = Operand::rows(inner.cuda(NAME, Form::Bf16)?, rank);
        write(&self.slots[1], Operand::columns(dy, stride), inner, self.b.rows(), rank)?;
        let b = rows_of(gpu, &self.b)?;
        let from = Operand::rows(dy, stride);
        let d_inner = self.inner(cuda, from, Operand::rows(b.slice().0, b.slice().1), [n, self.b.rows()])?;
        let d_inner = Operand::rows(d_inner.cuda(NAME, Form::Bf16)?, rank);
        let of_a = Operand { transposed: true, ..d_inner };
        write(&self.slots[0], of_a, Operand::rows(x.cuda(NAME, Form::Bf16)?, cols), rank, cols)?;
        let a = rows_of(gpu, &self.a)?;
        let dx = Tensor::allocate(gpu, Form::Bf16, [n, cols], NAME)?;
        let call = Multiply {
            a: d_inner,
            b: Operand::rows(a.slice().0, a.slice().1),
            out: dx.cuda(NAME, Form::Bf16)?,
            out_stride: cols,
            output: Output::Bf16,
            start: None,
            size: [n, cols, rank],
        };
        cuda.multiply(&call)?;
        self.dropout.mask(gpu, &dx)
    }
}

/// Weights that are one matrix `[rows, cols]` of bfloat16.
struct Joined<'a> {
    /// Columns of the output.
    columns: Range<usize>,
    rows: Rows<'a>,
}

/// Rows of a weight as bfloat16.
pub(super) enum Rows<'a> {
    Held(Slice<'a>, usize),
    Unpacked(Buffer, usize),
}

impl Rows<'_> {
    /// Them, and the elements from one to the next.
    pub(super) fn slice(&self) -> (Slice<'_>, usize) {
        match self {
            Self::Held(slice, stride) => (*slice, *stride),
            Self::Unpacked(buffer, stride) => (buffer.slice(), *stride),
        }
    }
}

pub(super) fn rows_of<'a>(gpu: &Gpu, weight: &'a Weight) -> Result<Rows<'a>> {
    if let Some(values) = weight.as_dense() {
        let Some(twin) = values.twin_slice()? else { return Err(values.misplaced(NAME, "a graphics card")) };
        return Ok(Rows::Held(twin, weight.cols()));
    }
    let matrix = weight.as_cuda(NAME)?;
    let stride = WeightLayout::padded_cols(matrix.cols);
    Ok(match bf16_rows(gpu, matrix)? {
        Some(buffer) => Rows::Unpacked(buffer, stride),
        None => Rows::Held(matrix.slice()?, stride),
    })
}

/// Sets (`first`) or adds to a weight's gradient, `place [rows, width]`, the product of `[a, b]` over `n`.
pub(super) fn weight_gradient(
    cuda: &CudaDevice,
    (place, first): (&Tensor, bool),
    [a, b]: [Operand<'_>; 2],
    [rows, width, n]: [usize; 3],
) -> Result<()> {
    let call = Multiply {
        a,
        b,
        out: place.cuda(NAME, Form::F32)?,
        out_stride: width,
        output: if first { Output::F32 } else { Output::AddF32 },
        start: None,
        size: [rows, width, n],
    };
    Ok(cuda.multiply(&call)?)
}

/// Whether `second` begins where `first`, of `bytes` bytes, ends.
fn follows(first: Slice<'_>, bytes: usize, second: Slice<'_>) -> bool {
    first.address() + bytes as u64 == second.address()
}

impl Layers {
    fn new(cx: &Context, projections: &[Projection<'_>]) -> Result<Self> {
        let mut column = 0;
        let layers = projections.iter().map(|projection| {
            let columns = column..column + projection.weight.rows();
            column = columns.end;
            Ok(Layer {
                weight: projection.weight.clone(),
                to_weight: projection.weight.as_dense().and_then(|weight| cx.slot(weight)),
                bias: projection.bias.cloned(),
                to_bias: projection.bias.and_then(|bias| cx.slot(bias)),
                adapter: projection.adapter.as_ref().map(|adapter| Adapter::new(cx, adapter)).transpose()?,
                columns,
            })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }

    /// Output features of all.
    fn rows(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.columns.end)
    }

    fn joined(&self, gpu: &Gpu) -> Result<Vec<Joined<'_>>> {
        let mut joined: Vec<Joined<'_>> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let rows = rows_of(gpu, &layer.weight)?;
            if let Some(last) = joined.last_mut() {
                let (held, stride) = last.rows.slice();
                let (next, _) = rows.slice();
                let dense = layer.weight.as_dense().is_some();
                if dense && stride == layer.weight.cols() && follows(held, last.columns.len() * stride * 2, next) {
                    last.columns.end = layer.columns.end;
                    continue;
                }
            }
            joined.push(Joined { columns: layer.columns.clone(), rows });
        }
        Ok(joined)
    }

    /// `out [n, rows] = x W^T` (+ bias) (+ residual).
    fn forward(&self, cuda: &CudaDevice, x: &Tensor, out: &Tensor, residual: Option<&Tensor>) -> Result<()> {
        let (gpu, n, cols) = (cuda.gpu(), x.rows(), x.width());
        let form = out.form().unwrap_or(Form::F32);
        let (element, output) = if form == Form::Bf16 { (2, Output::Bf16) } else { (4, Output::F32) };
        let place = out.cuda(NAME, form)?;
        for joined in self.joined(gpu)? {
            let (weight, stride) = joined.rows.slice();
            let start = joined.columns.start * element;
            let call = Multiply {
                a: Operand::rows(x.cuda(NAME, Form::Bf16)?, cols),
                b: Operand::columns(weight, stride),
                out: place.part(start, place.bytes() - start)?,
                out_stride: out.width(),
                output,
                start: residual.map(|residual| residual.cuda(NAME, Form::F32)).transpose()?,
                size: [n, joined.columns.len(), cols],
            };
            cuda.multiply(&call)?;
        }
        for layer in &self.layers {
            if let Some(adapter) = &layer.adapter {
                let start = layer.columns.start * element;
                let columns = place.part(start, place.bytes() - start)?;
                adapter.forward(cuda, x, (columns, out.width(), output))?;
            }
        }
        if self.layers.iter().all(|layer| layer.bias.is_none()) {
            return Ok(());
        }
        let biases = gpu.allocate(4 * self.rows(), NAME)?;
        gpu.clear(biases.slice())?;
        for layer in &self.layers {
            if let Some(bias) = &layer.bias {
                let place = biases.part(4 * layer.columns.start, 4 * layer.columns.len())?;
                gpu.copy(place, bias.cuda(NAME, Form::F32)?.part(0, place.bytes())?)?;
            }
        }
        Ok(kernels::add_bias(gpu, place, form, biases.slice(), n, self.rows())?)
    }

    fn record(
        self,
        cx: &Context,
        cuda: &CudaDevice,
        x: &Tensor,
        input: &Tensor,
        out: &Tensor,
        residual: Option<&Tensor>,
    ) {
        let Some(tape) = cx.tape else { return };
        let to_x = tape.slot(x);
        let to_residual = residual.and_then(|residual| tape.slot(residual));
        let learns = |layer: &Layer| layer.to_weight.is_some() || layer.to_bias.is_some() || layer.adapter.is_some();
        let learns = self.layers.iter().any(learns);
        if to_x.is_none() && to_residual.is_none() && !learns {
            return;
        }
        // Only the gradient of a weight needs the input.
        let input = self.layers.iter().any(|layer| layer.to_weight.is_some()).then(|| input.kept());
        let cuda = cuda.clone();
        tape.record(out, move |gradient, gradients| {
            if let Some(slot) = &to_residual {
                gradients.add(slot, gradient.clone())?;
            }
            let rounded = gradient.operand(cuda.gpu(), NAME)?;
            if let Some(input) = &input {
                self.weight_gradients(&cuda, &rounded, &input.get()?, gradients)?;
            }
            self.bias_gradients(&cuda, &rounded, gradients)?;
            let mut of_adapters = Vec::new();
            for layer in &self.layers {
                if let Some(adapter) = &layer.adapter {
                    let whole = rounded.cuda_rows(NAME)?;
                    let start = 2 * layer.columns.start;
                    let columns = whole.slice.part(start, whole.slice.bytes() - start)?;
                    of_adapters.push(adapter.back(&cuda, (columns, whole.stride), gradients)?);
                }
            }
            match &to_x {
                Some(slot) => self.input_gradient(&cuda, &rounded, &of_adapters, slot, gradients),
                None => Ok(()),
            }
        });
    }

    /// `dW (+)= dy^T x`.
    fn weight_gradients(&self, cuda: &CudaDevice, dy: &Tensor, x: &Tensor, gradients: &mut Gradients) -> Result<()> {
        let (n, cols) = (x.rows(), x.width());
        let dy = dy.cuda_rows(NAME)?;
        // The places of gradients, of which neighbours are written together.
        let mut places: Vec<(Tensor, bool, Range<usize>)> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let Some(slot) = &layer.to_weight else { continue };
            let (place, first) = gradients.weight_place(slot)?;
            if let Some((last, last_first, columns)) = places.last_mut() {
                let held = last.cuda(NAME, Form::F32)?;
                let next = place.cuda(NAME, Form::F32)?;
                let neighbours = columns.end == layer.columns.start && follows(held, columns.len() * cols * 4, next);
                if neighbours && *last_first == first {
                    columns.end = layer.columns.end;
                    continue;
                }
            }
            places.push((place, first, layer.columns.clone()));
        }
        for (place, first, columns) in places {
            let start = 2 * columns.start;
            let dy = Operand::columns(dy.slice.part(start, dy.slice.bytes() - start)?, dy.stride);
            let x = Operand::rows(x.cuda(NAME, Form::Bf16)?, cols);
            weight_gradient(cuda, (&place, first), [dy, x], [columns.len(), cols, n])?;
        }
        Ok(())
    }

    /// `db (+)= sum over rows of dy`.
    fn bias_gradients(&self, cuda: &CudaDevice, dy: &Tensor, gradients: &mut Gradients) -> Result<()> {
        let (gpu, whole) = (cuda.gpu(), dy.cuda_rows(NAME)?);
        for layer in &self.layers {
            let Some(slot) = &layer.to_bias else { continue };
            let (place, first) = gradients.weight_place(slot)?;
            let start = 2 * layer.columns.start;
            let workspace = gpu.allocate(kernels::column_sums_workspace(dy.rows(), layer.columns.len())?, NAME)?;
            let call = kernels::ColumnSums {
                x: whole.slice.part(start, whole.slice.bytes() - start)?,
                form: Form::Bf16,
                stride: whole.stride,
                workspace: workspace.slice(),
                out: place.cuda(NAME, Form::F32)?,
                add: !first,
                rows: dy.rows(),
                columns: layer.columns.len(),
            };
            kernels::column_sums(gpu, &call)?;
        }
        Ok(())
    }

    /// `dx = dy W` plus what adapters give, added to what there is.
    fn input_gradient(
        &self,
        cuda: &CudaDevice,
        dy: &Tensor,
        of_adapters: &[Tensor],
        slot: &Slot,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let (gpu, n) = (cuda.gpu(), dy.rows());
        let cols = self.layers.first().map_or(0, |layer| layer.weight.cols());
        let mut sum = gradients.take_slot(slot);
        let whole = dy.cuda_rows(NAME)?;
        for joined in self.joined(gpu)? {
            let (weight, stride) = joined.rows.slice();
            let start = 2 * joined.columns.start;
            let next = Tensor::allocate(gpu, Form::Bf16, [n, cols], NAME)?;
            let call = Multiply {
                a: Operand::rows(whole.slice.part(start, whole.slice.bytes() - start)?, whole.stride),
                b: Operand::rows(weight, stride),
                out: next.cuda(NAME, Form::Bf16)?,
                out_stride: cols,
                output: Output::Bf16,
                start: sum.as_ref().map(|sum| sum.cuda(NAME, Form::Bf16)).transpose()?,
                size: [n, cols, joined.columns.len()],
            };
            cuda.multiply(&call)?;
            sum = Some(next);
        }
        let Some(mut sum) = sum else { return Ok(()) };
        if !of_adapters.is_empty() {
            sum = sum_of(gpu, std::iter::once(&sum).chain(of_adapters), [n, cols])?;
        }
        gradients.put(slot, sum.reshape(slot.shape())?);
        Ok(())
    }
}
