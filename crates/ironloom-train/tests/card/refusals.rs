//! What is refused leaves everything as it was: losses that a guard refuses, batches that mean nothing, what a card can't take, and
//! steps without room.

use ironloom_lm::{Config, DenseShape, Model};
use ironloom_train::{
    Error, SpikeGuardOptions, Trainer, TrainerOptions,
    data::{Batch, IGNORED},
    optimizer::{MuonOptions, OptimizerOptions},
};

use super::{
    card,
    compare::{ByParameter, differing_bits, step_options, weights},
    models::{Subject, batch, dense, gemma3, our_experts, qwen2_experts, ragged, step_batches},
    processor,
    steps::{assert_near, both, on_card},
};

/// Weights, and every byte that an optimizer and an average remember.
fn everything(trainer: &Trainer) -> (ByParameter, Vec<(String, Vec<u8>)>) {
    let saved = trainer.saved_tensors().unwrap();
    (weights(trainer), saved.into_iter().map(|tensor| (tensor.name.clone(), tensor.bytes().to_vec())).collect())
}

fn assert_unchanged(trainer: &Trainer, before: &(ByParameter, Vec<(String, Vec<u8>)>), what: &str) {
    let (weights, remembered) = everything(trainer);
    let differing = differing_bits(&weights, &before.0);
    assert!(differing.is_empty(), "{what}: weights moved\n{}", differing.join("\n"));
    for ((name, bytes), (_, right)) in remembered.iter().zip(&before.1) {
        assert!(bytes == right, "{what}: {name} changed");
    }
    assert_eq!(remembered.len(), before.1.len(), "{what}");
}

/// Ids that follow each other in another way than in all other batches.
fn surprising() -> Batch {
    let mut batch = batch(&[90], 3);
    batch.targets.iter_mut().filter(|target| **target >= 0).for_each(|target| *target = 999 - *target);
    batch
}

#[test]
fn a_spike_leaves_every_byte_as_it_was() {
    let Some(device) = card() else { return };
    let guard = SpikeGuardOptions { ratio: 1.1, decay: 0.5, patience: 2, settle_steps: 3 };
    let options =
        TrainerOptions { spike_guard: guard, average_decay: Some(0.9), learning_rate: 1e-3, ..step_options() };
    for subject in [dense(), gemma3(), our_experts()] {
        let (mut host, mut there) = both(&subject, &options, &device);
        let (mut losses, mut moved) = (Vec::new(), Vec::new());
        let mut step = |there: &mut Trainer, batch: Batch| {
            let batches = [batch];
            let reports = [&mut host, there].map(|trainer| trainer.step(&batches).unwrap());
            losses.push(reports.each_ref().map(|report| report.loss));
            let verdicts = reports.each_ref().map(|report| (report.moved, report.rolls_back));
            assert_eq!(verdicts[0], verdicts[1], "{}: {losses:?}", subject.name);
            moved.push(verdicts[1]);
        };
        (0..6).for_each(|_| step(&mut there, ragged()));
        let before = everything(&there);
        step(&mut there, surprising());
        step(&mut there, surprising());
        assert_unchanged(&there, &before, subject.name);
        step(&mut there, ragged());
        let expected = [(true, false); 6].into_iter().chain([(false, false), (false, true), (true, false)]);
        assert!(moved.iter().copied().eq(expected), "{}: {moved:?} of {losses:?}", subject.name);
        assert_near(subject.name, &losses, 1e-1);
        assert_ne!(weights(&there), before.0);
    }
}

#[test]
fn a_loss_that_is_no_number_is_refused() {
    let Some(device) = card() else { return };
    for broken in [f32::NAN, f32::INFINITY, 3e38] {
        let mut model = dense().model();
        model
            .update(|name, values| {
                if name == "model.norm.weight" {
                    values.as_f32_mut()?[5] = broken;
                }
                Ok(())
            })
            .unwrap();
        let mut trainer = Trainer::new(model, step_options()).unwrap().to_device(&device).unwrap();
        let before = everything(&trainer);
        for _ in 0..2 {
            let report = trainer.step(&[ragged()]).unwrap();
            let is_finite = report.loss.is_finite() && report.gradient_norm.is_finite();
            assert!(!report.moved && !is_finite, "{broken}: {report:?}");
        }
        assert_unchanged(&trainer, &before, &broken.to_string());
    }
}

#[test]
fn batches_that_mean_nothing_change_nothing() {
    let Some(device) = card() else { return };
    let changed = |change: fn(&mut Batch)| {
        let mut batch = ragged();
        change(&mut batch);
        batch
    };
    let senseless = [
        changed(|batch| batch.ids[3] = 1000),
        changed(|batch| batch.targets[3] = 1000),
        changed(|batch| batch.targets[3] = -7),
        changed(|batch| batch.documents[0] += 1),
        changed(|batch| batch.documents.push(0)),
        batch(&[4097], 1),
    ];
    let subject = dense();
    let [mut trainer, mut undisturbed] = [(); 2].map(|()| on_card(&subject, &step_options(), &device));
    // Before a step was captured, and after.
    for number in 0..2 {
        let before = everything(&trainer);
        for batch in &senseless {
            for batches in [vec![batch.clone()], vec![ragged(), batch.clone()]] {
                assert!(trainer.step(&batches).is_err(), "{:?}", batch.documents);
            }
        }
        let uncounted = changed(|batch| batch.targets.fill(IGNORED));
        assert!(matches!(trainer.step(&[uncounted]), Err(Error::NothingCounts)));
        assert_unchanged(&trainer, &before, "a refused batch");
        assert_near_step(&mut trainer, &mut undisturbed, number);
    }
}

/// A step goes on as if nothing had been refused. Room for more rows may have come of it, and with it other roundings.
fn assert_near_step(one: &mut Trainer, other: &mut Trainer, number: usize) {
    let batches = step_batches(number);
    let [loss, expected] = [one, other].map(|trainer| trainer.step(&batches).unwrap().loss);
    assert!((loss - expected).abs() <= 1e-3, "{loss}, not {expected}");
}

#[test]
fn what_a_card_does_not_take_is_refused_with_a_reason() {
    let Some(device) = card() else { return };
    let refused = |config: &Config, optimizer: OptimizerOptions| {
        let model = Model::untrained(config, &processor(), 1).unwrap();
        let trainer = Trainer::new(model, TrainerOptions { optimizer, ..step_options() }).unwrap();
        trainer.to_device(&device).err().unwrap().to_string()
    };
    let shape =
        DenseShape { vocab_size: 64, width: 64, layers: 1, heads: 1, kv_heads: 1, head_width: 64, inner_width: 100 };
    let message = refused(&Config::dense(shape), OptimizerOptions::default());
    assert!(message.contains("multiple of 8") && message.contains("100"), "{message}");
    // The gate of a shared expert is a matrix of one row.
    let message = refused(&qwen2_experts().config, OptimizerOptions::Muon(MuonOptions::default()));
    assert!(message.contains("shared_expert_gate") && message.contains("Muon"), "{message}");
}

#[test]
fn without_room_nothing_is_done_and_with_room_again_all_is() {
    let Some(device) = card() else { return };
    let gpu = device.card("a test").unwrap().gpu();
    let subject = dense();
    let mut undisturbed = on_card(&subject, &step_options(), &device);
    let with_room = |more: usize| gpu.set_budget(gpu.held_bytes().saturating_add(more));
    gpu.trim();
    for more in [0, 1 << 20, 6 << 20] {
        with_room(more);
        let error = Trainer::new(subject.model(), step_options()).unwrap().to_device(&device).err().unwrap();
        assert!(error.to_string().contains("the budget"), "{error}");
    }
    gpu.set_budget(usize::MAX);
    let mut trainer = on_card(&subject, &step_options(), &device);
    for number in 0..2 {
        let before = everything(&trainer);
        gpu.trim();
        for more in [0, 1 << 20, 4 << 20] {
            with_room(more);
            // More rows than there were, so that memory is asked for.
            let error = trainer.step(&[batch(&[700 + 300 * number], 1)]).unwrap_err();
            assert!(error.to_string().contains("the budget"), "{error}");
            assert_unchanged(&trainer, &before, "a step without room");
        }
        gpu.set_budget(usize::MAX);
        assert_near_step(&mut trainer, &mut undisturbed, number);
    }
}

#[test]
fn nothing_is_left_on_the_card() {
    let Some(device) = card() else { return };
    let gpu = device.card("a test").unwrap().gpu();
    let used = |subject: &Subject| {
        let options = TrainerOptions { average_decay: Some(0.9), checkpointing: true, ..step_options() };
        let mut trainer = on_card(subject, &options, &device);
        for rows in [100, 300, 50] {
            trainer.step(&[batch(&[rows], 1), ragged()]).unwrap();
            trainer.evaluate(&[batch(&[200], 2)]).unwrap();
        }
        gpu.held_bytes()
    };
    // The first use loads kernels and the library of products.
    used(&dense());
    gpu.trim();
    let before = gpu.held_bytes();
    for subject in [dense(), gemma3(), our_experts()] {
        assert!(used(&subject) > before, "{}", subject.name);
        gpu.trim();
        assert_eq!(gpu.held_bytes(), before, "{}", subject.name);
    }
}
