//! Attention for training over packed documents, forward and backward: the launchers of `cuda/attention_training.cu`, and
//! on Hopper, for heads of 64 and 128 elements, of `cuda/attention_hopper.cu` and `cuda/attention_backward_hopper.cu`.
//!
//! Masks lie on the device, so that a captured step serves any packing of documents: each query row has a range of keys,
//! each key row the range of queries that see it.

use std::f32::consts::LOG2_E;

use bytemuck::NoUninit;

use crate::{
    Error, Form, Gpu, Kernels, Result, Slice,
    attention_backward_hopper::{Operands, attention_backward_hopper},
    attention_hopper::{AttentionHopper, Sees, attention_hopper},
    checks::{grouped_heads, int, strided_by_eight},
    launch::{Arguments, Launch},
    tensor_map::Tensor,
};

/// What each query row sees, and by which queries each key row is seen: the same relation from both sides.
///
/// Row `i` sees the keys `first_key[i] .. end_key[i]`, and key `s` is seen by the queries `first_query[s] ..
/// end_query[s]`. Each of the four ascends from row to row (it may stay), also over rows that see nothing, whose two
/// bounds are equal. Numbers are of rows of the whole tensors, from 0 to `keys` and to `rows`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBounds<'a> {
    /// i32 `[rows]`: the first key that a query sees.
    pub first_key: Slice<'a>,
    /// i32 `[rows]`: behind the last key that a query sees.
    pub end_key: Slice<'a>,
    /// i32 `[keys]`: the first query that sees a key.
    pub first_query: Slice<'a>,
    /// i32 `[keys]`: behind the last query that sees a key.
    pub end_query: Slice<'a>,
}

/// What [`attention_training`] works on. Strides are from the start of one row to the next, in elements, and multiples
/// of 8; places in memory are multiples of 16 bytes. Operands may be columns of one wide row. Everything that is read
/// is finite, also in rows that no other sees.
#[derive(Clone, Copy, Debug)]
pub struct AttentionTraining<'a> {
    /// bfloat16, `rows` of `heads * head_width` elements: the queries, rotated.
    pub q: Slice<'a>,
    /// The stride of `q`.
    pub q_stride: usize,
    /// bfloat16, `keys` rows of `kv_heads * head_width` elements: the keys, rotated.
    pub k: Slice<'a>,
    /// The stride of `k`.
    pub k_stride: usize,
    /// bfloat16, as `k`: the values.
    pub v: Slice<'a>,
    /// The stride of `v`.
    pub v_stride: usize,
    /// bfloat16, `rows` of `heads * head_width` elements: the output.
    pub out: Slice<'a>,
    /// The stride of `out`.
    pub out_stride: usize,
    /// F32 `[heads, rows]`: the natural logarithm of the sum of exponentials of the scaled scores; -infinity for a row
    /// that sees nothing.
    pub log_sum_exp: Slice<'a>,
    /// Who sees whom.
    pub bounds: AttentionBounds<'a>,
    /// Query rows.
    pub rows: usize,
    /// Key rows, and value rows.
    pub keys: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key heads, and value heads.
    pub kv_heads: usize,
    /// Elements of a head: a multiple of 8 up to 256; 64 and 128 are fast.
    pub head_width: usize,
    /// The factor on scores, usually `1 / sqrt(head_width)`; positive.
    pub scale: f32,
}

/// What [`attention_training_backward`] works on. All gradients are written, none is added to.
#[derive(Clone, Copy, Debug)]
pub struct AttentionTrainingBackward<'a> {
    /// The forward call; its output and log-sum-exp are read.
    pub forward: AttentionTraining<'a>,
    /// bfloat16, `rows` of `heads * head_width` elements: the gradient of the output.
    pub gradient: Slice<'a>,
    /// The stride of `gradient`.
    pub gradient_stride: usize,
    /// F32 `[heads, rows]`, written: the sum over a head of gradient times output.
    pub delta: Slice<'a>,
    /// bfloat16, `rows` of `heads * head_width` elements: the gradient of `q`.
    pub dq: Slice<'a>,
    /// The stride of `dq`.
    pub dq_stride: usize,
    /// bfloat16, `keys` rows of `kv_heads * head_width` elements: the gradient of `k`.
    pub dk: Slice<'a>,
    /// The stride of `dk`.
    pub dk_stride: usize,
    /// bfloat16, as `dk`: the gradient of `v`.
    pub dv: Slice<'a>,
    /// The stride of `dv`.
    pub dv_stride: usize,
}

/// `out[i, h] = sum_s softmax_s(scale q[i, h] . k_s) v_s` over the keys that row `i` sees; head `h` reads kv head `h /
/// (heads / kv_heads)`. A row that sees nothing becomes zero.
///
/// # Errors
/// A slice is too small or out of place, the sizes do not fit together, a head is wider than 256 or no multiple of 8,
/// or the launch fails.
pub fn attention_training(gpu: &Gpu, call: &AttentionTraining<'_>) -> Result<()> {
    attention_training_with(gpu, call, Kernels::Fastest)
}

/// [`attention_training`] by a choice of kernels.
///
/// # Errors
/// As [`attention_training`].
pub fn attention_training_with(gpu: &Gpu, call: &AttentionTraining<'_>, kernels: Kernels) -> Result<()> {
    const NAME: &str = "attention for training";
    let checked = check(NAME, call)?;
    if call.rows == 0 {
        return Ok(());
    }
    if kernels == Kernels::Fastest && call.keys > 0 && attention_hopper(gpu, &hopper_call(call, &checked))? {
        return Ok(());
    }
    let tilings = FORWARD.iter().filter(|tiling| tiling.width == kernel_width(call.head_width));
    let blocks = |tiling: &Forward| call.rows.div_ceil(tiling.rows).saturating_mul(call.heads);
    let tiling = choose(gpu, tilings, Forward::shared_bytes, |tiling| blocks(tiling) >= 2 * multiprocessors(gpu))?;
    let by_length = is_by_length(gpu, call.rows.div_ceil(tiling.rows), blocks(tiling));
    let launch = Launch {
        grid: [int(NAME, blocks(tiling))? as u32, 1, 1],
        threads: THREADS,
        shared_bytes: tiling.shared_bytes(),
    };
    let arguments = Arguments::new().value(Call { by_length, ..checked });
    gpu.launch(&gpu.function("attention_training", tiling.kernel)?, launch, arguments)
}

/// The gradients of queries, keys and values, from the gradient of the output, with `p` rebuilt from the log-sum-exp:
/// `dv_s = sum p gradient_i`, `ds = p (gradient_i . v_s - delta_i)`, `dq_i = scale sum_s ds k_s`, `dk_s = scale sum ds
/// q_i`, the sums of keys and values over all queries and heads that read them. Rows that see nothing, or that nobody
/// sees, have gradients of zero. The same bits every time.
///
/// # Errors
/// As [`attention_training`].
pub fn attention_training_backward(gpu: &Gpu, call: &AttentionTrainingBackward<'_>) -> Result<()> {
    attention_training_backward_with(gpu, call, Kernels::Fastest)
}

/// [`attention_training_backward`] by a choice of kernels.
///
/// # Errors
/// As [`attention_training`].
pub fn attention_training_backward_with(
    gpu: &Gpu,
    call: &AttentionTrainingBackward<'_>,
    kernels: Kernels,
) -> Result<()> {
    const NAME: &str = "attention's backward pass";
    let AttentionTrainingBackward { forward, .. } = *call;
    let AttentionTraining { rows, keys, heads, kv_heads, head_width, .. } = forward;
    let checked = check(NAME, &forward)?;
    let (width, kv_width) = (heads * head_width, kv_heads * head_width);
    let gradient = strided_by_eight(NAME, "the gradient in bytes", call.gradient, [rows, call.gradient_stride, width])?;
    let delta = call.delta.expect(NAME, "delta in bytes", Form::F32.bytes(rows, heads)?)?;
    let dq = strided_by_eight(NAME, "the queries' gradient in bytes", call.dq, [rows, call.dq_stride, width])?;
    let dk = strided_by_eight(NAME, "the keys' gradient in bytes", call.dk, [keys, call.dk_stride, kv_width])?;
    let dv = strided_by_eight(NAME, "the values' gradient in bytes", call.dv, [keys, call.dv_stride, kv_width])?;

    let mut arguments = BackwardCall {
        forward: checked,
        gradient,
        delta,
        dq,
        dk,
        dv,
        gradient_stride: call.gradient_stride as u64,
        dq_stride: call.dq_stride as u64,
        dk_stride: call.dk_stride as u64,
        dv_stride: call.dv_stride as u64,
        factor: forward.scale,
        key_blocks: 0,
    };
    if kernels == Kernels::Fastest && rows > 0 && keys > 0 {
        let AttentionHopper { queries, keys, values, .. } = hopper_call(&forward, &checked);
        let gradient = Tensor { address: gradient, row_stride: call.gradient_stride, ..queries };
        if attention_backward_hopper(gpu, arguments, &Operands { queries, keys, values, gradient })? {
            return Ok(());
        }
    }

    let lanes = (head_width / 8).next_power_of_two();
    let threads = rows.checked_mul(heads).and_then(|n| n.checked_mul(lanes)).ok_or(Error::SizeOverflow)?;
    let delta_arguments = Arguments::new()
        .u64(checked.out)
        .u64(checked.out_stride)
        .u64(gradient)
        .u64(call.gradient_stride as u64)
        .u64(delta)
        .i32(checked.rows)
        .i32(checked.heads)
        .i32(checked.width)
        .i32(lanes as i32);
    let launch = Launch {
        grid: [int(NAME, threads.div_ceil(DELTA_THREADS))? as u32, 1, 1],
        threads: DELTA_THREADS as u32,
        shared_bytes: 0,
    };
    gpu.launch(&gpu.function("attention_training", "attention_training_delta")?, launch, delta_arguments)?;

    let tilings = BACKWARD.iter().filter(|tiling| tiling.width == kernel_width(head_width));
    let key_blocks = |tiling: &Backward| keys.div_ceil(tiling.keys).saturating_mul(kv_heads * tiling.parts);
    // Long blocks of keys come first, then blocks of queries fill the gaps: so the former need not be many.
    let fills = |tiling: &Backward| key_blocks(tiling) >= 2 * multiprocessors(gpu);
    let tiling = choose(gpu, tilings, Backward::shared_bytes, fills)?;
    let key_blocks = key_blocks(tiling);
    let blocks = key_blocks.saturating_add(rows.div_ceil(tiling.rows).saturating_mul(heads));
    let tiles = keys.div_ceil(tiling.keys).max(rows.div_ceil(tiling.rows));
    arguments.forward.by_length = is_by_length(gpu, tiles, blocks);
    arguments.key_blocks = int(NAME, key_blocks)?;
    let launch =
        Launch { grid: [int(NAME, blocks)? as u32, 1, 1], threads: THREADS, shared_bytes: tiling.shared_bytes() };
    gpu.launch(&gpu.function("attention_training", tiling.kernel)?, launch, Arguments::new().value(arguments))
}

fn hopper_call(call: &AttentionTraining<'_>, checked: &Call) -> AttentionHopper {
    let AttentionTraining { rows, keys, heads, kv_heads, head_width, .. } = *call;
    let tensor = |address, heads, rows, row_stride| Tensor {
        address,
        columns: heads * head_width,
        rows,
        batch: 1,
        row_stride,
        batch_stride: 0,
    };
    AttentionHopper {
        queries: tensor(checked.q, heads, rows, call.q_stride),
        keys: tensor(checked.k, kv_heads, keys, call.k_stride),
        values: tensor(checked.v, kv_heads, keys, call.v_stride),
        out: checked.out,
        out_stride: call.out_stride,
        out_batch_stride: 0,
        log_sum_exp: checked.log_sum_exp,
        heads,
        kv_heads,
        sees: Sees::Bounds { first_key: checked.first_key, end_key: checked.end_key },
        scale: checked.scale,
    }
}

/// A kernel of the forward pass.
struct Forward {
    kernel: &'static str,
    /// Elements of a head that it takes at most.
    width: usize,
    /// Query rows of a block.
    rows: usize,
    /// Keys of a tile.
    keys: usize,
}

/// A kernel of the backward pass.
struct Backward {
    kernel: &'static str,
    /// Elements of a head that it takes at most.
    width: usize,
    /// Keys of a block for keys and values, and how many blocks share their columns.
    keys: usize,
    parts: usize,
    /// Query rows of a block for queries.
    rows: usize,
    /// Padded rows of shared memory, the larger number of the two kinds of blocks.
    shared_rows: usize,
    /// Bytes of shared memory behind them, through which warps exchange operands.
    exchange_bytes: usize,
}

/// For each width, large tiles first.
const FORWARD: [Forward; 5] = [
    Forward { kernel: "attention_training_64_rows_128", width: 64, rows: 128, keys: 128 },
    Forward { kernel: "attention_training_64_rows_64", width: 64, rows: 64, keys: 128 },
    Forward { kernel: "attention_training_128_rows_128", width: 128, rows: 128, keys: 64 },
    Forward { kernel: "attention_training_128_rows_64", width: 128, rows: 64, keys: 64 },
    Forward { kernel: "attention_training_256_rows_64", width: 256, rows: 64, keys: 64 },
];

const BACKWARD: [Backward; 5] = [
    Backward {
        kernel: "attention_training_backward_64_keys_128",
        width: 64,
        keys: 128,
        parts: 1,
        rows: 128,
        shared_rows: 512,
        exchange_bytes: 0,
    },
    Backward {
        kernel: "attention_training_backward_64_keys_64",
        width: 64,
        keys: 64,
        parts: 1,
        rows: 128,
        shared_rows: 512,
        exchange_bytes: 0,
    },
    Backward {
        kernel: "attention_training_backward_128_rows_128",
        width: 128,
        keys: 64,
        parts: 1,
        rows: 128,
        shared_rows: 384,
        exchange_bytes: 8192,
    },
    Backward {
        kernel: "attention_training_backward_128_rows_64",
        width: 128,
        keys: 64,
        parts: 1,
        rows: 64,
        shared_rows: 256,
        exchange_bytes: 0,
    },
    Backward {
        kernel: "attention_training_backward_256_rows_64",
        width: 256,
        keys: 32,
        parts: 2,
        rows: 64,
        shared_rows: 192,
        exchange_bytes: 0,
    },
];

const THREADS: u32 = 128;
const DELTA_THREADS: usize = 256;
/// Elements after each row in shared memory.
const PADDING: usize = 8;

impl Forward {
    fn shared_bytes(&self) -> u32 {
        ((self.rows + 2 * self.keys) * (self.width + PADDING) * 2) as u32
    }
}

impl Backward {
    fn shared_bytes(&self) -> u32 {
        (self.shared_rows * (self.width + PADDING) * 2 + self.exchange_bytes) as u32
    }
}

fn multiprocessors(gpu: &Gpu) -> usize {
    gpu.properties().multiprocessors as usize
}

fn kernel_width(head_width: usize) -> usize {
    head_width.next_power_of_two().max(64)
}

/// The first tiling that fits into shared memory and fills the device; else the last, the smallest.
fn choose<'a, T>(
    gpu: &Gpu,
    tilings: impl Iterator<Item = &'a T>,
    shared_bytes: impl Fn(&T) -> u32,
    fills: impl Fn(&T) -> bool,
) -> Result<&'a T> {
    let mut last = None;
    for tiling in tilings {
        last = Some(tiling);
        if shared_bytes(tiling) <= gpu.properties().shared_per_block && fills(tiling) {
            break;
        }
    }
    last.ok_or(Error::SizeOverflow)
}

/// Whether blocks take the longest tiles first, which every block has to find: where they are few.
fn is_by_length(gpu: &Gpu, tiles: usize, blocks: usize) -> i32 {
    i32::from(tiles <= 512 && blocks <= 16 * multiprocessors(gpu))
}

fn check(operation: &'static str, call: &AttentionTraining<'_>) -> Result<Call> {
    let AttentionTraining { rows, keys, heads, kv_heads, head_width, scale, bounds, .. } = *call;
    if head_width == 0 || head_width > 256 || !head_width.is_multiple_of(8) {
        let what = format!("heads of {head_width} elements; a multiple of 8 up to 256 has one");
        return Err(Error::Unsupported { operation, what });
    }
    grouped_heads(operation, heads, kv_heads)?;
    if scale.is_nan() || scale <= 0.0 {
        let what = format!("a factor of {scale} on scores; it has to be positive");
        return Err(Error::Unsupported { operation, what });
    }
    let width = heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?;
    let kv_width = kv_heads * head_width;
    let bound = |slice: Slice<'_>, rows: usize| slice.expect(operation, "bounds in bytes", Form::F32.bytes(rows, 1)?);
    Ok(Call {
        q: strided_by_eight(operation, "the queries in bytes", call.q, [rows, call.q_stride, width])?,
        k: strided_by_eight(operation, "the keys in bytes", call.k, [keys, call.k_stride, kv_width])?,
        v: strided_by_eight(operation, "the values in bytes", call.v, [keys, call.v_stride, kv_width])?,
        out: strided_by_eight(operation, "the output in bytes", call.out, [rows, call.out_stride, width])?,
        log_sum_exp: call.log_sum_exp.expect(operation, "the log-sum-exp in bytes", Form::F32.bytes(rows, heads)?)?,
        first_key: bound(bounds.first_key, rows)?,
        end_key: bound(bounds.end_key, rows)?,
        first_query: bound(bounds.first_query, keys)?,
        end_query: bound(bounds.end_query, keys)?,
        q_stride: call.q_stride as u64,
        k_stride: call.k_stride as u64,
        v_stride: call.v_stride as u64,
        out_stride: call.out_stride as u64,
        rows: int(operation, rows)?,
        keys: int(operation, keys)?,
        heads: int(operation, heads)?,
        kv_heads: int(operation, kv_heads)?,
        width: int(operation, head_width)?,
        scale: scale * LOG2_E,
        by_length: 0,
        padding: 0,
    })
}

/// The forward kernels' argument: `TrainingCall` in `cuda/attention/training_call.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Call {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    log_sum_exp: u64,
    first_key: u64,
    end_key: u64,
    first_query: u64,
    end_query: u64,
    q_stride: u64,
    k_stride: u64,
    v_stride: u64,
    out_stride: u64,
    rows: i32,
    keys: i32,
    pub(crate) heads: i32,
    pub(crate) kv_heads: i32,
    pub(crate) width: i32,
    scale: f32,
    pub(crate) by_length: i32,
    padding: i32,
}

// SAFETY: thirteen numbers of eight bytes, then eight of four: without a gap.
unsafe impl NoUninit for Call {}

/// The backward kernels' argument: `BackwardCall` in `cuda/attention/training_call.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct BackwardCall {
    pub(crate) forward: Call,
    gradient: u64,
    delta: u64,
    dq: u64,
    dk: u64,
    dv: u64,
    gradient_stride: u64,
    dq_stride: u64,
    dk_stride: u64,
    dv_stride: u64,
    factor: f32,
    pub(crate) key_blocks: i32,
}

// SAFETY: `Call` has no gap and a multiple of eight bytes; nine numbers of eight bytes, then two of four follow.
unsafe impl NoUninit for BackwardCall {}
