//! `gated_activation`: `act(gate) * up`, and its gradients `g up act'(gate)` and `g act(gate)`.
//!
//! Both activations are `x s(z)` with the logistic `s` and some `z(x)`: SiLU has `z = x`, the tanh form of GELU
//! `z = 2 sqrt(2/pi) (x + 0.044715 x^3)`. So `act' = s + x s (1 - s) z'`.

use anyhow::Result;
use ironloom_tensor::{
    Device, Tensor,
    ops::{self, Activation},
};

use super::{differentiate, gradient_of};
use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::{Place, is_cpu},
    real::Real,
};

const SHAPES: [[usize; 2]; 5] = [[1, 3], [1, 16], [3, 17], [5, 65], [9, 1536]];
/// More on a card: numbers of rows that passes have.
const CARD_SHAPES: [[usize; 2]; 3] = [[1, 11008], [33, 576], [64, 1536]];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    let more: &[[usize; 2]] = if is_cpu(device) { &[] } else { &CARD_SHAPES };
    for activation in [Activation::Silu, Activation::GeluTanh] {
        for &[rows, width] in SHAPES.iter().chain(more) {
            let shape = format!("{activation:?} [{rows}, {width}]");
            let mut inputs = Inputs::of("gated_activation", &shape);
            let mut draw = || inputs.normal(rows * width);
            let (mut gate, up, above) = (draw(), draw(), draw());
            // Far from zero, where e^-x overflows or vanishes.
            gate.iter_mut().step_by(7).for_each(|value| *value *= 40.0);

            for place in Place::each(device) {
                let (gate, up) = (gate.clone(), up.clone());
                cases.push(Case::new("gated_activation", place.shape(&shape), Bound::TwicePlain, move |kernel| {
                    let [gate_in, up_in] = place.side_by_side([&kernel.inputs(&gate), &up], rows)?;
                    let ours = ops::gated_activation(&place.context(), gate_in, &up_in, activation)?;
                    let held = place.activations();
                    let plain = forward::<f32>(&held.round(&gate), &held.round(&up), activation);
                    let plain = place.operands().round(&plain);
                    let results = Results::new(forward::<f64>(&gate, &up, activation), plain, ours.into_f32()?);
                    Ok(results.in_precision(place.operands()))
                }));
            }

            if is_cpu(device) {
                let place = device.clone();
                cases.push(Case::new("gated_activation gradient", &shape, Bound::ThricePlain, move |kernel| {
                    let tensor = |values: Vec<f32>| -> Result<Tensor> { Ok(Tensor::from_f32(values, [rows, width])?) };
                    let (gate_in, up_in) = (tensor(gate.clone())?, tensor(up.clone())?);
                    let found = differentiate(&place, tensor(kernel.inputs(&above))?, &[&gate_in, &up_in], |cx| {
                        Ok(ops::gated_activation(cx, gate_in.clone(), &up_in, activation)?)
                    })?;
                    let ours = [gradient_of(&found, &gate_in)?, gradient_of(&found, &up_in)?].concat();
                    Ok(Results::new(
                        backward::<f64>(&above, &gate, &up, activation),
                        backward::<f32>(&above, &gate, &up, activation),
                        ours,
                    ))
                }));
            }
        }
    }
    cases
}

/// `z(x)` and `z'(x)`.
fn exponent<R: Real>(x: R, activation: Activation) -> (R, R) {
    let (scale, cubic) = (R::of(2.0 * (2.0 / std::f64::consts::PI).sqrt()), R::of(0.044_715));
    match activation {
        Activation::Silu => (x, R::of(1.0)),
        Activation::GeluTanh => (scale * (x + cubic * x * x * x), scale * (R::of(1.0) + R::of(3.0) * cubic * x * x)),
    }
}

fn logistic<R: Real>(z: R) -> R {
    R::of(1.0) / (R::of(1.0) + (-z).exp())
}

fn forward<R: Real>(gate: &[f32], up: &[f32], activation: Activation) -> Vec<R> {
    gated(&R::all(gate), &R::all(up), activation)
}

/// `act(gate) * up`.
pub(super) fn gated<R: Real>(gate: &[R], up: &[R], activation: Activation) -> Vec<R> {
    gate.iter().zip(up).map(|(&x, &up)| x * logistic(exponent(x, activation).0) * up).collect()
}

/// The gradient of `gate`, then that of `up`.
fn backward<R: Real>(above: &[f32], gate: &[f32], up: &[f32], activation: Activation) -> Vec<R> {
    let (above, gate, up) = (R::all(above), R::all(gate), R::all(up));
    let (mut to_gate, mut to_up) = (Vec::new(), Vec::new());
    for ((&g, &x), &up) in above.iter().zip(&gate).zip(&up) {
        let (z, slope) = exponent(x, activation);
        let s = logistic(z);
        to_gate.push(g * up * (s + x * s * (R::of(1.0) - s) * slope));
        to_up.push(g * x * s);
    }
    [to_gate, to_up].concat()
}
