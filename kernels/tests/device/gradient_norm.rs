//! The gradient's norm and the judgement of a step against double precision.

use bytemuck::{Zeroable, bytes_of, bytes_of_mut};
use ironloom_kernels::{
    Gpu, JudgeStep, LossTotals, StepLimits, StepResult, StepValues, judge_step, sum_of_squares, sum_of_squares_pieces,
};

use crate::{buffer, gpu, normals, upload_f32};

fn partial_sums(gpu: &Gpu, gradient: &[f32]) -> Vec<f64> {
    let pieces = sum_of_squares_pieces(gradient.len());
    let sums = buffer(gpu, 8 * pieces);
    sum_of_squares(gpu, upload_f32(gpu, gradient).slice(), sums.slice(), gradient.len()).unwrap();
    let mut partial = vec![0.0; pieces];
    gpu.read(sums.slice(), bytemuck::cast_slice_mut(&mut partial)).unwrap();
    partial
}

#[test]
fn squares_are_summed_in_double_precision() {
    let Some(gpu) = gpu() else { return };
    // The last has more elements than the most pieces take at once.
    for count in [0, 1, 3, 4, 255, 4096, 4097, 100_003, 5_000_001] {
        let mut values = normals(3, count);
        values.iter_mut().step_by(5).for_each(|value| *value *= 1e-6);
        let found = partial_sums(&gpu, &values);
        let expected: f64 = values.iter().map(|&g| f64::from(g).powi(2)).sum();
        let total: f64 = found.iter().sum();
        assert!((total - expected).abs() <= 1e-12 * expected, "{count}: {total} {expected}");
        assert!(found == partial_sums(&gpu, &values), "{count}: the same bits again");
    }
    for (value, finite) in [(f32::MAX, true), (1e-45, true), (f32::INFINITY, false), (f32::NAN, false)] {
        let total: f64 = partial_sums(&gpu, &[0.0, 0.0, 0.0, 0.0, value]).iter().sum();
        assert_eq!(total.is_finite(), finite, "{value}");
        assert!(!finite || total == f64::from(value).powi(2), "{value}");
    }
}

const TOTALS: LossTotals = LossTotals { nll: 300.0, lse_squared: 9000.0, counted: 100.0, correct: 37.0 };
const LIMITS: StepLimits =
    StepLimits { loss_scale: 0.01, z_loss: 1e-4, loss_limit: f64::INFINITY, max_gradient_norm: 1.0 };

/// A judgement of these sums of squares, from values that it has to leave or to write.
fn judge(
    gpu: &Gpu,
    squares: &[f64],
    totals: &LossTotals,
    side: Option<f64>,
    limits: &StepLimits,
) -> (StepResult, StepValues) {
    let upload = |bytes: &[u8]| gpu.upload(bytes, "a test").unwrap();
    let before = StepValues {
        learning_rate: 0.5,
        adam_rate: 0.25,
        adam_root_factor: 2.0,
        gradient_factor: f32::NAN,
        apply: u32::MAX,
    };
    let (partial, totals, limits) =
        (upload(bytemuck::cast_slice(squares)), upload(bytes_of(totals)), upload(bytes_of(limits)));
    let side = side.map(|side| upload(bytes_of(&side)));
    let (step, result) = (upload(bytes_of(&before)), buffer(gpu, size_of::<StepResult>()));
    let call = JudgeStep {
        partial: partial.slice(),
        pieces: squares.len(),
        totals: totals.slice(),
        side_losses: side.as_ref().map(|side| side.slice()),
        limits: limits.slice(),
        step: step.slice(),
        result: result.slice(),
    };
    judge_step(gpu, &call).unwrap();
    let (mut found, mut values) = (StepResult::zeroed(), StepValues::zeroed());
    gpu.read(result.slice(), bytes_of_mut(&mut found)).unwrap();
    gpu.read(step.slice(), bytes_of_mut(&mut values)).unwrap();
    assert_eq!([values.learning_rate, values.adam_rate, values.adam_root_factor], [0.5, 0.25, 2.0]);
    assert_eq!(found.applied, values.apply);
    assert_eq!(found.reserved, 0);
    assert_eq!([found.counted, found.correct], [100.0, 37.0]);
    (found, values)
}

#[test]
fn a_step_is_judged_by_its_loss_and_its_norm() {
    let Some(gpu) = gpu() else { return };
    // Norm 2.5 in 2,000 pieces, which are more than a block has threads.
    let squares: Vec<f64> = (0..2000).map(|i| 6.25 * f64::from(i % 4) / 3000.0).collect();
    let norm = squares.iter().sum::<f64>().sqrt();
    let (found, values) = judge(&gpu, &squares, &TOTALS, Some(0.125), &LIMITS);
    assert!((found.loss - 3.0).abs() < 1e-12, "{found:?}");
    assert!((found.side_loss - (0.125 + 1e-4 * 90.0)).abs() < 1e-12, "{found:?}");
    assert!((found.gradient_norm - norm).abs() < 1e-12, "{found:?}");
    assert_eq!(values.gradient_factor, (1.0 / found.gradient_norm) as f32);
    assert_eq!(values.apply, 1);

    let without = judge(&gpu, &squares, &TOTALS, None, &StepLimits { z_loss: 0.0, ..LIMITS }).0;
    assert_eq!(without.side_loss, 0.0);
    let factor = |max_gradient_norm| {
        judge(&gpu, &[4.0], &TOTALS, None, &StepLimits { max_gradient_norm, ..LIMITS }).1.gradient_factor
    };
    assert_eq!([factor(0.5), factor(2.0), factor(3.0), factor(f64::INFINITY)], [0.25, 1.0, 1.0, 1.0]);
    assert_eq!(judge(&gpu, &[0.0], &TOTALS, None, &LIMITS).1.gradient_factor, 1.0);
}

#[test]
fn a_step_that_may_not_be_learned_from_is_refused() {
    let Some(gpu) = gpu() else { return };
    let applied = |squares: f64, nll: f64, side: f64, loss_limit: f64| {
        let limits = StepLimits { loss_limit, z_loss: 0.0, ..LIMITS };
        judge(&gpu, &[1.0, squares], &LossTotals { nll, ..TOTALS }, Some(side), &limits).0.applied
    };
    assert_eq!(applied(1.0, 300.0, 0.5, 3.5), 1, "at the limit");
    assert_eq!(applied(1.0, 300.0, 0.5, 3.499), 0);
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(applied(1.0, bad, 0.5, f64::INFINITY), 0, "{bad}");
        assert_eq!(applied(1.0, 300.0, bad, f64::INFINITY), 0, "{bad}");
    }
    assert_eq!(applied(f64::INFINITY, 300.0, 0.5, f64::INFINITY), 0);
    assert_eq!(applied(f64::NAN, 300.0, 0.5, f64::INFINITY), 0);
}

#[test]
fn memory_that_is_too_small_is_refused() {
    let Some(gpu) = gpu() else { return };
    let memory = buffer(&gpu, 4096 * 4);
    assert!(sum_of_squares(&gpu, memory.slice(), memory.slice(), 4097).is_err());
    assert!(sum_of_squares(&gpu, memory.part(4, 64).unwrap(), memory.slice(), 4).is_err());
    assert!(sum_of_squares(&gpu, memory.slice(), memory.part(0, 8).unwrap(), 4096).is_ok());
    assert!(sum_of_squares(&gpu, memory.slice(), memory.part(0, 4).unwrap(), 4096).is_err());
    let whole = memory.slice();
    let call = JudgeStep {
        partial: whole,
        pieces: 1,
        totals: whole,
        side_losses: None,
        limits: whole,
        step: whole,
        result: memory.part(256, 47).unwrap(),
    };
    assert!(judge_step(&gpu, &call).is_err());
}
