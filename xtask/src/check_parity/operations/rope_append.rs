//! `rope_append`: norms and turns of queries and keys, and the append of keys and values to the caches.
//!
//! Queries come out; keys and values are seen by an attention over them. Caches of a card hold bfloat16.

use anyhow::{Context as _, Result};
use ironloom_tensor::{
    Device,
    ops::{self, AttentionOptions, KvBuffer, KvRows, KvSpan, KvTable, RopeAppend, TableRow},
};

use super::{
    attention::{Shape, Span, attend, attention},
    rmsnorm::{EPSILON, norms},
    rope::{random_phases, turn},
};
use crate::check_parity::{
    case::{Bound, Case, Kernel, Results},
    inputs::Inputs,
    place::Place,
    real::Real,
};

/// Heads of queries and of keys, elements of a head, of which turned, and rows.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    width: usize,
    turned: usize,
    rows: usize,
}

const SIZES: [[usize; 5]; 9] = [
    [1, 1, 64, 64, 1],
    [9, 3, 64, 64, 5],
    [8, 2, 128, 128, 16],
    [4, 1, 256, 256, 33],
    [8, 4, 96, 72, 64],
    [3, 1, 16, 16, 7],
    [2, 2, 80, 32, 40],
    [9, 3, 64, 32, 65],
    [8, 2, 128, 128, 200],
];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for [heads, kv_heads, width, turned, rows] in SIZES {
        for place in Place::each(device).into_iter().filter(|place| place.takes(rows)) {
            for has_norms in [false, true] {
                let sizes = Sizes { heads, kv_heads, width, turned, rows };
                cases.push(queries(place.clone(), sizes, has_norms));
                if place.is_cpu() || place.is_few() || [64, 96, 128, 256].contains(&width) {
                    cases.push(caches(place.clone(), sizes, has_norms));
                }
            }
        }
    }
    cases
}

/// What one case runs on.
struct Given {
    sizes: Sizes,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    phases: Vec<f32>,
    /// Of queries and of keys.
    norms: Option<[Vec<f32>; 2]>,
    /// The queries of an attention over the cache: one for each row.
    probes: Vec<f32>,
}

impl Given {
    fn random(shape: &str, sizes: Sizes, has_norms: bool) -> Self {
        let Sizes { heads, kv_heads, width, turned, rows } = sizes;
        let mut inputs = Inputs::of("rope_append", shape);
        let q = inputs.normal(rows * heads * width);
        let [k, v] = [0; 2].map(|_| inputs.normal(rows * kv_heads * width));
        let phases = random_phases(&mut inputs, rows, turned);
        let norms = has_norms.then(|| [0; 2].map(|_| inputs.normal(width)));
        Self { sizes, q, k, v, phases, norms, probes: inputs.normal(rows * heads * width) }
    }

    /// The queries and the cache that ours makes of them.
    fn ours(&self, place: &Place, kernel: Kernel) -> Result<(Vec<f32>, KvBuffer)> {
        let Sizes { kv_heads, width, turned, rows, .. } = self.sizes;
        let parts = [&self.q, &self.k, &self.v].map(|values| kernel.inputs(values));
        let qkv = place.side_by_side(parts.each_ref().map(Vec::as_slice), rows)?;
        let phases = place.tensor(self.phases.clone(), [rows, turned])?;
        let mut weights = Vec::new();
        for weight in self.norms.iter().flatten() {
            weights.push(place.vector(weight.clone())?);
        }
        let norms = match weights.as_slice() {
            [q, k] => Some(([q, k], EPSILON)),
            _ => None,
        };
        let options = RopeAppend { head_width: width, norms, phases: &phases };
        let mut buffer = KvBuffer::new(&place.device, kv_heads, width);
        if !place.is_few() {
            let mut spans = [KvSpan { buffer: &mut buffer, rows }];
            let q = ops::rope_append(&place.context(), qkv, &options, KvRows::Spans(&mut spans))?;
            return Ok((q.into_f32()?, buffer));
        }
        buffer.reserve(rows)?;
        let table = KvTable::new(&place.device, rows, std::slice::from_ref(&buffer), rows)?;
        let cache = std::slice::from_ref(&buffer);
        let table_rows: Vec<TableRow<'_>> = (0..rows).map(|position| TableRow { id: 0, position, cache }).collect();
        table.set(&table_rows)?;
        let q = ops::rope_append(&place.context(), qkv, &options, KvRows::Table(&table, 0))?.into_f32()?;
        buffer.advance(rows)?;
        Ok((q, buffer))
    }

    /// Normed and turned heads of queries (0) or keys (1).
    fn heads<R: Real>(&self, which: usize, values: &[f32]) -> Vec<R> {
        let Sizes { heads, kv_heads, width, turned, .. } = self.sizes;
        let mut x = R::all(values);
        if let Some(weights) = &self.norms {
            x = norms(&x, &R::all(&weights[which]));
        }
        turn(&x, [heads, kv_heads][which], width, &self.phases, turned)
    }
}

fn name(Sizes { heads, kv_heads, width, turned, rows }: Sizes, has_norms: bool) -> String {
    let norms = if has_norms { ", norms" } else { "" };
    format!("[{rows}, {heads}/{kv_heads} x {width}], {turned} turned{norms}")
}

fn queries(place: Place, sizes: Sizes, has_norms: bool) -> Case {
    let shape = name(sizes, has_norms);
    Case::new("rope_append queries", place.shape(&shape), Bound::TwicePlain, move |kernel| {
        let given = Given::random(&shape, sizes, has_norms);
        let (ours, _) = given.ours(&place, kernel)?;
        let held = place.activations();
        let plain = held.round(&given.heads::<f32>(0, &held.round(&given.q)));
        Ok(Results::new(given.heads(0, &given.q), plain, ours).in_precision(held))
    })
}

fn caches(place: Place, sizes: Sizes, has_norms: bool) -> Case {
    let shape = name(sizes, has_norms);
    Case::new("rope_append keys and values", place.shape(&shape), Bound::TwicePlain, move |kernel| {
        let given = Given::random(&shape, sizes, has_norms);
        let (_, buffer) = given.ours(&place, kernel)?;
        let Sizes { heads, kv_heads, width, rows, .. } = sizes;
        let scale = 1.0 / (width as f32).sqrt();
        let spans: &'static [Span] = ALL_ROWS.get(rows).map(std::slice::from_ref).context("more rows than spans")?;
        let attended = Shape { heads, kv_heads, width, window: None, spans };
        let options = AttentionOptions { heads, scale, window: None };
        let ours = attention(&place, &given.probes, &[buffer], spans, &options)?;
        let exact: Vec<f32> = given.heads::<f64>(1, &given.k).into_iter().map(|key| key as f32).collect();
        let (arrived, held) = (place.activations(), place.caches());
        let keys = held.round(&given.heads::<f32>(1, &arrived.round(&given.k)));
        let reference = attend::<f64>(&attended, &given.probes, &[[exact, given.v.clone()]], scale);
        let probes = place.operands().round(&given.probes);
        let plain = attend::<f32>(&attended, &probes, &[[keys, held.round(&given.v)]], scale);
        let results = Results::new(reference, place.operands().round(&plain), ours);
        Ok(results.in_precision(held))
    })
}

/// The span of so many rows that are all of their sequence.
static ALL_ROWS: [Span; 201] = {
    let mut spans = [Span { positions: 0, rows: 0 }; 201];
    let mut rows = 0;
    while rows < spans.len() {
        spans[rows] = Span { positions: rows, rows };
        rows += 1;
    }
    spans
};
