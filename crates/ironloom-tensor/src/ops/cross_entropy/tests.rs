//! The loss against plain sums in double precision, in pieces and whole, and its refusals.

use ironloom_core::Philox;
use ironloom_quant::WeightFormat;

use super::*;
use crate::{Device, Gradients, Tape};

struct Case {
    n: usize,
    width: usize,
    vocabulary: usize,
    /// Every so many rows do not count.
    ignored: usize,
    options: CrossEntropyOptions,
}

struct Exact {
    loss: f64,
    nll: f64,
    correct: usize,
    to_hidden: Vec<f64>,
    to_head: Vec<f64>,
}

fn case([n, width, vocabulary]: [usize; 3], ignored: usize, z_loss: f32, scale: f32) -> Case {
    Case { n, width, vocabulary, ignored, options: CrossEntropyOptions { ignore_index: -100, z_loss, scale } }
}

fn small() -> Vec<Case> {
    vec![
        case([1, 1, 1], 9, 0.0, 1.0),
        case([1, 3, 2], 9, 0.25, 1.0),
        case([5, 3, 7], 9, 0.0, 0.2),
        case([9, 4, 33], 3, 0.125, 0.5),
        case([2, 4, 5], 1, 0.125, f32::INFINITY),
    ]
}

/// Several chunks of rows.
fn large() -> Case {
    case([150, 5, 70_001], 4, 1e-2, 1.0 / 112.0)
}

fn normals(count: usize, seed: u64) -> Vec<f32> {
    let mut draws = Philox::new(seed, 0);
    (0..count).map(|_| draws.next_normal()).collect()
}

fn doubled(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

impl Case {
    fn targets(&self) -> Vec<i64> {
        let id = |row: usize| (row * 7919 + 3) % self.vocabulary;
        (0..self.n).map(|row| if row % self.ignored + 1 == self.ignored { -100 } else { id(row) as i64 }).collect()
    }

    fn inputs(&self) -> [Vec<f32>; 2] {
        [normals(self.n * self.width, 1), normals(self.vocabulary * self.width, 2)]
    }

    /// The result, and the gradients of the rows and of the head for `factor` as the loss's.
    fn run(&self, threads: usize, hidden: &[f32], head: &Weight, factor: f32) -> (CrossEntropy, [Option<Vec<f32>>; 2]) {
        let (device, tape, mut gradients) = (Device::cpu(threads), Tape::new(), Gradients::new());
        let hidden = Tensor::from_f32(hidden.to_vec(), [self.n, self.width]).unwrap();
        tape.watch(&hidden);
        head.as_dense().inspect(|head| tape.watch(head));
        let cx = Context::training(&device, &tape);
        let result = cross_entropy(&cx, &hidden, head, Targets::Host(&self.targets()), &self.options).unwrap();
        let gradient = Tensor::from_f32(vec![factor], [1]).unwrap();
        tape.backward(&result.loss, gradient, &mut gradients).unwrap();
        let of = |leaf: &Tensor| gradients.get(leaf.id()).map(|gradient| gradient.as_f32().unwrap().to_vec());
        let made = [of(&hidden), head.as_dense().and_then(of)];
        (result, made)
    }

    fn exact(&self, hidden: &[f64], head: &[f64]) -> Exact {
        let (width, z_loss) = (self.width, f64::from(self.options.z_loss));
        let targets = self.targets();
        let empty = targets.iter().all(|target| *target == -100);
        let scale = if empty { 0.0 } else { f64::from(self.options.scale) };
        let mut exact = Exact {
            loss: 0.0,
            nll: 0.0,
            correct: 0,
            to_hidden: vec![0.0; hidden.len()],
            to_head: vec![0.0; head.len()],
        };
        for (row, target) in targets.iter().enumerate().filter(|(_, target)| **target != -100) {
            let target = *target as usize;
            let x = &hidden[row * width..][..width];
            let logits = head.chunks_exact(width).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>());
            let logits: Vec<f64> = logits.collect();
            let largest = logits.iter().fold(f64::MIN, |a, b| a.max(*b));
            let log_sum_exp = largest + logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln();
            exact.nll += log_sum_exp - logits[target];
            exact.loss += scale * (log_sum_exp - logits[target] + z_loss * log_sum_exp * log_sum_exp);
            exact.correct += usize::from(logits[target] == largest);
            for (id, logit) in logits.iter().enumerate() {
                let p = (logit - log_sum_exp).exp();
                let slope = scale * (p * (1.0 + 2.0 * z_loss * log_sum_exp) - f64::from(u8::from(id == target)));
                for d in 0..width {
                    exact.to_hidden[row * width + d] += slope * head[id * width + d];
                    exact.to_head[id * width + d] += slope * x[d];
                }
            }
        }
        exact
    }

    fn dense(&self, values: &[f32]) -> Weight {
        Weight::dense(Tensor::from_f32(values.to_vec(), [self.vocabulary, self.width]).unwrap()).unwrap()
    }
}

fn assert_close(found: &[f32], exact: &[f64], factor: f64, bound: f64) {
    assert_eq!(found.len(), exact.len());
    for (found, exact) in found.iter().zip(exact.iter().map(|exact| exact * factor)) {
        assert!((f64::from(*found) - exact).abs() < bound * (1.0 + exact.abs()), "{found} {exact}");
    }
}

#[test]
fn gradients_equal_finite_differences_of_every_element() {
    for case in small() {
        let inputs = case.inputs();
        let (_, made) = case.run(2, &inputs[0], &case.dense(&inputs[1]), 1.0);
        let inputs = inputs.each_ref().map(|values| doubled(values));
        for (input, made) in made.iter().enumerate() {
            for (element, found) in made.as_ref().unwrap().iter().enumerate() {
                let at = |step: f64| {
                    let mut moved = inputs.clone();
                    moved[input][element] += step;
                    case.exact(&moved[0], &moved[1]).loss
                };
                let exact = (at(1e-5) - at(-1e-5)) / 2e-5;
                assert!((f64::from(*found) - exact).abs() < 2e-6 * (1.0 + exact.abs()), "{found} {exact}");
            }
        }
    }
}

#[test]
fn losses_and_gradients_equal_double_precision_on_any_threads() {
    for case in small().into_iter().chain([large()]) {
        let [hidden, head] = case.inputs();
        let exact = case.exact(&doubled(&hidden), &doubled(&head));
        let weight = case.dense(&head);
        let (result, made) = case.run(1, &hidden, &weight, 0.5);
        assert!((f64::from(result.loss.as_f32().unwrap()[0]) - exact.loss).abs() < 1e-6 * (1.0 + exact.loss));
        assert!((result.nll_sum - exact.nll).abs() < 1e-6 * (1.0 + exact.nll));
        let counted = case.targets().iter().filter(|target| **target != -100).count();
        assert_eq!((result.counted, result.correct), (counted, exact.correct));
        for (found, exact) in made.iter().zip([&exact.to_hidden, &exact.to_head]) {
            assert_close(found.as_ref().unwrap(), exact, 0.5, 2e-6);
        }
        for threads in [2, 3] {
            let (again, made_again) = case.run(threads, &hidden, &weight, 0.5);
            assert_eq!((again.loss.as_f32().unwrap(), again.nll_sum.to_bits()), {
                (result.loss.as_f32().unwrap(), result.nll_sum.to_bits())
            });
            assert_eq!(made_again, made);
        }
    }
}

#[test]
fn a_packed_head_is_frozen_and_gives_the_rows_their_gradient() {
    // The second is unpacked in two parts.
    for case in [case([9, 32, 48], 3, 0.125, 0.5), case([3, 64, 20_000], 9, 0.0, 1.0)] {
        let [hidden, head] = case.inputs();
        let device = Device::cpu(1);
        for format in [WeightFormat::F32, WeightFormat::Int8] {
            let head = Weight::from_f32(&device, &head, [case.vocabulary, case.width], format).unwrap();
            let mut unpacked = vec![0.0; case.vocabulary * case.width];
            for (row, out) in unpacked.chunks_exact_mut(case.width).enumerate() {
                head.row(row, out).unwrap();
            }
            let exact = case.exact(&doubled(&hidden), &doubled(&unpacked));
            let (result, [to_hidden, to_head]) = case.run(2, &hidden, &head, 1.0);
            assert!((result.nll_sum - exact.nll).abs() < 3e-6 * (1.0 + exact.nll), "{} {}", result.nll_sum, exact.nll);
            // Logits of 64 terms reach 40 here, and probabilities are as exact as those are.
            assert_close(&to_hidden.unwrap(), &exact.to_hidden, 1.0, 6e-6);
            assert!(to_head.is_none());
        }
    }
}

#[test]
fn a_head_and_rows_that_need_no_gradient_get_none() {
    let (case, device, tape) = (&small()[3], Device::cpu(1), Tape::new());
    let [hidden, head] = case.inputs();
    let (hidden, head) = (Tensor::from_f32(hidden, [case.n, case.width]).unwrap(), case.dense(&head));
    let weight = head.as_dense().unwrap();
    tape.watch(weight);
    let mut gradients = Gradients::new();
    let cx = Context::training(&device, &tape);
    let result = cross_entropy(&cx, &hidden, &head, Targets::Host(&case.targets()), &case.options).unwrap();
    tape.backward(&result.loss, Tensor::from_f32(vec![1.0], [1]).unwrap(), &mut gradients).unwrap();
    let (_, [_, expected]) = case.run(1, hidden.as_f32().unwrap(), &head, 1.0);
    assert_eq!(gradients.get(weight.id()).map(|gradient| gradient.as_f32().unwrap()), expected.as_deref());
    assert!(gradients.get(hidden.id()).is_none());
    let alone =
        cross_entropy(&Context::inference(&device), &hidden, &head, Targets::Host(&case.targets()), &case.options)
            .unwrap();
    assert_eq!((alone.nll_sum, alone.correct), (result.nll_sum, result.correct));
}

#[test]
fn equal_logits_are_correct_for_the_first_id_only() {
    let (device, head) = (Device::cpu(1), Weight::dense(Tensor::zeros([3, 2]).unwrap()).unwrap());
    let hidden = Tensor::from_f32(vec![1.0; 6], [3, 2]).unwrap();
    let options = CrossEntropyOptions::default();
    let result =
        cross_entropy(&Context::inference(&device), &hidden, &head, Targets::Host(&[0, 1, 2]), &options).unwrap();
    assert_eq!((result.counted, result.correct), (3, 1));
    assert!((result.nll_sum - 3.0 * 3f64.ln()).abs() < 1e-6);
}

#[test]
fn what_does_not_fit_is_refused() {
    let (device, head) = (Device::cpu(1), Weight::dense(Tensor::zeros([3, 2]).unwrap()).unwrap());
    let cx = Context::inference(&device);
    let refuse = |hidden: [usize; 2], targets: &[i64]| {
        let (hidden, options) = (Tensor::zeros(hidden).unwrap(), CrossEntropyOptions::default());
        cross_entropy(&cx, &hidden, &head, Targets::Host(targets), &options).unwrap_err().to_string()
    };
    let error = refuse([2, 2], &[0, 3]);
    assert_eq!(error, "cross entropy: target 3 at row 1 is outside the vocabulary of 3; -100 leaves a row out");
    assert!(refuse([2, 2], &[-1, 0]).contains("target -1 at row 0"));
    assert!(refuse([2, 2], &[0]).contains("targets is 1, and 2"));
    assert!(refuse([2, 3], &[0, 0]).contains("hidden rows"));
}
