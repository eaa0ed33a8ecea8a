//! Runs that are cut: what a trainer saves, another one goes on from, on the card and across devices.

use ironloom_tensor::Device;
use ironloom_train::{
    SavedTensor, SavedValues, Trainer, TrainerOptions, TrainerState,
    data::Batch,
    optimizer::{AdamWOptions, LionOptions, MuonOptions, OptimizerOptions, SgdOptions},
};

use super::{
    card,
    compare::{ByParameter, differing_bits, step_options, weights},
    models::{Subject, dense, few, step_batches},
    processor,
    steps::{assert_near, losses, on_card},
};

/// What a checkpoint holds.
struct Checkpoint {
    state: TrainerState,
    tensors: Vec<SavedTensor<'static>>,
    weights: ByParameter,
}

impl Checkpoint {
    fn of(trainer: &Trainer) -> Self {
        let owned = |SavedTensor { name, values }: SavedTensor<'_>| {
            let values = match values {
                SavedValues::F32(values) => SavedValues::F32(values.into_owned().into()),
                SavedValues::U8(values) => SavedValues::U8(values.into_owned().into()),
            };
            SavedTensor { name, values }
        };
        let mut tensors: Vec<_> = trainer.saved_tensors().unwrap().into_iter().map(owned).collect();
        tensors.sort_by(|one, other| one.name.cmp(&other.name));
        Self { state: trainer.state(), tensors, weights: weights(trainer) }
    }

    /// A trainer on `device` that goes on from here.
    fn resumed(&self, subject: &Subject, options: &TrainerOptions, device: &Device) -> Trainer {
        let mut model = subject.model();
        model
            .update(|name, values| {
                values.as_f32_mut()?.copy_from_slice(&self.weights[name]);
                Ok(())
            })
            .unwrap();
        let mut trainer = Trainer::new(model, options.clone()).unwrap().to_device(device).unwrap();
        trainer.restore(&self.state, self.tensors.iter().cloned()).unwrap();
        trainer
    }

    /// Fails where a bit differs.
    fn assert_same(&self, other: &Self, what: &str) {
        assert_eq!(self.state, other.state, "{what}");
        let names = |held: &Self| held.tensors.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(self), names(other), "{what}");
        for (one, other) in self.tensors.iter().zip(&other.tensors) {
            let differing = one.bytes().iter().zip(other.bytes()).filter(|(one, other)| one != other).count();
            assert!(one.len() == other.len() && differing == 0, "{what}: {differing} bytes of {} differ", one.name);
        }
        let differing = differing_bits(&self.weights, &other.weights);
        assert!(differing.is_empty(), "{what}: weights differ\n{}", differing.join("\n"));
    }
}

fn optimizers() -> [OptimizerOptions; 5] {
    [
        OptimizerOptions::AdamW(AdamWOptions::default()),
        OptimizerOptions::AdamW8bit(AdamWOptions::default()),
        OptimizerOptions::Sgd(SgdOptions { momentum: 0.9, nesterov: true, weight_decay: 0.01 }),
        OptimizerOptions::Lion(LionOptions::default()),
        OptimizerOptions::Muon(MuonOptions::default()),
    ]
}

fn options(optimizer: OptimizerOptions) -> TrainerOptions {
    TrainerOptions { optimizer, average_decay: Some(0.8), ..step_options() }
}

fn step(trainer: &mut Trainer, steps: &[Vec<Batch>]) -> Vec<u64> {
    steps.iter().map(|batches| trainer.step(batches).unwrap().loss.to_bits()).collect()
}

#[test]
fn a_run_that_was_cut_is_the_run_that_was_not() {
    let Some(device) = card() else { return };
    let steps: Vec<_> = (0..10).map(step_batches).collect();
    let check = |subject: &Subject, optimizer: OptimizerOptions| {
        let what = format!("{}, {}", subject.name, optimizer.name());
        let options = options(optimizer);
        let mut straight = on_card(subject, &options, &device);
        let mut first = on_card(subject, &options, &device);
        let expected = step(&mut straight, &steps);
        let mut found = step(&mut first, &steps[..5]);
        let mut second = Checkpoint::of(&first).resumed(subject, &options, &device);
        drop(first);
        found.extend(step(&mut second, &steps[5..]));
        assert!(found == expected, "{what}: the losses differ");
        Checkpoint::of(&straight).assert_same(&Checkpoint::of(&second), &what);
    };
    for subject in few() {
        check(&subject, OptimizerOptions::default());
    }
    for optimizer in optimizers() {
        check(&dense(), optimizer);
    }
}

/// What the processor remembers is what the card remembers, and the other way.
#[test]
fn a_run_goes_from_the_processor_to_the_card_and_back() {
    let Some(device) = card() else { return };
    let (subject, steps) = (dense(), (0..12).map(step_batches).collect::<Vec<_>>());
    for optimizer in optimizers() {
        let what = optimizer.name();
        let options = options(optimizer);
        let mut straight = Trainer::new(subject.model(), options.clone()).unwrap();
        let mut host = Trainer::new(subject.model(), options.clone()).unwrap();
        let mut before = losses(&mut straight, &mut host, &steps[..4]);
        let of_host = Checkpoint::of(&host);
        let mut there = of_host.resumed(&subject, &options, &device);
        Checkpoint::of(&there).assert_same(&of_host, &format!("{what}, as the card has it"));
        before.extend(losses(&mut straight, &mut there, &steps[4..8]));
        let of_card = Checkpoint::of(&there);
        let mut back = of_card.resumed(&subject, &options, &processor());
        Checkpoint::of(&back).assert_same(&of_card, &format!("{what}, as the processor has it again"));
        before.extend(losses(&mut straight, &mut back, &steps[8..]));
        assert_near(what, &before, 2e-2);
    }
}
