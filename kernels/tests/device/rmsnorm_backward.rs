//! Gradients of norms: every width class, both forms of every operand, in place and not, of strided rows and of heads.

use ironloom_kernels::{Form, Gpu, NormWeightGradient, RmsNormBackward, rmsnorm_backward, rmsnorm_backward_workspace};

use crate::{
    buffer, gpu, normals, read_bf16, read_f32, relative_error,
    rows::{Rows, bound, same_bits},
    upload_f32,
};

const EPSILON: f32 = 1e-5;

/// The gradients of `x` and of the weight.
fn expected(x: &[f32], weight: &[f32], gradient: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let (mut to_x, mut to_weight) = (Vec::with_capacity(x.len()), vec![0.0; width]);
    for (x, g) in x.chunks_exact(width).zip(gradient.chunks_exact(width)) {
        let mean = |of: &dyn Fn(usize) -> f64| (0..width).map(of).sum::<f64>() / width as f64;
        let r = 1.0 / (mean(&|j| f64::from(x[j]).powi(2)) + f64::from(EPSILON)).sqrt();
        let h = |j: usize| f64::from(x[j]) * r;
        let slope = |j: usize| f64::from(g[j]) * f64::from(weight[j]);
        let common = mean(&|j| slope(j) * h(j));
        to_x.extend((0..width).map(|j| r * (slope(j) - h(j) * common)));
        (0..width).for_each(|j| to_weight[j] += f64::from(g[j]) * h(j));
    }
    (to_x, to_weight)
}

/// Where the result goes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    New,
    OfResidual,
    OfGradient,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    runs: usize,
    width: usize,
    gap: usize,
    x_form: Form,
    gradient_form: Form,
    out_form: Form,
    residual: bool,
    place: Place,
}

/// The gradients of `x`, the operand and the weight's gradient, added to ones.
fn run(gpu: &Gpu, case: Case) -> [Vec<f32>; 3] {
    let Case { rows, runs, width, gap, x_form, gradient_form, out_form, place, .. } = case;
    let row_width = runs * width;
    let shape = [rows, row_width, row_width + gap];
    let (x, x_values) = Rows::normals(gpu, x_form, shape, 1, 1.5);
    let (gradient, gradient_values) = Rows::normals(gpu, gradient_form, shape, 2, 1.0);
    let (residual, residual_values) = Rows::normals(gpu, Form::F32, [rows, row_width, row_width], 3, 1.0);
    let weight_values: Vec<f32> = normals(4, width).iter().map(|w| 1.0 + 0.3 * w).collect();
    let weight = upload_f32(gpu, &weight_values);
    let new = Rows::poisoned(gpu, out_form, shape);
    let operand = buffer(gpu, Form::Bf16.bytes(rows, row_width).unwrap());
    let weight_gradient = upload_f32(gpu, &vec![1.0; width]);
    let partials = buffer(gpu, rmsnorm_backward_workspace(rows, runs, width).unwrap());
    let out = match place {
        Place::New => &new,
        Place::OfResidual => &residual,
        Place::OfGradient => &gradient,
    };
    let wanted = NormWeightGradient { out: weight_gradient.slice(), add: true, partials: partials.slice() };
    let call = RmsNormBackward {
        x: x.slice(),
        x_form,
        x_stride: x.stride,
        weight: weight.slice(),
        gradient: gradient.slice(),
        gradient_form,
        gradient_stride: gradient.stride,
        residual: case.residual.then(|| residual.slice()),
        out: out.slice(),
        out_form,
        out_stride: out.stride,
        operand: Some(operand.slice()),
        weight_gradient: Some(wanted),
        rows,
        runs,
        width,
        epsilon: EPSILON,
    };
    rmsnorm_backward(gpu, &call).unwrap();
    let found = [out.read(gpu), read_bf16(gpu, &operand, rows * row_width), read_f32(gpu, &weight_gradient, width)];

    let (mut to_x, mut to_weight) = expected(&x_values, &weight_values, &gradient_values);
    if case.residual {
        to_x.iter_mut().zip(&residual_values).for_each(|(dx, &before)| *dx += f64::from(before));
    }
    to_weight.iter_mut().for_each(|sum| *sum += 1.0);
    for (found, expected, bound) in
        [(&found[0], &to_x, bound(out_form)), (&found[1], &to_x, 3e-3), (&found[2], &to_weight, 2e-6)]
    {
        let error = relative_error(found, expected);
        assert!(error < bound, "{case:?}: {error:e}");
    }
    found
}

const MAIN: Case = Case {
    rows: 70,
    runs: 1,
    width: 768,
    gap: 0,
    x_form: Form::F32,
    gradient_form: Form::Bf16,
    out_form: Form::F32,
    residual: true,
    place: Place::OfResidual,
};

#[test]
fn gradients_equal_double_precision() {
    let Some(gpu) = gpu() else { return };
    for width in [6, 64, 128, 256, 300, 512, 768, 1000, 1024, 1536, 2048, 2560, 4096, 8192, 8196, 4098] {
        let main = Case { width, ..MAIN };
        let heads = Case { rows: 5, runs: 3, gap: 8, residual: false, ..main };
        run(&gpu, main);
        run(&gpu, Case { gap: 8, place: Place::New, ..main });
        run(&gpu, Case { gradient_form: Form::F32, x_form: Form::Bf16, ..main });
        run(&gpu, Case { x_form: Form::Bf16, ..main });
        run(&gpu, Case { gradient_form: Form::F32, place: Place::OfGradient, ..heads });
        run(&gpu, Case { x_form: Form::Bf16, out_form: Form::Bf16, place: Place::OfGradient, ..heads });
        run(&gpu, Case { out_form: Form::Bf16, residual: true, place: Place::New, gap: 3, ..heads });
    }
}

#[test]
fn many_rows_give_the_same_bits_again() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in [(9000, 768), (3000, 2048), (2100, 1024), (1500, 4096), (1200, 37)] {
        let case = Case { rows, width, ..MAIN };
        let (first, second) = (run(&gpu, case), run(&gpu, case));
        assert!(first.iter().zip(&second).all(|(first, second)| same_bits(first, second)), "{rows} x {width}");
    }
}

/// Rows whose starts are not multiples of 16 bytes do not come by shared memory.
#[test]
fn runs_that_are_fetched_ahead_give_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in [(9000, 768), (70, 768), (3000, 512), (1, 264), (2100, 1024), (2500, 904)] {
        let case = Case { rows, width, x_form: Form::Bf16, ..MAIN };
        let (ahead, plain) = (run(&gpu, case), run(&gpu, Case { gap: 4, place: Place::New, ..case }));
        assert!(ahead.iter().zip(&plain).all(|(ahead, plain)| same_bits(ahead, plain)), "{rows} x {width}");
    }
}

#[test]
fn a_frozen_weight_and_wrong_sizes() {
    let Some(gpu) = gpu() else { return };
    let (rows, width) = (3, 64);
    let (x, x_values) = Rows::normals(&gpu, Form::F32, [rows, width, width], 1, 1.0);
    let (gradient, values) = Rows::normals(&gpu, Form::F32, [rows, width, width], 2, 1.0);
    let weight = upload_f32(&gpu, &vec![1.0; width]);
    let out = Rows::poisoned(&gpu, Form::F32, [rows, width, width]);
    let call = RmsNormBackward {
        x: x.slice(),
        x_form: Form::F32,
        x_stride: width,
        weight: weight.slice(),
        gradient: gradient.slice(),
        gradient_form: Form::F32,
        gradient_stride: width,
        residual: None,
        out: out.slice(),
        out_form: Form::F32,
        out_stride: width,
        operand: None,
        weight_gradient: None,
        rows,
        runs: 1,
        width,
        epsilon: EPSILON,
    };
    rmsnorm_backward(&gpu, &call).unwrap();
    let (to_x, _) = expected(&x_values, &vec![1.0; width], &values);
    assert!(relative_error(&out.read(&gpu), &to_x) < 1e-6);
    rmsnorm_backward(&gpu, &RmsNormBackward { rows: 0, ..call }).unwrap();
    assert!(rmsnorm_backward(&gpu, &RmsNormBackward { rows: 4, ..call }).is_err());
    assert!(rmsnorm_backward(&gpu, &RmsNormBackward { x_stride: 63, ..call }).is_err());
    assert!(rmsnorm_backward(&gpu, &RmsNormBackward { x_form: Form::Split, ..call }).is_err());
    assert!(rmsnorm_backward(&gpu, &RmsNormBackward { operand: Some(weight.slice()), ..call }).is_err());
}
