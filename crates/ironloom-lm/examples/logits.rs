//! The likeliest next tokens of a text.
//!
//! `cargo run --release -p ironloom-lm --example logits -- MODEL TEXT`, where MODEL is a GGUF file or a Hugging Face folder.

use ironloom_lm::{
    LoadOptions, LogitRows, Model,
    text::{AddBos, Specials, Tokenizer},
};
use ironloom_nn::Span;
use ironloom_tensor::{Context, Device};

const SHOWN: usize = 10;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(text), None) = (arguments.next(), arguments.next(), arguments.next()) else {
        return Err("usage: logits MODEL TEXT".into());
    };
    let device = Device::cpu(0);
    let checkpoint = ironloom_weights::open(path)?;
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
    let model = Model::load(&checkpoint, &device, &LoadOptions::default())?;
    for name in model.unused_tensors() {
        eprintln!("not used: {name}");
    }

    let ids = tokenizer.encode(&text, Specials::Literal, AddBos::Yes)?;
    let mut cache = model.new_cache();
    let mut spans = [Span { cache: &mut cache, rows: ids.len() }];
    let logits = model.forward(&Context::inference(&device), &ids, &mut spans, LogitRows::Last)?;
    let logits = logits.as_f32()?;

    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = logits.iter().map(|logit| (logit - largest).exp()).sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_unstable_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    for &id in order.iter().take(SHOWN) {
        let probability = 100.0 * (logits[id] - largest).exp() / total;
        let token = tokenizer.token_text(id as u32).unwrap_or_default();
        println!("{:8.3}  {probability:5.1}%  {id:6}  {token:?}", logits[id]);
    }
    Ok(())
}
