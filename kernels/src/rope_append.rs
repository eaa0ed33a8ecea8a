//! Rotary embedding of queries and keys, and the append of keys and values to the caches: the launcher of
//! `cuda/rope_append.cu`.

use crate::{
    Error, Form, Gpu, Result, Slice,
    add::int,
    launch::{Arguments, Launch},
};

/// What [`rope_append`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RopeAppend<'a> {
    /// The projections, `[rows, (heads + 2 * kv_heads) * head_width]`: queries, keys, values. In F32 where the caches
    /// are found through a table, in bfloat16 where the rows are one sequence.
    pub qkv: Slice<'a>,
    /// The norm of every query head, `[head_width]` in F32; none leaves queries as they are.
    pub q_norm: Option<Slice<'a>>,
    /// The norm of every key head, `[head_width]` in F32.
    pub k_norm: Option<Slice<'a>>,
    /// Added to the mean of squares in a norm.
    pub epsilon: f32,
    /// `[rows, 2 * half]` in F32: cosines, then sines of each row's position.
    pub phases: Slice<'a>,
    /// The rotated queries, `[rows, heads * head_width]` in the precision of `qkv`.
    pub queries: Slice<'a>,
    /// Where keys and values go.
    pub to: KvDestination<'a>,
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

/// Where keys and values go: bfloat16, `[position, kv_heads, head_width]`.
#[derive(Clone, Copy, Debug)]
pub enum KvDestination<'a> {
    /// Each row to a cache of its own.
    Table {
        /// `[rows, 2]` addresses (u64): a row's keys and values.
        kv_table: Slice<'a>,
        /// `[rows]` positions (i32), which the caches have room for. Negative: nothing is done for the row.
        positions: Slice<'a>,
    },
    /// All rows to one cache, one position after the other.
    Sequence {
        /// The keys, from position 0.
        keys: Slice<'a>,
        /// The values, from position 0.
        values: Slice<'a>,
        /// The position of the first row.
        first_position: usize,
    },
}

/// Heads of a block.
const HEADS_A_BLOCK: usize = 4;

/// Norms and rotates the heads of queries and keys, and appends keys and values to their caches:
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
    let form = match call.to {
        KvDestination::Table { .. } => Form::F32,
        KvDestination::Sequence { .. } => Form::Bf16,
    };
    let norm = |weight: Option<Slice<'_>>, what| {
        weight.map_or(Ok(0), |weight| weight.expect(NAME, what, Form::F32.bytes(1, head_width)?))
    };
    let mut arguments = Arguments::new()
        .u64(call.qkv.expect(NAME, "the projections in bytes", form.bytes(rows, row_width)?)?)
        .u64(norm(call.q_norm, "the query norm in bytes")?)
        .u64(norm(call.k_norm, "the key norm in bytes")?)
        .u64(call.phases.expect(NAME, "the phases in bytes", Form::F32.bytes(rows, 2 * half)?)?);
    let name = match call.to {
        KvDestination::Table { kv_table, positions } => {
            arguments = arguments
                .u64(kv_table.expect(NAME, "the table of caches in bytes", rows.saturating_mul(16))?)
                .u64(positions.expect(NAME, "the positions in bytes", rows.saturating_mul(4))?);
            "rope_append_few"
        }
        KvDestination::Sequence { keys, values, first_position } => {
            let positions = first_position.checked_add(rows).ok_or(Error::SizeOverflow)?;
            let bytes = Form::Bf16.bytes(positions, kv_heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?)?;
            arguments = arguments
                .u64(keys.expect(NAME, "the keys in bytes", bytes)?)
                .u64(values.expect(NAME, "the values in bytes", bytes)?)
                .u64(first_position as u64);
            "rope_append_many"
        }
    };
    arguments = arguments
        .u64(call.queries.expect(NAME, "the queries in bytes", form.bytes(rows, heads * head_width)?)?)
        .i32(int(heads)?)
        .i32(int(kv_heads)?)
        .i32(int(head_width)?)
        .i32(int(half)?)
        .f32(call.epsilon);
    let grid = [int(rows)? as u32, int(all_heads.div_ceil(HEADS_A_BLOCK))? as u32, 1];
    let launch = Launch { grid, threads: 32 * HEADS_A_BLOCK as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("rope_append", name)?, launch, arguments)
}
