//! `attention`: `sum_s softmax_s(scale q . k_s) v_s` over the positions a query sees, with grouped queries and a window; on a
//! card also `attention_rows`, the same for rows that find their histories in a table.
//!
//! A card's caches hold bfloat16: there the keys and values of a case are numbers that bfloat16 has, so that what is checked
//! is the attention over what is held. They enter by `rope_append` without a turn, some at a time, so that caches grow.
//! `attention_rows` appends too: its rows come with the keys and values that are already theirs, and write them once more.

use anyhow::Result;
use ironloom_tensor::{
    Device,
    ops::{self, AttentionOptions, AttentionSpan, KvBuffer, KvSpan, RopeAppend},
};

use super::attention_rows::Rows;
use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::{Place, is_cpu},
    real::Real,
};

/// One attention.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) width: usize,
    pub(super) window: Option<usize>,
    pub(super) spans: &'static [Span],
}

/// One sequence.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) positions: usize,
    /// How many of them, the last ones, are queries.
    pub(super) rows: usize,
}

impl Shape {
    /// Its name for a reader.
    pub(super) fn name(&self) -> String {
        let Self { heads, kv_heads, width, window, spans } = self;
        let lengths: Vec<String> = spans.iter().map(|span| format!("{}/{}", span.rows, span.positions)).collect();
        let window = window.map_or(String::new(), |window| format!(", window {window}"));
        format!("{heads}/{kv_heads} x {width}, rows {}{window}", lengths.join(" "))
    }
}

pub(super) const fn shape(
    heads: usize,
    kv_heads: usize,
    width: usize,
    window: Option<usize>,
    spans: &'static [Span],
) -> Shape {
    Shape { heads, kv_heads, width, window, spans }
}

pub(super) const fn span(rows: usize, positions: usize) -> Span {
    Span { positions, rows }
}

const SHAPES: [Shape; 9] = [
    shape(1, 1, 4, None, &[span(1, 1)]),
    shape(4, 4, 32, None, &[span(17, 17)]),
    shape(9, 3, 64, None, &[span(1, 33)]),
    shape(9, 3, 64, None, &[span(65, 200)]),
    shape(8, 2, 80, None, &[span(3, 40), span(1, 1), span(8, 129)]),
    shape(4, 1, 128, Some(8), &[span(29, 29)]),
    shape(2, 2, 64, Some(1), &[span(4, 20)]),
    shape(6, 2, 20, Some(64), &[span(2, 64), span(2, 65), span(66, 66)]),
    shape(3, 1, 64, None, &[span(1, 1025)]),
];

/// More on a card: every width with kernels of its own, groups past the eight heads of a block, histories of one chunk and
/// past the most chunks, windows that end in a chunk, rows past a block of queries.
const CARD_SHAPES: [Shape; 16] = [
    shape(4, 4, 64, None, &[span(1, 1), span(2, 65), span(16, 64), span(1, 128)]),
    shape(8, 2, 96, None, &[span(1, 63), span(7, 200)]),
    shape(16, 2, 128, None, &[span(1, 64), span(4, 129), span(1, 1000)]),
    shape(12, 1, 128, None, &[span(2, 300)]),
    shape(4, 2, 256, None, &[span(1, 17), span(3, 150)]),
    shape(20, 2, 64, None, &[span(1, 777)]),
    shape(8, 1, 256, Some(100), &[span(1, 99), span(1, 100), span(5, 400)]),
    shape(4, 2, 64, Some(1000), &[span(1, 3000), span(16, 900)]),
    shape(8, 8, 64, None, &[span(1, 2500)]),
    shape(8, 1, 128, None, &[span(1, 9001), span(1, 8192)]),
    shape(64, 64, 64, None, &[span(1, 1100)]),
    shape(2, 1, 16, None, &[span(64, 80)]),
    shape(4, 4, 96, None, &[span(130, 130)]),
    shape(8, 2, 128, Some(64), &[span(200, 300)]),
    shape(4, 1, 256, None, &[span(70, 140)]),
    shape(16, 4, 64, None, &[span(257, 600), span(1, 3), span(66, 66)]),
];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    let more: &[Shape] = if is_cpu(device) { &[] } else { &CARD_SHAPES };
    for &shape in SHAPES.iter().chain(more) {
        for place in Place::each(device) {
            let rows = shape.spans.iter().map(|span| span.rows).sum();
            if place.takes(rows) && (place.is_cpu() || place.is_few() || [64, 96, 128, 256].contains(&shape.width)) {
                cases.push(case(place, shape));
            }
        }
    }
    cases
}

fn case(place: Place, shape: Shape) -> Case {
    let Shape { heads, kv_heads, width, window, spans } = shape;
    let name = shape.name();
    let scale = 1.0 / (width as f32).sqrt();
    let operation = if place.is_few() { "attention_rows" } else { "attention" };
    Case::new(operation, place.shape(&name), Bound::TwicePlain, move |kernel| {
        let mut inputs = Inputs::of("attention", &name);
        let rows: usize = spans.iter().map(|span| span.rows).sum();
        let q = inputs.normal(rows * heads * width);
        let mut history: Vec<[Vec<f32>; 2]> = Vec::new();
        for span in spans {
            history.push([0; 2].map(|_| place.caches().round(&inputs.normal(span.positions * kv_heads * width))));
        }
        let mut buffers = Vec::new();
        // The keys and values of the rows themselves.
        let mut own: [Vec<f32>; 2] = Default::default();
        for ([keys, values], span) in history.iter().zip(spans) {
            let values = kernel.inputs(values);
            let from = (span.positions - span.rows) * kv_heads * width;
            own[0].extend(&keys[from..]);
            own[1].extend(&values[from..]);
            buffers.push(filled(&place, [kv_heads, width], keys, &values)?);
        }
        let options = AttentionOptions { heads, scale, window };
        let ours = if place.is_few() {
            let phases = [vec![1.0; width / 2], vec![0.0; width / 2]].concat().repeat(rows);
            let call = Rows { parts: [&q, &own[0], &own[1]], phases: &phases, norms: None };
            call.attention(&place, width, &buffers, spans, &options)?
        } else {
            attention(&place, &q, &buffers, spans, &options)?
        };
        let results = if place.is_cpu() {
            Results::new(attend::<f64>(&shape, &q, &history, scale), attend::<f32>(&shape, &q, &history, scale), ours)
        } else {
            let held = if place.is_few() { place.operands() } else { place.activations() };
            let plain = place.operands().round(&attend(&shape, &held.round(&q), &history, scale));
            Results::new(attend::<f64>(&shape, &q, &history, scale), plain, ours)
        };
        Ok(results.in_precision(place.operands()))
    })
}

/// Positions that go to a cache together.
const APPENDED: usize = 77;

/// A cache of these keys and values.
pub(super) fn filled(place: &Place, [kv_heads, width]: [usize; 2], keys: &[f32], values: &[f32]) -> Result<KvBuffer> {
    let mut buffer = KvBuffer::new(&place.device, kv_heads, width);
    let row = kv_heads * width;
    // The kernels of many rows append to one sequence; what they append does not depend on the path.
    let place = Place::single(&place.device);
    for (keys, values) in keys.chunks(APPENDED * row).zip(values.chunks(APPENDED * row)) {
        let rows = keys.len() / row;
        let queries = vec![0.0; rows * width];
        let qkv = place.side_by_side([&queries, keys, values], rows)?;
        let phases = place.tensor([1.0, 0.0].repeat(rows), [rows, 2])?;
        let options = RopeAppend { head_width: width, norms: None, phases: &phases };
        let mut spans = [KvSpan { buffer: &mut buffer, rows }];
        ops::rope_append(&place.context(), qkv, &options, &mut spans)?;
    }
    Ok(buffer)
}

/// The attention of `q`, whose rows belong to the last positions of `buffers`, one after the other.
fn attention(
    place: &Place,
    q: &[f32],
    buffers: &[KvBuffer],
    spans: &[Span],
    options: &AttentionOptions,
) -> Result<Vec<f32>> {
    let rows: usize = spans.iter().map(|span| span.rows).sum();
    let spans_in: Vec<AttentionSpan<'_>> =
        buffers.iter().zip(spans).map(|(history, span)| AttentionSpan { history, rows: span.rows }).collect();
    let given = place.activation(q.to_vec(), [rows, q.len() / rows])?;
    Ok(ops::attention(&place.context(), &given, &spans_in, options)?.into_f32()?)
}

/// The attention of each span's last rows over its keys and values.
pub(super) fn attend<R: Real>(shape: &Shape, q: &[f32], history: &[[Vec<f32>; 2]], scale: f32) -> Vec<R> {
    let &Shape { heads, kv_heads, width, window, spans } = shape;
    let mut out = Vec::new();
    let q = R::all(q);
    let mut queries = q.chunks_exact(width);
    for (span, [keys, values]) in spans.iter().zip(history) {
        let (keys, values) = (R::all(keys), R::all(values));
        for position in span.positions - span.rows..span.positions {
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            for (head, query) in queries.by_ref().take(heads).enumerate() {
                let at = |s: usize| (s * kv_heads + head / (heads / kv_heads)) * width;
                let score = |s: usize| {
                    let products = query.iter().zip(&keys[at(s)..][..width]).map(|(&q, &k)| q * k);
                    products.sum::<R>() * R::of(f64::from(scale))
                };
                let scores: Vec<R> = (first..=position).map(score).collect();
                let largest = scores.iter().copied().fold(scores[0], |a, b| if b > a { b } else { a });
                let shares: Vec<R> = scores.iter().map(|&score| (score - largest).exp()).collect();
                let total: R = shares.iter().copied().sum();
                out.extend((0..width).map(|j| {
                    let terms = shares.iter().zip(first..).map(|(&share, s)| share * values[at(s) + j]);
                    terms.sum::<R>() / total
                }));
            }
        }
    }
    out
}
