//! Attention of few rows, each over its own history, from the raw projections: the launcher of `cuda/attention_few.cu`.
//!
//! One launch norms and turns queries and keys, appends keys and values to the caches, and attends. A history is cut in
//! chunks, one a block at a time, whose results are merged in their order; the cut depends on the model's shape and the
//! row's own length, so a row's bits are the same alone and among others. Positions and caches are read from tables on
//! the device: a captured launch follows them while they grow, up to the `max_positions` it was captured for.

use std::f32::consts::LOG2_E;

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{aligned, aligned_to, grouped_heads, int},
    gpu::CLUSTERS_FROM,
    launch::{Arguments, Launch},
};

/// What [`attention_few`] works on.
#[derive(Clone, Copy, Debug)]
pub struct AttentionFew<'a> {
    /// The projections, `[rows, (heads + 2 * kv_heads) * head_width]` in F32: queries, keys, values.
    pub qkv: Slice<'a>,
    /// The norm of every query head, `[head_width]` in F32; none leaves queries as they are.
    pub q_norm: Option<Slice<'a>>,
    /// The norm of every key head, `[head_width]` in F32.
    pub k_norm: Option<Slice<'a>>,
    /// Added to the mean of squares in a norm.
    pub epsilon: f32,
    /// `[rows, 2 * half]` in F32: cosines, then sines of each row's position.
    pub phases: Slice<'a>,
    /// Pairs of a head that turn: elements `i` and `i + half` for `i < half`; the others stay.
    pub half: usize,
    /// `[rows, 2]` addresses (u64): a row's keys and values, bfloat16, `[position, kv_heads, head_width]`, with room
    /// for its position. Each address is a multiple of 16.
    pub kv_table: Slice<'a>,
    /// `[rows]` positions (i32): the row's key and value are put there, and it sees them and all before. Negative: the
    /// row is padding, and its output zero. Every position must be less than `max_positions`. Rows of one sequence
    /// stand side by side, at consecutive positions.
    pub positions: Slice<'a>,
    /// `[rows, 2, heads * head_width]`, [`Form::Split`].
    pub out: Slice<'a>,
    /// Memory for a launch, of at least [`FewWorkspace::partials`] bytes; what is in it does not matter.
    pub partials: Slice<'a>,
    /// Memory of at least [`FewWorkspace::tickets`] bytes that is zero before the first launch; each launch leaves it
    /// zero.
    pub tickets: Slice<'a>,
    /// Sizes.
    pub shape: FewShape,
    /// The factor on scores, usually `1 / sqrt(head_width)`.
    pub scale: f32,
}

/// The sizes of an attention of few rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewShape {
    /// Query rows.
    pub rows: usize,
    /// No position is as great: what the grid is made for.
    pub max_positions: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key heads, and value heads.
    pub kv_heads: usize,
    /// Elements of a head; 64, 96, 128 and 256 are fast.
    pub head_width: usize,
    /// How many positions a row sees, its own among them; none: all before it.
    pub window: Option<usize>,
}

/// Bytes that [`attention_few`] needs beside its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewWorkspace {
    /// Results of chunks.
    pub partials: usize,
    /// Counters.
    pub tickets: usize,
}

// As in cuda/attention/split_history.cuh and the kernels.
const HEADS_A_BLOCK: usize = 8;
const LEAF: usize = 8;
const ONE_LEAF: usize = 2048;
const CHUNK_STEP: usize = 128;
const MOST_WIDTH: usize = 256;
/// Blocks that are enough for a card: two of these for each multiprocessor of a large one.
const BLOCKS: usize = 256;

/// For each of so many multiprocessors a cluster of [`LEAF`] blocks runs at a time, two blocks a multiprocessor: a
/// cluster lies within a group of 16 or 18. Where there are more leaves, they are merged by tickets.
const MULTIPROCESSORS_A_CLUSTER: usize = 5;

const NAME: &str = "attention of few rows";

/// How a shape is cut into blocks.
struct Plan {
    /// Blocks of heads of one kv head.
    head_blocks: usize,
    /// The most chunks that a history is cut in.
    most_chunks: usize,
    /// The most leaves, of [`LEAF`] chunks each, that a history is cut in.
    most_leaves: usize,
    /// Leaves in the grid: blocks go through the rest of a row's in steps of so many.
    leaves_at_once: usize,
    workspace: FewWorkspace,
}

impl FewShape {
    /// What a launch of this shape needs.
    ///
    /// # Errors
    /// The heads are not a multiple of the kv heads, or a size overflows.
    pub fn workspace(&self) -> Result<FewWorkspace> {
        Ok(self.plan()?.workspace)
    }

    fn plan(&self) -> Result<Plan> {
        let Self { rows, max_positions, heads, kv_heads, head_width, window } = *self;
        let group = grouped_heads(NAME, heads, kv_heads)?;
        if window == Some(0) {
            return Err(Error::Shape { operation: NAME, what: "the window", expected: 1, found: 0 });
        }
        let head_blocks = group.div_ceil(HEADS_A_BLOCK);
        let most_chunks = (BLOCKS / (kv_heads * head_blocks)).clamp(16, 128);
        let visible = window.map_or(max_positions, |window| window.min(max_positions));
        let chunks = if visible <= ONE_LEAF { LEAF } else { visible.div_ceil(CHUNK_STEP).min(most_chunks) };
        let most_leaves = chunks.div_ceil(LEAF);
        let slots = rows.checked_mul(kv_heads * head_blocks).ok_or(Error::SizeOverflow)?;
        // Of a leaf: the results of its chunks, then its own, in as many parts.
        let leaf = LEAF * (head_width + 2) + head_width + 2 * LEAF;
        let slot = most_leaves * group.min(HEADS_A_BLOCK) * leaf * size_of::<f32>();
        let workspace = FewWorkspace {
            partials: slots.checked_mul(slot).ok_or(Error::SizeOverflow)?,
            tickets: slots.checked_mul(LEAF.max(1 + most_leaves) * size_of::<u32>()).ok_or(Error::SizeOverflow)?,
        };
        let leaves_at_once = (BLOCKS / LEAF / slots.max(1)).clamp(1, most_leaves);
        Ok(Plan { head_blocks, most_chunks, most_leaves, leaves_at_once, workspace })
    }
}

/// `out[h] = sum_s softmax_s(scale q[h] . k_s) v_s` for every row and head over `s` in `max(0, p - window + 1) ..= p`,
/// `p` the row's position; head `h` reads kv head `h / (heads / kv_heads)`. Queries and keys are normed, where there
/// are norms, and turned: `y[i] = x[i] cos_i - x[i + half] sin_i`, `y[i + half] = x[i + half] cos_i + x[i] sin_i`; the
/// row's key and value are written to its cache.
///
/// # Errors
/// A slice is too small, or numbers that are read 16 bytes at a time are not at a multiple of that, the shape does not
/// fit together, a head is wider than 256, or the launch fails.
pub fn attention_few(gpu: &Gpu, call: &AttentionFew<'_>) -> Result<()> {
    let FewShape { rows, heads, kv_heads, head_width, window, .. } = call.shape;
    let half = call.half;
    let plan = call.shape.plan()?;
    if half > head_width / 2 {
        let what = "the number of pairs that turn";
        return Err(Error::Shape { operation: NAME, what, expected: head_width / 2, found: half });
    }
    let slots = rows.checked_mul(kv_heads * plan.head_blocks).ok_or(Error::SizeOverflow)?;
    let card = gpu.properties();
    let by_tickets =
        card.compute_capability >= CLUSTERS_FROM && slots > card.multiprocessors as usize / MULTIPROCESSORS_A_CLUSTER;
    // Threads, the kernels that merge in clusters and by tickets, which give the same bits, and their shared memory.
    let (threads, kernels, shared_bytes) = match head_width {
        64 if half.is_multiple_of(8) => (256, ["attention_few_64", "attention_few_64_by_tickets"], 38 << 10),
        96 if half.is_multiple_of(8) => (256, ["attention_few_96", "attention_few_96_by_tickets"], 57 << 10),
        128 if half.is_multiple_of(8) => (256, ["attention_few_128", "attention_few_128_by_tickets"], 74 << 10),
        256 if half.is_multiple_of(8) => (128, ["attention_few_256", "attention_few_256_by_tickets"], 82 << 10),
        1..=MOST_WIDTH => (128, ["attention_few_any_width"; 2], 44 << 10),
        _ => {
            let what = format!("heads of {head_width} elements; up to {MOST_WIDTH} are supported");
            return Err(Error::Unsupported { operation: NAME, what });
        }
    };
    let width = heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?;
    let row_width =
        kv_heads.checked_mul(2 * head_width).and_then(|kv| kv.checked_add(width)).ok_or(Error::SizeOverflow)?;
    let norm_bytes = Form::F32.bytes(1, head_width)?;
    let norm = |weight, what| aligned_to(16, NAME, what, Slice::expect_optional(weight, NAME, what, norm_bytes)?);
    let arguments = Arguments::new()
        .u64(aligned(NAME, "the projections in bytes", call.qkv, Form::F32.bytes(rows, row_width)?)?)
        .u64(norm(call.q_norm, "the query norm in bytes")?)
        .u64(norm(call.k_norm, "the key norm in bytes")?)
        .u64(aligned(NAME, "the phases in bytes", call.phases, Form::F32.bytes(rows, 2 * half)?)?)
        .u64(call.kv_table.expect(NAME, "the table of caches in bytes", rows.saturating_mul(16))?)
        .u64(call.positions.expect(NAME, "the positions in bytes", rows.saturating_mul(4))?)
        .u64(call.out.expect(NAME, "the output in bytes", Form::Split.bytes(rows, width)?)?)
        .u64(call.partials.expect(NAME, "the partial results in bytes", plan.workspace.partials)?)
        .u64(call.tickets.expect(NAME, "the tickets in bytes", plan.workspace.tickets)?)
        .f32(call.epsilon)
        .f32(call.scale * LOG2_E)
        .i32(int(NAME, half)?)
        // A window past the greatest number is none.
        .i32(window.and_then(|window| i32::try_from(window).ok()).unwrap_or(0))
        .i32(int(NAME, heads)?)
        .i32(int(NAME, kv_heads)?)
        .i32(int(NAME, heads / kv_heads)?)
        .i32(int(NAME, head_width)?)
        .i32(int(NAME, plan.head_blocks)?)
        .i32(int(NAME, plan.most_chunks)?)
        .i32(int(NAME, plan.most_leaves)?);
    let grid = [
        int(NAME, LEAF * kv_heads * plan.head_blocks)? as u32,
        int(NAME, rows)? as u32,
        int(NAME, plan.leaves_at_once)? as u32,
    ];
    gpu.launch(
        &gpu.function("attention_few", kernels[usize::from(by_tickets)])?,
        Launch { grid, threads, shared_bytes },
        arguments,
    )
}
