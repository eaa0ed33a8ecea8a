//! `attention`: `sum_s softmax_s(scale q . k_s) v_s` over the positions a query sees, with grouped queries and a window.

use anyhow::Result;
use ironloom_tensor::{
    Context, Device, Tensor,
    ops::{self, AttentionOptions, AttentionSpan, KvBuffer},
};

use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    real::Real,
};

/// One attention.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    width: usize,
    window: Option<usize>,
    spans: &'static [Span],
}

/// One sequence.
#[derive(Clone, Copy)]
struct Span {
    positions: usize,
    /// How many of them, the last ones, are queries.
    rows: usize,
}

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let shape = |heads, kv_heads, width, window, spans| Shape { heads, kv_heads, width, window, spans };
    let shapes = [
        shape(1, 1, 4, None, &[Span { positions: 1, rows: 1 }]),
        shape(4, 4, 32, None, &[Span { positions: 17, rows: 17 }]),
        shape(9, 3, 64, None, &[Span { positions: 33, rows: 1 }]),
        shape(9, 3, 64, None, &[Span { positions: 200, rows: 65 }]),
        shape(
            8,
            2,
            80,
            None,
            &[Span { positions: 40, rows: 3 }, Span { positions: 1, rows: 1 }, Span { positions: 129, rows: 8 }],
        ),
        shape(4, 1, 128, Some(8), &[Span { positions: 29, rows: 29 }]),
        shape(2, 2, 64, Some(1), &[Span { positions: 20, rows: 4 }]),
        shape(
            6,
            2,
            20,
            Some(64),
            &[Span { positions: 64, rows: 2 }, Span { positions: 65, rows: 2 }, Span { positions: 66, rows: 66 }],
        ),
        shape(3, 1, 64, None, &[Span { positions: 1025, rows: 1 }]),
    ];
    shapes.into_iter().map(|shape| case(device.clone(), shape)).collect()
}

fn case(device: Device, shape: Shape) -> Case {
    let Shape { heads, kv_heads, width, window, spans } = shape;
    let lengths: Vec<String> = spans.iter().map(|span| format!("{}/{}", span.rows, span.positions)).collect();
    let window_name = window.map_or(String::new(), |window| format!(", window {window}"));
    let name = format!("{heads}/{kv_heads} x {width}, rows {}{window_name}", lengths.join(" "));
    let mut inputs = Inputs::of("attention", &name);
    let rows: usize = spans.iter().map(|span| span.rows).sum();
    let q = inputs.normal(rows * heads * width);
    let history: Vec<[Vec<f32>; 2]> =
        spans.iter().map(|span| [0; 2].map(|_| inputs.normal(span.positions * kv_heads * width))).collect();
    let scale = 1.0 / (width as f32).sqrt();
    Case::new("attention", name, Bound::TwicePlain, move |kernel| {
        let cx = Context::inference(&device);
        let mut buffers = Vec::new();
        for (span, [keys, values]) in spans.iter().zip(&history) {
            let tensor = |values: Vec<f32>| -> Result<Tensor> {
                Ok(Tensor::from_f32(values, [span.positions, kv_heads * width])?)
            };
            let mut buffer = KvBuffer::new(&device, kv_heads, width);
            buffer.append(&cx, &tensor(keys.clone())?, &tensor(kernel.inputs(values))?)?;
            buffers.push(buffer);
        }
        let given = Tensor::from_f32(q.clone(), [rows, heads * width])?;
        let spans_in: Vec<AttentionSpan<'_>> =
            buffers.iter().zip(spans).map(|(history, span)| AttentionSpan { history, rows: span.rows }).collect();
        let ours = ops::attention(&cx, &given, &spans_in, &AttentionOptions { heads, scale, window })?;
        Ok(Results::new(
            attend::<f64>(&shape, &q, &history, scale),
            attend::<f32>(&shape, &q, &history, scale),
            ours.into_f32()?,
        ))
    })
}

fn attend<R: Real>(shape: &Shape, q: &[f32], history: &[[Vec<f32>; 2]], scale: f32) -> Vec<R> {
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
