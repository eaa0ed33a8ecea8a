//! The gated half of a feed-forward block: `out = act(gate) * up`.
//!
//! `act` is SiLU, `x / (1 + e^-x)` (SwiGLU; Shazeer, arXiv 2002.05202), or the tanh form of GELU, written as
//! `x / (1 + e^-2u)` with `u = sqrt(2/pi) (x + 0.044715 x^3)` (GeGLU; Hendrycks and Gimpel, arXiv 1606.08415).

use super::{Activation, Disjoint, for_rows};
use crate::{
    Context, CpuDevice, Result, Tensor,
    error::expect_shape,
    lanes::{exp, per_level},
};

/// `act(gate) * up` of equal shapes; writes into `gate` when nothing else shares it. Has a gradient for both.
///
/// # Errors
/// The shapes differ.
pub fn gated_activation(cx: &Context, gate: Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    expect_shape("gated activation", "up", *gate.shape(), up.shape())?;
    let (shape, width) = (*gate.shape(), gate.width());
    if let Some(gpu) = cx.gpu() {
        let out =
            super::cuda::rows::gated_activation(gpu, [&gate, up], activation, cx.operand_form())?.reshape(shape)?;
        return Ok(super::cuda::rows::record_gated_activation(cx, gpu, [&gate, up], activation, out));
    }
    let recorded = cx.slots([&gate, up]).map(|slots| (slots, gate.clone()));
    let mut out = gate.into_f32()?;
    let (cpu, factors) = (cx.cpu("gated activation")?, up.as_f32()?);
    for_rows(cpu, &mut out, width, |rows, out| {
        let factors = &factors[rows.start * width..rows.end * width];
        match activation {
            Activation::Silu => silu(cpu.level, out, factors),
            Activation::GeluTanh => gelu_tanh(cpu.level, out, factors),
        }
    });
    let out = Tensor::from_f32(out, shape)?;
    if let Some(((tape, slots), gate)) = recorded {
        let (cpu, up) = (cpu.clone(), up.clone());
        tape.record(&out, move |gradient, gradients| {
            let found = backward(&cpu, gradient, &gate, &up, activation)?;
            for (slot, gradient) in slots.iter().zip(found) {
                if let Some(slot) = slot {
                    gradients.add(slot, gradient)?;
                }
            }
            Ok(())
        });
    }
    Ok(out)
}

per_level! {
    fn silu(out: &mut [f32], factors: &[f32]) {
        for (out, factor) in out.iter_mut().zip(factors) {
            *out = *out / (1.0 + exp(-*out)) * factor;
        }
    }
}

const GELU_SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_CUBIC: f32 = 0.044_715;

per_level! {
    fn gelu_tanh(out: &mut [f32], factors: &[f32]) {
        for (out, factor) in out.iter_mut().zip(factors) {
            let x = *out;
            let u = GELU_SCALE * (x * x * x).mul_add(GELU_CUBIC, x);
            *out = x / (1.0 + exp(-2.0 * u)) * factor;
        }
    }
}

/// The gradients of gate and up.
fn backward(
    cpu: &CpuDevice,
    gradient: &Tensor,
    gate: &Tensor,
    up: &Tensor,
    activation: Activation,
) -> Result<[Tensor; 2]> {
    let (g, x, up, width) = (gradient.as_f32()?, gate.as_f32()?, up.as_f32()?, gradient.width());
    let (mut to_gate, mut to_up) = (vec![0.0; g.len()], vec![0.0; g.len()]);
    let shared = Disjoint::new(&mut to_up);
    for_rows(cpu, &mut to_gate, width, |rows, to_gate| {
        let range = rows.start * width..rows.end * width;
        // SAFETY: ranges of one region do not overlap.
        let to_up = unsafe { shared.slice(range.clone()) };
        let (g, x, up) = (&g[range.clone()], &x[range.clone()], &up[range]);
        match activation {
            Activation::Silu => silu_back(cpu.level, g, x, up, to_gate, to_up),
            Activation::GeluTanh => gelu_tanh_back(cpu.level, g, x, up, to_gate, to_up),
        }
    });
    Ok([Tensor::from_f32(to_gate, *gradient.shape())?, Tensor::from_f32(to_up, *gradient.shape())?])
}

// Both activations are x * sigmoid(z) for some z(x): the derivative is s + x s (1 - s) z'.

per_level! {
    fn silu_back(g: &[f32], x: &[f32], up: &[f32], to_gate: &mut [f32], to_up: &mut [f32]) {
        for ((((&g, &x), &up), to_gate), to_up) in g.iter().zip(x).zip(up).zip(to_gate).zip(to_up) {
            let s = 1.0 / (1.0 + exp(-x));
            *to_gate = g * up * (s + x * s * (1.0 - s));
            *to_up = g * x * s;
        }
    }
}

per_level! {
    fn gelu_tanh_back(g: &[f32], x: &[f32], up: &[f32], to_gate: &mut [f32], to_up: &mut [f32]) {
        for ((((&g, &x), &up), to_gate), to_up) in g.iter().zip(x).zip(up).zip(to_gate).zip(to_up) {
            let z = 2.0 * GELU_SCALE * (x * x * x).mul_add(GELU_CUBIC, x);
            let slope = 2.0 * GELU_SCALE * (3.0 * GELU_CUBIC * x * x + 1.0);
            let s = 1.0 / (1.0 + exp(-z));
            *to_gate = g * up * (s + x * s * (1.0 - s) * slope);
            *to_up = g * x * s;
        }
    }
}

#[cfg(test)]
mod tests {
    use ironloom_core::Philox;

    use super::*;
    use crate::{Device, Gradients, Tape};

    fn exact(x: f64, activation: Activation) -> f64 {
        match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
        }
    }

    fn normals(seed: u64, count: usize) -> Vec<f32> {
        let mut draws = Philox::new(seed, 0);
        (0..count).map(|_| 3.0 * draws.next_normal()).collect()
    }

    #[test]
    fn values_equal_double_precision() {
        let device = Device::cpu(2);
        let (gate, up) = (normals(1, 5 * 4001), normals(2, 5 * 4001));
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let out = gated_activation(
                &Context::inference(&device),
                Tensor::from_f32(gate.clone(), [5, 4001]).unwrap(),
                &Tensor::from_f32(up.clone(), [5, 4001]).unwrap(),
                activation,
            )
            .unwrap();
            for ((&out, &gate), &up) in out.as_f32().unwrap().iter().zip(&gate).zip(&up) {
                let exact = exact(f64::from(gate), activation) * f64::from(up);
                assert!((f64::from(out) - exact).abs() <= 2e-6 * (1e-2 + exact.abs()), "{gate} {up}: {out} {exact}");
            }
        }
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let (device, gate, up) = (Device::cpu(1), normals(3, 24), normals(4, 24));
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let tape = Tape::new();
            let gate_tensor = Tensor::from_f32(gate.clone(), [4, 6]).unwrap();
            let up_tensor = Tensor::from_f32(up.clone(), [4, 6]).unwrap();
            let cx = Context::training(&device, &tape);
            [&gate_tensor, &up_tensor].into_iter().for_each(|leaf| tape.watch(leaf));
            let out = gated_activation(&cx, gate_tensor.clone(), &up_tensor, activation).unwrap();
            let mut gradients = Gradients::new();
            tape.backward(&out, Tensor::from_f32(vec![1.0; 24], [4, 6]).unwrap(), &mut gradients).unwrap();
            let [to_gate, to_up] = [&gate_tensor, &up_tensor].map(|leaf| gradients.get(leaf.id()).unwrap());
            for i in 0..24 {
                let (x, u, step) = (f64::from(gate[i]), f64::from(up[i]), 1e-5);
                let slope = (exact(x + step, activation) - exact(x - step, activation)) / (2.0 * step) * u;
                assert!((f64::from(to_gate.as_f32().unwrap()[i]) - slope).abs() < 1e-5 * (1.0 + slope.abs()));
                assert!((f64::from(to_up.as_f32().unwrap()[i]) - exact(x, activation)).abs() < 1e-5 * (1.0 + x.abs()));
            }
        }
    }
}
