//! Public faults of training, each as a test named by project and number.

use ironloom_core::{Philox, Threads};
use ironloom_train::optimizer::{
    AdamWOptions, LionOptions, MuonOptions, Optimizer, OptimizerOptions, Parameter, Role, Step,
};

/// Weights held in 16 bits do not move: a step of a millionth is far below half their spacing, and every optimizer ran on without
/// learning. Here weights are single precision in every optimizer, and the mean moves as far as the steps say.
#[test]
fn pytorch_120376_weights_move_at_a_rate_of_a_millionth() {
    let (threads, elements, steps, rate) = (Threads::new(2), 64 * 128, 100, 1e-6f32);
    let mut philox = Philox::new(120_376, 0);
    let start: Vec<f32> = (0..elements).map(|_| 1.0 + 0.02 * philox.next_normal()).collect();
    let mean = |weights: &[f32]| weights.iter().map(|&weight| f64::from(weight)).sum::<f64>() / weights.len() as f64;
    let adamw = || AdamWOptions { weight_decay: 0.0, ..Default::default() };
    for options in [
        OptimizerOptions::AdamW(adamw()),
        OptimizerOptions::AdamW8bit(adamw()),
        OptimizerOptions::Lion(LionOptions { weight_decay: 0.0, ..Default::default() }),
        OptimizerOptions::Muon(MuonOptions { adamw: adamw(), ..Default::default() }),
    ] {
        let (mut optimizer, mut weights) = (Optimizer::new(options.clone()).unwrap(), start.clone());
        for number in 1..=steps {
            let step = Step { number, learning_rate: rate, gradient_factor: 1.0 };
            let parameter = Parameter::new("embed", &[64, 128], Role::Embedding);
            optimizer.update(&threads, &step, &parameter, &mut weights, &vec![0.3; elements]).unwrap();
        }
        let moved = mean(&weights) - mean(&start);
        let expected = -f64::from(rate) * steps as f64;
        assert!((moved / expected - 1.0).abs() < 0.05, "{}: {moved}, expected {expected}", options.name());
    }
}

/// The same for decay: `weight · (1 - rate · decay)` is the weight itself once the product is below half the spacing, and
/// decay was a no-op. It is added to the step first, and together they move the mean as double precision says.
#[test]
fn torchao_1124_weight_decay_moves_weights_at_a_small_rate() {
    let (threads, elements, steps, rate) = (Threads::new(1), 4096, 200, 1e-6f32);
    let mut philox = Philox::new(1124, 0);
    let start: Vec<f32> = (0..elements).map(|_| 0.02 * philox.next_normal().abs()).collect();
    let sum = |weights: &[f32]| weights.iter().map(|&weight| f64::from(weight)).sum::<f64>();
    for options in [
        OptimizerOptions::AdamW(AdamWOptions::default()),
        OptimizerOptions::AdamW8bit(AdamWOptions::default()),
        OptimizerOptions::Lion(LionOptions { weight_decay: 0.1, ..Default::default() }),
    ] {
        let (mut optimizer, mut weights) = (Optimizer::new(options.clone()).unwrap(), start.clone());
        for number in 1..=steps {
            let step = Step { number, learning_rate: rate, gradient_factor: 1.0 };
            let parameter = Parameter::new("w", &[4096], Role::Matrix);
            optimizer.update(&threads, &step, &parameter, &mut weights, &vec![0.0; elements]).unwrap();
        }
        let expected = (1.0 - 1e-7f64).powi(steps as i32) - 1.0;
        let moved = sum(&weights) / sum(&start) - 1.0;
        assert!((moved / expected - 1.0).abs() < 0.2, "{}: {moved}, expected {expected}", options.name());
    }
}
