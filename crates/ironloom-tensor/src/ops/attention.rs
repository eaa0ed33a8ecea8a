//! Attention over kept keys and values, with grouped queries, a causal mask and an optional window.
//!
//! For a query row at position `t` and head `h` (which reads kv head `h / (heads / kv_heads)`):
//! `out = sum_s softmax_s(scale * q . k_s) v_s` over `s` in `max(0, t - window + 1) ..= t`.
//!
//! Every score of a row is computed before its softmax; sums run over positions in ascending order (the softmax's in lanes
//! of `s % 16`). So a row's bits depend on its own query and its own history alone: not on how many rows or sequences run
//! beside it, nor on how rows are grouped into blocks here. Blocks exist for speed: a block of query rows that share a kv
//! head reads each key panel and value once.

use ironloom_kernels::{self as kernels, Form, Gpu};

use super::{Disjoint, KvBuffer, KvTable, RopeAppend, kv_buffer::PANEL, rope_append::Projected};
use crate::{
    Context, CpuDevice, Error, Result, Tensor,
    error::{expect_count, expect_shape},
    lanes::{exp, maximum, per_level, sum},
};

/// The shape and the mask of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Query heads; a multiple of the kv heads.
    pub heads: usize,
    /// The factor on scores, usually `1 / sqrt(head width)`.
    pub scale: f32,
    /// How many positions a query sees, its own among them; `None` sees all before it.
    pub window: Option<usize>,
}

/// One sequence's part in a call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpan<'a> {
    /// Its keys and values, those of its query rows already appended.
    pub history: &'a KvBuffer,
    /// How many query rows it has: its last `rows` positions.
    pub rows: usize,
}

const NAME: &str = "attention";

/// Whether [`attention`] on a graphics card takes heads of this width; [`attention_rows`] takes any up to 256.
pub fn attention_takes_many_rows(head_width: usize) -> bool {
    [64, 96, 128, 256].contains(&head_width)
}

/// Attention of `q [n, heads * head_width]`, whose rows belong to `spans` one after the other; the result has `q`'s shape.
///
/// # Errors
/// The spans' rows are not `n`, a history is shorter than its rows, head counts or widths don't fit, or a tape records.
pub fn attention(cx: &Context, q: &Tensor, spans: &[AttentionSpan<'_>], options: &AttentionOptions) -> Result<Tensor> {
    cx.without_gradient(NAME)?;
    expect_count(NAME, "the number of query rows", spans.iter().map(|span| span.rows).sum(), q.rows())?;
    if options.window == Some(0) {
        return Err(Error::Count { operation: NAME, what: "the window", expected: 1, found: 0 });
    }
    for span in spans {
        check_span(q, span, options)?;
    }
    if let Some(gpu) = cx.gpu() {
        return on_cuda(gpu, q, spans, options);
    }
    let cpu = cx.cpu(NAME)?;
    let mut tasks = Vec::new();
    let mut first_row = 0;
    for span in spans {
        let history = span.history;
        history.expect_cpu(NAME)?;
        let kv_heads = history.kv_heads();
        let queries = span.rows * (options.heads / kv_heads);
        // Few queries: one a task, so that the threads share them; many: whole blocks, several a task.
        let step = if queries * kv_heads < 8 * cpu.threads.count() { 1 } else { TASK_QUERIES };
        for kv_head in 0..kv_heads {
            tasks.extend((0..queries).step_by(step).map(|first| Task {
                history,
                rows: span.rows,
                first_row,
                kv_head,
                queries: first..(first + step).min(queries),
            }));
        }
        first_row += span.rows;
    }
    let queries = q.as_f32()?;
    let mut out = vec![0.0; queries.len()];
    let shared = Disjoint::new(&mut out);
    cpu.threads.run(tasks.len(), |i| tasks[i].run(cpu, queries, options, &shared));
    Tensor::from_f32(out, *q.shape())
}

fn check_span(q: &Tensor, span: &AttentionSpan<'_>, options: &AttentionOptions) -> Result<()> {
    let history = span.history;
    let (kv_heads, width) = (history.kv_heads(), history.head_width());
    check_heads(q, kv_heads, width, options)?;
    if history.len() < span.rows {
        let (expected, found) = (span.rows, history.len());
        return Err(Error::Count { operation: NAME, what: "the history's length", expected, found });
    }
    Ok(())
}

fn check_heads(q: &Tensor, kv_heads: usize, width: usize, options: &AttentionOptions) -> Result<()> {
    expect_shape(NAME, "the queries", [q.rows(), options.heads * width], q.shape())?;
    if kv_heads == 0 || !options.heads.is_multiple_of(kv_heads) {
        let (expected, found) = (kv_heads, options.heads);
        return Err(Error::Count { operation: NAME, what: "the number of query heads", expected, found });
    }
    Ok(())
}

/// Many rows on a graphics card: one launch a sequence.
fn on_cuda(gpu: &Gpu, q: &Tensor, spans: &[AttentionSpan<'_>], options: &AttentionOptions) -> Result<Tensor> {
    let queries = q.cuda(NAME, Form::Bf16)?;
    let out = Tensor::allocate(gpu, Form::Bf16, [q.rows(), q.width()], NAME)?;
    let mut start = 0;
    for span in spans {
        let history = span.history;
        let [keys, values] = history.cuda(NAME)?;
        let bytes = Form::Bf16.bytes(span.rows, q.width())?;
        let call = kernels::Attention {
            queries: queries.part(start, bytes)?,
            query_stride: q.width(),
            keys,
            values,
            kv_batch_stride: 0,
            out: out.cuda(NAME, Form::Bf16)?.part(start, bytes)?,
            log_sum_exp: None,
            batch: 1,
            rows: span.rows,
            length: history.len(),
            heads: options.heads,
            kv_heads: history.kv_heads(),
            head_width: history.head_width(),
            scale: options.scale,
            mask: options.window.map_or(kernels::Mask::Causal, kernels::Mask::Window),
        };
        kernels::attention(gpu, &call)?;
        start += bytes;
    }
    Ok(out)
}

/// From the projections of the rows of a table to their attention, each over its own history in layer `layer`: norms and
/// rotation of queries and keys as `options` say, the append of keys and values, and attention, in one kernel for few rows on
/// a graphics card. `q`, `k` and `v` are columns of the same rows, as [`linear_many`](super::linear_many) makes them.
///
/// # Errors
/// A shape does not fit the table's caches, or a tape records.
pub fn attention_rows(
    cx: &Context,
    [q, k, v]: [Tensor; 3],
    rotation: &RopeAppend<'_>,
    table: &KvTable,
    layer: usize,
    options: &AttentionOptions,
) -> Result<Tensor> {
    cx.without_gradient(NAME)?;
    let gpu = cx.device.card(NAME)?.gpu();
    expect_count(NAME, "the number of query rows", table.rows(), q.rows())?;
    check_heads(&q, table.kv_heads(), table.head_width(), options)?;
    expect_count(NAME, "the head width", table.head_width(), rotation.head_width)?;
    let projected = Projected::new([&q, &k, &v], rotation, Form::F32)?;
    let out = Tensor::allocate(gpu, Form::Split, [q.rows(), q.width()], NAME)?;
    let shape = kernels::FewShape {
        rows: q.rows(),
        max_positions: table.reach(),
        heads: options.heads,
        kv_heads: table.kv_heads(),
        head_width: table.head_width(),
        window: options.window,
    };
    let workspace = shape.workspace()?;
    let partials = gpu.allocate(workspace.partials, NAME)?;
    let call = kernels::AttentionFew {
        qkv: projected.qkv,
        q_norm: projected.q_norm,
        k_norm: projected.k_norm,
        epsilon: projected.epsilon,
        phases: projected.phases,
        half: projected.half,
        kv_table: table.layer(layer)?,
        positions: table.positions_slice(),
        out: out.cuda(NAME, Form::Split)?,
        partials: partials.slice(),
        tickets: table.tickets(workspace.tickets)?,
        shape,
        scale: options.scale,
    };
    kernels::attention_few(gpu, &call)?;
    Ok(out)
}

/// Query rows of a block: they share each key panel and value row read.
const BLOCK: usize = 8;
/// Query rows of a task where there are many.
const TASK_QUERIES: usize = 4 * BLOCK;

/// Some queries of one kv head of one span. Query `i` is row `i / group`, head `kv_head * group + i % group`.
struct Task<'a> {
    history: &'a KvBuffer,
    rows: usize,
    first_row: usize,
    kv_head: usize,
    queries: std::ops::Range<usize>,
}

/// One query of a block: where it is in `q` and in the output, and the positions it sees.
#[derive(Clone)]
struct Query {
    offset: usize,
    start: usize,
    end: usize,
}

impl Task<'_> {
    fn run(&self, cpu: &CpuDevice, q: &[f32], options: &AttentionOptions, out: &Disjoint<'_>) {
        let width = self.history.head_width();
        let group = options.heads / self.history.kv_heads();
        let queries: Vec<Query> = self
            .queries
            .clone()
            .map(|i| {
                let (row, head) = (i / group, self.kv_head * group + i % group);
                let end = self.history.len() - self.rows + row + 1;
                let start = options.window.map_or(0, |window| end.saturating_sub(window));
                Query { offset: ((self.first_row + row) * options.heads + head) * width, start, end }
            })
            .collect();
        let mut scores = Vec::new();
        let mut sums = vec![0.0; BLOCK * width];
        let mut blocks = queries.chunks_exact(BLOCK);
        let finish = |block: &[Query], sums: &[f32]| {
            for (query, sums) in block.iter().zip(sums.chunks_exact(width)) {
                // SAFETY: each query's place in the output belongs to one task.
                unsafe { out.slice(query.offset..query.offset + width) }.copy_from_slice(sums);
            }
        };
        for block in &mut blocks {
            attend_block(cpu.level, block, q, self.history, self.kv_head, options.scale, &mut scores, &mut sums);
            finish(block, &sums);
        }
        for query in blocks.remainder().chunks(1) {
            attend_one(cpu.level, query, q, self.history, self.kv_head, options.scale, &mut scores, &mut sums);
            finish(query, &sums);
        }
    }
}

per_level! {
    fn attend_block(queries: &[Query], q: &[f32], history: &KvBuffer, kv_head: usize, scale: f32, scores: &mut Vec<f32>, sums: &mut [f32]) {
        attend::<BLOCK>(queries, q, history, kv_head, scale, scores, sums);
    }
}

per_level! {
    fn attend_one(queries: &[Query], q: &[f32], history: &KvBuffer, kv_head: usize, scale: f32, scores: &mut Vec<f32>, sums: &mut [f32]) {
        attend::<1>(queries, q, history, kv_head, scale, scores, sums);
    }
}

/// The `N` outputs of `queries`, `[N, head width]`, into `sums`.
#[inline(always)]
fn attend<const N: usize>(
    queries: &[Query],
    q: &[f32],
    history: &KvBuffer,
    kv_head: usize,
    scale: f32,
    scores: &mut Vec<f32>,
    sums: &mut [f32],
) {
    let width = history.head_width();
    let start = queries.iter().map(|query| query.start).min().unwrap_or(0);
    let end = queries.iter().map(|query| query.end).max().unwrap_or(0);
    let panels = start / PANEL..end.div_ceil(PANEL);
    let length = panels.len() * PANEL;
    let base = panels.start * PANEL;
    scores.clear();
    scores.resize(N * length, 0.0);
    let q: [&[f32]; N] = std::array::from_fn(|i| &q[queries[i].offset..][..width]);

    for panel in panels.clone() {
        let keys = history.key_panel(panel, kv_head);
        let mut dots = [[0.0f32; PANEL]; N];
        for (d, keys) in keys.chunks_exact(PANEL).enumerate() {
            for i in 0..N {
                let factor = q[i][d];
                for lane in 0..PANEL {
                    dots[i][lane] = factor.mul_add(keys[lane], dots[i][lane]);
                }
            }
        }
        for i in 0..N {
            let scores = &mut scores[i * length + (panel * PANEL - base)..][..PANEL];
            for lane in 0..PANEL {
                scores[lane] = dots[i][lane] * scale;
            }
        }
    }

    let mut divisors = [0.0f32; N];
    for i in 0..N {
        let scores = &mut scores[i * length..][..length];
        let (from, to) = (queries[i].start - base, queries[i].end - base);
        let largest = maximum(&scores[from..to]);
        scores[..from].fill(0.0);
        scores[to..].fill(0.0);
        for score in &mut scores[from..to] {
            *score = exp(*score - largest);
        }
        // From the panel's start on, so that position s is always in lane s % 16; masked positions add zeros.
        divisors[i] = sum(&scores[from / PANEL * PANEL..to]);
    }

    // A position that a query does not see has probability 0: adding 0 * v leaves its sum's bits as they are.
    let stride = history.kv_heads() * width;
    let values = &history.values_of(kv_head);
    sums[..N * width].fill(0.0);
    let mut column = 0;
    // Sixteen columns at a time: of twice as many the compiler keeps the sums in memory, one by one (3 times slower).
    while column + PANEL <= width {
        let mut lanes = [[0.0f32; PANEL]; N];
        let rows: [&[f32]; N] = std::array::from_fn(|i| &scores[i * length + start - base..][..end - start]);
        for position in 0..end - start {
            let value = &values[(start + position) * stride + column..][..PANEL];
            for i in 0..N {
                let probability = rows[i][position];
                for lane in 0..PANEL {
                    lanes[i][lane] = probability.mul_add(value[lane], lanes[i][lane]);
                }
            }
        }
        for i in 0..N {
            sums[i * width + column..][..PANEL].copy_from_slice(&lanes[i]);
        }
        column += PANEL;
    }
    for position in start..end {
        for column in column..width {
            for i in 0..N {
                let probability = scores[i * length + position - base];
                let sum = &mut sums[i * width + column];
                *sum = probability.mul_add(values[position * stride + column], *sum);
            }
        }
    }
    for i in 0..N {
        sums[i * width..][..width].iter_mut().for_each(|sum| *sum /= divisors[i]);
    }
}

#[cfg(test)]
mod tests;
