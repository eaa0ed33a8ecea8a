//! Benchmarks of whole language models: a prompt at once, tokens one at a time, loading.
//!
//! They are taken the way llama-bench takes its own: ids are random, nothing is sampled, every run starts with an empty
//! cache, and the logits of the last position are computed.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use ironloom_lm::{Config, DenseShape, LoadOptions, LogitRows, Model, text::Tokenizer};
use ironloom_nn::{KvCache, Span};
use ironloom_quant::WeightFormat;
use ironloom_tensor::{Context, Device, Tensor};
use serde_json::json;

use super::{
    inputs::{HOST_DECODE, HOST_NF4, random_ids},
    measurement::{Measurement, Work, measure, seconds},
};
use crate::{machine, smollm2};

const PROMPT: usize = 512;
const NEW_TOKENS: usize = 128;

pub(super) fn decode_host() -> Result<Measurement> {
    decode_random(HOST_DECODE, WeightFormat::F32)
}

pub(super) fn decode_host_int8() -> Result<Measurement> {
    decode_random(HOST_NF4, WeightFormat::Int8)
}

pub(super) fn decode_host_nf4() -> Result<Measurement> {
    decode_random(HOST_NF4, WeightFormat::Nf4)
}

/// Tokens/s of decoding after a prompt, of a model with random weights.
fn decode_random(shape: DenseShape, format: WeightFormat) -> Result<Measurement> {
    let device = Device::cpu(0);
    let model = Model::random(&Config::dense(shape), &device, format, 17)?;
    decode(&Runner { model, device }, PROMPT)
}

/// A prompt of 512 ids in one pass, from an empty cache.
pub(super) fn smollm2_prompt() -> Result<Measurement> {
    let runner = Runner::smollm2()?;
    let ids = random_ids(runner.model.config().vocab_size, PROMPT);
    let operations = 2.0 * runner.multiplied_weights() * PROMPT as f64 + runner.attention_operations(PROMPT);
    let shape = json!({"prompt": PROMPT, "threads": machine::threads()});
    measure(Work::Operations(operations / PROMPT as f64), shape, || {
        let mut cache = runner.model.new_cache();
        let (time, _) = seconds(|| runner.pass(&mut cache, &ids))?;
        Ok(PROMPT as f64 / time)
    })
}

/// 128 ids one after the other, from an empty cache.
pub(super) fn smollm2_generate() -> Result<Measurement> {
    decode(&Runner::smollm2()?, 0)
}

/// Tokens/s of [`NEW_TOKENS`] steps after a prompt of `prompt` ids, which is not timed.
fn decode(runner: &Runner, prompt: usize) -> Result<Measurement> {
    let ids = random_ids(runner.model.config().vocab_size, prompt + NEW_TOKENS);
    let config = runner.model.config();
    // A step reads every weight once, and the keys and values before it: on average those of the middle of the run.
    let history = 2 * config.layers.len() * config.kv_heads * config.head_width * size_of::<f32>();
    let bytes = runner.model.weight_bytes() as f64 + (history * (prompt + NEW_TOKENS / 2)) as f64;
    let shape = json!({
        "prompt": prompt,
        "new": NEW_TOKENS,
        "threads": machine::threads(),
        "weights": runner.model.weight_format(),
        "weight_bytes": runner.model.weight_bytes(),
    });
    measure(Work::Bytes(bytes), shape, || {
        let mut cache = runner.model.new_cache();
        if prompt > 0 {
            runner.pass(&mut cache, &ids[..prompt])?;
        }
        let (time, ()) = seconds(|| ids[prompt..].iter().try_for_each(|&id| runner.pass(&mut cache, &[id]).map(drop)))?;
        Ok(NEW_TOKENS as f64 / time)
    })
}

/// Seconds from the file to the logits of a first token, tokenizer included. The peak memory is that of one load, of the
/// cache of 512 positions and of the prompt that fills it.
pub(super) fn load_smollm2() -> Result<Measurement> {
    let path = smollm2::fetch()?;
    let file_bytes = fs::metadata(&path).with_context(|| format!("cannot read {}", path.display()))?.len();
    let (runner, _) = load(&path)?;
    let mut cache = runner.model.new_cache();
    runner.pass(&mut cache, &random_ids(runner.model.config().vocab_size, PROMPT))?;
    let peak_mib = machine::peak_mib();
    let cache_bytes = cache.bytes();
    drop((runner, cache));
    let shape = json!({"file_bytes": file_bytes, "cache_bytes": cache_bytes, "threads": machine::threads()});
    let measured = measure(Work::Bytes(file_bytes as f64), shape, || {
        let (time, (runner, first_id)) = seconds(|| {
            let (runner, tokenizer) = load(&path)?;
            let first_id = tokenizer.bos_id().unwrap_or(0);
            runner.pass(&mut runner.model.new_cache(), &[first_id])?;
            Ok((runner, first_id))
        })?;
        ensure!((first_id as usize) < runner.model.config().vocab_size, "the tokenizer is another model's");
        Ok(time)
    })?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let above = peak_mib - mib(file_bytes) - mib(cache_bytes as u64);
    Ok(Measurement { peak_mib, notes: format!("peak memory is the file, the cache and {above:.0} MiB"), ..measured })
}

fn load(path: &Path) -> Result<(Runner, Tokenizer)> {
    let device = Device::cpu(0);
    let checkpoint = ironloom_weights::open(path)?;
    let model = Model::load(&checkpoint, &device, &LoadOptions::default())?;
    Ok((Runner { model, device }, Tokenizer::from_checkpoint(&checkpoint)?))
}

/// A model on its device.
struct Runner {
    model: Model,
    device: Device,
}

impl Runner {
    fn smollm2() -> Result<Self> {
        Ok(load(&smollm2::fetch()?)?.0)
    }

    fn pass(&self, cache: &mut KvCache, ids: &[u32]) -> Result<Tensor> {
        let mut spans = [Span { cache, rows: ids.len() }];
        Ok(self.model.forward(&Context::inference(&self.device), ids, &mut spans, LogitRows::Last)?)
    }

    /// Weights that each row of a prompt is multiplied with: all but the embedding, whose product as a head is taken for
    /// the last row only.
    fn multiplied_weights(&self) -> f64 {
        let config = self.model.config();
        config.parameters() as f64 - (config.vocab_size * config.width) as f64
    }

    /// Operations of attention over a prompt: for each pair of positions, a product of a query and a key and one of a
    /// share and a value.
    fn attention_operations(&self, prompt: usize) -> f64 {
        let config = self.model.config();
        let pairs = (prompt * (prompt + 1) / 2) as f64;
        4.0 * pairs * (config.layers.len() * config.heads * config.head_width) as f64
    }
}
