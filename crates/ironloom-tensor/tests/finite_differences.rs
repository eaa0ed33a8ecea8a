//! Gradients of operations against central differences of the same formula in double precision.
//!
//! `tests/gradients.rs` holds them to PyTorch's autograd; this needs no other implementation than the formula, which each test
//! writes down once. Operations with a file of their own tests for this (norm, activation, attention, loss) are not repeated.

use ironloom_core::Philox;
use ironloom_tensor::{Context, Device, Gradients, Indices, Result, Tape, Tensor, Weight, ops};

/// Distance of the two points of a difference: the error of a central difference is its square.
const STEP: f64 = 1e-4;

fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut draws = Philox::new(seed, 0);
    (0..count).map(|_| draws.next_normal()).collect()
}

fn tensor(seed: u64, shape: [usize; 2]) -> Tensor {
    Tensor::from_f32(normals(seed, shape[0] * shape[1]), shape).unwrap()
}

/// Holds the gradients of `inputs` through `operation` to the slopes of `formula`, both weighted by a random gradient above.
fn check(
    inputs: &[Tensor],
    operation: impl Fn(&Context<'_>, &[Tensor]) -> Result<Tensor>,
    formula: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    let (device, tape, mut gradients) = (Device::cpu(2), Tape::new(), Gradients::new());
    inputs.iter().for_each(|input| tape.watch(input));
    let out = operation(&Context::training(&device, &tape), inputs).unwrap();
    let above = normals(99, out.shape().elements().unwrap());
    let exact: Vec<Vec<f64>> =
        inputs.iter().map(|input| input.as_f32().unwrap().iter().map(|value| f64::from(*value)).collect()).collect();
    for (found, exact) in out.as_f32().unwrap().iter().zip(formula(&exact)) {
        assert!((f64::from(*found) - exact).abs() < 1e-5 * (1.0 + exact.abs()), "the value: {found} {exact}");
    }
    tape.backward(&out, Tensor::from_f32(above.clone(), *out.shape()).unwrap(), &mut gradients).unwrap();
    let loss = |inputs: &[Vec<f64>]| -> f64 {
        formula(inputs).iter().zip(&above).map(|(out, above)| out * f64::from(*above)).sum()
    };
    for (number, input) in inputs.iter().enumerate() {
        let found = gradients.get(input.id()).expect("a gradient").as_f32().unwrap();
        for (place, found) in found.iter().enumerate() {
            let moved = |by: f64| {
                let mut moved = exact.clone();
                moved[number][place] += by;
                loss(&moved)
            };
            let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            assert!(
                (f64::from(*found) - slope).abs() < 2e-5 * (1.0 + slope.abs()),
                "{number}[{place}]: {found} {slope}"
            );
        }
    }
}

/// `x W^T` for rows of `x` and `w` as long as `cols`.
fn product(x: &[f64], w: &[f64], cols: usize) -> Vec<f64> {
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
    x.chunks(cols).flat_map(|x| w.chunks(cols).map(move |w| dot(x, w))).collect()
}

#[test]
fn linear_with_bias() {
    let (x, w, bias) = (tensor(1, [5, 7]), tensor(2, [3, 7]), Tensor::from_f32(normals(3, 3), [3]).unwrap());
    check(
        &[x, w, bias],
        |cx, inputs| {
            let weight = Weight::dense(inputs[1].clone())?;
            ops::linear(cx, &inputs[0], ops::Projection { weight: &weight, bias: Some(&inputs[2]), adapter: None })
        },
        |inputs| {
            let out = product(&inputs[0], &inputs[1], 7);
            out.iter().enumerate().map(|(i, out)| out + inputs[2][i % 3]).collect()
        },
    );
}

#[test]
fn embedding_with_repeated_ids() {
    let ids = [4u32, 0, 4, 2];
    check(
        &[tensor(4, [6, 3])],
        |cx, inputs| {
            let table = Weight::dense(inputs[0].clone())?;
            ops::embedding(cx, &table, &Indices::new(cx.device, &ids)?, 1.5)
        },
        |inputs| ids.iter().flat_map(|&id| inputs[0][id as usize * 3..][..3].iter().map(|value| 1.5 * value)).collect(),
    );
}

#[test]
fn rope_of_a_part_of_each_head() {
    let phases = tensor(6, [3, 4]);
    let turn = phases.as_f32().unwrap().to_vec();
    check(
        &[tensor(5, [3, 10])],
        move |cx, inputs| ops::rope(cx, inputs[0].clone(), 5, &phases),
        move |inputs| {
            let mut out = inputs[0].clone();
            for (row, out) in out.chunks_mut(10).enumerate() {
                for head in out.chunks_mut(5) {
                    for i in 0..2 {
                        let (cosine, sine) = (f64::from(turn[row * 4 + i]), f64::from(turn[row * 4 + 2 + i]));
                        let (a, b) = (head[i], head[2 + i]);
                        (head[i], head[2 + i]) = (a * cosine - b * sine, b * cosine + a * sine);
                    }
                }
            }
            out
        },
    );
}

#[test]
fn rows_gathered_weighted_and_added_back() {
    let (rows, places) = ([2u32, 0, 2], [1u32, 3, 0]);
    check(
        &[tensor(7, [3, 4]), tensor(8, [2, 2]), tensor(9, [3, 4])],
        |cx, inputs| {
            let gathered = ops::gather_rows(cx, &inputs[0], &rows)?;
            let weights = ops::RowWeights { weights: &inputs[1], places: &places };
            ops::scatter_add_rows(cx, inputs[2].clone(), &rows, &gathered, weights)
        },
        |inputs| {
            let mut out = inputs[2].clone();
            for (&row, &place) in rows.iter().zip(&places) {
                for j in 0..4 {
                    let at = row as usize * 4 + j;
                    out[at] += inputs[1][place as usize] * inputs[0][at];
                }
            }
            out
        },
    );
}

#[test]
fn rows_behind_a_sigmoid() {
    check(
        &[tensor(10, [4, 3]), tensor(11, [4, 1])],
        |cx, inputs| ops::scale_rows_by_sigmoid(cx, inputs[0].clone(), &inputs[1]),
        |inputs| inputs[0].iter().enumerate().map(|(i, x)| x / (1.0 + (-inputs[1][i / 3]).exp())).collect(),
    );
}

fn softmax(row: &[f64]) -> Vec<f64> {
    let total: f64 = row.iter().map(|x| x.exp()).sum();
    row.iter().map(|x| x.exp() / total).collect()
}

#[test]
fn weights_of_chosen_experts() {
    for (per_row, normalize) in [(1, false), (2, false), (2, true), (4, true)] {
        let logits = tensor(12, [6, 5]);
        let device = Device::cpu(1);
        let routing = ops::route_experts(&Context::inference(&device), &logits, per_row, normalize).unwrap();
        let (chosen, _) = routing.read().unwrap();
        check(
            &[logits],
            |cx, inputs| Ok(ops::route_experts(cx, &inputs[0], per_row, normalize)?.weights()?.clone()),
            |inputs| {
                let rows = inputs[0].chunks(5).zip(chosen.chunks(per_row));
                rows.flat_map(|(row, chosen)| {
                    let p = softmax(row);
                    let total: f64 = chosen.iter().map(|&expert| p[expert as usize]).sum();
                    let divisor = if normalize { total } else { 1.0 };
                    chosen.iter().map(|&expert| p[expert as usize] / divisor).collect::<Vec<_>>()
                })
                .collect()
            },
        );
    }
}

#[test]
fn losses_of_a_router() {
    let losses = ops::RouterLosses { balance: 0.7, z: 0.3 };
    let (device, tape, mut gradients, logits) = (Device::cpu(1), Tape::new(), Gradients::new(), tensor(13, [6, 5]));
    tape.watch(&logits);
    let cx = Context::training(&device, &tape);
    let routing = ops::route_experts(&cx, &logits, 2, true).unwrap();
    ops::router_losses(&cx, &logits, &routing, losses, 0.5).unwrap();
    let (chosen, _) = routing.read().unwrap();
    let mut shares = [0.0f64; 5];
    chosen.iter().for_each(|&expert| shares[expert as usize] += 1.0 / chosen.len() as f64);
    let formula = |logits: &[f64]| -> f64 {
        let rows = logits.chunks(5).map(|row| {
            let balance: f64 = softmax(row).iter().zip(&shares).map(|(p, share)| 5.0 * p * share).sum();
            0.7 * balance + 0.3 * row.iter().map(|x| x.exp()).sum::<f64>().ln().powi(2)
        });
        0.5 * rows.sum::<f64>() / 6.0
    };
    let exact: Vec<f64> = logits.as_f32().unwrap().iter().map(|value| f64::from(*value)).collect();
    assert!((tape.side_loss() - formula(&exact)).abs() < 1e-6);
    assert_eq!(tape.expert_loads(), [shares.map(|share| share as f32).to_vec()]);
    tape.backward(&logits, Tensor::zeros([6, 5]).unwrap(), &mut gradients).unwrap();
    for (place, found) in gradients.get(logits.id()).unwrap().as_f32().unwrap().iter().enumerate() {
        let moved = |by: f64| {
            let mut moved = exact.clone();
            moved[place] += by;
            formula(&moved)
        };
        let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
        assert!((f64::from(*found) - slope).abs() < 1e-5 * (1.0 + slope.abs()), "{place}: {found} {slope}");
    }
}

#[test]
fn a_frozen_weight_hands_on_the_gradient_of_its_input() {
    let (x, w) = (tensor(14, [4, 64]), normals(15, 3 * 64));
    let device = Device::cpu(2);
    let weight = Weight::from_f32(&device, &w, [3, 64], ironloom_quant::WeightFormat::F32).unwrap();
    let exact: Vec<f64> = w.iter().map(|value| f64::from(*value)).collect();
    check(&[x], |cx, inputs| ops::linear(cx, &inputs[0], &weight), |inputs| product(&inputs[0], &exact, 64));
}
