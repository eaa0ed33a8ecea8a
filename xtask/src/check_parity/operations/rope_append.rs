//! `rope_append`: norms and turns of queries and keys, and the append of keys and values to the caches.
//!
//! Queries come out; keys and values are read from the caches. Caches of a card hold bfloat16. A card's few rows have all this
//! and their attention in one call: `attention_rows`.

use anyhow::Result;
use ironloom_tensor::{
    Device, Tensor,
    ops::{self, KvBuffer, KvSpan, RopeAppend},
};

use super::{
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
pub(super) struct Sizes {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) width: usize,
    pub(super) turned: usize,
    pub(super) rows: usize,
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
        for place in Place::each(device).into_iter().filter(|place| !place.is_few()) {
            for has_norms in [false, true] {
                let sizes = Sizes { heads, kv_heads, width, turned, rows };
                cases.push(queries(place.clone(), sizes, has_norms));
                cases.push(caches(place.clone(), sizes, has_norms));
            }
        }
    }
    cases
}

/// What one case runs on.
pub(super) struct Given {
    pub(super) sizes: Sizes,
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) phases: Vec<f32>,
    /// Of queries and of keys.
    norms: Option<[Vec<f32>; 2]>,
}

impl Given {
    pub(super) fn random(shape: &str, sizes: Sizes, has_norms: bool) -> Self {
        let Sizes { heads, kv_heads, width, turned, rows } = sizes;
        let mut inputs = Inputs::of("rope_append", shape);
        let q = inputs.normal(rows * heads * width);
        let [k, v] = [0; 2].map(|_| inputs.normal(rows * kv_heads * width));
        let phases = random_phases(&mut inputs, rows, turned);
        let norms = has_norms.then(|| [0; 2].map(|_| inputs.normal(width)));
        Self { sizes, q, k, v, phases, norms }
    }

    /// The weights of the norms, where there are any.
    pub(super) fn norm_weights(&self, place: &Place) -> Result<Option<[Tensor; 2]>> {
        Ok(match &self.norms {
            Some([q, k]) => Some([place.vector(q.clone())?, place.vector(k.clone())?]),
            None => None,
        })
    }

    /// The queries and the cache that ours makes of them.
    fn ours(&self, place: &Place, kernel: Kernel) -> Result<(Vec<f32>, KvBuffer)> {
        let Sizes { kv_heads, width, turned, rows, .. } = self.sizes;
        let parts = [&self.q, &self.k, &self.v].map(|values| kernel.inputs(values));
        let qkv = place.side_by_side(parts.each_ref().map(Vec::as_slice), rows)?;
        let phases = place.tensor(self.phases.clone(), [rows, turned])?;
        let weights = self.norm_weights(place)?;
        let norms = weights.as_ref().map(|[q, k]| ([q, k], EPSILON));
        let options = RopeAppend { head_width: width, norms, phases: &phases };
        let mut buffer = KvBuffer::new(&place.device, kv_heads, width);
        let mut spans = [KvSpan { buffer: &mut buffer, rows }];
        let q = ops::rope_append(&place.context(), qkv, &options, &mut spans)?;
        Ok((q.into_f32()?, buffer))
    }

    /// Normed and turned heads of queries (0) or keys (1).
    pub(super) fn heads<R: Real>(&self, which: usize, values: &[f32]) -> Vec<R> {
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
        let (arrived, held) = (place.activations(), place.caches());
        let reference = [given.heads::<f64>(1, &given.k), f64::all(&given.v)].concat();
        let keys = given.heads::<f32>(1, &arrived.round(&given.k));
        let plain = held.round(&[keys, arrived.round(&given.v)].concat());
        Ok(Results::new(reference, plain, buffer.read()?.concat()).in_precision(held))
    })
}
