//! `attention_rows`: on a card, from the raw projections of few rows to their attention over their histories, in one call:
//! norms and turns of queries and keys, the append of keys and values, and the attention.
//!
//! The cases here have turns, and norms or none, and look at the attention and at what the caches hold afterwards. Those of
//! `attention` give rows the keys and values that their caches already hold, with phases that turn nothing: what they look
//! at is the attention alone, to more digits.

use anyhow::Result;
use ironloom_tensor::{
    Device, Tensor,
    ops::{self, AttentionOptions, KvBuffer, KvTable, RopeAppend, TableRow},
};

use super::{
    attention::{Shape, Span, attend, filled, shape, span},
    rmsnorm::EPSILON,
    rope_append::{Given, Sizes},
};
use crate::check_parity::{
    case::{Bound, Case, Kernel, Results},
    inputs::Inputs,
    place::Place,
    real::Real,
};

/// Attentions, and elements of a head that turn: whole sequences and later parts, rows past the end of a chunk of 128
/// positions and of a cache's first 64, windows, and widths and turns without kernels of their own.
const SHAPES: [(Shape, usize); 12] = [
    (shape(9, 3, 64, None, &[span(1, 1)]), 64),
    (shape(9, 3, 64, None, &[span(1, 33), span(2, 65), span(1, 128)]), 64),
    (shape(8, 2, 128, None, &[span(16, 16)]), 128),
    (shape(16, 2, 128, None, &[span(1, 64), span(4, 129), span(1, 1000)]), 128),
    (shape(20, 2, 64, None, &[span(64, 700)]), 64),
    (shape(4, 1, 256, Some(100), &[span(1, 99), span(5, 400)]), 256),
    (shape(8, 1, 128, Some(8), &[span(29, 29)]), 128),
    (shape(8, 4, 96, None, &[span(3, 200), span(1, 65)]), 96),
    (shape(8, 4, 96, None, &[span(20, 136)]), 72),
    (shape(9, 3, 64, None, &[span(5, 5), span(2, 257)]), 32),
    (shape(2, 2, 80, None, &[span(8, 129), span(1, 1)]), 32),
    (shape(3, 1, 20, Some(64), &[span(2, 64), span(40, 66)]), 20),
];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for place in Place::each(device).into_iter().filter(Place::is_few) {
        for (shape, turned) in SHAPES {
            for has_norms in [false, true] {
                for what in [What::Attention, What::Caches] {
                    cases.push(case(place.clone(), shape, turned, has_norms, what));
                }
            }
        }
    }
    cases
}

/// What a case looks at.
#[derive(Clone, Copy, PartialEq)]
enum What {
    Attention,
    Caches,
}

fn case(place: Place, shape: Shape, turned: usize, has_norms: bool, what: What) -> Case {
    let Shape { heads, kv_heads, width, window, spans } = shape;
    let norms = if has_norms { ", norms" } else { "" };
    let name = format!("{}, {turned} turned{norms}", shape.name());
    let operation = match what {
        What::Attention => "attention_rows with turns",
        What::Caches => "attention_rows keys and values",
    };
    Case::new(operation, place.shape(&name), Bound::TwicePlain, move |kernel| {
        let rows = spans.iter().map(|span| span.rows).sum();
        let given = Given::random(&name, Sizes { heads, kv_heads, width, turned, rows }, has_norms);
        let mut inputs = Inputs::of("attention_rows before", &name);
        let held = place.caches();
        let (mut before, mut buffers) = (Vec::new(), Vec::new());
        for span in spans {
            let count = (span.positions - span.rows) * kv_heads * width;
            let kept = [0; 2].map(|_| held.round(&inputs.normal(count)));
            buffers.push(filled(&place, [kv_heads, width], &kept[0], &kept[1])?);
            before.push(kept);
        }
        let options = AttentionOptions { heads, scale: 1.0 / (width as f32).sqrt(), window };
        let ours = ours(&place, kernel, &given, &mut buffers, spans, &options)?;

        // The rows' keys and values behind those that were there.
        let row = kv_heads * width;
        let after = |keys: &[f32], values: &[f32]| -> Vec<[Vec<f32>; 2]> {
            let mut first = 0;
            let history = before.iter().zip(spans).map(|([old_keys, old_values], span)| {
                let new = first * row..(first + span.rows) * row;
                first += span.rows;
                [[old_keys, &keys[new.clone()]].concat(), [old_values, &values[new]].concat()]
            });
            history.collect()
        };
        let single = |values: Vec<f64>| -> Vec<f32> { values.into_iter().map(|value| value as f32).collect() };
        let exact = after(&single(given.heads(1, &given.k)), &given.v);
        let plain = after(&held.round(&given.heads::<f32>(1, &given.k)), &held.round(&given.v));
        let results = match what {
            What::Caches => {
                let mut found = Vec::new();
                for buffer in &buffers {
                    found.extend(buffer.read()?.concat());
                }
                Results::new(f64::all(&exact.concat().concat()), plain.concat().concat(), found)
            }
            What::Attention => {
                let reference = attend(&shape, &single(given.heads(0, &given.q)), &exact, options.scale);
                let queries = place.operands().round(&given.heads::<f32>(0, &given.q));
                let plain = place.operands().round(&attend(&shape, &queries, &plain, options.scale));
                Results::new(reference, plain, ours)
            }
        };
        Ok(results.in_precision(held))
    })
}

/// The attention that ours gives; the caches get the rows' keys and values.
fn ours(
    place: &Place,
    kernel: Kernel,
    given: &Given,
    buffers: &mut [KvBuffer],
    spans: &[Span],
    options: &AttentionOptions,
) -> Result<Vec<f32>> {
    for (buffer, span) in buffers.iter_mut().zip(spans) {
        buffer.reserve(span.rows)?;
    }
    let weights = given.norm_weights(place)?;
    let parts = [&given.q, &given.k, &given.v].map(|values| kernel.inputs(values));
    let call = Rows { parts: parts.each_ref().map(Vec::as_slice), phases: &given.phases, norms: weights.as_ref() };
    let out = call.attention(place, given.sizes.width, buffers, spans, options)?;
    for (buffer, span) in buffers.iter_mut().zip(spans) {
        buffer.advance(span.rows)?;
    }
    Ok(out)
}

/// The rows of a call, which are the last positions of some sequences, one after the other.
pub(super) struct Rows<'a> {
    /// Queries, keys and values as projections give them.
    pub(super) parts: [&'a [f32]; 3],
    /// Cosines and sines of each row.
    pub(super) phases: &'a [f32],
    /// Of queries and of keys.
    pub(super) norms: Option<&'a [Tensor; 2]>,
}

impl Rows<'_> {
    /// Their attention over caches that have room for them.
    pub(super) fn attention(
        &self,
        place: &Place,
        head_width: usize,
        buffers: &[KvBuffer],
        spans: &[Span],
        options: &AttentionOptions,
    ) -> Result<Vec<f32>> {
        let mut table_rows = Vec::new();
        for (buffer, span) in buffers.iter().zip(spans) {
            let cache = std::slice::from_ref(buffer);
            let positions = span.positions - span.rows..span.positions;
            table_rows.extend(positions.map(|position| TableRow { id: 0, position, cache }));
        }
        let rows = table_rows.len();
        // As a model's passes have it: a power of two of rows, those past the last not in use.
        let capacity = rows.next_power_of_two();
        let reach = spans.iter().map(|span| span.positions).max().unwrap_or(1);
        let table = KvTable::new(&place.device, capacity, options.heads, &buffers[..1], reach)?;
        table.set(&table_rows)?;
        let filled_up = |values: &[f32]| {
            let mut all = values.to_vec();
            all.resize(values.len() / rows * capacity, 1.0);
            all
        };
        let parts = self.parts.map(filled_up);
        let projected = place.side_by_side(parts.each_ref().map(Vec::as_slice), capacity)?;
        let phases = place.tensor(filled_up(self.phases), [capacity, self.phases.len() / rows])?;
        let norms = self.norms.map(|[q, k]| ([q, k], EPSILON));
        let rotation = RopeAppend { head_width, norms, phases: &phases };
        let out = ops::attention_rows(&place.context(), projected, &rotation, &table, 0, options)?;
        Ok(out.rows_view(0..rows)?.into_f32()?)
    }
}
