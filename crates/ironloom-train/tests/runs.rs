//! Whole training steps, held against PyTorch's: `tests/golden/training` has models, batches and what the reference made of them.
//!
//! In single precision the reference itself is within 4e-6 of its double-precision run in the cross-entropy, and within 1e-4 in the norms:
//! AdamW's first steps are signs, and a gradient near zero has its sign from rounding.

use std::path::PathBuf;

use ironloom_lm::{LoadOptions, Model, TrainingPass, TrainingRows};
use ironloom_quant::WeightFormat;
use ironloom_tensor::{Context, Device, Gradients, Tape, Tensor, ops::RouterLosses};
use ironloom_train::{
    Schedule, SpikeGuardOptions, Trainer, TrainerOptions,
    data::Batch,
    optimizer::{AdamWOptions, OptimizerOptions},
};
use serde_json::Value;

const RUNS: [&str; 11] = [
    "llama",
    "llama-tied",
    "llama-micro-batches",
    "llama-packed",
    "gemma3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_moe-not-normalized",
    "qwen3_moe-balanced",
    "ironloom_moe",
    "ironloom_moe-balanced",
];

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/training")
}

struct Run {
    json: Value,
    gradients: ironloom_weights::Checkpoint,
}

impl Run {
    fn open(name: &str) -> Self {
        let runs = golden().join("runs");
        let json = std::fs::read(runs.join(format!("{name}.json"))).unwrap();
        let gradients = ironloom_weights::open(runs.join(format!("{name}.gradients.safetensors"))).unwrap();
        Self { json: serde_json::from_slice(&json).unwrap(), gradients }
    }

    fn model(&self, device: &Device) -> Model {
        let folder = golden().join("models").join(self.json["model"].as_str().unwrap());
        let options = LoadOptions { format: WeightFormat::F32, ..LoadOptions::default() };
        let mut model = Model::load(&ironloom_weights::open(folder).unwrap(), device, &options).unwrap();
        model.make_trainable().unwrap();
        model
    }

    fn steps(&self) -> Vec<Vec<Batch>> {
        let numbers = |value: &Value| -> Vec<i64> {
            value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
        };
        let batch = |batch: &Value| Batch {
            ids: numbers(&batch["ids"]).into_iter().map(|id| id as u32).collect(),
            targets: numbers(&batch["targets"]),
            documents: numbers(&batch["documents"]).into_iter().map(|length| length as usize).collect(),
        };
        let steps = self.json["steps"].as_array().unwrap();
        steps.iter().map(|step| step.as_array().unwrap().iter().map(batch).collect()).collect()
    }

    fn number(&self, key: &str) -> f64 {
        self.json[key].as_f64().unwrap_or(0.0)
    }

    fn options(&self) -> TrainerOptions {
        let adamw = &self.json["optimizer"];
        let number = |key: &str| adamw[key].as_f64().unwrap();
        TrainerOptions {
            steps: 20,
            learning_rate: number("learning_rate"),
            schedule: Schedule::Constant { warmup_steps: 0 },
            optimizer: OptimizerOptions::AdamW(AdamWOptions {
                beta1: adamw["betas"][0].as_f64().unwrap(),
                beta2: adamw["betas"][1].as_f64().unwrap(),
                epsilon: number("epsilon"),
                weight_decay: number("weight_decay"),
            }),
            max_gradient_norm: Some(number("clip_norm")),
            z_loss: self.number("head_z_weight") as f32,
            balance_loss: self.number("load_balancing_weight") as f32,
            router_z_loss: self.number("router_z_weight") as f32,
            spike_guard: SpikeGuardOptions { settle_steps: 1000, ..SpikeGuardOptions::default() },
            ..TrainerOptions::default()
        }
    }
}

fn largest_difference(found: &[f32], expected: &[f32]) -> f64 {
    let pairs = found.iter().zip(expected);
    pairs.map(|(found, expected)| (f64::from(*found) - f64::from(*expected)).abs()).fold(0.0, f64::max)
}

/// The first step's gradients of a run, by parameter.
fn first_gradients(run: &Run, model: &Model, checkpoint: bool) -> Vec<(String, Vec<f32>)> {
    let (device, mut gradients) = (model.device().clone(), Gradients::new());
    let options = run.options();
    let batches = &run.steps()[0];
    let total: usize = batches.iter().map(Batch::counted).sum();
    for batch in batches {
        let tape = Tape::new();
        model.watch(&tape);
        let pass = TrainingPass {
            scale: 1.0 / total as f32,
            share: 1.0,
            z_loss: options.z_loss,
            router: RouterLosses { balance: options.balance_loss, z: options.router_z_loss },
            checkpoint,
        };
        let rows = TrainingRows { ids: &batch.ids, targets: &batch.targets, documents: &batch.documents };
        let result = model.loss(&Context::training(&device, &tape), &rows, &pass).unwrap();
        tape.backward(&result.loss, Tensor::from_f32(vec![1.0], [1]).unwrap(), &mut gradients).unwrap();
    }
    let values = |values: &Tensor| match gradients.get(values.id()) {
        Some(gradient) => gradient.as_f32().unwrap().to_vec(),
        // An expert that no row chose.
        None => vec![0.0; values.shape().elements().unwrap()],
    };
    model.parameters().iter().map(|parameter| (parameter.name.clone(), values(&parameter.values))).collect()
}

#[test]
fn first_gradients_equal_autograd_and_are_the_same_bits_with_checkpointing() {
    let device = Device::cpu(2);
    for name in RUNS {
        let run = Run::open(name);
        let model = run.model(&device);
        let found = first_gradients(&run, &model, false);
        assert!(found == first_gradients(&run, &model, true), "{name}: checkpointing changes gradients");
        for (parameter, found) in found {
            let data = run.gradients.tensor(&parameter).unwrap();
            let mut expected = vec![0.0; data.shape.elements().unwrap()];
            ironloom_quant::unpack(data.dtype, &data.bytes, &mut expected).unwrap();
            let size = expected.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>() / expected.len() as f64;
            let difference = largest_difference(&found, &expected);
            assert!(difference <= 5e-5 * size.sqrt() + 1e-8, "{name}: {parameter}: {difference} of {}", size.sqrt());
        }
        assert!(run.gradients.unused().is_empty(), "{name}: {:?}", run.gradients.unused());
    }
}

#[test]
fn losses_of_twenty_steps_equal_pytorch_s() {
    let device = Device::cpu(2);
    for name in RUNS {
        let run = Run::open(name);
        let mut trainer = Trainer::new(run.model(&device), run.options()).unwrap();
        for (number, batches) in run.steps().iter().enumerate() {
            let report = trainer.step(batches).unwrap();
            assert!(report.moved && !report.rolls_back);
            let expected = |key: &str| run.json[key][number].as_f64();
            let loss = expected("cross_entropy").unwrap();
            assert!((report.loss - loss).abs() <= 1e-5, "{name}: step {number}: {} {loss}", report.loss);
            let norm = expected("gradient_norm").unwrap();
            assert!(
                (report.gradient_norm - norm).abs() <= 3e-4 * norm,
                "{name}: {number}: {} {norm}",
                report.gradient_norm
            );
            if let Some(whole) = expected("loss") {
                let found = report.loss + report.side_loss;
                assert!((found - whole).abs() <= 1e-5, "{name}: step {number}: {found} {whole}");
            }
        }
    }
}
