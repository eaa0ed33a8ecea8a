//! Optimizers, averages, clipping and evaluation on the card, near the processor's.

use ironloom_train::{
    Trainer, TrainerOptions,
    optimizer::{AdamWOptions, LionOptions, MuonOptions, OptimizerOptions, SgdOptions},
};

use super::{
    card,
    compare::{ByParameter, differing_bits, gradient_options, relative_error, step_options, weights, whole_error},
    models::{all, batch, dense, few, gemma3, our_experts, qwen3, ragged, step_batches},
    steps::{assert_near, both, losses, on_card},
};

#[test]
fn ten_steps_of_each_optimizer_are_near_the_processor_s() {
    let Some(device) = card() else { return };
    let sgd = |momentum, nesterov| SgdOptions { momentum, nesterov, weight_decay: 0.01 };
    let optimizers = [
        (3e-4, OptimizerOptions::AdamW8bit(AdamWOptions::default())),
        (2e-4, OptimizerOptions::Lion(LionOptions::default())),
        (0.2, OptimizerOptions::Sgd(sgd(0.0, false))),
        (0.05, OptimizerOptions::Sgd(sgd(0.9, false))),
        (0.05, OptimizerOptions::Sgd(sgd(0.9, true))),
        (1e-3, OptimizerOptions::Muon(MuonOptions::default())),
    ];
    let steps: Vec<_> = (0..10).map(step_batches).collect();
    for (learning_rate, optimizer) in optimizers {
        for subject in [dense(), qwen3(), our_experts()] {
            let what = format!("{}, {}", optimizer.name(), subject.name);
            let options = TrainerOptions { learning_rate, optimizer: optimizer.clone(), ..step_options() };
            let (mut host, mut there) = both(&subject, &options, &device);
            let losses = losses(&mut host, &mut there, &steps);
            assert_near(&what, &losses, 2e-2);
            assert!(losses[9][1] < losses[0][1] - 0.1, "{what}: nothing is learnt: {losses:?}");
        }
    }
}

/// How far weights went, against how far the processor's went: the direction of plain descent is the gradient's.
#[test]
fn plain_descent_moves_weights_as_far_as_the_processor_s() {
    let Some(device) = card() else { return };
    let optimizer = OptimizerOptions::Sgd(SgdOptions { momentum: 0.9, nesterov: true, weight_decay: 0.01 });
    let options = TrainerOptions { learning_rate: 0.01, optimizer, ..step_options() };
    for subject in few() {
        let (mut host, mut there) = both(&subject, &options, &device);
        let starts = [&host, &there].map(weights);
        losses(&mut host, &mut there, &(0..5).map(step_batches).collect::<Vec<_>>());
        let [expected, found] =
            [(&host, &starts[0]), (&there, &starts[1])].map(|(trainer, start)| moved(&weights(trainer), start));
        let error = whole_error(&found, &expected);
        println!("{}: {error:.1e} off", subject.name);
        assert!(error <= 5e-2, "{}: {error:.1e} of the way off", subject.name);
    }
}

fn moved(to: &ByParameter, from: &ByParameter) -> ByParameter {
    let way = |(to, from): (&Vec<f32>, &Vec<f32>)| to.iter().zip(from).map(|(to, from)| to - from).collect();
    to.iter().zip(from.values()).map(|((name, to), from)| (name.clone(), way((to, from)))).collect()
}

#[test]
fn a_clipped_step_is_as_long_as_the_limit_says() {
    let Some(device) = card() else { return };
    let limit = 0.05;
    let optimizer = OptimizerOptions::Sgd(SgdOptions::default());
    let options =
        TrainerOptions { learning_rate: 1.0, optimizer, max_gradient_norm: Some(limit), ..gradient_options() };
    for subject in few() {
        let (mut host, mut there) = both(&subject, &options, &device);
        let start = weights(&there);
        let [host, report] = [&mut host, &mut there].map(|trainer| trainer.step(&[ragged()]).unwrap());
        let off = (report.gradient_norm / host.gradient_norm - 1.0).abs();
        assert!(off <= 2e-2, "{}: norm {}, not {}", subject.name, report.gradient_norm, host.gradient_norm);
        assert!(report.gradient_norm > 2.0 * limit, "{}: there is nothing to clip", subject.name);
        let way = moved(&weights(&there), &start);
        let length = way.values().flatten().map(|way| f64::from(*way).powi(2)).sum::<f64>().sqrt();
        assert!((length / limit - 1.0).abs() <= 1e-3, "{}: {length} long, not {limit}", subject.name);
    }
}

#[test]
fn evaluation_is_the_processor_s() {
    let Some(device) = card() else { return };
    let batches = [ragged(), batch(&[130, 70], 2), batch(&[5], 3)];
    for subject in all() {
        let (mut host, mut there) = both(&subject, &gradient_options(), &device);
        let start = weights(&there);
        for _ in 0..2 {
            let [expected, found] = [&mut host, &mut there].map(|trainer| trainer.evaluate(&batches).unwrap());
            let off = (found / expected - 1.0).abs();
            assert!(off <= 1e-3, "{}: {found}, not {expected}", subject.name);
        }
        assert!(differing_bits(&weights(&there), &start).is_empty(), "{}: evaluation moved weights", subject.name);
        // Between steps too, where the captured step has its rows.
        let [first, second] = [(); 2].map(|()| {
            there.step(&[ragged()]).unwrap();
            there.evaluate(&batches).unwrap()
        });
        assert!(first.is_finite() && second < first, "{}: {first}, then {second}", subject.name);
    }
}

#[test]
fn averages_are_those_of_the_weights_that_were() {
    let Some(device) = card() else { return };
    let decay = 0.8;
    let options = TrainerOptions { average_decay: Some(decay), learning_rate: 1e-3, ..step_options() };
    let held_out = [batch(&[64, 64], 9)];
    for subject in [dense(), gemma3(), our_experts()] {
        let (mut host, mut there) = both(&subject, &options, &device);
        let plain = TrainerOptions { average_decay: None, ..options.clone() };
        let mut plain = on_card(&subject, &plain, &device);
        let mut average: Option<ByParameter> = None;
        for number in 0..8 {
            let batches = step_batches(number);
            for trainer in [&mut host, &mut there, &mut plain] {
                trainer.step(&batches).unwrap();
            }
            let now = weights(&there);
            match &mut average {
                None => average = Some(now),
                Some(average) => {
                    for (mean, weight) in average.values_mut().flatten().zip(now.values().flatten()) {
                        *mean += (1.0 - decay as f32) * (weight - *mean);
                    }
                }
            }
        }
        let (now, average) = (weights(&there), average.unwrap());
        assert!(differing_bits(&now, &weights(&plain)).is_empty(), "{}: an average moves weights", subject.name);
        let [expected, found] = [&mut host, &mut there].map(|trainer| trainer.evaluate(&held_out).unwrap());
        let by_last = plain.evaluate(&held_out).unwrap();
        assert!((found - expected).abs() <= 5e-2, "{}: {found}, not {expected}", subject.name);
        assert!((found - by_last).abs() > 0.1, "{}: {found} is not the average's", subject.name);
        assert!(differing_bits(&weights(&there), &now).is_empty(), "{}: evaluation moved weights", subject.name);
        there.swap_average().unwrap();
        for (name, found) in weights(&there) {
            let error = relative_error(found.iter().zip(&average[&name]));
            assert!(error <= 1e-6, "{}: the average of {name} is {error:.1e} off", subject.name);
        }
        there.swap_average().unwrap();
        assert!(differing_bits(&weights(&there), &now).is_empty(), "{}: two exchanges are none", subject.name);
        assert_goes_on(&mut there, &mut plain);
    }
}

/// Products read weights rounded beforehand: those of an exchange that was undone are the weights' own.
fn assert_goes_on(exchanged: &mut Trainer, plain: &mut Trainer) {
    let [one, other] = [exchanged, plain].map(|trainer| trainer.step(&step_batches(1)).unwrap().loss);
    assert_eq!(one.to_bits(), other.to_bits(), "{one} after exchanges, and {other} without");
}
