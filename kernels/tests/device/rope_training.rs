//! Rotation of heads in training, with and without a norm, forward and back, in place and not.

use ironloom_kernels::{
    Form, Gpu, HeadNorm, HeadNormBackward, NormWeightGradient, RopeTraining, RopeTrainingBackward, rope_training,
    rope_training_backward, rope_training_workspace,
};

use crate::{
    buffer, gpu, normals, read_f32, relative_error,
    rows::{Rows, bound, same_bits},
    upload_f32,
};

const EPSILON: f32 = 1e-5;

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    heads: usize,
    head_width: usize,
    half: usize,
    gap: usize,
    in_place: bool,
}

impl Case {
    fn row_width(&self) -> usize {
        self.heads * self.head_width
    }

    fn shape(&self) -> [usize; 3] {
        [self.rows, self.row_width(), self.row_width() + self.gap]
    }

    /// Cosines and sines of each row, times a factor of their own.
    fn phases(&self) -> Vec<f32> {
        let angles = normals(9, self.rows * self.half);
        let of_row = |row: usize| angles[row * self.half..(row + 1) * self.half].iter();
        (0..self.rows)
            .flat_map(|row| {
                of_row(row).map(|a| 1.1 * (3.0 * a).cos()).chain(of_row(row).map(|a| 1.1 * (3.0 * a).sin()))
            })
            .collect()
    }

    /// A head of row `row`, turned in `direction`.
    fn turned(&self, head: &[f64], phases: &[f32], row: usize, direction: f64) -> Vec<f64> {
        let (half, mut out) = (self.half, head.to_vec());
        for i in 0..half {
            let cosine = f64::from(phases[row * 2 * half + i]);
            let sine = direction * f64::from(phases[row * 2 * half + half + i]);
            out[i] = head[i] * cosine - head[half + i] * sine;
            out[half + i] = head[half + i] * cosine + head[i] * sine;
        }
        out
    }
}

fn doubled(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

fn inverse_root(x: &[f64]) -> f64 {
    1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(EPSILON)).sqrt()
}

fn weights(width: usize) -> Vec<f32> {
    normals(4, width).iter().map(|w| 1.0 + 0.3 * w).collect()
}

fn forward(gpu: &Gpu, case: Case, with_norm: bool) -> Vec<f32> {
    let Case { rows, heads, head_width, half, in_place, .. } = case;
    let (x, values) = Rows::normals(gpu, Form::Bf16, case.shape(), 1, 1.5);
    let new = Rows::poisoned(gpu, Form::Bf16, case.shape());
    let (phase_values, weight_values) = (case.phases(), weights(head_width));
    let (phases, weight) = (upload_f32(gpu, &phase_values), upload_f32(gpu, &weight_values));
    let out = if in_place { &x } else { &new };
    let call = RopeTraining {
        x: x.slice(),
        x_stride: x.stride,
        out: out.slice(),
        out_stride: out.stride,
        norm: with_norm.then(|| HeadNorm { weight: weight.slice(), epsilon: EPSILON }),
        phases: phases.slice(),
        rows,
        heads,
        head_width,
        half,
    };
    rope_training(gpu, &call).unwrap();
    assert!(rope_training(gpu, &RopeTraining { rows: rows + 1, ..call }).is_err());
    assert!(rope_training(gpu, &RopeTraining { half: head_width, ..call }).is_err());
    let found = out.read(gpu);
    let mut expected = Vec::with_capacity(values.len());
    for (place, head) in values.chunks_exact(head_width).enumerate() {
        let mut head = doubled(head);
        if with_norm {
            let r = inverse_root(&head);
            head.iter_mut().zip(&weight_values).for_each(|(x, &w)| *x *= r * f64::from(w));
        }
        expected.extend(case.turned(&head, &phase_values, place / heads, 1.0));
    }
    let error = relative_error(&found, &expected);
    assert!(error < bound(Form::Bf16), "{case:?}, norm {with_norm}: {error:e}");
    found
}

/// The gradients of the input and of the norm's weight, which are added to ones.
fn backward(gpu: &Gpu, case: Case, with_norm: bool) -> [Vec<f32>; 2] {
    let Case { rows, heads, head_width, half, in_place, .. } = case;
    let (gradient, gradient_values) = Rows::normals(gpu, Form::Bf16, case.shape(), 2, 1.0);
    let (x, values) = Rows::normals(gpu, Form::Bf16, [rows, case.row_width(), case.row_width() + 8], 1, 1.5);
    let new = Rows::poisoned(gpu, Form::Bf16, case.shape());
    let (phase_values, weight_values) = (case.phases(), weights(head_width));
    let (phases, weight) = (upload_f32(gpu, &phase_values), upload_f32(gpu, &weight_values));
    let weight_gradient = upload_f32(gpu, &vec![1.0; head_width]);
    let partials = buffer(gpu, rope_training_workspace(head_width).unwrap());
    let wanted = NormWeightGradient { out: weight_gradient.slice(), add: true, partials: partials.slice() };
    let out = if in_place { &gradient } else { &new };
    let norm = HeadNormBackward {
        norm: HeadNorm { weight: weight.slice(), epsilon: EPSILON },
        x: x.slice(),
        x_stride: x.stride,
        weight_gradient: Some(wanted),
    };
    let call = RopeTrainingBackward {
        gradient: gradient.slice(),
        gradient_stride: gradient.stride,
        norm: with_norm.then_some(norm),
        phases: phases.slice(),
        out: out.slice(),
        out_stride: out.stride,
        rows,
        heads,
        head_width,
        half,
    };
    rope_training_backward(gpu, &call).unwrap();
    assert!(rope_training_backward(gpu, &RopeTrainingBackward { heads: heads + 9, ..call }).is_err());
    let found = [out.read(gpu), read_f32(gpu, &weight_gradient, head_width)];

    let (mut to_x, mut to_weight) = (Vec::with_capacity(values.len()), vec![1.0; head_width]);
    for (place, (g, x)) in gradient_values.chunks_exact(head_width).zip(values.chunks_exact(head_width)).enumerate() {
        let g = case.turned(&doubled(g), &phase_values, place / heads, -1.0);
        if !with_norm {
            to_x.extend(g);
            continue;
        }
        let x = doubled(x);
        let r = inverse_root(&x);
        let slopes: Vec<f64> = g.iter().zip(&weight_values).map(|(g, &w)| g * f64::from(w)).collect();
        let common = slopes.iter().zip(&x).map(|(slope, x)| slope * x * r).sum::<f64>() / head_width as f64;
        to_x.extend(slopes.iter().zip(&x).map(|(slope, x)| r * (slope - x * r * common)));
        (0..head_width).for_each(|i| to_weight[i] += g[i] * x[i] * r);
    }
    let error = relative_error(&found[0], &to_x);
    assert!(error < bound(Form::Bf16), "{case:?}, norm {with_norm}: {error:e}");
    let error = relative_error(&found[1], &to_weight);
    assert!(error < 2e-6, "{case:?}, norm {with_norm}, weight: {error:e}");
    found
}

#[test]
fn rotations_equal_double_precision_forward_and_back() {
    let Some(gpu) = gpu() else { return };
    let widths =
        [(64, 32), (128, 64), (128, 16), (80, 40), (96, 48), (256, 128), (256, 32), (32, 16), (20, 4), (300, 150)];
    for (head_width, half) in widths {
        for (rows, heads, gap) in [(5, 9, 8), (67, 3, 0), (3, 1, 3)] {
            for in_place in [false, true] {
                let case = Case { rows, heads, head_width, half, gap, in_place };
                for with_norm in [false, true] {
                    forward(&gpu, case, with_norm);
                    backward(&gpu, case, with_norm);
                }
            }
        }
    }
}

#[test]
fn many_rows_give_the_same_bits_again() {
    let Some(gpu) = gpu() else { return };
    for (rows, heads, head_width, half) in [(5000, 4, 128, 64), (2500, 9, 64, 32), (900, 2, 20, 10)] {
        let case = Case { rows, heads, head_width, half, gap: 0, in_place: false };
        assert!(same_bits(&forward(&gpu, case, true), &forward(&gpu, case, true)));
        let (first, second) = (backward(&gpu, case, true), backward(&gpu, case, true));
        assert!(first.iter().zip(&second).all(|(first, second)| same_bits(first, second)), "{case:?}");
    }
}
