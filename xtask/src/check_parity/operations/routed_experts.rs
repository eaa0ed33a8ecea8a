//! `routed_experts`: `out[i] + sum over e in S_i of p_ie down_e(act(gate_e x_i) * up_e x_i)`, with `S_i` the `k` experts of the
//! largest probabilities `p_i`.

use ironloom_core::DType;
use ironloom_quant::WeightFormat;
use ironloom_tensor::{
    Device, Weight,
    ops::{self, Activation, ExpertWeights},
};

use super::{
    gated_activation::gated,
    linear::product,
    route_experts::route,
    weights::{self, FAST_FORMATS, Matrix},
};
use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::{Place, Precision},
    real::Real,
};

/// Rows, experts, experts of a row, width, inner width.
const SHAPES: [[usize; 5]; 8] = [
    [1, 4, 1, 256, 256],
    [1, 8, 2, 256, 512],
    [3, 8, 2, 512, 256],
    [16, 60, 4, 256, 256],
    [33, 8, 2, 256, 256],
    [64, 16, 4, 256, 256],
    [65, 4, 2, 256, 256],
    [200, 16, 4, 256, 256],
];
/// Widths that are parts of tiles, chunks and records, for the formats that take any.
const ODD_WIDTHS: [[usize; 2]; 8] = [[8, 24], [72, 40], [136, 88], [32, 24], [64, 48], [328, 96], [40, 64], [64, 24]];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for place in Place::each(device) {
        for (shape, [odd_width, odd_inner]) in SHAPES.into_iter().zip(ODD_WIDTHS) {
            if !place.takes(shape[0]) {
                continue;
            }
            for format in FAST_FORMATS {
                let [rows, experts, chosen, width, inner] = shape;
                cases.push(case(place.clone(), format, [rows, experts, chosen, width, inner]));
                if format.0 == DType::F32 {
                    cases.push(case(place.clone(), format, [rows, experts, chosen, odd_width, odd_inner]));
                }
            }
        }
    }
    cases
}

/// One expert's weights as held: gate, up, down.
type Held = [Vec<f32>; 3];

fn case(place: Place, format: (DType, WeightFormat), [rows, count, chosen, width, inner]: [usize; 5]) -> Case {
    let activation = if rows % 2 == 0 { Activation::GeluTanh } else { Activation::Silu };
    let shape = format!("{}, {rows} rows, {chosen} of {count} x [{inner}, {width}]", weights::name(format));
    Case::new("routed_experts", place.shape(&shape), Bound::TwicePlain, move |kernel| {
        let mut inputs = Inputs::of("routed_experts", &shape);
        let logits = inputs.normal(rows * count);
        let x: Vec<f32> = inputs.normal(rows * width).iter().map(|x| x / (width as f32).sqrt()).collect();
        let residual = inputs.normal(rows * width);
        let (mut stacks, mut held): ([Vec<Weight>; 3], Vec<Held>) = Default::default();
        for _ in 0..count {
            let mut values = Held::default();
            let sizes = [[inner, width], [inner, width], [width, inner]];
            for ((stack, values), size) in stacks.iter_mut().zip(&mut values).zip(sizes) {
                let matrix = Matrix::random(format, size, &mut inputs)?;
                stack.push(matrix.weight(&place.device)?);
                *values = matrix.held(&place.device)?;
            }
            held.push(values);
        }
        let [gate, up, down] = stacks.map(|stack| Weight::stack(&place.device, stack));
        let (gate, up, down) = (gate?, up?, down?);
        let experts: Vec<ExpertWeights<'_>> = gate
            .iter()
            .zip(&up)
            .zip(&down)
            .map(|((gate, up), down)| ExpertWeights { gate: gate.into(), up: up.into(), down: down.into() })
            .collect();
        let cx = place.context();
        let routing = ops::route_experts(&cx, &place.tensor(logits.clone(), [rows, count])?, chosen, false)?;
        let onto = place.tensor(residual.clone(), [rows, width])?;
        let given = place.operand(kernel.inputs(&x), [rows, width])?;
        let ours = ops::routed_experts(&cx, onto, &given, &routing, &experts, activation)?.into_f32()?;

        let shares = route::<f64>(&logits, count, chosen, false);
        let layer = Layer { count, width, inner, activation };
        let reference = layer.run::<f64>(&residual, &x, &shares, &held, Precision::Single);
        let multiplied: Vec<Held> =
            held.iter().map(|expert| expert.each_ref().map(|values| place.weights(values))).collect();
        let rounded = place.operands().round(&x);
        let plain = layer.run::<f32>(&residual, &rounded, &shares, &multiplied, place.operands());
        Ok(Results::new(reference, plain, ours).in_precision(place.operands()))
    })
}

struct Layer {
    count: usize,
    width: usize,
    inner: usize,
    activation: Activation,
}

impl Layer {
    /// The sum, with what goes into the last product rounded to `between`.
    fn run<R: Real>(
        &self,
        residual: &[f32],
        x: &[f32],
        shares: &[f64],
        experts: &[Held],
        between: Precision,
    ) -> Vec<R> {
        let Self { count, width, inner, activation } = *self;
        let mut out = R::all(residual);
        let experts: Vec<[Vec<R>; 3]> = experts.iter().map(|held| held.each_ref().map(|held| R::all(held))).collect();
        let rows = out.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(shares.chunks_exact(count));
        for ((out, x), shares) in rows {
            let x = R::all(x);
            for ([gate, up, down], &share) in experts.iter().zip(shares).filter(|(_, share)| **share > 0.0) {
                let middle = gated(&product(&x, gate, width), &product(&x, up, width), activation);
                let middle = R::rounded(middle, between);
                for (out, sum) in out.iter_mut().zip(product(&middle, down, inner)) {
                    *out = *out + R::of(share) * sum;
                }
            }
        }
        out
    }
}
