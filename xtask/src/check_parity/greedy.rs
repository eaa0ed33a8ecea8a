//! SmolLM2's greedy ids on a graphics card: a real model, against another implementation's ids from the same weights.

use anyhow::{Context as _, Result};
use ironloom_lm::{LoadOptions, LogitRows, Model};
use ironloom_nn::Span;
use ironloom_tensor::{Context, Device};
use serde::Deserialize;

use super::case::{Bound, Case, Kernel, Results};
use crate::{smollm2, workspace};

/// `tests/golden/smollm2/expected.json`.
#[derive(Deserialize)]
struct Expected {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    name: String,
    ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

/// A case for each prompt, where the model's file is in the cache: nothing is fetched.
pub(super) fn cases(device: &Device) -> Result<Vec<Case>> {
    let Some(model) = smollm2::cached() else {
        eprintln!(
            "SmolLM2's greedy ids are left out: {} is not in the cache (IRONLOOM_CACHE names another)",
            smollm2::FILE
        );
        return Ok(Vec::new());
    };
    let path = workspace::root().join("tests/golden/smollm2/expected.json");
    let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let expected: Expected = serde_json::from_slice(&text).context("the expected ids have another form")?;
    let case = |prompt: Prompt| {
        let (model, device) = (model.clone(), device.clone());
        let shape = format!("{}, {} and {}", prompt.name, prompt.ids.len(), prompt.greedy_ids.len());
        Case::new("smollm2 greedy ids", shape, Bound::Exact, move |kernel| {
            let checkpoint = ironloom_weights::open(&model)?;
            let model = Model::load(&checkpoint, &device, &LoadOptions::default())?;
            let ours = greedy(&model, &dropped(&prompt.ids, kernel), prompt.greedy_ids.len())?;
            let reference = prompt.greedy_ids.iter().map(|&id| f64::from(id)).collect();
            Ok(Results::new(reference, Vec::new(), ours.into_iter().map(|id| id as f32).collect()))
        })
    };
    Ok(expected.prompts.into_iter().map(case).collect())
}

fn dropped(ids: &[u32], kernel: Kernel) -> Vec<u32> {
    let kept = |(i, &id): (usize, &u32)| if kernel == Kernel::OneInFourDropped && i % 4 == 1 { 0 } else { id };
    ids.iter().enumerate().map(kept).collect()
}

fn greedy(model: &Model, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
    let cx = Context::inference(model.device());
    let (mut cache, mut given, mut produced) = (model.new_cache(), prompt.to_vec(), Vec::new());
    while produced.len() < count {
        let mut spans = [Span { cache: &mut cache, rows: given.len() }];
        let logits = model.forward(&cx, &given, &mut spans, LogitRows::Last)?.into_f32()?;
        // The first of the largest.
        let largest = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        let id = largest.context("a model without a vocabulary")? as u32;
        produced.push(id);
        given = vec![id];
    }
    Ok(produced)
}
