//! Language models on a card: steps of decoding, and prompts.
//!
//! A step is what a session runs: one replay of a graph that chooses the next id and takes it as its own next input, two
//! steps in flight. The prompt before is not in the time. Bytes of the bound: the weights that the step reads, once for all
//! sequences, and every sequence's keys and values in the middle of the run.

use anyhow::{Context as _, Result, ensure};
use ironloom_decode::{CudaSteps, SamplerOptions, StepRow, Steps};
use ironloom_lm::{LogitRows, Model};
use ironloom_nn::{KvCache, Span};
use ironloom_tensor::Context;
use serde_json::json;

use super::card::{Card, Choice};
use crate::bench::{
    inputs::random_ids,
    measurement::{Kernel, Measurement, Work, seconds},
};

const PROMPT: usize = 512;
const NEW_TOKENS: usize = 128;
/// Steps in flight, as sessions have them.
const AHEAD: usize = 2;
/// Positions of the prompts that are timed together: one of 512 takes a few milliseconds.
const PROMPT_POSITIONS: usize = 8192;

/// Tokens/s over `sequences` sequences of [`NEW_TOKENS`] steps each after a prompt of [`PROMPT`].
pub(in crate::bench) fn decode(card: &mut Card, choice: Choice, sequences: usize) -> Result<Measurement> {
    card.load(choice)?;
    let (card, model) = (&*card, card.model()?);
    let config = model.config();
    // Of each sequence the prompt, and the first step's input.
    let ids = random_ids(config.vocab_size, sequences * (PROMPT + 1));
    let ids: Vec<&[u32]> = ids.chunks_exact(PROMPT + 1).collect();
    let mut caches: Vec<KvCache> = (0..sequences).map(|_| model.new_cache()).collect();
    for (cache, ids) in caches.iter_mut().zip(&ids) {
        pass(model, cache, &ids[..PROMPT])?;
    }
    let options = SamplerOptions::greedy();
    let steps = CudaSteps::new(model, &card.device, sequences, false)?;
    let mut steps = steps.context("graphs are switched off")?;
    let bytes = step_bytes(model, sequences) / sequences as f64;
    let shape = json!({
        "prompt": PROMPT,
        "new": NEW_TOKENS,
        "sequences": sequences,
        "weights": model.weight_format(),
        "weight_bytes": model.weight_bytes(),
        "kernels_per_step": steps.nodes(),
    });
    let measured = card.measure(Work::Bytes(bytes), shape, || {
        caches.iter_mut().for_each(|cache| cache.truncate(PROMPT));
        let rows = caches.iter_mut().zip(&ids).map(|(cache, ids)| StepRow { ids, cache, options: &options });
        steps.begin(&mut rows.collect::<Vec<_>>())?;
        card.device.synchronize()?;
        let mut caches: Vec<&mut KvCache> = caches.iter_mut().collect();
        let (time, last) = seconds(|| {
            let mut last = Vec::new();
            for _ in 0..NEW_TOKENS {
                steps.launch(&mut caches)?;
                if steps.in_flight() >= AHEAD {
                    last = steps.next()?;
                }
            }
            while steps.in_flight() > 0 {
                last = steps.next()?;
            }
            Ok(last)
        })?;
        ensure!(last.iter().all(|&id| (id as usize) < config.vocab_size), "a step chose no id");
        Ok((sequences * NEW_TOKENS) as f64 / time)
    })?;
    caches.iter_mut().for_each(|cache| cache.truncate(PROMPT));
    let last: Vec<u32> = ids.iter().map(|ids| ids[PROMPT]).collect();
    let mut spans: Vec<Span<'_>> = caches.iter_mut().map(|cache| Span { cache, rows: 1 }).collect();
    with_kernels(measured, model, &last, &mut spans)
}

/// Tokens/s of a prompt of `length` in one pass, from an empty cache to the logits of its last position.
pub(in crate::bench) fn prompt(card: &mut Card, choice: Choice, length: usize) -> Result<Measurement> {
    card.load(choice)?;
    let (card, model) = (&*card, card.model()?);
    let config = model.config();
    let ids = random_ids(config.vocab_size, length);
    let mut cache = model.new_cache();
    let passes = (PROMPT_POSITIONS / length).max(1);
    let table = (config.vocab_size * config.width) as f64;
    let tables = if config.tied_embeddings { 1.0 } else { 2.0 };
    let pairs = (length * (length + 1) / 2) as f64;
    let operations = 2.0 * (config.active_parameters() as f64 - tables * table) * length as f64
        + 4.0 * pairs * (config.layers.len() * config.heads * config.head_width) as f64
        + 2.0 * table;
    let shape = json!({"prompt": length, "weights": model.weight_format(), "weight_bytes": model.weight_bytes()});
    let measured = card.measure(Work::Operations(operations / length as f64), shape, || {
        let (time, ()) = seconds(|| {
            for _ in 0..passes {
                cache.truncate(0);
                pass(model, &mut cache, &ids)?;
            }
            Ok(card.device.synchronize()?)
        })?;
        Ok((passes * length) as f64 / time)
    })?;
    cache.truncate(0);
    with_kernels(measured, model, &ids, &mut [Span { cache: &mut cache, rows: length }])
}

fn pass(model: &Model, cache: &mut KvCache, ids: &[u32]) -> Result<()> {
    let mut spans = [Span { cache, rows: ids.len() }];
    model.forward(&Context::inference(model.device()), ids, &mut spans, LogitRows::Last)?;
    Ok(())
}

/// Adds the profile of a pass, and how fast its products read the weights where they read them once.
fn with_kernels(measured: Measurement, model: &Model, ids: &[u32], spans: &mut [Span<'_>]) -> Result<Measurement> {
    let rows = spans.len();
    let few = ids.len() == rows;
    let times = model.profile(ids, spans)?;
    let products: f64 =
        times.iter().filter(|kernel| kernel.name.starts_with("linear")).map(|kernel| kernel.seconds).sum();
    let notes = match few && products > 0.0 {
        true => {
            let rate = weight_bytes_read(model, rows) / products / 1e12;
            format!("one by one, products read the weights at {rate:.2} TB/s")
        }
        false => String::new(),
    };
    Ok(Measurement { kernels: Kernel::of_profile(&times), notes, ..measured })
}

/// Bytes that a step of `sequences` sequences reads.
fn step_bytes(model: &Model, sequences: usize) -> f64 {
    let config = model.config();
    let position = 2 * config.layers.len() * config.kv_heads * config.head_width * size_of::<half::bf16>();
    weight_bytes_read(model, sequences) + (sequences * position * (PROMPT + NEW_TOKENS / 2)) as f64
}

/// Bytes of the weights that a step reads: not those of an embedding that is no head, nor of experts that no sequence goes
/// to. How many those are is expected of sequences that choose independently.
fn weight_bytes_read(model: &Model, sequences: usize) -> f64 {
    let config = model.config();
    let all = config.parameters() as f64;
    let mut read = all;
    if !config.tied_embeddings {
        read -= (config.vocab_size * config.width) as f64;
    }
    if let Some(experts) = &config.experts {
        let left = 1.0 - experts.per_row as f64 / experts.count as f64;
        if left > 0.0 {
            let of_experts = (all - config.active_parameters() as f64) / left;
            read -= of_experts * left.powi(sequences as i32);
        }
    }
    model.weight_bytes() as f64 * read / all
}
