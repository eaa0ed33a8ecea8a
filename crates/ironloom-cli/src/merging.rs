//! Adapters added to the weights of their model, with a measure of what that changed, and the folder of the sum.
//!
//! In exact numbers a merged model answers as the model beside its adapters did. Weights of few bits are computed with in few
//! bits before and in 32 after, so what is measured is how far the logits of a probe moved.

use std::{fmt, path::Path};

use anyhow::{Context as _, Result, bail};
use ironloom_core::PartialFolder;
use ironloom_lm::{
    LogitRows, Model,
    export::{TextFiles, write_trained},
};
use ironloom_nn::Span;
use ironloom_tensor::Context;
use serde::Serialize;

/// The most tokens of a probe.
pub(crate) const PROBE: usize = 64;

/// What merging changed.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Merged {
    /// The largest change of a logit.
    pub(crate) largest_logit_change: f32,
    /// The largest logit before.
    pub(crate) largest_logit: f32,
    /// Tokens of the probe.
    pub(crate) probe_tokens: usize,
}

/// Adds the adapters of `model` to its weights.
///
/// # Errors
/// There are none, or the probe's ids are not the model's.
pub(crate) fn merge(model: &mut Model, probe: &[u32]) -> Result<Merged> {
    if !model.has_adapters() {
        bail!("the model has no adapters to merge");
    }
    let before = logits(model, probe)?;
    model.merge_adapters()?;
    let after = logits(model, probe)?;
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0_f32, |largest, value| largest.max(value));
    Ok(Merged {
        largest_logit_change: largest(&mut before.iter().zip(&after).map(|(before, after)| (before - after).abs())),
        largest_logit: largest(&mut before.iter().map(|value| value.abs())),
        probe_tokens: probe.len(),
    })
}

/// Writes a merged model as a folder, under another name first.
///
/// # Errors
/// The configuration can't be said in a `config.json`, or the disk can't be written.
pub(crate) fn write_folder(model: &Model, folder: &Path, text: &TextFiles) -> Result<()> {
    let cannot = || format!("cannot write {}", folder.display());
    let unfinished = PartialFolder::create(folder).with_context(cannot)?;
    write_trained(model, unfinished.path(), text)?;
    unfinished.finish().with_context(cannot)
}

fn logits(model: &Model, ids: &[u32]) -> Result<Vec<f32>> {
    let mut cache = model.new_cache();
    let mut spans = [Span { cache: &mut cache, rows: ids.len() }];
    let logits = model.forward(&Context::inference(model.device()), ids, &mut spans, LogitRows::All)?;
    Ok(logits.as_f32()?.to_vec())
}

impl fmt::Display for Merged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { largest_logit_change, largest_logit, probe_tokens } = self;
        write!(
            f,
            "logits of {probe_tokens} tokens changed by {largest_logit_change:.1e} at most, and the largest is {largest_logit:.1}"
        )
    }
}
