//! Gradients of gated activations, of columns of one buffer, in place and not, the product made again, and the
//! sums of gradients times products.

use ironloom_kernels::{
    Activation, Columns, Form, GatedActivationBackward, Gpu, gated_activation_backward, gated_activation_backward_dots,
};

use crate::{
    buffer, gpu, read_f32, relative_error,
    rows::{Rows, bound, same_bits},
};

/// The activation and its slope.
fn exact(x: f64, activation: Activation) -> (f64, f64) {
    match activation {
        Activation::Silu => {
            let s = 1.0 / (1.0 + (-x).exp());
            (x * s, s * (1.0 + x * (1.0 - s)))
        }
        Activation::GeluTanh => {
            let c = (2.0 / std::f64::consts::PI).sqrt();
            let t = (c * (x + 0.044_715 * x.powi(3))).tanh();
            (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 0.134_145 * x * x))
        }
    }
}

fn columns(rows: &Rows) -> Columns<'_> {
    Columns { slice: rows.slice(), stride: rows.stride }
}

/// The gradients of gate and up, and the product.
fn run(gpu: &Gpu, rows: usize, width: usize, gap: usize, activation: Activation, in_place: bool) -> [Vec<f32>; 3] {
    let shape = [rows, width, width + gap];
    let (gate, gates) = Rows::normals(gpu, Form::Bf16, shape, 1, 3.0);
    let (up, ups) = Rows::normals(gpu, Form::Bf16, shape, 2, 1.0);
    let (gradient, gradients) = Rows::normals(gpu, Form::Bf16, [rows, width, width + 8], 3, 1.0);
    let new = [(); 3].map(|()| Rows::poisoned(gpu, Form::Bf16, shape));
    let out = if in_place { [&gate, &up, &new[2]] } else { [&new[0], &new[1], &new[2]] };
    let call = GatedActivationBackward {
        gate: columns(&gate),
        up: columns(&up),
        gradient: columns(&gradient),
        gate_gradient: columns(out[0]),
        up_gradient: columns(out[1]),
        product: Some(columns(out[2])),
        rows,
        width,
        activation,
    };
    gated_activation_backward(gpu, &call).unwrap();
    assert!(gated_activation_backward(gpu, &GatedActivationBackward { rows: rows + 2, ..call }).is_err());
    assert!(gated_activation_backward(gpu, &GatedActivationBackward { width: width + gap + 1, ..call }).is_err());
    let found = out.map(|rows| rows.read(gpu));
    let mut expected = [(); 3].map(|()| Vec::with_capacity(gates.len()));
    for ((&x, &up), &g) in gates.iter().zip(&ups).zip(&gradients) {
        let ((value, slope), up, g) = (exact(f64::from(x), activation), f64::from(up), f64::from(g));
        expected[0].push(g * up * slope);
        expected[1].push(g * value);
        expected[2].push(value * up);
    }
    for (found, expected) in found.iter().zip(&expected) {
        let error = relative_error(found, expected);
        assert!(error < bound(Form::Bf16), "{rows} x {width}, {activation:?}: {error:e}");
    }
    found
}

#[test]
fn gradients_equal_double_precision() {
    let Some(gpu) = gpu() else { return };
    for (rows, width, gap) in [(3, 576, 576), (64, 1536, 0), (5, 37, 3), (300, 512, 8), (2, 11_008, 0), (7, 40, 4)] {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let new = run(&gpu, rows, width, gap, activation, false);
            let in_place = run(&gpu, rows, width, gap, activation, true);
            assert!(new.iter().zip(&in_place).all(|(new, in_place)| same_bits(new, in_place)));
        }
    }
}

#[test]
fn dots_equal_double_precision_and_what_is_beside_them_the_plain_kernel() {
    let Some(gpu) = gpu() else { return };
    for (rows, width, gap) in [(3, 8, 0), (37, 352, 352), (300, 264, 8), (9, 2056, 0)] {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let shape = [rows, width, width + gap];
            let (gate, gates) = Rows::normals(&gpu, Form::Bf16, shape, 1, 3.0);
            let (up, ups) = Rows::normals(&gpu, Form::Bf16, shape, 2, 1.0);
            let (gradient, gradients) = Rows::normals(&gpu, Form::Bf16, [rows, width, width + 8], 3, 1.0);
            let out = [(); 2].map(|()| Rows::poisoned(&gpu, Form::Bf16, shape));
            let dots = buffer(&gpu, rows * 4);
            // The product takes the place of the gradient.
            let call = GatedActivationBackward {
                gate: columns(&gate),
                up: columns(&up),
                gradient: columns(&gradient),
                gate_gradient: columns(&out[0]),
                up_gradient: columns(&out[1]),
                product: Some(columns(&gradient)),
                rows,
                width,
                activation,
            };
            gated_activation_backward_dots(&gpu, &call, dots.slice()).unwrap();
            let plain = run(&gpu, rows, width, gap, activation, false);
            for (out, plain) in [&out[0], &out[1], &gradient].into_iter().zip(&plain) {
                assert!(same_bits(&out.read(&gpu), plain), "{rows} x {width}, {activation:?}");
            }
            let products = gates.iter().zip(&ups).zip(&gradients);
            let products: Vec<f64> = products
                .map(|((&x, &up), &g)| exact(f64::from(x), activation).0 * f64::from(up) * f64::from(g))
                .collect();
            let expected: Vec<f64> = products.chunks_exact(width).map(|row| row.iter().sum()).collect();
            let error = relative_error(&read_f32(&gpu, &dots, rows), &expected);
            assert!(error < 2e-5, "{rows} x {width}, {activation:?}: {error:e}");
            for wrong in [
                GatedActivationBackward { width: width - 1, ..call },
                GatedActivationBackward { rows: rows + 40, ..call },
            ] {
                assert!(gated_activation_backward_dots(&gpu, &wrong, dots.slice()).is_err());
            }
        }
    }
}

#[test]
fn extreme_gates_stay_finite() {
    let Some(gpu) = gpu() else { return };
    let gates = [-3e38f32, -200.0, -100.0, -88.0, 88.0, 200.0, 0.0, 3e38];
    let shape = [1, 8, 8];
    let (gate, ones) = (Rows::of(&gpu, Form::Bf16, shape, &gates), Rows::of(&gpu, Form::Bf16, shape, &[1.0; 8]));
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let out = [(); 2].map(|()| Rows::poisoned(&gpu, Form::Bf16, shape));
        let call = GatedActivationBackward {
            gate: columns(&gate),
            up: columns(&ones),
            gradient: columns(&ones),
            gate_gradient: columns(&out[0]),
            up_gradient: columns(&out[1]),
            product: None,
            rows: 1,
            width: 8,
            activation,
        };
        gated_activation_backward(&gpu, &call).unwrap();
        let slopes = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0];
        for ((found, expected), x) in out[0].read(&gpu).iter().zip(slopes).zip(gates) {
            assert!((found - expected).abs() < 1e-3, "{activation:?} at {x}: {found}");
        }
        for (found, x) in out[1].read(&gpu).iter().zip(gates) {
            let expected = x.max(0.0);
            assert!((found - expected).abs() <= 1e-2 * expected, "{activation:?} at {x}: {found}");
        }
    }
}
