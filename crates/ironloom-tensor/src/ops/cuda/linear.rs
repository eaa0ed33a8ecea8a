//! Products: `y = x W^T`, `dx = dy W`, `dW = dy^T x`, by cuBLASLt.
//!
//! Dense weights that lie one behind the other in their arena (q, k, v; gate, up) are one matrix, in all three products.
//! Packed weights are frozen: they are unpacked to bfloat16 for the time of a product, on the way back once more.

use std::ops::Range;

use ironloom_kernels::{self as kernels, Buffer, Form, Gpu, Multiply, Operand, Output, Slice, WeightLayout};

use super::super::linear::{Projection, bf16_rows};
use crate::{Context, CudaDevice, Gradients, Result, Tensor, Weight, tape::Slot};

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
    layers.record(cx, cuda, x, input, &whole, None);
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
    layers.forward(cuda, &input, &out, residual)?;
    layers.record(cx, cuda, x, input, &out, residual);
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
    /// Of the output.
    columns: Range<usize>,
}

/// Weights that are one matrix `[rows, cols]` of bfloat16.
struct Joined<'a> {
    layers: Range<usize>,
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
            let slot = |tensor: &Tensor| cx.tape.and_then(|tape| tape.slot(tensor));
            Layer {
                weight: projection.weight.clone(),
                to_weight: projection.weight.as_dense().and_then(slot),
                bias: projection.bias.cloned(),
                to_bias: projection.bias.and_then(slot),
                columns,
            }
        });
        Ok(Self { layers: layers.collect() })
    }

    /// Output features of all.
    fn rows(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.columns.end)
    }

    fn joined(&self, gpu: &Gpu) -> Result<Vec<Joined<'_>>> {
        let mut joined: Vec<Joined<'_>> = Vec::with_capacity(self.layers.len());
        for (number, layer) in self.layers.iter().enumerate() {
            let rows = rows_of(gpu, &layer.weight)?;
            if let Some(last) = joined.last_mut() {
                let (held, stride) = last.rows.slice();
                let (next, _) = rows.slice();
                let dense = layer.weight.as_dense().is_some();
                if dense && stride == layer.weight.cols() && follows(held, last.columns.len() * stride * 2, next) {
                    last.layers.end = number + 1;
                    last.columns.end = layer.columns.end;
                    continue;
                }
            }
            joined.push(Joined { layers: number..number + 1, columns: layer.columns.clone(), rows });
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
        input: Tensor,
        out: &Tensor,
        residual: Option<&Tensor>,
    ) {
        let Some(tape) = cx.tape else { return };
        let to_x = tape.slot(x);
        let to_residual = residual.and_then(|residual| tape.slot(residual));
        let learns = self.layers.iter().any(|layer| layer.to_weight.is_some() || layer.to_bias.is_some());
        if to_x.is_none() && to_residual.is_none() && !learns {
            return;
        }
        // Only the gradient of a weight needs the input.
        let input = self.layers.iter().any(|layer| layer.to_weight.is_some()).then_some(input);
        let cuda = cuda.clone();
        tape.record(out, move |gradient, gradients| {
            if let Some(slot) = &to_residual {
                gradients.add(slot, gradient.clone())?;
            }
            let rounded = gradient.operand(cuda.gpu(), NAME)?;
            if let Some(input) = &input {
                self.weight_gradients(&cuda, &rounded, input, gradients)?;
            }
            self.bias_gradients(&cuda, &rounded, gradients)?;
            match &to_x {
                Some(slot) => self.input_gradient(&cuda, &rounded, slot, gradients),
                None => Ok(()),
            }
        });
    }

    /// `dW (+)= dy^T x`.
    fn weight_gradients(&self, cuda: &CudaDevice, dy: &Tensor, x: &Tensor, gradients: &mut Gradients) -> Result<()> {
        let (n, cols) = (x.rows(), x.width());
        let dy = (dy.cuda(NAME, Form::Bf16)?, dy.width());
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
            let call = Multiply {
                a: Operand::columns(dy.0.part(start, dy.0.bytes() - start)?, dy.1),
                b: Operand::rows(x.cuda(NAME, Form::Bf16)?, cols),
                out: place.cuda(NAME, Form::F32)?,
                out_stride: cols,
                output: if first { Output::F32 } else { Output::AddF32 },
                start: None,
                size: [columns.len(), cols, n],
            };
            cuda.multiply(&call)?;
        }
        Ok(())
    }

    /// `db (+)= sum over rows of dy`.
    fn bias_gradients(&self, cuda: &CudaDevice, dy: &Tensor, gradients: &mut Gradients) -> Result<()> {
        let (gpu, whole) = (cuda.gpu(), dy.cuda(NAME, Form::Bf16)?);
        for layer in &self.layers {
            let Some(slot) = &layer.to_bias else { continue };
            let (place, first) = gradients.weight_place(slot)?;
            let start = 2 * layer.columns.start;
            let workspace = gpu.allocate(kernels::column_sums_workspace(dy.rows(), layer.columns.len())?, NAME)?;
            let call = kernels::ColumnSums {
                x: whole.part(start, whole.bytes() - start)?,
                form: Form::Bf16,
                stride: dy.width(),
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

    /// `dx = dy W`, added to what there is.
    fn input_gradient(&self, cuda: &CudaDevice, dy: &Tensor, slot: &Slot, gradients: &mut Gradients) -> Result<()> {
        let (gpu, n) = (cuda.gpu(), dy.rows());
        let cols = self.layers.first().map_or(0, |layer| layer.weight.cols());
        let mut sum = gradients.take_slot(slot);
        let whole = dy.cuda(NAME, Form::Bf16)?;
        for joined in self.joined(gpu)? {
            let (weight, stride) = joined.rows.slice();
            let start = 2 * joined.columns.start;
            let next = Tensor::allocate(gpu, Form::Bf16, [n, cols], NAME)?;
            let call = Multiply {
                a: Operand::rows(whole.part(start, whole.bytes() - start)?, dy.width()),
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
        if let Some(sum) = sum {
            gradients.put(slot, sum.reshape(slot.shape())?);
        }
        Ok(())
    }
}
