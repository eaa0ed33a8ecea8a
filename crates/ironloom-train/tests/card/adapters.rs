//! Adapters beside frozen weights of every form, against the processor's.

use ironloom_lm::{
    Config, DenseShape, LoadOptions, Model,
    export::{TextFiles, write_trained},
};
use ironloom_quant::WeightFormat;
use ironloom_tensor::Device;
use ironloom_train::{
    Trainer, TrainerOptions,
    lora::{LoraAdapter, LoraOptions},
};

use super::{
    card,
    compare::step_options,
    models::{Subject, batch, our_experts, qwen2_experts, step_batches},
    processor,
    steps::{assert_near, losses},
};

fn trainer(device: &Device, format: WeightFormat, dropout: f64) -> Trainer {
    let shape =
        DenseShape { vocab_size: 1000, width: 256, layers: 3, heads: 4, kv_heads: 2, head_width: 64, inner_width: 704 };
    let model = Model::random(&Config::dense(shape), device, format, 3).unwrap();
    let options = LoraOptions { rank: 16, dropout, ..LoraOptions::default() };
    let adapter = LoraAdapter::new(&model, options, None, 5).unwrap();
    Trainer::with_adapters(model, &adapter, TrainerOptions { learning_rate: 3e-3, ..step_options() }).unwrap()
}

/// Adapters beside a model with routed experts, all of it frozen.
fn beside_experts(
    subject: &Subject,
    device: &Device,
    format: WeightFormat,
    lora: LoraOptions,
    options: TrainerOptions,
) -> Trainer {
    let folder = tempfile::tempdir().unwrap();
    write_trained(&subject.model(), folder.path(), &TextFiles::default()).unwrap();
    let stored = ironloom_weights::open(folder.path()).unwrap();
    let model = Model::load(&stored, device, &LoadOptions { format, ..LoadOptions::default() }).unwrap();
    let adapter = LoraAdapter::new(&model, lora, None, 5).unwrap();
    Trainer::with_adapters(model, &adapter, options).unwrap()
}

#[test]
fn losses_beside_frozen_experts_are_the_processor_s() {
    losses_with_experts(&["q_proj", "k_proj", "v_proj", "o_proj"]);
}

#[test]
fn losses_of_experts_with_adapters_are_the_processor_s() {
    losses_with_experts(&["all-linear"]);
    losses_with_experts(&["down_proj"]);
}

fn losses_with_experts(targets: &[&str]) {
    let Some(device) = card() else { return };
    let options = TrainerOptions { learning_rate: 3e-3, ..step_options() };
    let again = TrainerOptions { checkpointing: true, ..options.clone() };
    for subject in [our_experts(), qwen2_experts()] {
        for (name, format, dropout, bound) in [
            ("bfloat16", WeightFormat::Bf16, 0.0, 2e-2),
            ("int8", WeightFormat::Int8, 0.0, 2e-2),
            // A rounding may move a row to another expert: after steps as uneven as these, or where levels that say where it
            // goes are as one in four bits.
            ("bfloat16, an element in ten left out", WeightFormat::Bf16, 0.1, 5e-2),
            ("NF4", WeightFormat::Nf4, 0.0, 5e-2),
        ] {
            let targets: Vec<String> = targets.iter().map(|&target| target.to_owned()).collect();
            let of = |device: &Device, options: &TrainerOptions| {
                let lora = LoraOptions { targets: targets.clone(), dropout, ..LoraOptions::default() };
                beside_experts(&subject, device, format, lora, options.clone())
            };
            let name = format!("{}, {name}, {targets:?}", subject.name);
            let (mut host, mut there) = (of(&processor(), &options), of(&device, &options));
            let steps: Vec<_> = (0..9).map(step_batches).collect();
            let held = losses(&mut host, &mut there, &steps);
            assert_near(&name, &held, bound);
            // Every fourth step has the same rows.
            assert!(held[8][1] < held[0][1] - 0.4, "{name}: nothing is learnt: {held:?}");
            let mut checkpointed = of(&device, &again);
            for (step, [_, loss]) in steps.iter().zip(&held) {
                assert_eq!(checkpointed.step(step).unwrap().loss, *loss, "{name}, blocks run again");
            }
        }
    }
}

#[test]
fn adapters_that_a_card_does_not_train_are_refused() {
    let Some(device) = card() else { return };
    let refused_of = |config: &Config, options: LoraOptions| {
        let model = Model::random(config, &device, WeightFormat::Bf16, 3).unwrap();
        let adapter = LoraAdapter::new(&model, options, None, 5).unwrap();
        Trainer::with_adapters(model, &adapter, step_options()).err().unwrap().to_string()
    };
    let refused = |config: &Config, rank: usize| refused_of(config, LoraOptions { rank, ..LoraOptions::default() });
    let targets = vec!["experts.1.up_proj".to_owned()];
    let message = refused_of(&our_experts().config, LoraOptions { targets, ..LoraOptions::default() });
    assert!(message.contains(".experts.0.") && message.contains(".experts.1."), "{message}");
    let shape =
        DenseShape { vocab_size: 64, width: 64, layers: 1, heads: 1, kv_heads: 1, head_width: 64, inner_width: 100 };
    assert!(refused(&Config::dense(shape), 16).contains("100"));
    assert!(refused(&Config::dense(DenseShape { inner_width: 96, ..shape }), 4).contains("rank is 4"));
}

#[test]
fn losses_of_adapters_are_the_processor_s() {
    let Some(device) = card() else { return };
    let cases = [
        ("bfloat16", WeightFormat::Bf16, 0.0),
        ("int8", WeightFormat::Int8, 0.0),
        ("NF4", WeightFormat::Nf4, 0.0),
        ("bfloat16, an element in ten left out", WeightFormat::Bf16, 0.1),
    ];
    for (name, format, dropout) in cases {
        let (mut host, mut there) = (trainer(&processor(), format, dropout), trainer(&device, format, dropout));
        let steps: Vec<_> = (0..10).map(step_batches).collect();
        let losses = losses(&mut host, &mut there, &steps);
        assert_near(name, &losses, 2e-2);
        assert!(losses[9][1] < losses[0][1] - 0.3, "{name}: nothing is learnt: {losses:?}");
        let held_out = [batch(&[64], 3)];
        let [exact, found] = [&mut host, &mut there].map(|trainer| trainer.evaluate(&held_out).unwrap());
        assert!((exact - found).abs() < 1e-2, "{name}: {found} held out, not {exact}");
        // What was learnt comes back from the card.
        let layers = there.adapter().unwrap().unwrap().layers;
        assert!(layers.iter().all(|layer| layer.b.iter().any(|&value| value != 0.0)), "{name}: an adapter is zeros");
    }
}
