//! The memory plan against what a run takes of the card.

use ironloom_core::MemoryPlan;
use ironloom_lm::{Config, Model};
use ironloom_quant::WeightFormat;
use ironloom_train::{
    FrozenWeights, RunSize, Trainer, TrainerOptions, adapter_memory,
    data::Batch,
    lora::{LoraAdapter, LoraOptions},
    optimizer::{AdamWOptions, MuonOptions, OptimizerOptions},
    training_memory,
};

use super::{card, compare::step_options, processor};

/// Documents of 512 tokens.
fn batch(documents: usize, vocabulary: usize) -> Batch {
    let tokens = documents * 512;
    let ids: Vec<u32> = (0..tokens).map(|token| (token * 7919 % vocabulary) as u32).collect();
    let targets = ids.iter().map(|&id| i64::from(id)).collect();
    Batch { ids, targets, documents: vec![512; documents] }
}

#[test]
fn a_run_takes_what_the_plan_says() {
    let checkpointing = TrainerOptions { checkpointing: true, ..step_options() };
    let small = OptimizerOptions::AdamW8bit(AdamWOptions::default());
    for (name, config, options, documents) in [
        ("dense", Config::dense_102m(), step_options(), 8),
        ("dense, checkpointing", Config::dense_102m(), checkpointing.clone(), 32),
        ("dense, small moments", Config::dense_102m(), TrainerOptions { optimizer: small, ..step_options() }, 2),
        ("routed", Config::moe_55m(), step_options(), 8),
        ("routed, checkpointing", Config::moe_55m(), checkpointing, 32),
    ] {
        check_run(name, &config, options, documents);
    }
}

#[test]
fn muon_and_an_average_take_what_the_plan_says() {
    let optimizer = OptimizerOptions::Muon(MuonOptions::default());
    let options = TrainerOptions { optimizer, average_decay: Some(0.9), ..step_options() };
    check_run("routed, Muon and an average", &Config::moe_55m(), options, 4);
}

/// What a run holds is within the plan, and not far below it.
fn check_run(name: &str, config: &Config, options: TrainerOptions, documents: usize) {
    let Some(device) = card() else { return };
    let gpu = device.card("a test").unwrap().gpu();
    let batches = [(); 2].map(|()| batch(documents, config.vocab_size));
    let plan = training_memory(config, &device, &options, RunSize { tokens: documents * 512, batches: 2 });
    let model = Model::untrained(config, &processor(), 1).unwrap();
    gpu.trim();
    let before = gpu.held_bytes();
    let mut trainer = Trainer::new(model, options).unwrap().to_device(&device).unwrap();
    trainer.step(&batches).unwrap();
    trainer.evaluate(&batches[..1]).unwrap();
    trainer.step(&batches).unwrap();
    check(name, gpu.held_bytes() - before, &plan, 8);
}

#[test]
fn adapters_take_what_the_plan_says() {
    let Some(device) = card() else { return };
    let gpu = device.card("a test").unwrap().gpu();
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(str::to_owned).to_vec();
    let (all, attention) =
        (LoraOptions::default(), LoraOptions { targets: attention, dropout: 0.1, ..LoraOptions::default() });
    let all_dropout = LoraOptions { dropout: 0.1, ..all.clone() };
    let checkpointing = TrainerOptions { checkpointing: true, ..step_options() };
    for (name, config, format, lora, options, documents) in [
        ("dense, bfloat16", Config::dense_102m(), WeightFormat::Bf16, &all, step_options(), 8),
        ("dense, int8, dropout", Config::dense_102m(), WeightFormat::Int8, &attention, step_options(), 4),
        ("dense, NF4, checkpointing", Config::dense_102m(), WeightFormat::Nf4, &all, checkpointing, 16),
        ("routed, int8", Config::moe_55m(), WeightFormat::Int8, &attention, step_options(), 4),
        ("routed, bfloat16, experts", Config::moe_55m(), WeightFormat::Bf16, &all, step_options(), 8),
        ("routed, NF4, experts, dropout", Config::moe_55m(), WeightFormat::Nf4, &all_dropout, step_options(), 4),
    ] {
        let batches = [(); 2].map(|()| batch(documents, config.vocab_size));
        let size = RunSize { tokens: documents * 512, batches: 2 };
        gpu.trim();
        let before = gpu.held_bytes();
        let model = Model::random(&config, &device, format, 1).unwrap();
        let frozen = FrozenWeights { bytes: model.weight_bytes(), unpacked: format != WeightFormat::Bf16 };
        let plan = adapter_memory(&config, &device, frozen, lora, &options, size).unwrap();
        let adapter = LoraAdapter::new(&model, lora.clone(), None, 1).unwrap();
        let mut trainer = Trainer::with_adapters(model, &adapter, options).unwrap();
        trainer.step(&batches).unwrap();
        trainer.evaluate(&batches[..1]).unwrap();
        trainer.step(&batches).unwrap();
        check(name, gpu.held_bytes() - before, &plan, 5);
    }
}

/// The plan has room for what is held, which is so many tenths of it at least.
fn check(name: &str, held: usize, plan: &MemoryPlan, tenths: usize) {
    let planned = plan.total() as usize;
    println!("{name}: {} MiB of {} MiB planned: {plan}", held >> 20, planned >> 20);
    assert!(held <= planned, "{name}: {held} bytes are held, and {planned} were planned: {plan}");
    assert!(held >= planned / 10 * tenths, "{name}: {held} bytes are held, and {planned} were planned: {plan}");
}
