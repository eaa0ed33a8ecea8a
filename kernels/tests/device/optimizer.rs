//! Optimizers and the weights' average over 50 steps: the bits of the same single-precision arithmetic on the host, and for
//! AdamW also the formula in double precision.

use ironloom_kernels::{
    AdamW, AdamWRule, Buffer, Gpu, Lion, ParameterRange, Sgd, StepValues, WeightAverage, adamw, lion, sgd,
    weight_average,
};

use crate::{buffer, gpu, normals, read_bf16, read_f32, relative_error, round_bf16, upload_f32};

const STEPS: usize = 50;
const RULE: AdamWRule = AdamWRule { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };

/// What a step is on the device, with a rate and a factor of its own.
pub(crate) fn step_values(number: usize, apply: u32) -> StepValues {
    let t = number as i32;
    let learning_rate = 1e-2 / (1.0 + 0.1 * number as f32);
    StepValues {
        learning_rate,
        adam_rate: (f64::from(learning_rate) / (1.0 - RULE.beta1.powi(t))) as f32,
        adam_root_factor: (1.0 / (1.0 - RULE.beta2.powi(t)).sqrt()) as f32,
        gradient_factor: if number.is_multiple_of(3) { 0.7 } else { 1.0 },
        apply,
    }
}

/// Gradients of a step: most are plain, some thousands of times smaller, some zero.
pub(crate) fn gradients(number: usize, count: usize) -> Vec<f32> {
    let scale = |i: usize| [1.0, 0.3, 1e-4, 0.0, 3.0, 1.0, 1e-7][i % 7];
    normals(100 + number as u64, count).iter().enumerate().map(|(i, g)| g * scale(i)).collect()
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    AdamW { weight_decay: f64 },
    Sgd { mu: f64, nesterov: bool },
    Lion,
}

const KINDS: [Kind; 6] = [
    Kind::AdamW { weight_decay: 0.1 },
    Kind::AdamW { weight_decay: 0.0 },
    Kind::Sgd { mu: 0.0, nesterov: false },
    Kind::Sgd { mu: 0.9, nesterov: false },
    Kind::Sgd { mu: 0.9, nesterov: true },
    Kind::Lion,
];

/// One element's step in single precision.
pub(crate) fn adamw_on_host(step: &StepValues, rule: &AdamWRule, g: f32, w: &mut f32, m: &mut f32, v: &mut f32) {
    let decay = (f64::from(step.learning_rate) * rule.weight_decay) as f32;
    let g = g * step.gradient_factor;
    *m += (1.0 - rule.beta1) as f32 * (g - *m);
    *v = rule.beta2 as f32 * *v + (1.0 - rule.beta2) as f32 * (g * g);
    let direction = *m / (v.sqrt() * step.adam_root_factor + rule.epsilon as f32);
    *w -= step.adam_rate * direction + decay * *w;
}

impl Kind {
    fn on_host(self, step: &StepValues, g: f32, w: &mut f32, m: &mut f32, v: &mut f32) {
        let rate = step.learning_rate;
        let scaled = g * step.gradient_factor;
        match self {
            Self::AdamW { weight_decay } => adamw_on_host(step, &AdamWRule { weight_decay, ..RULE }, g, w, m, v),
            Self::Sgd { mu, nesterov } => {
                let g = scaled + 0.1f32 * *w;
                let mu = mu as f32;
                *m = mu * *m + g;
                *w -= rate * if nesterov { g + mu * *m } else { *m };
            }
            Self::Lion => {
                let c = *m + (1.0f64 - 0.9) as f32 * (scaled - *m);
                let along = if c == 0.0 { 0.0 } else { rate.copysign(c) };
                *w -= along + (f64::from(rate) * 0.3) as f32 * *w;
                *m += (1.0f64 - 0.99) as f32 * (scaled - *m);
            }
        }
    }

    fn on_device(self, gpu: &Gpu, range: ParameterRange<'_>, first: &Buffer, second: &Buffer) {
        let (first, second) = (first.slice(), second.slice());
        match self {
            Self::AdamW { weight_decay } => {
                adamw(gpu, &AdamW { range, first, second, rule: AdamWRule { weight_decay, ..RULE } }).unwrap();
            }
            Self::Sgd { mu, nesterov } => {
                let momentum = (mu != 0.0).then_some(first);
                sgd(gpu, &Sgd { range, momentum, mu, nesterov, weight_decay: 0.1 }).unwrap();
            }
            Self::Lion => {
                let (beta1, beta2) = (0.9, 0.99);
                lion(gpu, &Lion { range, momentum: first, beta1, beta2, weight_decay: 0.3 }).unwrap();
            }
        }
    }
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn steps_have_the_bits_of_the_host() {
    let Some(gpu) = gpu() else { return };
    for kind in KINDS {
        for count in [1, 3, 256, 1030, 5003] {
            let start = normals(1, count);
            let (mut w, mut m, mut v) = (start.clone(), vec![0.0; count], vec![0.0; count]);
            let weights = upload_f32(&gpu, &w);
            let (first, second) = (upload_f32(&gpu, &m), upload_f32(&gpu, &v));
            let rounded = buffer(&gpu, 2 * count);
            for number in 1..=STEPS {
                // A refused step, with a gradient as such steps have it.
                let refused = number == 20;
                let g = if refused { vec![f32::NAN; count] } else { gradients(number, count) };
                let values = step_values(number, u32::from(!refused));
                let step = gpu.upload(bytemuck::bytes_of(&values), "a test").unwrap();
                let gradient = upload_f32(&gpu, &g);
                let range = ParameterRange {
                    weights: weights.slice(),
                    gradient: gradient.slice(),
                    rounded: (number > 10).then_some(rounded.slice()),
                    step: step.slice(),
                    count,
                };
                kind.on_device(&gpu, range, &first, &second);
                if !refused {
                    for i in 0..count {
                        kind.on_host(&values, g[i], &mut w[i], &mut m[i], &mut v[i]);
                    }
                }
                if number == 10 {
                    assert!(read_bf16(&gpu, &rounded, count).iter().all(|x| x.is_nan()), "{kind:?}: no copy was asked");
                }
            }
            let found = read_f32(&gpu, &weights, count);
            assert!(bits(&found) == bits(&w), "{kind:?} of {count}");
            // Every seventh has no gradient, and may have no decay.
            let moved = |i: usize| i % 7 == 3 || found[i] != start[i];
            assert!((0..count).all(moved), "{kind:?} of {count}");
            assert!(read_bf16(&gpu, &rounded, count) == w.iter().map(|&w| round_bf16(w)).collect::<Vec<_>>());
            if !matches!(kind, Kind::Sgd { mu: 0.0, .. }) {
                assert!(bits(&read_f32(&gpu, &first, count)) == bits(&m), "{kind:?} of {count}, first state");
            }
            assert!(bits(&read_f32(&gpu, &second, count)) == bits(&v), "{kind:?} of {count}, second state");
        }
    }
}

#[test]
fn adamw_is_its_formula_in_double_precision() {
    let Some(gpu) = gpu() else { return };
    let count = 3001;
    let start = normals(2, count);
    let mut w: Vec<f64> = start.iter().map(|&w| f64::from(w)).collect();
    let (mut m, mut v) = (vec![0.0f64; count], vec![0.0f64; count]);
    let weights = upload_f32(&gpu, &start);
    let (first, second) = (upload_f32(&gpu, &vec![0.0; count]), upload_f32(&gpu, &vec![0.0; count]));
    for number in 1..=STEPS {
        let (g, values) = (gradients(number, count), step_values(number, 1));
        let (gradient, step) = (upload_f32(&gpu, &g), gpu.upload(bytemuck::bytes_of(&values), "a test").unwrap());
        let range = ParameterRange {
            weights: weights.slice(),
            gradient: gradient.slice(),
            rounded: None,
            step: step.slice(),
            count,
        };
        adamw(&gpu, &AdamW { range, first: first.slice(), second: second.slice(), rule: RULE }).unwrap();
        let (rate, t) = (f64::from(values.learning_rate), number as i32);
        for i in 0..count {
            let g = f64::from(g[i]) * f64::from(values.gradient_factor);
            m[i] = RULE.beta1 * m[i] + (1.0 - RULE.beta1) * g;
            v[i] = RULE.beta2 * v[i] + (1.0 - RULE.beta2) * g * g;
            let corrected = [m[i] / (1.0 - RULE.beta1.powi(t)), v[i] / (1.0 - RULE.beta2.powi(t))];
            w[i] -= rate * (corrected[0] / (corrected[1].sqrt() + RULE.epsilon) + RULE.weight_decay * w[i]);
        }
    }
    let way = |found: f64, start: &f32| found - f64::from(*start);
    let found: Vec<f32> = read_f32(&gpu, &weights, count).iter().zip(&start).map(|(w, s)| w - s).collect();
    let expected: Vec<f64> = w.iter().zip(&start).map(|(&w, s)| way(w, s)).collect();
    let error = relative_error(&found, &expected);
    assert!(error < 2e-5, "{error:e}");
}

#[test]
fn zeros_between_parameters_stay_zeros() {
    let Some(gpu) = gpu() else { return };
    let zeros = || upload_f32(&gpu, &[0.0; 300]);
    for kind in KINDS {
        let (weights, first, second, gradient, rounded) = (zeros(), zeros(), zeros(), zeros(), buffer(&gpu, 600));
        for number in 1..=3 {
            let step = gpu.upload(bytemuck::bytes_of(&step_values(number, 1)), "a test").unwrap();
            let range = ParameterRange {
                weights: weights.slice(),
                gradient: gradient.slice(),
                rounded: Some(rounded.slice()),
                step: step.slice(),
                count: 300,
            };
            kind.on_device(&gpu, range, &first, &second);
        }
        for memory in [&weights, &first, &second] {
            assert!(read_f32(&gpu, memory, 300).iter().all(|&x| x == 0.0), "{kind:?}");
        }
        assert!(read_bf16(&gpu, &rounded, 300).iter().all(|&x| x == 0.0), "{kind:?}");
    }
}

#[test]
fn an_average_follows_the_weights() {
    let Some(gpu) = gpu() else { return };
    for count in [2, 1024, 4999] {
        let mut expected = normals(1, count);
        let average = upload_f32(&gpu, &expected);
        for number in 1..=STEPS {
            let w = normals(number as u64, count);
            let weights = upload_f32(&gpu, &w);
            let apply = u32::from(number % 7 != 0);
            let step = gpu.upload(bytemuck::bytes_of(&step_values(number, apply)), "a test").unwrap();
            let (average, weights, step) = (average.slice(), weights.slice(), step.slice());
            weight_average(&gpu, &WeightAverage { average, weights, step, decay: 0.97, count }).unwrap();
            if apply == 1 {
                expected
                    .iter_mut()
                    .zip(&w)
                    .for_each(|(average, w)| *average += (1.0f64 - 0.97) as f32 * (w - *average));
            }
        }
        assert!(bits(&read_f32(&gpu, &average, count)) == bits(&expected), "{count}");
    }
}

#[test]
fn ranges_that_are_too_small_or_not_aligned_are_refused() {
    let Some(gpu) = gpu() else { return };
    let memory = upload_f32(&gpu, &[0.0; 64]);
    let step = gpu.upload(bytemuck::bytes_of(&step_values(1, 1)), "a test").unwrap();
    let whole = memory.slice();
    let range = ParameterRange { weights: whole, gradient: whole, rounded: None, step: step.slice(), count: 64 };
    let call = AdamW { range, first: whole, second: whole, rule: RULE };
    let with = |range| adamw(&gpu, &AdamW { range, ..call });
    with(ParameterRange { count: 0, ..range }).unwrap();
    assert!(with(ParameterRange { count: 65, ..range }).is_err());
    assert!(with(ParameterRange { step: step.part(0, 16).unwrap(), ..range }).is_err());
    assert!(with(ParameterRange { weights: memory.part(4, 252).unwrap(), count: 8, ..range }).is_err());
    assert!(adamw(&gpu, &AdamW { second: memory.part(0, 252).unwrap(), ..call }).is_err());
}
