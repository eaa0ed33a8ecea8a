//! The same bits: of two runs, with checkpointing and without.

use ironloom_tensor::Device;
use ironloom_train::{TrainerOptions, data::Batch};

use super::{
    card,
    compare::{ByParameter, differing_bits, step_options, weights},
    models::{Subject, all, few, step_batches},
    steps::on_card,
};

/// Losses and norms of steps, and the weights after them.
pub(crate) struct Trace {
    pub(crate) reports: Vec<[f64; 3]>,
    pub(crate) weights: ByParameter,
}

impl Trace {
    fn of(subject: &Subject, options: &TrainerOptions, device: &Device, steps: &[Vec<Batch>]) -> Self {
        let mut trainer = on_card(subject, options, device);
        let step = |batches: &Vec<Batch>| {
            let report = trainer.step(batches).unwrap();
            assert!(report.moved);
            [report.loss, report.side_loss, report.gradient_norm]
        };
        let reports = steps.iter().map(step).collect();
        Self { reports, weights: weights(&trainer) }
    }

    /// Fails where a bit differs.
    pub(crate) fn assert_same(&self, other: &Self, what: &str) {
        let bits = |trace: &Self| trace.reports.iter().map(|report| report.map(f64::to_bits)).collect::<Vec<_>>();
        assert!(bits(self) == bits(other), "{what}: {:?}\n{:?}", self.reports, other.reports);
        let differing = differing_bits(&self.weights, &other.weights);
        assert!(differing.is_empty(), "{what}: weights differ\n{}", differing.join("\n"));
    }
}

#[test]
fn two_runs_are_the_same_bits() {
    let Some(device) = card() else { return };
    let steps: Vec<_> = (0..5).map(step_batches).collect();
    for subject in all() {
        let [one, other] = [(); 2].map(|()| Trace::of(&subject, &step_options(), &device, &steps));
        one.assert_same(&other, subject.name);
    }
}

#[test]
fn checkpointing_changes_no_bit() {
    let Some(device) = card() else { return };
    let steps: Vec<_> = (0..3).map(step_batches).collect();
    for subject in few() {
        let [kept, again] = [false, true].map(|checkpointing| {
            let options = TrainerOptions { checkpointing, z_loss: 1e-3, ..step_options() };
            Trace::of(&subject, &options, &device, &steps)
        });
        kept.assert_same(&again, subject.name);
    }
}
