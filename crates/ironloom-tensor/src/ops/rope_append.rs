//! From projections to attention: norms of queries and keys where the family has them, rotary position embedding, and the
//! append of keys and values to the caches.

use ironloom_kernels::{self as kernels, Form, KvDestination};

use super::{KvBuffer, KvTable, rmsnorm, rope};
use crate::{
    Context, Path, Result, Tensor,
    error::{expect_count, expect_shape},
};

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

/// Which caches the rows of a pass belong to.
#[derive(Debug)]
pub enum KvRows<'a, 'b> {
    /// Consecutive rows of these sequences, one after the other.
    Spans(&'a mut [KvSpan<'b>]),
    /// The rows of a table, in this layer.
    Table(&'a KvTable, usize),
}

/// Turns `q [n, heads * head_width]` and `k [n, kv_heads * head_width]`, appends `k` and `v` to the caches, and gives `q`.
/// On a graphics card `q`, `k` and `v` are columns of the same rows, as [`linear_many`](super::linear_many) makes them.
///
/// # Errors
/// A shape does not fit, a cache has no room, or a tape records.
pub fn rope_append(
    cx: &Context,
    [q, k, v]: [Tensor; 3],
    options: &RopeAppend<'_>,
    caches: KvRows<'_, '_>,
) -> Result<Tensor> {
    const NAME: &str = "rope and append";
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
        let KvRows::Spans(spans) = caches else {
            return Err(crate::Error::NoKernel { operation: "the table of a pass", device: "the processor" });
        };
        let mut first = 0;
        for span in spans {
            let rows = first..first + span.rows;
            first = rows.end;
            span.buffer.append(cx, &k.rows_view(rows.clone())?, &v.rows_view(rows)?)?;
        }
        return Ok(q);
    };
    let (n, head_width) = (q.rows(), options.head_width);
    let (heads, kv_heads) = (q.width() / head_width.max(1), k.width() / head_width.max(1));
    expect_shape(NAME, "the queries", [n, heads * head_width], q.shape())?;
    expect_shape(NAME, "the keys", [n, kv_heads * head_width], k.shape())?;
    expect_count(NAME, "the number of rows with phases", n, options.phases.rows())?;
    let form = if cx.path == Path::Few { Form::F32 } else { Form::Bf16 };
    let rows = q.cuda_rows(NAME)?;
    let element = form.bytes(1, 1)?;
    let address = |part: &Tensor| part.cuda_rows(NAME).map(|rows| rows.slice.address());
    let (at_q, at_k, at_v) = (address(&q)?, address(&k)?, address(&v)?);
    let adjacent = at_k == at_q + (heads * head_width * element) as u64
        && at_v == at_k + (kv_heads * head_width * element) as u64
        && rows.stride == (heads + 2 * kv_heads) * head_width
        && rows.form == form;
    if !adjacent {
        q.cuda(NAME, form)?;
        expect_count(NAME, "the width of a row of q, k and v", (heads + 2 * kv_heads) * head_width, rows.stride)?;
    }
    let out = Tensor::allocate(gpu, form, [n, q.width()], NAME)?;
    let (q_norm, k_norm, epsilon) = match options.norms {
        Some(([q_weight, k_weight], epsilon)) => {
            (Some(q_weight.cuda(NAME, Form::F32)?), Some(k_weight.cuda(NAME, Form::F32)?), epsilon)
        }
        None => (None, None, 0.0),
    };
    let half = options.phases.width() / 2;
    let phases = options.phases.cuda(NAME, Form::F32)?;
    let call = |first: usize, rows_here: usize, to: KvDestination<'_>| -> Result<()> {
        let from = |slice: kernels::Slice<'_>, width: usize, element: usize| {
            let start = first * width * element;
            (start, slice.bytes() - start)
        };
        let (qkv_at, qkv_bytes) = from(rows.slice, rows.stride, element);
        let (out_at, out_bytes) = from(out.cuda(NAME, form)?, heads * head_width, element);
        let (phases_at, phases_bytes) = from(phases, 2 * half, 4);
        let call = kernels::RopeAppend {
            qkv: rows.slice.part(qkv_at, qkv_bytes)?,
            q_norm,
            k_norm,
            epsilon,
            phases: phases.part(phases_at, phases_bytes)?,
            queries: out.cuda(NAME, form)?.part(out_at, out_bytes)?,
            to,
            rows: rows_here,
            heads,
            kv_heads,
            head_width,
            half,
        };
        Ok(kernels::rope_append(gpu, &call)?)
    };
    match caches {
        KvRows::Table(table, layer) => {
            expect_count(NAME, "the number of the table's rows", table.rows(), n)?;
            expect_count(NAME, "the number of kv heads", table.kv_heads(), kv_heads)?;
            expect_count(NAME, "the head width", table.head_width(), head_width)?;
            call(0, n, KvDestination::Table { kv_table: table.layer(layer)?, positions: table.positions_slice() })?;
        }
        KvRows::Spans(spans) => {
            expect_count(NAME, "the number of the spans' rows", n, spans.iter().map(|span| span.rows).sum())?;
            let mut first = 0;
            for span in spans {
                expect_count(NAME, "the number of kv heads", span.buffer.kv_heads(), kv_heads)?;
                expect_count(NAME, "the head width", span.buffer.head_width(), head_width)?;
                span.buffer.reserve(span.rows)?;
                let [keys, values] = span.buffer.cuda(NAME)?;
                let to = KvDestination::Sequence { keys, values, first_position: span.buffer.len() };
                call(first, span.rows, to)?;
                span.buffer.advance(span.rows)?;
                first += span.rows;
            }
        }
    }
    Ok(out)
}
