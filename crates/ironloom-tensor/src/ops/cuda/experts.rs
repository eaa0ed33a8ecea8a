//! Routed experts, from the router's logits to the residual stream.
//!
//! Nothing of the routing comes to the host: rows are sorted by expert on the card, and each expert's products are tiles of one
//! launch. Of experts that are learnt, gate and up lie one behind the other in the arena, and experts at equal distances: gate and
//! up are one product. Frozen ones are stacks of one kind of matrix, unpacked to bfloat16 for the time of a product where they are
//! packed.

use std::ops::Range;

use ironloom_kernels::{self as kernels, Buffer, Form, Gpu, Slice, WeightLayout};

use super::{
    super::{Activation, ExpertWeights, RoutedTraining, RouterLosses, routed_experts::Stack},
    expert_adapters::{ExpertAdapters, Grouped, Places},
    linear::Rows,
    rows::{self, columns},
};
use crate::{Context, Error, Gradients, Result, Tape, Tensor, Weight, error::expect_shape, kept::Kept, tape::Slot};

pub(super) const NAME: &str = "routed experts";

/// `residual` plus what the experts make of `x`.
pub(in crate::ops) fn routed(
    cx: &Context,
    gpu: &Gpu,
    residual: &Tensor,
    x: &Tensor,
    layer: &RoutedTraining<'_>,
) -> Result<Tensor> {
    let RoutedTraining { logits, per_row, normalize, losses, experts, activation, .. } = *layer;
    let (n, width, count) = (x.rows(), x.width(), experts.len());
    expect_shape(NAME, "the router's logits", [n, count], logits.shape())?;
    expect_shape(NAME, "the residual", [n, width], residual.shape())?;
    let stacks = Stacks::new(experts)?;
    let inner = stacks.inner;
    let slots = n * per_row;
    let numbers = |count: usize| gpu.allocate(4 * count, NAME);
    let figures = cx.tape.map(|tape| tape.figures(NAME)).transpose()?;
    let positions = figures.and_then(|figures| figures.positions());
    let routes = Routes {
        ids: numbers(slots)?,
        gates: numbers(slots)?,
        places: numbers(slots)?,
        sources: numbers(slots)?,
        offsets: numbers(count + 1)?,
    };
    let route = kernels::RouteExperts {
        logits: logits.cuda(NAME, Form::F32)?,
        positions: positions.map(|positions| positions.cuda(NAME)).transpose()?,
        ids: routes.ids.slice(),
        gates: routes.gates.slice(),
        rows: n,
        experts: count,
        per_row,
        normalize,
    };
    kernels::route_experts(gpu, &route)?;
    let sort = kernels::RoutedSort {
        ids: routes.ids.slice(),
        places: routes.places.slice(),
        sources: routes.sources.slice(),
        offsets: routes.offsets.slice(),
        rows: n,
        per_row,
        experts: count,
    };
    kernels::routed_sort(gpu, &sort)?;
    let shares = Tensor::allocate(gpu, Form::F32, [1, count], NAME)?.reshape([count])?;
    if let (Some(tape), Some(figures)) = (cx.tape, figures) {
        let workspace = gpu.allocate(kernels::router_losses_workspace(count), NAME)?;
        let call = kernels::RouterLosses {
            logits: logits.cuda(NAME, Form::F32)?,
            ids: routes.ids.slice(),
            offsets: routes.offsets.slice(),
            share: figures.share()?,
            side_loss: figures.side_loss()?,
            shares: shares.cuda(NAME, Form::F32)?,
            workspace: workspace.slice(),
            rows: n,
            experts: count,
            per_row,
            balance: losses.balance,
            z: losses.z,
        };
        kernels::router_losses(gpu, &call)?;
        tape.note_expert_shares(shares.clone());
    }

    let input = x.operand(gpu, NAME)?;
    let kind = |kind: usize| ExpertAdapters::new(cx, experts.iter().map(|expert| expert.all()[kind]));
    let adapters = [kind(0)?, kind(1)?, kind(2)?];
    let places = routes.places(gpu, slots, count);
    let halves = Tensor::allocate(gpu, Form::Bf16, [slots, 2 * inner], NAME)?;
    for number in 0..stacks.halves() {
        let matrices = stacks.half(gpu, number)?;
        let half = halves.columns(matrices.outputs.clone())?;
        places.product(&input, true, &matrices.grouped(), &half, false)?;
    }
    for (number, adapters) in adapters[..2].iter().enumerate() {
        if let Some(adapters) = adapters {
            let half = halves.columns(number * inner..(number + 1) * inner)?;
            adapters.forward(&places, &input, true, Some(&half))?;
        }
    }
    let out = Tensor::allocate(gpu, Form::F32, [n, width], NAME)?;
    if !cx.is_unread() || adapters[2].is_some() {
        let [gate, up] = [halves.columns(0..inner)?, halves.columns(inner..2 * inner)?];
        let gated = rows::gated_activation(gpu, [&gate, &up], activation, Form::Bf16)?;
        let outputs = match cx.is_unread() {
            true => None,
            false => {
                let outputs = Tensor::allocate(gpu, Form::Bf16, [slots, width], NAME)?;
                places.product(&gated, false, &stacks.down(gpu)?.grouped(), &outputs, false)?;
                Some(outputs)
            }
        };
        if let Some(adapters) = &adapters[2] {
            adapters.forward(&places, &gated, false, outputs.as_ref())?;
        }
        drop(gated);
        if let Some(outputs) = outputs {
            let sum = kernels::RoutedSum {
                y: outputs.cuda(NAME, Form::Bf16)?,
                places: routes.places.slice(),
                gates: Some(routes.gates.slice()),
                before: Some(residual.cuda(NAME, Form::F32)?),
                out: out.cuda(NAME, Form::F32)?,
                form: Form::F32,
                rows: n,
                per_row,
                width,
            };
            kernels::routed_sum(gpu, &sum)?;
        }
    }

    let Some((tape, [to_residual, to_x, to_logits])) = cx.slots([residual, x, logits]) else { return Ok(out) };
    let share = match figures {
        Some(figures) => figures.clone(),
        None => return Err(Error::NoGradient { operation: NAME }),
    };
    let slots = stacks.slots(tape);
    let learns = slots.iter().flatten().any(Option::is_some) || adapters[..2].iter().any(Option::is_some);
    let back = Back {
        gpu: gpu.clone(),
        rows: n,
        width,
        per_row,
        normalize,
        losses,
        activation,
        // Only the gradients of weights need the input.
        input: learns.then(|| input.kept()),
        slots,
        stacks,
        adapters,
        routes,
        shares,
        halves,
        logits: logits.clone(),
    };
    tape.record(&out, move |gradient, gradients| {
        if let Some(slot) = &to_residual {
            gradients.add(slot, gradient.clone())?;
        }
        back.run(gradient, share.share()?, [to_x.as_ref(), to_logits.as_ref()], gradients)
    });
    Ok(out)
}

/// Where rows go: `[n, per_row]` experts, weights and places, `[n * per_row]` rows by place, `[experts + 1]` first places.
struct Routes {
    ids: Buffer,
    gates: Buffer,
    places: Buffer,
    sources: Buffer,
    offsets: Buffer,
}

impl Routes {
    fn places<'a>(&'a self, gpu: &'a Gpu, places: usize, experts: usize) -> Places<'a> {
        Places { gpu, sources: self.sources.slice(), offsets: self.offsets.slice(), places, experts }
    }
}

/// The experts' matrices.
struct Stacks {
    weights: Vec<[Weight; 3]>,
    inner: usize,
    /// Of experts in an arena, elements from one to the next.
    learnt: Option<usize>,
}

/// Matrices of all experts, one for each, in bfloat16.
struct Matrices<'a> {
    rows: Rows<'a>,
    /// Elements from one expert's to the next.
    expert_stride: usize,
    /// Of gate and up together; all of down.
    outputs: Range<usize>,
    cols: usize,
}

impl Matrices<'_> {
    fn grouped(&self) -> Grouped<'_> {
        let (weight, stride) = self.rows.slice();
        let Self { expert_stride, cols, .. } = *self;
        Grouped { weight, stride, expert_stride, outputs: self.outputs.len(), inputs: cols }
    }
}

/// Where the gradients of an expert's gate, up and down go.
type ExpertSlots = [Option<Slot>; 3];

impl Stacks {
    fn new(experts: &[ExpertWeights<'_>]) -> Result<Self> {
        let weights: Vec<[Weight; 3]> =
            experts.iter().map(|expert| expert.all().map(|projection| projection.weight.clone())).collect();
        let Some(first) = weights.first() else {
            return Err(Error::Count { operation: NAME, what: "the number of experts", expected: 1, found: 0 });
        };
        let (inner, width) = (first[0].rows(), first[0].cols());
        let alike = weights.iter().all(|[gate, up, down]| {
            [gate, up].iter().all(|half| (half.rows(), half.cols()) == (inner, width))
                && (down.rows(), down.cols()) == (width, inner)
        });
        let misplaced = |expected| Err(Error::Device { operation: NAME, expected, found: "elsewhere" });
        if !alike {
            return misplaced("matrices of equal shapes");
        }
        if first[0].as_dense().is_none() {
            return Ok(Self { weights, inner, learnt: None });
        }
        let together = twin(&first[1])?.address() == twin(&first[0])?.address() + (2 * inner * width) as u64;
        match distance(&weights)? {
            Some(learnt) if together => Ok(Self { weights, inner, learnt: Some(learnt) }),
            _ => misplaced("dense matrices at equal distances in one arena"),
        }
    }

    /// Products that gate and up are.
    fn halves(&self) -> usize {
        if self.learnt.is_some() { 1 } else { 2 }
    }

    /// Gate and up, or one of them.
    fn half(&self, gpu: &Gpu, number: usize) -> Result<Matrices<'_>> {
        let outputs = 2 * self.inner / self.halves();
        self.matrices(gpu, number, number * outputs..(number + 1) * outputs)
    }

    fn down(&self, gpu: &Gpu) -> Result<Matrices<'_>> {
        self.matrices(gpu, 2, 0..self.weights[0][2].rows())
    }

    /// From those of a kind on.
    fn matrices(&self, gpu: &Gpu, kind: usize, outputs: Range<usize>) -> Result<Matrices<'_>> {
        let first = &self.weights[0][kind];
        let cols = first.cols();
        if let Some(expert_stride) = self.learnt {
            return Ok(Matrices { rows: Rows::Held(twin(first)?, cols), expert_stride, outputs, cols });
        }
        let stack = Stack::new(self.weights.iter().map(|expert| &expert[kind]))?;
        let stride = WeightLayout::padded_cols(cols);
        let (unpacked, expert_stride) = stack.bf16(gpu, self.weights.len())?;
        let rows = match unpacked {
            Some(buffer) => Rows::Unpacked(buffer, stride),
            None => Rows::Held(stack.whole, stride),
        };
        Ok(Matrices { rows, expert_stride, outputs, cols })
    }

    fn slots(&self, tape: &Tape) -> Vec<ExpertSlots> {
        let slot = |weight: &Weight| weight.as_dense().and_then(|values| tape.slot(values));
        self.weights.iter().map(|[gate, up, down]| [slot(gate), slot(up), slot(down)]).collect()
    }
}

/// Elements from one expert's dense matrices to the next one's, if all lie at equal distances in one arena.
pub(super) fn distance<const N: usize>(experts: &[[Weight; N]]) -> Result<Option<usize>> {
    let addresses = experts.iter().map(|weights| {
        let mut found = [0; N];
        for (address, weight) in found.iter_mut().zip(weights) {
            *address = twin(weight)?.address();
        }
        Ok(found)
    });
    let addresses = addresses.collect::<Result<Vec<[u64; N]>>>()?;
    let bytes = addresses.get(1).map_or(0, |second| second[0].wrapping_sub(addresses[0][0]));
    let regular = addresses.iter().enumerate().all(|(number, places)| {
        places.iter().zip(&addresses[0]).all(|(place, first)| *place == first.wrapping_add(number as u64 * bytes))
    });
    Ok(regular.then_some((bytes / 2) as usize))
}

/// A dense weight's rows as bfloat16, and what lies behind them.
pub(super) fn twin(weight: &Weight) -> Result<Slice<'_>> {
    match weight.as_dense().map(Tensor::twin_slice).transpose()?.flatten() {
        Some(slice) => Ok(slice),
        None => Err(Error::Device { operation: NAME, expected: "dense matrices of one arena", found: "elsewhere" }),
    }
}

/// What the way back keeps.
struct Back {
    gpu: Gpu,
    rows: usize,
    width: usize,
    per_row: usize,
    normalize: bool,
    losses: RouterLosses,
    activation: Activation,
    input: Option<Kept>,
    slots: Vec<ExpertSlots>,
    stacks: Stacks,
    adapters: [Option<ExpertAdapters>; 3],
    routes: Routes,
    shares: Tensor,
    halves: Tensor,
    logits: Tensor,
}

impl Back {
    fn run(
        &self,
        gradient: &Tensor,
        share: Slice<'_>,
        [to_x, to_logits]: [Option<&Slot>; 2],
        gradients: &mut Gradients,
    ) -> Result<()> {
        let (gpu, places, inner) = (&self.gpu, self.rows * self.per_row, self.stacks.inner);
        let by_expert = self.routes.places(gpu, places, self.slots.len());
        let d_outputs = Tensor::allocate(gpu, Form::Bf16, [places, self.width], NAME)?;
        let spread = kernels::RoutedSpread {
            dout: gradient.cuda(NAME, Form::F32)?,
            places: self.routes.places.slice(),
            gates: self.routes.gates.slice(),
            dy: d_outputs.cuda(NAME, Form::Bf16)?,
            rows: self.rows,
            per_row: self.per_row,
            width: self.width,
        };
        kernels::routed_spread(gpu, &spread)?;
        let mut d_product = Tensor::allocate(gpu, Form::Bf16, [places, inner], NAME)?;
        by_expert.input_gradient(&d_outputs, &self.stacks.down(gpu)?.grouped(), &d_product, false)?;
        let mut of_down = None;
        if let Some(adapters) = &self.adapters[2] {
            let d_inner = adapters.back(&by_expert, &d_outputs, gradients)?;
            d_product = adapters.add_input_gradient(&by_expert, &d_inner, d_product)?;
            of_down = Some((adapters, d_inner));
        }
        let dots = gpu.allocate(4 * places, NAME)?;
        let part = |whole: &Tensor, number: usize| whole.columns(number * inner..(number + 1) * inner);
        let [gate, up] = [part(&self.halves, 0)?, part(&self.halves, 1)?];
        let (gate, up) = (columns(gate.cuda_rows(NAME)?), columns(up.cuda_rows(NAME)?));
        // Gradients take the places of gate and up, and the product that of its gradient: a node of a tape runs once.
        let gated = kernels::GatedActivationBackward {
            gate,
            up,
            gradient: columns(d_product.cuda_rows(NAME)?),
            gate_gradient: gate,
            up_gradient: up,
            product: Some(columns(d_product.cuda_rows(NAME)?)),
            rows: places,
            width: inner,
            activation: self.activation,
        };
        kernels::gated_activation_backward_dots(gpu, &gated, dots.slice())?;
        let d_halves = &self.halves;
        if let Some((adapters, d_inner)) = of_down {
            adapters.back_to_a(&by_expert, &d_inner, &d_product, gradients)?;
        }
        // The inputs by place: rows are picked anew rather than kept.
        let picked = match &self.input {
            Some(input) => Some(by_expert.pick(&input.get()?)?),
            None => None,
        };
        if let Some(picked) = &picked {
            self.weight_gradients(&by_expert, [&d_outputs, &d_product], [d_halves, picked], gradients)?;
        }
        drop((d_outputs, d_product));
        let mut of_halves = Vec::new();
        for (number, adapters) in self.adapters[..2].iter().enumerate() {
            if let (Some(adapters), Some(picked)) = (adapters, &picked) {
                let dy = part(d_halves, number)?;
                let d_inner = adapters.back(&by_expert, &dy, gradients)?;
                adapters.back_to_a(&by_expert, &d_inner, picked, gradients)?;
                of_halves.push((adapters, d_inner));
            }
        }
        drop(picked);
        if let Some(slot) = to_x {
            let mut d_places = Tensor::allocate(gpu, Form::Bf16, [places, self.width], NAME)?;
            for number in 0..self.stacks.halves() {
                let matrices = self.stacks.half(gpu, number)?;
                let dy = d_halves.columns(matrices.outputs.clone())?;
                by_expert.input_gradient(&dy, &matrices.grouped(), &d_places, number > 0)?;
            }
            for (adapters, d_inner) in of_halves {
                d_places = adapters.add_input_gradient(&by_expert, &d_inner, d_places)?;
            }
            let before = gradients.take_slot(slot);
            let out = Tensor::allocate(gpu, Form::Bf16, [self.rows, self.width], NAME)?;
            let sum = kernels::RoutedSum {
                y: d_places.cuda(NAME, Form::Bf16)?,
                places: self.routes.places.slice(),
                gates: None,
                before: before.as_ref().map(|before| before.cuda(NAME, Form::Bf16)).transpose()?,
                out: out.cuda(NAME, Form::Bf16)?,
                form: Form::Bf16,
                rows: self.rows,
                per_row: self.per_row,
                width: self.width,
            };
            kernels::routed_sum(gpu, &sum)?;
            gradients.put(slot, out);
        }
        if let Some(slot) = to_logits {
            let count = self.slots.len();
            let stride = count.next_multiple_of(8);
            let d_logits = Tensor::allocate(gpu, Form::Bf16, [self.rows, stride], NAME)?;
            let call = kernels::RouterGradient {
                logits: self.logits.cuda(NAME, Form::F32)?,
                ids: self.routes.ids.slice(),
                places: self.routes.places.slice(),
                gates: self.routes.gates.slice(),
                dots: dots.slice(),
                offsets: self.routes.offsets.slice(),
                shares: self.shares.cuda(NAME, Form::F32)?,
                share,
                dlogits: d_logits.cuda(NAME, Form::Bf16)?,
                dlogits_stride: stride,
                rows: self.rows,
                experts: count,
                per_row: self.per_row,
                normalize: self.normalize,
                balance: self.losses.balance,
                z: self.losses.z,
            };
            kernels::router_gradient(gpu, &call)?;
            gradients.put(slot, d_logits.columns(0..count)?);
        }
        Ok(())
    }

    /// From outputs' gradients and inputs by place: of down, and of gate and up together.
    fn weight_gradients(
        &self,
        places: &Places<'_>,
        down: [&Tensor; 2],
        halves: [&Tensor; 2],
        gradients: &mut Gradients,
    ) -> Result<()> {
        // All of a kind are written together: none or all of them are learnt.
        let mut first_places: Vec<(Tensor, bool)> = Vec::new();
        for slots in &self.slots {
            for slot in slots {
                let Some(slot) = slot else { return Ok(()) };
                let place = gradients.weight_place(slot)?;
                if first_places.len() < 3 {
                    first_places.push(place);
                }
            }
        }
        let ([(gate, first), _, (of_down, _)], Some(expert_stride)) = (&first_places[..], self.stacks.learnt) else {
            return Ok(());
        };
        for ([dy, x], place) in [(down, of_down), (halves, gate)] {
            places.weight_gradient(dy, x, (place, *first), expert_stride)?;
        }
        Ok(())
    }
}
