//! From projections to attention: norms of queries and keys where the family has them, rotary position embedding, and the
//! append of keys and values to the caches.

use ironloom_kernels::{self as kernels, Form, Slice};

use super::{KvBuffer, rmsnorm, rope};
use crate::{
    Context, Error, Result, Tensor,
    error::{expect_count, expect_shape},
};

const NAME: &str = "rope and append";

/// What [`rope_append`] does to queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct RopeAppend<'a> {
    /// Elements of a head.
    pub head_width: usize,
    /// The norms' weights of every query head and of every key head, and what is added to the mean square.
    pub norms: Option<([&'a Tensor; 2], f32)>,
    /// Cosines and sines of the rows' positions, from [`rope_phases`](super::rope_phases).
    pub phases: &'a Tensor,
}

/// One sequence's part in a pass.
#[derive(Debug)]
pub struct KvSpan<'a> {
    /// Its keys and values of the layer.
    pub buffer: &'a mut KvBuffer,
    /// How many of the pass's rows are its next positions.
    pub rows: usize,
}

/// Turns `q [n, heads * head_width]` and `k [n, kv_heads * head_width]`, appends `k` and `v` to the caches of `spans`, whose
/// rows follow one another, and gives `q`. On a graphics card `q`, `k` and `v` are columns of the same rows, as [`linear_many`](super::linear_many) makes them.
///
/// # Errors
/// A shape does not fit, a cache has no room, or a tape records.
pub fn rope_append(
    cx: &Context,
    [q, k, v]: [Tensor; 3],
    options: &RopeAppend<'_>,
    spans: &mut [KvSpan<'_>],
) -> Result<Tensor> {
    cx.without_gradient(NAME)?;
    expect_shape(NAME, "the values", *k.shape(), v.shape())?;
    let Some(gpu) = cx.gpu() else {
        let (mut q, mut k) = (q, k);
        if let Some(([q_weight, k_weight], epsilon)) = options.norms {
            q = rmsnorm(cx, &q, q_weight, epsilon)?;
            k = rmsnorm(cx, &k, k_weight, epsilon)?;
        }
        q = rope(cx, q, options.head_width, options.phases)?;
        k = rope(cx, k, options.head_width, options.phases)?;
        let mut first = 0;
        for span in spans {
            let rows = first..first + span.rows;
            first = rows.end;
            span.buffer.append(cx, &k.rows_view(rows.clone())?, &v.rows_view(rows)?)?;
        }
        return Ok(q);
    };
    let (n, head_width) = (q.rows(), options.head_width);
    let projected = Projected::new([&q, &k, &v], options, Form::Bf16)?;
    let Projected { heads, kv_heads, half, .. } = projected;
    let out = Tensor::allocate(gpu, Form::Bf16, [n, q.width()], NAME)?;
    let queries = out.cuda(NAME, Form::Bf16)?;
    expect_count(NAME, "the number of the spans' rows", n, spans.iter().map(|span| span.rows).sum())?;
    // Bytes of a row.
    let [qkv_row, queries_row] = [heads + 2 * kv_heads, heads].map(|heads| 2 * heads * head_width);
    let phases_row = 8 * half;
    let mut first = 0;
    for span in spans {
        expect_count(NAME, "the number of kv heads", span.buffer.kv_heads(), kv_heads)?;
        expect_count(NAME, "the head width", span.buffer.head_width(), head_width)?;
        span.buffer.reserve(span.rows)?;
        let [keys, values] = span.buffer.cuda(NAME)?;
        let call = kernels::RopeAppend {
            qkv: projected.qkv.part(first * qkv_row, span.rows * qkv_row)?,
            q_norm: projected.q_norm,
            k_norm: projected.k_norm,
            epsilon: projected.epsilon,
            phases: projected.phases.part(first * phases_row, span.rows * phases_row)?,
            queries: queries.part(first * queries_row, span.rows * queries_row)?,
            keys,
            values,
            first_position: span.buffer.len(),
            rows: span.rows,
            heads,
            kv_heads,
            head_width,
            half,
        };
        kernels::rope_append(gpu, &call)?;
        span.buffer.advance(span.rows)?;
        first += span.rows;
    }
    Ok(out)
}

/// Projections as kernels take them: rows of all query heads, all key heads and all value heads.
#[derive(Clone, Copy)]
pub(super) struct Projected<'a> {
    pub(super) qkv: Slice<'a>,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) q_norm: Option<Slice<'a>>,
    pub(super) k_norm: Option<Slice<'a>>,
    pub(super) epsilon: f32,
    pub(super) phases: Slice<'a>,
    pub(super) half: usize,
}

impl<'a> Projected<'a> {
    /// Makes sure that `q`, `k` and `v` are columns of the same rows, in `form`, and that the phases are theirs.
    pub(super) fn new([q, k, v]: [&'a Tensor; 3], options: &RopeAppend<'a>, form: Form) -> Result<Self> {
        let (n, head_width) = (q.rows(), options.head_width);
        let (heads, kv_heads) = (q.width() / head_width.max(1), k.width() / head_width.max(1));
        expect_shape(NAME, "the queries", [n, heads * head_width], q.shape())?;
        expect_shape(NAME, "the keys", [n, kv_heads * head_width], k.shape())?;
        expect_shape(NAME, "the values", [n, kv_heads * head_width], v.shape())?;
        expect_count(NAME, "the number of rows with phases", n, options.phases.rows())?;
        let rows = q.cuda_rows(NAME)?;
        let element = form.bytes(1, 1)?;
        let address = |part: &Tensor| part.cuda_rows(NAME).map(|rows| rows.slice.address());
        let (at_q, at_k, at_v) = (address(q)?, address(k)?, address(v)?);
        let width = (heads + 2 * kv_heads) * head_width;
        let adjacent = at_k == at_q + (heads * head_width * element) as u64
            && at_v == at_k + (kv_heads * head_width * element) as u64;
        if !adjacent || rows.stride != width || rows.form != form {
            return Err(Error::Device { operation: NAME, expected: "rows of q, k and v together", found: "elsewhere" });
        }
        let (q_norm, k_norm, epsilon) = match options.norms {
            Some(([q_weight, k_weight], epsilon)) => {
                (Some(q_weight.cuda(NAME, Form::F32)?), Some(k_weight.cuda(NAME, Form::F32)?), epsilon)
            }
            None => (None, None, 0.0),
        };
        let (phases, half) = (options.phases.cuda(NAME, Form::F32)?, options.phases.width() / 2);
        Ok(Self { qkv: rows.slice, heads, kv_heads, q_norm, k_norm, epsilon, phases, half })
    }
}
