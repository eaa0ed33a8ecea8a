//! `gated_activation`: `act(gate) * up`, and its gradients `g up act'(gate)` and `g act(gate)`.
//!
//! Both activations are `x s(z)` with the logistic `s` and some `z(x)`: SiLU has `z = x`, the tanh form of GELU
//! `z = 2 sqrt(2/pi) (x + 0.044715 x^3)`. So `act' = s + x s (1 - s) z'`.

use anyhow::Result;
use ironloom_tensor::{
    Context, Device, Tensor,
    ops::{self, Activation},
};

use super::{differentiate, gradient_of};
use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    real::Real,
};

const SHAPES: [[usize; 2]; 5] = [[1, 3], [1, 16], [3, 17], [5, 65], [9, 1536]];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for activation in [Activation::Silu, Activation::GeluTanh] {
        for [rows, width] in SHAPES {
            let shape = format!("{activation:?} [{rows}, {width}]");
            let mut inputs = Inputs::of("gated_activation", &shape);
            let mut draw = || inputs.normal(rows * width);
            let (mut gate, up, above) = (draw(), draw(), draw());
            // Far from zero, where e^-x overflows or vanishes.
            gate.iter_mut().step_by(7).for_each(|value| *value *= 40.0);
            let tensor = move |values: Vec<f32>| -> Result<Tensor> { Ok(Tensor::from_f32(values, [rows, width])?) };

            let place = device.clone();
            let (gate_in, up_in) = (gate.clone(), up.clone());
            cases.push(Case::new("gated_activation", &shape, Bound::TwicePlain, move |kernel| {
                let (gate, up) = (tensor(kernel.inputs(&gate_in))?, tensor(up_in.clone())?);
                let ours = ops::gated_activation(&Context::inference(&place), gate, &up, activation)?;
                Ok(Results::new(
                    forward::<f64>(&gate_in, &up_in, activation),
                    forward::<f32>(&gate_in, &up_in, activation),
                    ours.into_f32()?,
                ))
            }));

            let place = device.clone();
            cases.push(Case::new("gated_activation gradient", &shape, Bound::ThricePlain, move |kernel| {
                let (gate_in, up_in) = (tensor(gate.clone())?, tensor(up.clone())?);
                let found = differentiate(&place, tensor(kernel.inputs(&above))?, |cx| {
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
    let pairs = R::all(gate).into_iter().zip(R::all(up));
    pairs.map(|(x, up)| x * logistic(exponent(x, activation).0) * up).collect()
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
