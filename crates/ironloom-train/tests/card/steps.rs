//! Losses of steps that follow each other, against the processor's, and steps cut into batches in several ways.

use ironloom_tensor::Device;
use ironloom_train::{Trainer, TrainerOptions, data::Batch};

use super::{
    card,
    compare::{errors, first_gradients, gradient_options, step_options},
    models::{Subject, batch, dense, few, gemma3, our_experts, qwen3, step_batches},
};

/// The processor's trainer and the card's, of the same first weights.
pub(crate) fn both(subject: &Subject, options: &TrainerOptions, device: &Device) -> (Trainer, Trainer) {
    let host = Trainer::new(subject.model(), options.clone()).unwrap();
    (host, on_card(subject, options, device))
}

pub(crate) fn on_card(subject: &Subject, options: &TrainerOptions, device: &Device) -> Trainer {
    Trainer::new(subject.model(), options.clone()).unwrap().to_device(device).unwrap()
}

/// Losses of the steps on `steps`, on the processor and on the card.
pub(crate) fn losses(host: &mut Trainer, there: &mut Trainer, steps: &[Vec<Batch>]) -> Vec<[f64; 2]> {
    let pair = |batches: &Vec<Batch>| [&mut *host, &mut *there].map(|trainer| trainer.step(batches).unwrap().loss);
    steps.iter().map(pair).collect()
}

/// Fails where the two losses of a step differ by more than `bound`.
pub(crate) fn assert_near(name: &str, losses: &[[f64; 2]], bound: f64) {
    let far = losses.iter().map(|[host, there]| (host - there).abs());
    let (step, far) = far.enumerate().max_by(|(_, one), (_, other)| one.total_cmp(other)).unwrap();
    println!("{name}: {:?} to {:?}, {far:.1e} apart at most", losses[0], losses.last().unwrap());
    assert!(far <= bound, "{name}: {far:.1e} apart at step {step}, over {bound:.1e}: {losses:?}");
}

#[test]
fn losses_of_twenty_steps_are_the_processor_s() {
    let Some(device) = card() else { return };
    for subject in few() {
        let (mut host, mut there) = both(&subject, &step_options(), &device);
        let steps: Vec<_> = (0..20).map(step_batches).collect();
        let losses = losses(&mut host, &mut there, &steps);
        assert_near(subject.name, &losses, 2e-2);
        assert!(losses[19][1] < losses[0][1] - 1.0, "{}: nothing is learnt: {losses:?}", subject.name);
    }
}

/// Batches whose sizes go up and down: rows are filled up, room grows, and the step is captured anew.
#[test]
fn losses_of_uneven_steps_are_the_processor_s() {
    let Some(device) = card() else { return };
    let steps = [
        vec![batch(&[100], 0)],
        vec![batch(&[128], 1)],
        vec![batch(&[129], 2)],
        vec![batch(&[2], 3)],
        vec![batch(&[50, 7], 0), batch(&[130], 1)],
        vec![batch(&[300, 1], 2)],
        vec![batch(&[20, 20, 20], 3), batch(&[5], 0), batch(&[64], 1)],
        vec![batch(&[257, 255], 2)],
        vec![batch(&[99], 3)],
    ];
    for subject in [dense(), gemma3(), our_experts()] {
        let (mut host, mut there) = both(&subject, &step_options(), &device);
        let losses = losses(&mut host, &mut there, &steps);
        assert_near(subject.name, &losses, 2e-2);
    }
}

/// A step is the same however its rows are cut. The balance of experts' loads is of each pass's own rows, so it is left out.
#[test]
fn micro_batches_are_one_batch() {
    let Some(device) = card() else { return };
    let parts = [batch(&[37, 1, 62], 1), batch(&[90], 2), batch(&[5, 120, 3], 3)];
    let mut whole = Batch::default();
    parts.iter().cloned().for_each(|part| whole.append(part));
    let options = TrainerOptions { balance_loss: 0.0, ..gradient_options() };
    for subject in [dense(), qwen3(), gemma3(), our_experts()] {
        let [(one, of_one), (many, of_many)] = [std::slice::from_ref(&whole), &parts[..]].map(|batches| {
            let mut trainer = on_card(&subject, &options, &device);
            first_gradients(&mut trainer, batches)
        });
        let near = |what: &str, found: f64, right: f64, bound: f64| {
            let error = (found - right).abs() / right.abs();
            assert!(error <= bound, "{}: {what}: {found}, not {right}: {error:.1e} over {bound:.1e}", subject.name);
        };
        // Products of other sizes may be summed in other tiles.
        near("the loss", many.loss, one.loss, 3e-5);
        near("the loss beside it", many.side_loss, one.side_loss, 1e-4);
        near("the norm", many.gradient_norm, one.gradient_norm, 1e-3);
        for (name, error) in errors(&of_many, &of_one) {
            assert!(error <= 1e-2, "{}: {name} is {error:.1e} off", subject.name);
        }
    }
}
