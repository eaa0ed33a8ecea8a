//! What steps leave behind, and how far two of them are apart.

use std::collections::BTreeMap;

use ironloom_lm::ParameterRole;
use ironloom_train::{
    SavedValues, Schedule, StepReport, Trainer, TrainerOptions,
    data::Batch,
    optimizer::{OptimizerOptions, SgdOptions},
};

/// Numbers by a parameter's name.
pub(crate) type ByParameter = BTreeMap<String, Vec<f32>>;

/// Options of a trainer whose momentum is the first step's gradient, to the bit. Losses beside the output's weigh enough to be seen.
pub(crate) fn gradient_options() -> TrainerOptions {
    TrainerOptions {
        learning_rate: 1e-3,
        optimizer: OptimizerOptions::Sgd(SgdOptions { momentum: 0.9, ..SgdOptions::default() }),
        max_gradient_norm: None,
        z_loss: 1e-3,
        balance_loss: 0.1,
        router_z_loss: 0.01,
        ..step_options()
    }
}

/// Options of a run at one learning rate, at which what a rounding changes stays small.
pub(crate) fn step_options() -> TrainerOptions {
    let schedule = Schedule::Constant { warmup_steps: 0 };
    TrainerOptions { steps: 100, learning_rate: 3e-4, schedule, ..TrainerOptions::default() }
}

/// The gradient of a first step under [`gradient_options`].
pub(crate) fn first_gradients(trainer: &mut Trainer, batches: &[Batch]) -> (StepReport, ByParameter) {
    assert_eq!(trainer.steps_done(), 0);
    let report = trainer.step(batches).unwrap();
    assert!(report.moved);
    // An expert that no row went to has no momentum on the processor.
    let zeros = |parameter: ironloom_lm::Parameter| {
        let elements = parameter.values.shape().elements().unwrap();
        (parameter.name, vec![0.0; elements])
    };
    let mut gradients: ByParameter = trainer.model().parameters().into_iter().map(zeros).collect();
    for saved in trainer.saved_tensors().unwrap() {
        let momentum = saved.name.strip_prefix("optimizer.").and_then(|name| name.strip_suffix(".momentum"));
        if let (Some(name), SavedValues::F32(values)) = (momentum, saved.values) {
            gradients.insert(name.to_owned(), values.into_owned());
        }
    }
    (report, gradients)
}

/// The weights, wherever they are.
pub(crate) fn weights(trainer: &Trainer) -> ByParameter {
    let parameters = trainer.model().parameters().into_iter();
    parameters.map(|parameter| (parameter.name, parameter.values.into_f32().unwrap())).collect()
}

/// The names of parameters that products read.
pub(crate) fn matrices(trainer: &Trainer) -> Vec<String> {
    let parameters = trainer.model().parameters().into_iter();
    parameters.filter(|parameter| parameter.role != ParameterRole::Vector).map(|parameter| parameter.name).collect()
}

/// `‖found - expected‖ / ‖expected‖`; infinite where there should be zeros or a value is no number.
pub(crate) fn relative_error<'a>(pairs: impl IntoIterator<Item = (&'a f32, &'a f32)>) -> f64 {
    let (mut difference, mut size) = (0.0f64, 0.0f64);
    for (&found, &expected) in pairs {
        difference += (f64::from(found) - f64::from(expected)).powi(2);
        size += f64::from(expected).powi(2);
    }
    match difference {
        0.0 => 0.0,
        _ if difference.is_finite() => (difference / size).sqrt(),
        _ => f64::INFINITY,
    }
}

/// The relative error of each parameter.
pub(crate) fn errors(found: &ByParameter, expected: &ByParameter) -> BTreeMap<String, f64> {
    assert!(found.keys().eq(expected.keys()), "other parameters");
    let pairs = found.iter().zip(expected.values());
    pairs.map(|((name, found), expected)| (name.clone(), relative_error(found.iter().zip(expected)))).collect()
}

/// The relative error of all parameters together.
pub(crate) fn whole_error(found: &ByParameter, expected: &ByParameter) -> f64 {
    relative_error(found.values().flatten().zip(expected.values().flatten()))
}

/// What differs in its bits, and how much; nothing where all is the same.
pub(crate) fn differing_bits(found: &ByParameter, expected: &ByParameter) -> Vec<String> {
    let mut differing = Vec::new();
    for ((name, found), expected) in found.iter().zip(expected.values()) {
        let pairs = || found.iter().zip(expected);
        let count = pairs().filter(|(one, other)| one.to_bits() != other.to_bits()).count();
        if count > 0 {
            let error = relative_error(pairs());
            differing.push(format!("{name}: {count} of {} elements, relative difference {error:.1e}", found.len()));
        }
    }
    differing
}
