//! Adapters beside frozen weights, held against peft's: `tests/golden/training/adapters` has the first matrices, the batches of ten
//! steps, and what the reference made of them.

use std::{ops::ControlFlow, path::PathBuf};

use ironloom_lm::{
    LoadOptions, LogitRows, Model, TrainingPass, TrainingRows,
    export::{TextFiles, write_trained},
};
use ironloom_nn::Span;
use ironloom_quant::WeightFormat;
use ironloom_tensor::{Context, Device, Gradients, Tape, Tensor, ops::RouterLosses};
use ironloom_train::{
    Error, Run, Schedule, SpikeGuardOptions, Trainer, TrainerOptions,
    data::{Batch, Document, DocumentsBuilder, Loader, LoaderOptions, Order, Overlong, Packing, Place, Share},
    lora::{LoraAdapter, LoraOptions, peft},
    optimizer::{AdamWOptions, OptimizerOptions},
    resume_adapters,
    run::{EndReason, Event, RunOptions, checkpoints},
};
use ironloom_weights::Checkpoint;
use serde_json::Value;

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/training")
}

fn folder() -> PathBuf {
    golden().join("adapters/llama")
}

fn model(name: &str, format: WeightFormat) -> Model {
    let options = LoadOptions { format, ..LoadOptions::default() };
    let stored = ironloom_weights::open(golden().join("models").join(name)).unwrap();
    Model::load(&stored, &Device::cpu(2), &options).unwrap()
}

fn initial() -> LoraAdapter {
    peft::load(folder().join("initial")).unwrap()
}

fn expected() -> Checkpoint {
    ironloom_weights::open(folder().join("expected.safetensors")).unwrap()
}

fn values(stored: &Checkpoint, name: &str) -> Vec<f32> {
    let data = stored.tensor(name).unwrap();
    let mut values = vec![0.0; data.shape.elements().unwrap()];
    ironloom_quant::unpack(data.dtype, &data.bytes, &mut values).unwrap();
    values
}

fn run() -> Value {
    serde_json::from_slice(&std::fs::read(folder().join("run.json")).unwrap()).unwrap()
}

fn steps() -> Vec<Vec<Batch>> {
    let numbers = |value: &Value| -> Vec<i64> {
        value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
    };
    let batch = |batch: &Value| Batch {
        ids: numbers(&batch["ids"]).into_iter().map(|id| id as u32).collect(),
        targets: numbers(&batch["targets"]),
        documents: numbers(&batch["documents"]).into_iter().map(|length| length as usize).collect(),
    };
    let run = run();
    let steps = run["steps"].as_array().unwrap();
    steps.iter().map(|step| step.as_array().unwrap().iter().map(batch).collect()).collect()
}

fn options() -> TrainerOptions {
    TrainerOptions {
        steps: 10,
        learning_rate: 0.01,
        schedule: Schedule::Constant { warmup_steps: 0 },
        optimizer: OptimizerOptions::AdamW(AdamWOptions { beta2: 0.95, weight_decay: 0.0, ..AdamWOptions::default() }),
        spike_guard: SpikeGuardOptions { settle_steps: 1000, ..SpikeGuardOptions::default() },
        ..TrainerOptions::default()
    }
}

fn largest_difference(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let pairs = found.iter().zip(expected);
    pairs.map(|(found, expected)| (f64::from(*found) - f64::from(*expected)).abs()).fold(0.0, f64::max)
}

fn logits(model: &Model, ids: &[u32]) -> Vec<f32> {
    let mut cache = model.new_cache();
    let spans = &mut [Span { cache: &mut cache, rows: ids.len() }];
    let logits = model.forward(&Context::inference(model.device()), ids, spans, LogitRows::All).unwrap();
    logits.as_f32().unwrap().to_vec()
}

/// The model's matrices without adapters.
fn detach(model: &mut Model) {
    model
        .for_each_linear(|_, linear| {
            linear.adapter = None;
            Ok(())
        })
        .unwrap();
}

/// The mean loss of a batch and its gradients by parameter, with the dropout of `seed`.
fn first_gradients(model: &Model, batch: &Batch, checkpoint: bool, seed: u64) -> (f64, Vec<(String, Vec<f32>)>) {
    let (device, mut gradients) = (model.device().clone(), Gradients::new());
    let tape = Tape::with_seed(seed);
    model.watch(&tape);
    let pass = TrainingPass {
        scale: 1.0 / batch.counted() as f32,
        share: 1.0,
        z_loss: 0.0,
        router: RouterLosses { balance: 0.0, z: 0.0 },
        checkpoint,
    };
    let rows = TrainingRows { ids: &batch.ids, targets: &batch.targets, documents: &batch.documents };
    let result = model.loss(&Context::training(&device, &tape), &rows, &pass).unwrap();
    tape.backward(&result.loss, Tensor::from_f32(vec![1.0], [1]).unwrap(), &mut gradients).unwrap();
    let gradient = |values: &Tensor| gradients.get(values.id()).unwrap().as_f32().unwrap().to_vec();
    let named =
        model.parameters().iter().map(|parameter| (parameter.name.clone(), gradient(&parameter.values))).collect();
    (result.nll_sum / batch.counted() as f64, named)
}

#[test]
fn first_gradients_equal_peft_s() {
    let mut model = model("llama", WeightFormat::F32);
    initial().attach(&mut model).unwrap();
    let expected = expected();
    let (_, found) = first_gradients(&model, &steps()[0][0], false, 0);
    assert_eq!(found.len(), 12, "two matrices of three layers in two blocks, and nothing else");
    for (parameter, found) in found {
        let expected = values(&expected, &format!("gradients.base_model.model.{parameter}"));
        let size = expected.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>() / expected.len() as f64;
        let difference = largest_difference(&found, &expected);
        assert!(difference <= 5e-5 * size.sqrt(), "{parameter}: {difference} of {}", size.sqrt());
    }
}

/// Merging that changed what a model says, or did nothing without a word (peft 2321 and 1035, qlora 28, trl 386): the merged
/// weights and logits are the reference's, and so is how little the logits move.
#[test]
fn peft_2321_ten_steps_and_the_merged_model_equal_peft_s() {
    let mut trainer = Trainer::with_adapters(model("llama", WeightFormat::F32), &initial(), options()).unwrap();
    let (run, expected) = (run(), expected());
    for (number, batches) in steps().iter().enumerate() {
        let report = trainer.step(batches).unwrap();
        let wanted = |key: &str| run[key][number].as_f64().unwrap();
        assert!(report.moved);
        let loss = wanted("cross_entropy");
        assert!((report.loss - loss).abs() <= 1e-5, "step {number}: {} {loss}", report.loss);
        let norm = wanted("gradient_norm");
        assert!((report.gradient_norm - norm).abs() <= 3e-4 * norm, "step {number}: {} {norm}", report.gradient_norm);
    }

    let adapter = trainer.adapter().unwrap().unwrap();
    let trained = peft::load(folder().join("trained")).unwrap();
    assert_eq!(adapter.options, trained.options);
    assert_eq!(adapter.layers.len(), trained.layers.len());
    for layer in &trained.layers {
        let found = adapter.layers.iter().find(|found| found.layer == layer.layer).unwrap();
        assert_eq!((found.inputs, found.outputs), (layer.inputs, layer.outputs));
        // Steps are of 0.01: a matrix that went another way differs by that.
        let difference = largest_difference(&found.a, &layer.a).max(largest_difference(&found.b, &layer.b));
        assert!(difference <= 2e-5, "{}: {difference}", layer.layer);
    }

    let mut model = trainer.into_model();
    let ids: Vec<u32> = {
        let data = expected.tensor("input_ids").unwrap();
        data.bytes.chunks_exact(4).map(|id| u32::from_le_bytes(id.try_into().unwrap())).collect()
    };
    let adapted = logits(&model, &ids);
    assert!(largest_difference(&adapted, &values(&expected, "adapted.logits")) <= 1e-4);
    let base = self::model("llama", WeightFormat::F32);
    assert!(largest_difference(&logits(&base, &ids), &values(&expected, "base.logits")) <= 1e-4);

    model.merge_adapters().unwrap();
    assert!(!model.has_adapters() && model.is_dense());
    let merged = logits(&model, &ids);
    assert!(largest_difference(&merged, &values(&expected, "merged.logits")) <= 1e-4);
    let (change, limit) = (largest_difference(&merged, &adapted), values(&expected, "merged.largest_change")[0]);
    assert!(change <= 3.0 * f64::from(limit), "{change} {limit}");
    let mut compared = 0;
    for parameter in model.parameters() {
        let name = format!("merged.{}", parameter.name);
        if expected.contains(&name) {
            compared += 1;
            let difference = largest_difference(parameter.values.as_f32().unwrap(), &values(&expected, &name));
            assert!(difference <= 2e-5, "{name}: {difference}");
        }
    }
    assert_eq!(compared, 6);
}

#[test]
fn an_adapter_that_is_saved_and_read_again_gives_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let mut trainer = Trainer::with_adapters(model("llama", WeightFormat::F32), &initial(), options()).unwrap();
    trainer.step(&steps()[0]).unwrap();
    let adapter = trainer.adapter().unwrap().unwrap();
    peft::save(folder.path(), &adapter).unwrap();
    let mut again = model("llama", WeightFormat::F32);
    peft::load(folder.path()).unwrap().attach(&mut again).unwrap();
    let ids = &steps()[0][0].ids[..16];
    assert!(logits(&again, ids) == logits(trainer.model(), ids));
}

/// Rows of q and k rotate neighbours in ERNIE's files, and peft's second factor has them in that order.
#[test]
fn an_adapter_of_rotated_neighbours_equals_peft_s_and_is_saved_as_it_was() {
    let folder = golden().join("adapters/ernie4_5_moe");
    let stored = ironloom_weights::open(folder.join("expected.safetensors")).unwrap();
    let ids: Vec<u32> = stored.tensor("input_ids").unwrap().bytes.chunks_exact(4).map(|id| u32::from(id[0])).collect();
    let mut model = model("../../models/ernie4_5_moe", WeightFormat::F32);
    let before = logits(&model, &ids);
    let adapter = peft::load(&folder).unwrap();
    adapter.attach(&mut model).unwrap();
    let (adapted, wanted) = (logits(&model, &ids), values(&stored, "adapted.logits"));
    assert!(largest_difference(&adapted, &wanted) < 1e-4, "{}", largest_difference(&adapted, &wanted));
    assert!(largest_difference(&adapted, &before) > 0.1);

    let (options, base_model) = (adapter.options.clone(), adapter.base_model.clone());
    let mut again = LoraAdapter::of(&model, options, base_model).unwrap();
    again.layers.sort_by(|left, right| left.layer.cmp(&right.layer));
    assert!(again.layers == adapter.layers);

    model.merge_adapters().unwrap();
    let merged = tempfile::tempdir().unwrap();
    write_trained(&model, merged.path(), &TextFiles::default()).unwrap();
    let stored = ironloom_weights::open(merged.path()).unwrap();
    let model = Model::load(&stored, &Device::cpu(2), &LoadOptions::default()).unwrap();
    assert!(largest_difference(&logits(&model, &ids), &wanted) < 1e-4);
}

#[test]
fn frozen_bases_of_few_bits_are_learnt_beside_and_do_not_move() {
    for (name, format) in [
        ("llama", WeightFormat::Bf16),
        ("llama", WeightFormat::Int8),
        ("llama", WeightFormat::Nf4),
        ("llama-tied", WeightFormat::Nf4),
        ("gemma3", WeightFormat::Int8),
        ("qwen2_moe", WeightFormat::Nf4),
        ("qwen3_moe", WeightFormat::Int8),
        ("ironloom_moe", WeightFormat::Nf4),
        ("../../models/ernie4_5_moe", WeightFormat::F32),
    ] {
        let base = model(name, format);
        let vocabulary = base.config().vocab_size as u32;
        let ids: Vec<u32> = (0..24_u32).map(|place| (place * place + 7) % vocabulary).collect();
        let before = logits(&base, &ids);
        let lora = LoraOptions { rank: 8, alpha: 16.0, dropout: 0.1, ..LoraOptions::default() };
        let adapter = LoraAdapter::new(&base, lora, None, 3).unwrap();
        let mut trainer =
            Trainer::with_adapters(base, &adapter, TrainerOptions { checkpointing: true, ..options() }).unwrap();
        assert!(trainer.model().parameters().iter().all(|parameter| parameter.name.contains(".lora_")));
        // Beginning adapters add nothing.
        assert!(logits(trainer.model(), &ids) == before, "{name} {format:?}");
        let targets = ids[1..].iter().map(|id| i64::from(*id)).chain([-100]).collect();
        let batch = Batch { documents: vec![ids.len()], targets, ids: ids.clone() };
        let losses: Vec<f64> = (0..30).map(|_| trainer.step(std::slice::from_ref(&batch)).unwrap().loss).collect();
        assert!(losses[29] < losses[0] - 1.0, "{name} {format:?}: {losses:?}");

        let adapter = trainer.adapter().unwrap().unwrap();
        let mut model = trainer.into_model();
        let adapted = logits(&model, &ids);
        detach(&mut model);
        assert!(logits(&model, &ids) == before, "{name} {format:?}: the base moved");
        // The base as its packed values are, which products of few bits come near.
        adapter.attach(&mut model).unwrap();
        model.merge_adapters().unwrap();
        let change = largest_difference(&logits(&model, &ids), &adapted);
        let size = adapted.iter().fold(0.0_f32, |size, value| size.max(value.abs()));
        assert!(change <= 0.1 * f64::from(size), "{name} {format:?}: {change} of {size}");
    }
}

/// Checkpointing that lost adapters' gradients, drew another mask when a block was run again, or a gradient that passed by
/// the mask: transformers 26221, cloneofsimo/lora 26, peft 2826, unsloth 10744.
#[test]
fn transformers_26221_dropout_is_the_same_when_a_block_is_run_again_and_gradients_go_through_it() {
    let mut model = model("llama", WeightFormat::F32);
    let mut adapter = initial();
    adapter.options.dropout = 0.4;
    adapter.attach(&mut model).unwrap();
    let batch = &steps()[0][0];
    let (loss, gradients) = first_gradients(&model, batch, false, 5);
    assert!(first_gradients(&model, batch, true, 5) == (loss, gradients.clone()));
    assert_ne!(first_gradients(&model, batch, true, 6).0, loss, "another seed leaves out others");

    // Along the gradient the loss rises by its norm.
    let square: f64 = gradients.iter().flat_map(|(_, g)| g).map(|g| f64::from(*g).powi(2)).sum();
    let step = 2e-3 / square.sqrt();
    let mut moved = |by: f64| {
        let mut gradients = gradients.iter();
        model
            .update(|name, values| {
                let (parameter, gradient) = gradients.next().unwrap();
                assert_eq!(parameter, name);
                let pairs = values.as_f32_mut()?.iter_mut().zip(gradient);
                pairs.for_each(|(value, g)| *value += (by * f64::from(*g)) as f32);
                Ok(())
            })
            .unwrap();
        first_gradients(&model, batch, false, 5).0
    };
    let (up, down) = (moved(step), moved(-2.0 * step));
    let slope = (up - down) / (2.0 * step);
    assert!((slope / square - 1.0).abs() < 5e-3, "{slope} {square}");
}

fn loader() -> Loader {
    let mut builder = DocumentsBuilder::new("numbers", 96);
    let place = Place { path: "numbers".into(), line: None };
    for number in 0..20_u32 {
        let ids = (0..16).map(|place| (place * (number % 5 + 1) + number) % 96).collect();
        builder.push(&Document { ids, learned: None }, &place).unwrap();
    }
    let options = LoaderOptions {
        sequence_length: 32,
        rows: 2,
        packing: Packing::Documents,
        overlong: Overlong::Cut,
        order: Order::Shuffled,
        seed: 1,
        vocab_size: 96,
    };
    Loader::new(vec![Share { documents: builder.finish().unwrap(), weight: 1.0 }], &options).unwrap()
}

#[test]
fn a_run_of_adapters_goes_back_and_goes_on_beside_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let mut adapter = initial();
    adapter.options.dropout = 0.1;
    let run_options = RunOptions { checkpoint_every: 2, ..RunOptions::default() };
    // After four steps every loss that is larger than the one before is a spike.
    let spike_guard = SpikeGuardOptions { ratio: 1.000_001, decay: 0.0, patience: 1, settle_steps: 4 };
    let options = TrainerOptions { spike_guard, steps: 400, learning_rate: 1e-6, ..options() };
    let trainer = Trainer::with_adapters(model("llama", WeightFormat::Int8), &adapter, options.clone()).unwrap();
    let run = Run::begin(folder.path(), trainer, loader(), TextFiles::default(), run_options.clone()).unwrap();
    let mut rollbacks = Vec::new();
    let ended = run.go(&mut |event| {
        if let Event::RolledBack { from, to } = event {
            rollbacks.push((*from, *to));
        }
        ControlFlow::Continue(())
    });
    assert!(matches!(ended, Err(Error::NoProgress { .. })), "{ended:?}");
    assert!(rollbacks.len() >= 3 && rollbacks.iter().all(|(from, to)| from > to && to % 2 == 0), "{rollbacks:?}");

    // Without the guard it goes on from there to the end.
    let steps = rollbacks[rollbacks.len() - 1].1 + 3;
    let options = TrainerOptions { spike_guard: SpikeGuardOptions::default(), steps, ..options };
    let last = checkpoints(folder.path(), &run_options).latest().unwrap().unwrap();
    assert!(!last.join("model.safetensors").exists(), "the base is not written again");
    let goes_on = resume_adapters(&last, model("llama", WeightFormat::Int8), options).unwrap();
    assert_eq!(goes_on.0.adapter().unwrap().unwrap().options.dropout, 0.1);
    let run = Run::resume(folder.path(), goes_on, loader(), TextFiles::default(), run_options).unwrap();
    let ended = run.go(&mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((ended.reason, ended.trainer.steps_done()), (EndReason::Done, steps));
    let written = ended.model.unwrap();
    assert_eq!(written, folder.path().join("adapter"));
    assert_eq!(peft::load(written).unwrap().layers.len(), 6);
    assert!(!folder.path().join("model").exists());
}

#[test]
fn an_adapter_of_another_model_is_refused_and_leaves_the_model_as_it_was() {
    let mut other = model("gemma3", WeightFormat::F32);
    assert!(initial().attach(&mut other).is_err());
    assert!(!other.has_adapters());
    let base = model("llama", WeightFormat::F32);
    let wrong = LoraOptions { targets: vec!["query".into()], ..LoraOptions::default() };
    let message = LoraAdapter::new(&base, wrong, None, 0).unwrap_err().to_string();
    assert!(message.contains("\"query\"") && message.contains("q_proj"), "{message}");
}
