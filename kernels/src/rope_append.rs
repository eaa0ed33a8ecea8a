//! Rotary embedding of queries and keys of many rows of one sequence, and the append of keys and values to its cache: the
//! launcher of `cuda/rope_append.cu`.

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::int,
    launch::{Arguments, Launch},
};

/// What [`rope_append`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RopeAppend<'a> {
    /// The projections, `[rows, (heads + 2 * kv_heads) * head_width]` in bfloat16: queries, keys, values.
    pub qkv: Slice<'a>,
    /// The norm of every query head, `[head_width]` in F32; none leaves queries as they are.
    pub q_norm: Option<Slice<'a>>,
    /// The norm of every key head, `[head_width]` in F32.
    pub k_norm: Option<Slice<'a>>,
    /// Added to the mean of squares in a norm.
    pub epsilon: f32,
    /// `[rows, 2 * half]` in F32: cosines, then sines of each row's position.
    pub phases: Slice<'a>,
    /// The rotated queries, `[rows, heads * head_width]` in bfloat16.
    pub queries: Slice<'a>,
    /// The sequence's keys from position 0 on, `[position, kv_heads, head_width]` in bfloat16.
    pub keys: Slice<'a>,
    /// Its values, likewise.
    pub values: Slice<'a>,
    /// The position of the first row; the others follow.
    pub first_position: usize,
    /// Rows.
    pub rows: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads, and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_width: usize,
    /// Pairs of a head that turn: elements `i` and `i + half` for `i < half`; the others stay.
    pub half: usize,
}

/// Heads of a block.
const HEADS_A_BLOCK: usize = 4;

/// Norms and rotates the heads of queries and keys, and appends keys and values to their cache:
/// `y[i] = x[i] cos_i - x[i + half] sin_i`, `y[i + half] = x[i + half] cos_i + x[i] sin_i`.
///
/// # Errors
/// A slice is too small, `half` is more than half of a head, or the launch fails.
pub fn rope_append(gpu: &Gpu, call: &RopeAppend<'_>) -> Result<()> {
    const NAME: &str = "rope and append";
    let RopeAppend { rows, heads, kv_heads, head_width, half, .. } = *call;
    if half > head_width / 2 {
        let what = "the number of pairs that turn";
        return Err(Error::Shape { operation: NAME, what, expected: head_width / 2, found: half });
    }
    let all_heads = kv_heads.checked_mul(2).and_then(|kv| kv.checked_add(heads)).ok_or(Error::SizeOverflow)?;
    let row_width = all_heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?;
    let norm_bytes = Form::F32.bytes(1, head_width)?;
    let norm = |weight, what| Slice::expect_optional(weight, NAME, what, norm_bytes);
    let positions = call.first_position.checked_add(rows).ok_or(Error::SizeOverflow)?;
    let cache_bytes = Form::Bf16.bytes(positions, kv_heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?)?;
    let arguments = Arguments::new()
        .u64(call.qkv.expect(NAME, "the projections in bytes", Form::Bf16.bytes(rows, row_width)?)?)
        .u64(norm(call.q_norm, "the query norm in bytes")?)
        .u64(norm(call.k_norm, "the key norm in bytes")?)
        .u64(call.phases.expect(NAME, "the phases in bytes", Form::F32.bytes(rows, 2 * half)?)?)
        .u64(call.keys.expect(NAME, "the keys in bytes", cache_bytes)?)
        .u64(call.values.expect(NAME, "the values in bytes", cache_bytes)?)
        .u64(call.first_position as u64)
        .u64(call.queries.expect(NAME, "the queries in bytes", Form::Bf16.bytes(rows, heads * head_width)?)?)
        .i32(int(NAME, heads)?)
        .i32(int(NAME, kv_heads)?)
        .i32(int(NAME, head_width)?)
        .i32(int(NAME, half)?)
        .f32(call.epsilon);
    let grid = [int(NAME, rows)? as u32, int(NAME, all_heads.div_ceil(HEADS_A_BLOCK))? as u32, 1];
    let launch = Launch { grid, threads: 32 * HEADS_A_BLOCK as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("rope_append", "rope_append_many")?, launch, arguments)
}
