//! Adapters beside frozen weights of every form, against the processor's.

use ironloom_lm::{Config, DenseShape, Model};
use ironloom_quant::WeightFormat;
use ironloom_tensor::Device;
use ironloom_train::{
    Trainer, TrainerOptions,
    lora::{LoraAdapter, LoraOptions},
};

use super::{
    card,
    compare::step_options,
    models::{batch, step_batches},
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
