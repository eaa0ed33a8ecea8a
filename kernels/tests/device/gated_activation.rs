//! Gated activations of every input and output form, also of two halves of one buffer and of odd widths.

use ironloom_kernels::{Activation, Form, GatedActivation, gated_activation};

use crate::{
    buffer, gpu, normals, read_bf16, read_f32, read_split, relative_error, round_bf16, upload_bf16, upload_f32,
};

pub(crate) fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
        }
    }
}

#[test]
fn activations_equal_double_precision() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in [(1, 11_008), (3, 576), (64, 1536), (5, 37), (300, 512), (77, 352)] {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            for input_form in [Form::F32, Form::Bf16] {
                // Gate and up side by side in one row.
                let mut both: Vec<f32> = normals(5, rows * 2 * width).iter().map(|x| 4.0 * x).collect();
                let input = if input_form == Form::F32 {
                    upload_f32(&gpu, &both)
                } else {
                    both.iter_mut().for_each(|x| *x = round_bf16(*x));
                    upload_bf16(&gpu, &both)
                };
                let expected: Vec<f64> = both
                    .chunks_exact(2 * width)
                    .flat_map(|row| {
                        let (gate, up) = row.split_at(width);
                        gate.iter().zip(up).map(|(&x, &up)| activate(activation, f64::from(x)) * f64::from(up))
                    })
                    .collect();
                let offset = input_form.bytes(1, width).unwrap();
                for (form, bound) in [(Form::F32, 1e-6), (Form::Bf16, 3e-3), (Form::Split, 6e-6)] {
                    let out = buffer(&gpu, form.bytes(rows, width).unwrap());
                    let call = GatedActivation {
                        gate: input.slice(),
                        gate_stride: 2 * width,
                        up: input.part(offset, input.bytes() - offset).unwrap(),
                        up_stride: 2 * width,
                        input_form,
                        out: out.slice(),
                        form,
                        rows,
                        width,
                        activation,
                    };
                    gated_activation(&gpu, &call).unwrap();
                    let found = match form {
                        Form::F32 => read_f32(&gpu, &out, rows * width),
                        Form::Bf16 => read_bf16(&gpu, &out, rows * width),
                        Form::Split => read_split(&gpu, &out, rows, width),
                    };
                    let error = relative_error(&found, &expected);
                    assert!(error < bound, "{rows} x {width}, {activation:?}, {input_form:?} to {form:?}: {error:e}");
                    assert!(gated_activation(&gpu, &GatedActivation { rows: rows + 1, ..call }).is_err());
                    assert!(gated_activation(&gpu, &GatedActivation { input_form: Form::Split, ..call }).is_err());
                }
            }
        }
    }
}

#[test]
fn extreme_gates_stay_finite() {
    let Some(gpu) = gpu() else { return };
    let gates = [-200.0f32, -100.0, -88.0, 88.0, 200.0, 0.0, -0.0, 1e-30];
    let (gate, up) = (upload_f32(&gpu, &gates), upload_f32(&gpu, &[1.0; 8]));
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let out = buffer(&gpu, 32);
        let call = GatedActivation {
            gate: gate.slice(),
            gate_stride: 8,
            up: up.slice(),
            up_stride: 8,
            input_form: Form::F32,
            out: out.slice(),
            form: Form::F32,
            rows: 1,
            width: 8,
            activation,
        };
        gated_activation(&gpu, &call).unwrap();
        for (&x, found) in gates.iter().zip(read_f32(&gpu, &out, 8)) {
            let exact = activate(activation, f64::from(x));
            assert!((f64::from(found) - exact).abs() <= 1e-6 * exact.abs() + 1e-36, "{x}: {found} {exact}");
        }
    }
}
