//! Attention of many query rows over one history, or over a batch of equal ones: the launcher of `cuda/attention.cu`, and
//! on Hopper, for heads of 64 and 128 elements, of `cuda/attention_hopper.cu`.

use std::f32::consts::LOG2_E;

use crate::{
    Error, Form, Gpu, Kernels, Result, Slice,
    attention_hopper::{AttentionHopper, Sees, attention_hopper},
    checks::{aligned, grouped_heads, int, multiple, strided_by_eight},
    launch::{Arguments, Launch},
    tensor_map::Tensor,
};

/// What [`attention`] works on: `batch` independent sequences, each of `rows` query rows, the last of its `length`
/// positions.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// bfloat16, rotated: `heads * head_width` elements in each row, rows `query_stride` elements apart, sequences one
    /// after the other.
    pub queries: Slice<'a>,
    /// From the start of one query row to the next, in elements; a multiple of 8.
    pub query_stride: usize,
    /// bfloat16, `[length, kv_heads, head_width]` of each sequence.
    pub keys: Slice<'a>,
    /// As `keys`.
    pub values: Slice<'a>,
    /// From the start of one sequence's keys to the next one's, in elements; a multiple of 8. Not read where `batch`
    /// is 1.
    pub kv_batch_stride: usize,
    /// bfloat16, `[batch, rows, heads * head_width]`.
    pub out: Slice<'a>,
    /// `[batch, heads, rows]` in F32: the natural logarithm of the sum of exponentials of the scaled scores, which a
    /// backward pass needs.
    pub log_sum_exp: Option<Slice<'a>>,
    /// Sequences.
    pub batch: usize,
    /// Query rows of a sequence.
    pub rows: usize,
    /// Positions of a sequence.
    pub length: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key heads, and value heads.
    pub kv_heads: usize,
    /// Elements of a head: 64, 96, 128 or 256.
    pub head_width: usize,
    /// The factor on scores, usually `1 / sqrt(head_width)`; positive.
    pub scale: f32,
    /// What a query sees.
    pub mask: Mask,
}

/// Which positions a query at position `p` sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// All of them.
    None,
    /// `0 ..= p`.
    Causal,
    /// The last so many of `0 ..= p`; at least 1.
    Window(usize),
}

/// How a width of a head is tiled.
struct Tiling {
    head_width: usize,
    /// Positions of a tile of keys.
    keys: usize,
    /// The kernels with 64 and with 128 query rows a block; the same bits.
    rows_64: &'static str,
    rows_128: Option<&'static str>,
}

const TILINGS: [Tiling; 4] = [
    Tiling { head_width: 64, keys: 128, rows_64: "attention_64_rows_64", rows_128: Some("attention_64_rows_128") },
    Tiling { head_width: 96, keys: 64, rows_64: "attention_96_rows_64", rows_128: Some("attention_96_rows_128") },
    Tiling { head_width: 128, keys: 64, rows_64: "attention_128_rows_64", rows_128: Some("attention_128_rows_128") },
    Tiling { head_width: 256, keys: 64, rows_64: "attention_256_rows_64", rows_128: None },
];

const THREADS: u32 = 128;
/// Elements after each row in shared memory.
const PADDING: usize = 8;
const NAME: &str = "attention";

/// `out[i, h] = sum_s softmax_s(scale q[i, h] . k_s) v_s` for every row and head over the positions that `mask`
/// leaves; head `h` reads kv head `h / (heads / kv_heads)`. A row's bits depend on its own query and history alone.
///
/// # Errors
/// A slice is too small or not at a multiple of 16 bytes, the sizes do not fit together, there is no kernel
/// for the head's width ([`crate::attention_few`] takes any, some rows at a time), or the launch fails.
pub fn attention(gpu: &Gpu, call: &Attention<'_>) -> Result<()> {
    attention_with(gpu, call, Kernels::Fastest)
}

/// [`attention`] by a choice of kernels. Their sums differ in their order: a row has the same bits only within one.
///
/// # Errors
/// As [`attention`].
pub fn attention_with(gpu: &Gpu, call: &Attention<'_>, kernels: Kernels) -> Result<()> {
    let Attention { query_stride, kv_batch_stride, batch, rows, length, heads, kv_heads, head_width, .. } = *call;
    let Some(tiling) = TILINGS.iter().find(|tiling| tiling.head_width == head_width) else {
        let what = format!("heads of {head_width} elements; 64, 96, 128 and 256 have one");
        return Err(Error::Unsupported { operation: NAME, what });
    };
    let shape = |what, expected, found| Error::Shape { operation: NAME, what, expected, found };
    grouped_heads(NAME, heads, kv_heads)?;
    if length < rows {
        return Err(shape("the history's length", rows, length));
    }
    if call.mask == Mask::Window(0) {
        return Err(shape("the window", 1, 0));
    }
    if call.scale.is_nan() || call.scale <= 0.0 {
        let what = format!("a factor of {} on scores; it has to be positive", call.scale);
        return Err(Error::Unsupported { operation: NAME, what });
    }
    let width = heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?;
    let kv_width = kv_heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?;
    let all_rows = batch.checked_mul(rows).ok_or(Error::SizeOverflow)?;
    let queries = strided_by_eight(NAME, "the queries in bytes", call.queries, [all_rows, query_stride, width])?;
    if all_rows == 0 {
        return Ok(());
    }
    let one_history = length.checked_mul(kv_width).ok_or(Error::SizeOverflow)?;
    if batch > 1 {
        multiple(NAME, "the stride of sequences (needed: a multiple of)", kv_batch_stride, 8)?;
    }
    // The last history ends where its own elements do.
    let kv_bytes = Form::Bf16.bytes(batch - 1, kv_batch_stride)? + Form::Bf16.bytes(1, one_history)?;
    let keys = aligned(NAME, "the keys in bytes", call.keys, kv_bytes)?;
    let values = aligned(NAME, "the values in bytes", call.values, kv_bytes)?;
    let out = aligned(NAME, "the output in bytes", call.out, Form::Bf16.bytes(all_rows, width)?)?;
    let sums = Form::F32.bytes(all_rows, heads)?;
    let log_sum_exp = Slice::expect_optional(call.log_sum_exp, NAME, "the log-sum-exp in bytes", sums)?;

    let query_batch_stride = rows.checked_mul(query_stride).ok_or(Error::SizeOverflow)?;
    if kernels == Kernels::Fastest {
        let history = |address| Tensor {
            address,
            columns: kv_width,
            rows: length,
            batch,
            row_stride: kv_width,
            batch_stride: kv_batch_stride,
        };
        let call = AttentionHopper {
            queries: Tensor {
                address: queries,
                columns: width,
                rows,
                batch,
                row_stride: query_stride,
                batch_stride: query_batch_stride,
            },
            keys: history(keys),
            values: history(values),
            out,
            out_stride: width,
            out_batch_stride: rows * width,
            log_sum_exp,
            heads,
            kv_heads,
            sees: match call.mask {
                Mask::None => Sees::All,
                Mask::Causal => Sees::Causal { window: usize::MAX },
                Mask::Window(window) => Sees::Causal { window },
            },
            scale: call.scale * LOG2_E,
        };
        if attention_hopper(gpu, &call)? {
            return Ok(());
        }
    }

    // Large blocks read shared memory half as often; small ones serve more multiprocessors. The bits are the same.
    let large_blocks = rows.div_ceil(128).saturating_mul(heads).saturating_mul(batch);
    let fills = rows > 64 && large_blocks >= gpu.properties().multiprocessors as usize;
    let (kernel, block_rows) = match tiling.rows_128 {
        Some(kernel) if fills => (kernel, 128),
        _ => (tiling.rows_64, 64),
    };
    let (causal, window) = match call.mask {
        Mask::None => (0, i32::MAX),
        Mask::Causal => (1, i32::MAX),
        Mask::Window(window) => (1, i32::try_from(window).unwrap_or(i32::MAX)),
    };
    let arguments = Arguments::new()
        .u64(queries)
        .u64(keys)
        .u64(values)
        .u64(out)
        .u64(log_sum_exp)
        .u64(query_stride as u64)
        .u64(query_batch_stride as u64)
        .u64(kv_width as u64)
        .u64(kv_batch_stride as u64)
        .i32(int(NAME, rows)?)
        .i32(int(NAME, length)?)
        .i32(int(NAME, heads)?)
        .i32(int(NAME, kv_heads)?)
        .f32(call.scale * LOG2_E)
        .i32(causal)
        .i32(window);
    let grid = [rows.div_ceil(block_rows) as u32, int(NAME, heads)? as u32, int(NAME, batch)? as u32];
    let shared_bytes = ((block_rows + 2 * tiling.keys) * (head_width + PADDING) * 2) as u32;
    gpu.launch(&gpu.function("attention", kernel)?, Launch { grid, threads: THREADS, shared_bytes }, arguments)
}
