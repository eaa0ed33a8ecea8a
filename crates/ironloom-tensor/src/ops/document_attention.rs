//! Attention within documents, for training: packed documents are kept apart, and no keys are kept for later.
//!
//! Document `d` has its own rows of `q [n, heads * w]` and of `k`, `v` (`[m, kv_heads * w]`). For its query `t` and head `h`,
//! which reads kv head `h / (heads / kv_heads)`, over the keys `s` that the mask lets it see:
//! `p_s = softmax_s(scale * q . k_s)`, `out = sum_s p_s v_s`.
//!
//! Forward: a task takes [`QUERIES`] queries of one kv head and walks tiles of [`KEYS`] keys in view with a running maximum
//! and sum (Dao et al., arXiv 2205.14135), so that a tile of scores is all there ever is. What stays for the backward pass is
//! the log of each row's sum of exponentials, `[n, heads]`. Backward, with `g` the gradient of `out`:
//! `delta = g . out`, `dp_s = g . v_s`, `ds_s = scale * p_s (dp_s - delta)`, `dq = sum_s ds_s k_s`, `dk_s = sum_t ds_s q_t`,
//! `dv_s = sum_t p_s g_t`, the last two summed over the heads of a group as well.
//!
//! Products are those of [`gemm`](crate::gemm). It wants the inner side of its right operand to lie together, so keys (and, for
//! `dp`, values) are transposed once into panels a tile wide: 2 to 3 times faster than leaving it to each product. All splits
//! and orders of sums depend on a document's own lengths alone: a document gives the same bits on any number of threads and
//! whatever is packed beside it.

mod plan;

use std::ops::Range;

use self::plan::{Document, Plan, QUERIES};
use super::{Disjoint, DocumentBounds, rmsnorm, rope};
use crate::{
    Context, CpuDevice, Error, Result, Tensor,
    gemm::{Matrix, Write, gemm_serial},
    lanes::{dot, exp, maximum, per_level, softmax_exp, sum},
};

/// Which keys of its document a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// Those up to its own position. The document has as many keys as queries.
    Causal,
    /// The last so many of those up to its own position, its own among them; at least 1.
    Window(usize),
    /// All. Keys and queries may differ in number, as in cross-attention.
    Bidirectional,
}

/// One document's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentSpan {
    /// Rows of the queries.
    pub queries: usize,
    /// Rows of the keys and values.
    pub keys: usize,
}

/// The heads and the mask of an attention within documents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DocumentAttentionOptions {
    /// Query heads; a multiple of the kv heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// The factor on scores, usually `1 / sqrt(head width)`.
    pub scale: f32,
    /// Which keys a query sees.
    pub mask: Mask,
}

const NAME: &str = "document attention";

/// Attention of `q [n, heads * w]` over `k` and `v` (`[m, kv_heads * w]`), each of `spans` within itself; the result has `q`'s
/// shape. Has a gradient for all three.
///
/// # Errors
/// Head counts or shapes don't fit, the spans are not `n` queries and `m` keys, a span has queries without keys or, under a
/// causal mask, other keys than queries, the window is 0, or the device is not the processor.
pub fn document_attention(
    cx: &Context,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spans: &[DocumentSpan],
    options: &DocumentAttentionOptions,
) -> Result<Tensor> {
    let cpu = cx.cpu(NAME)?;
    let plan = Plan::new([q, k, v], spans, options)?;
    let slots = cx.slots([q, k, v]);
    let (out, log_sum_exp) = plan.forward(cpu, [q.as_f32()?, k.as_f32()?, v.as_f32()?]);
    let out = Tensor::from_f32(out, *q.shape())?;
    if let Some((tape, slots)) = slots {
        let (cpu, inputs, kept_out) = (cpu.clone(), [q.clone(), k.clone(), v.clone()], out.clone());
        tape.record(&out, move |gradient, gradients| {
            let [q, k, v] = &inputs;
            let kept = Kept {
                inputs: [q.as_f32()?, k.as_f32()?, v.as_f32()?],
                out: kept_out.as_f32()?,
                log_sum_exp: &log_sum_exp,
                gradient: gradient.as_f32()?,
            };
            let made = plan.backward(&cpu, &kept, slots.map(|slot| slot.is_some()));
            for (slot, made) in slots.iter().zip(made) {
                if let (Some(slot), Some(made)) = (slot, made) {
                    gradients.add(slot, Tensor::from_f32(made, slot.shape())?)?;
                }
            }
            Ok(())
        });
    }
    Ok(out)
}

/// The documents that the rows of a pass belong to, one after the other.
#[derive(Clone, Copy, Debug)]
pub enum Documents<'a> {
    /// Their lengths, on the processor.
    Lengths(&'a [usize]),
    /// On a graphics card, where they change between the replays of a pass.
    Card(&'a DocumentBounds),
}

/// What a training pass does with q, k and v.
#[derive(Clone, Copy, Debug)]
pub struct RotatedAttention<'a> {
    /// Elements of a head.
    pub head_width: usize,
    /// The weights of the norms of every head of q and of k, `[head_width]`, and their epsilon, where there are norms.
    pub norms: Option<([&'a Tensor; 2], f32)>,
    /// Cosines and sines of the rows' positions, from [`rope_phases`](super::rope_phases).
    pub phases: &'a Tensor,
    /// The documents of the rows.
    pub documents: Documents<'a>,
    /// Heads, scale and mask.
    pub options: &'a DocumentAttentionOptions,
}

/// [`document_attention`] of `q [n, heads * w]` over `k` and `v` (`[n, kv_heads * w]`), the heads of q and k normed where there
/// are norms, and turned by their positions. Has a gradient for all three and the norms.
///
/// # Errors
/// As [`document_attention`], [`rmsnorm`] and [`rope`], or the documents are on another device than the rows.
pub fn rotated_attention(cx: &Context, [q, k, v]: [Tensor; 3], rotation: &RotatedAttention<'_>) -> Result<Tensor> {
    let RotatedAttention { head_width, norms, phases, documents, options } = *rotation;
    let lengths = match (cx.gpu(), documents) {
        (Some(gpu), Documents::Card(bounds)) => {
            return super::cuda::attention::rotated(cx, gpu, [&q, &k, &v], rotation, bounds);
        }
        (None, Documents::Lengths(lengths)) => lengths,
        (gpu, _) => {
            let places = ["the processor", "a graphics card"];
            let found = ["documents on a graphics card", "documents on the processor"];
            let at = usize::from(gpu.is_some());
            return Err(Error::Device { operation: NAME, expected: places[at], found: found[at] });
        }
    };
    let [mut q, mut k] = [q, k];
    if let Some(([of_q, of_k], epsilon)) = norms {
        (q, k) = (rmsnorm(cx, &q, of_q, epsilon)?, rmsnorm(cx, &k, of_k, epsilon)?);
    }
    let (q, k) = (rope(cx, q, head_width, phases)?, rope(cx, k, head_width, phases)?);
    let span = |&length: &usize| DocumentSpan { queries: length, keys: length };
    document_attention(cx, &q, &k, &v, &lengths.iter().map(span).collect::<Vec<_>>(), options)
}

impl Plan {
    /// The output and the log-sum-exp, `[n, heads]`.
    fn forward(&self, cpu: &CpuDevice, [q, k, v]: [&[f32]; 3]) -> (Vec<f32>, Vec<f32>) {
        let keys = self.transposed(cpu, k);
        let mut tasks = Vec::new();
        for document in &self.documents {
            // The last blocks have the most keys in view under a causal mask: they start first.
            for block in document.blocks().rev() {
                tasks.extend((0..self.options.kv_heads).map(|kv_head| (document, block.clone(), kv_head)));
            }
        }
        let mut out = vec![0.0; q.len()];
        let mut log_sum_exp = vec![0.0; self.rows[0] * self.options.heads];
        let places = [Disjoint::new(&mut out), Disjoint::new(&mut log_sum_exp)];
        cpu.threads.run(tasks.len(), |i| {
            let (document, block, kv_head) = &tasks[i];
            self.attend(cpu, [q, k, &keys, v], document, block, *kv_head, &places);
        });
        (out, log_sum_exp)
    }

    /// One block of queries of one kv head.
    fn attend(
        &self,
        cpu: &CpuDevice,
        [q, k, key_panels, v]: [&[f32]; 4],
        document: &Document,
        block: &Range<usize>,
        kv_head: usize,
        [out, log_sum_exp]: &[Disjoint<'_>; 2],
    ) {
        let (rows, width, stride) = (block.len(), self.width, document.widest());
        let mut scores = vec![0.0; rows * stride];
        let mut sums = vec![0.0; rows * width];
        for head in kv_head * self.group()..(kv_head + 1) * self.group() {
            let queries = self.query_rows(q, document.queries.start + block.start, rows, head);
            let mut running = vec![Running { largest: f32::NEG_INFINITY, total: 0.0 }; rows];
            sums.fill(0.0);
            for tile in document.tiles_in_view(block) {
                let keys = self.turned([k, key_panels], document, kv_head, &tile);
                gemm_serial(&mut scores, stride, queries, keys, Write::Set);
                let seen = document.seen(block, &tile);
                soften(cpu.level, &mut scores, stride, tile.len(), &seen, self.options.scale, &mut running, &mut sums);
                let probabilities = Matrix::new(&scores, [rows, tile.len()], stride);
                let values = self.key_rows(v, document.keys.start + tile.start, tile.len(), kv_head);
                gemm_serial(&mut sums, width, probabilities, values, Write::Add);
            }
            for ((row, sums), running) in block.clone().zip(sums.chunks_exact(width)).zip(&running) {
                let row = document.queries.start + row;
                let (start, at) = (self.query(row, head), row * self.options.heads + head);
                // SAFETY: each row of a head belongs to one task.
                let (out, kept) = unsafe { (out.slice(start..start + width), log_sum_exp.slice(at..at + 1)) };
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum / running.total);
                kept[0] = (f64::from(running.largest) + libm::log(f64::from(running.total))) as f32;
            }
        }
    }

    /// The gradients of queries, keys and values that are wanted.
    fn backward(&self, cpu: &CpuDevice, kept: &Kept<'_>, wanted: [bool; 3]) -> [Option<Vec<f32>>; 3] {
        let [_, k, v] = kept.inputs;
        let keys = self.transposed(cpu, k);
        let values = if wanted[0] || wanted[1] { self.transposed(cpu, v) } else { Vec::new() };
        let lengths = [kept.gradient.len(), self.partials, self.partials];
        let mut made: [_; 3] = std::array::from_fn(|i| wanted[i].then(|| vec![0.0; lengths[i]]));
        let places = made.each_mut().map(|place| place.as_mut().map(|place| Disjoint::new(place)));
        let mut tasks = Vec::new();
        for document in &self.documents {
            for slice in (0..document.slices).rev() {
                tasks.extend((0..self.options.kv_heads).map(|kv_head| (document, slice, kv_head)));
            }
        }
        cpu.threads.run(tasks.len(), |i| {
            let (document, slice, kv_head) = tasks[i];
            self.attend_back(cpu, kept, [&keys, &values], (document, slice, kv_head), &places);
        });
        let [to_queries, to_keys, to_values] = made;
        let [to_keys, to_values] = [to_keys, to_values].map(|made| made.map(|made| self.gathered(cpu, &made)));
        [to_queries, to_keys, to_values]
    }

    /// One slice of a document's blocks of queries, of one kv head.
    fn attend_back(
        &self,
        cpu: &CpuDevice,
        kept: &Kept<'_>,
        [key_panels, value_panels]: [&[f32]; 2],
        (document, slice, kv_head): (&Document, usize, usize),
        [to_queries, to_keys, to_values]: &[Option<Disjoint<'_>>; 3],
    ) {
        let [q, k, v] = kept.inputs;
        let (width, stride, scale) = (self.width, document.widest(), self.options.scale);
        let start = self.partial(document, kv_head, slice);
        let length = document.keys.len() * width;
        // SAFETY: each slice of a kv head belongs to one task.
        let [mut to_keys, mut to_values] =
            [to_keys, to_values].map(|place| place.as_ref().map(|place| unsafe { place.slice(start..start + length) }));
        let most = document.queries.len().min(QUERIES);
        let [mut scores, mut slopes] = [0, 1].map(|_| vec![0.0; most * stride]);
        let mut sums = vec![0.0; most * width];
        for block in document.blocks_of(slice) {
            let (rows, first) = (block.len(), document.queries.start + block.start);
            for head in kv_head * self.group()..(kv_head + 1) * self.group() {
                let queries = self.query_rows(q, first, rows, head);
                let gradient = self.query_rows(kept.gradient, first, rows, head);
                let row_of = |row: usize| self.query(first + row, head)..self.query(first + row, head) + width;
                let terms = (0..rows).map(|row| RowTerms {
                    log_sum_exp: kept.log_sum_exp[(first + row) * self.options.heads + head],
                    delta: row_dot(cpu.level, &kept.gradient[row_of(row)], &kept.out[row_of(row)]),
                });
                let terms: Vec<_> = terms.collect();
                for (number, tile) in document.tiles_in_view(&block).enumerate() {
                    let (columns, seen) = (tile.len(), document.seen(&block, &tile));
                    let places = tile.start * width..tile.end * width;
                    let keys = self.turned([k, key_panels], document, kv_head, &tile);
                    gemm_serial(&mut scores, stride, queries, keys, Write::Set);
                    probabilities(cpu.level, &mut scores, stride, columns, &seen, scale, &terms);
                    let weights = Matrix::new(&scores, [rows, columns], stride);
                    if let Some(to_values) = &mut to_values {
                        let to_values = &mut to_values[places.clone()];
                        gemm_serial(to_values, width, weights.transposed(), gradient, Write::Add);
                    }
                    if to_queries.is_none() && to_keys.is_none() {
                        continue;
                    }
                    let values = self.turned([v, value_panels], document, kv_head, &tile);
                    gemm_serial(&mut slopes, stride, gradient, values, Write::Set);
                    slope(cpu.level, &mut slopes, &scores, stride, columns, &seen, scale, &terms);
                    let slopes = Matrix::new(&slopes, [rows, columns], stride);
                    if let Some(to_keys) = &mut to_keys {
                        gemm_serial(&mut to_keys[places], width, slopes.transposed(), queries, Write::Add);
                    }
                    if to_queries.is_some() {
                        let keys = self.key_rows(k, document.keys.start + tile.start, columns, kv_head);
                        gemm_serial(&mut sums, width, slopes, keys, Write::first(number == 0));
                    }
                }
                if let Some(to_queries) = to_queries {
                    for (row, sums) in sums.chunks_exact(width).take(rows).enumerate() {
                        // SAFETY: each row of a head belongs to one task.
                        unsafe { to_queries.slice(row_of(row)) }.copy_from_slice(sums);
                    }
                }
            }
        }
    }

    /// The slices' gradients of keys or values added in their order, as `[m, kv_heads * w]`.
    fn gathered(&self, cpu: &CpuDevice, partials: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; self.rows[1] * self.options.kv_heads * self.width];
        let (shared, tiles) = (Disjoint::new(&mut out), self.tiles());
        cpu.threads.run(tiles.len(), |i| {
            let (document, tile) = tiles[i];
            let rows = document.tile(tile);
            let place = self.key(document.keys.start + rows.start, 0)..self.key(document.keys.start + rows.end, 0);
            // SAFETY: each tile's rows belong to one task.
            let out = unsafe { shared.slice(place) };
            for (key, out) in rows.zip(out.chunks_exact_mut(self.options.kv_heads * self.width)) {
                for (kv_head, out) in out.chunks_exact_mut(self.width).enumerate() {
                    for slice in 0..document.slices {
                        let terms = &partials[self.partial(document, kv_head, slice) + key * self.width..];
                        out.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
                    }
                }
            }
        });
        out
    }
}

/// What a forward pass left, and the gradient of its output.
struct Kept<'a> {
    inputs: [&'a [f32]; 3],
    out: &'a [f32],
    log_sum_exp: &'a [f32],
    gradient: &'a [f32],
}

/// A row's softmax so far: the largest score, and the sum of the exponentials of scores less that.
#[derive(Clone, Copy)]
struct Running {
    largest: f32,
    total: f32,
}

/// What the backward pass needs of a row besides its tiles.
struct RowTerms {
    log_sum_exp: f32,
    delta: f32,
}

per_level! {
    /// A tile of products of queries and keys becomes exponentials of scores less each row's largest so far, 0 where a row does
    /// not see; `sums` are brought to a new largest score.
    fn soften(scores: &mut [f32], stride: usize, columns: usize, seen: &[Range<usize>], scale: f32, running: &mut [Running], sums: &mut [f32]) {
        let width = sums.len() / seen.len().max(1);
        for (i, (seen, running)) in seen.iter().zip(running).enumerate() {
            let row = &mut scores[i * stride..][..columns];
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
            let row = &mut row[seen.clone()];
            if row.is_empty() {
                continue;
            }
            row.iter_mut().for_each(|score| *score *= scale);
            let here = maximum(row);
            let largest = if here > running.largest { here } else { running.largest };
            row.iter_mut().for_each(|score| *score = softmax_exp(*score - largest));
            let factor = exp(running.largest - largest);
            *running = Running { largest, total: running.total.mul_add(factor, sum(row)) };
            if factor != 1.0 {
                sums[i * width..][..width].iter_mut().for_each(|sum| *sum *= factor);
            }
        }
    }
}

per_level! {
    /// A tile of products of queries and keys becomes probabilities, 0 where a row does not see.
    fn probabilities(scores: &mut [f32], stride: usize, columns: usize, seen: &[Range<usize>], scale: f32, terms: &[RowTerms]) {
        for (i, (seen, terms)) in seen.iter().zip(terms).enumerate() {
            let row = &mut scores[i * stride..][..columns];
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
            row[seen.clone()].iter_mut().for_each(|score| *score = softmax_exp(*score * scale - terms.log_sum_exp));
        }
    }
}

per_level! {
    /// A tile of gradients of probabilities becomes gradients of products of queries and keys.
    fn slope(slopes: &mut [f32], scores: &[f32], stride: usize, columns: usize, seen: &[Range<usize>], scale: f32, terms: &[RowTerms]) {
        for (i, (seen, terms)) in seen.iter().zip(terms).enumerate() {
            let row = &mut slopes[i * stride..][..columns];
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
            let probabilities = &scores[i * stride..][..columns][seen.clone()];
            for (slope, probability) in row[seen.clone()].iter_mut().zip(probabilities) {
                *slope = probability * (*slope - terms.delta) * scale;
            }
        }
    }
}

per_level! {
    fn row_dot(a: &[f32], b: &[f32]) -> f32 {
        dot(a, b)
    }
}

#[cfg(test)]
mod tests;
