//! Attention of few query rows, each over a history of its own: the launcher of `cuda/attention_few.cu`.
//!
//! A history is cut in chunks, one block each, whose results the last block to arrive merges; the cut depends on the
//! model's shape and the row's own length, so a row's bits are the same alone and among others. Positions and caches
//! are read from tables on the device: a captured launch follows them while they grow, up to the `max_positions` it
//! was captured for.

use std::f32::consts::LOG2_E;

use crate::{
    Error, Form, Gpu, Result, Slice,
    add::int,
    launch::{Arguments, Launch},
};

/// What [`attention_few`] works on.
#[derive(Clone, Copy, Debug)]
pub struct AttentionFew<'a> {
    /// `[rows, heads * head_width]` in F32, rotated.
    pub queries: Slice<'a>,
    /// `[rows, 2]` addresses (u64): a row's keys and values, bfloat16, `[position, kv_heads, head_width]`.
    pub kv_table: Slice<'a>,
    /// `[rows]` positions (i32): the row sees all before it and its own, whose key and value are there already.
    /// Negative: the row is padding, and its output zero. Every position must be less than `max_positions`.
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

// As in cuda/attention/split_history.cuh.
const THREADS: u32 = 128;
const HEADS_A_BLOCK: usize = 8;
const SHORTEST_CHUNK: usize = 64;
const TICKETS: usize = 9;
const MOST_WIDTH: usize = 256;

const NAME: &str = "attention of few rows";

/// How a shape is cut into blocks.
struct Plan {
    /// Blocks of heads of one kv head.
    head_blocks: usize,
    /// The most chunks that a history is cut in.
    most_chunks: usize,
    /// Chunks in the grid.
    chunks: usize,
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
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            let what = "the number of query heads";
            return Err(Error::Shape { operation: NAME, what, expected: kv_heads.max(1), found: heads });
        }
        if window == Some(0) {
            return Err(Error::Shape { operation: NAME, what: "the window", expected: 1, found: 0 });
        }
        let group = heads / kv_heads;
        let head_blocks = group.div_ceil(HEADS_A_BLOCK);
        // About 256 blocks for a long history: two for a multiprocessor of a large card.
        let most_chunks = (256 / (kv_heads * head_blocks)).clamp(16, 128);
        let visible = window.map_or(max_positions, |window| window.min(max_positions));
        let chunks = visible.div_ceil(SHORTEST_CHUNK).clamp(1, most_chunks);
        let slots = rows.checked_mul(kv_heads * head_blocks).ok_or(Error::SizeOverflow)?;
        let record = group.min(HEADS_A_BLOCK) * (head_width + 2) * size_of::<f32>();
        let workspace = FewWorkspace {
            partials: slots.checked_mul(chunks * record).ok_or(Error::SizeOverflow)?,
            tickets: slots.checked_mul(TICKETS * size_of::<u32>()).ok_or(Error::SizeOverflow)?,
        };
        Ok(Plan { head_blocks, most_chunks, chunks, workspace })
    }
}

/// `out[h] = sum_s softmax_s(scale q[h] . k_s) v_s` for every row and head over `s` in `max(0, p - window + 1) ..= p`,
/// `p` the row's position; head `h` reads kv head `h / (heads / kv_heads)`.
///
/// # Errors A slice is too small or the queries not at a multiple of 16 bytes, the shape does not fit together, a head
/// is wider than 256, or the launch fails.
pub fn attention_few(gpu: &Gpu, call: &AttentionFew<'_>) -> Result<()> {
    let FewShape { rows, heads, kv_heads, head_width, window, .. } = call.shape;
    let plan = call.shape.plan()?;
    let kernel = match head_width {
        64 => "attention_few_64",
        96 => "attention_few_96",
        128 => "attention_few_128",
        256 => "attention_few_256",
        1..=MOST_WIDTH => "attention_few_any_width",
        _ => {
            let what = format!("heads of {head_width} elements; up to {MOST_WIDTH} are supported");
            return Err(Error::Unsupported { operation: NAME, what });
        }
    };
    let width = heads.checked_mul(head_width).ok_or(Error::SizeOverflow)?;
    let past = (call.queries.address() % 16) as usize;
    if past != 0 {
        let what = "the queries' place, past a multiple of 16 bytes,";
        return Err(Error::Shape { operation: NAME, what, expected: 0, found: past });
    }
    let arguments = Arguments::new()
        .u64(call.queries.expect(NAME, "the queries in bytes", Form::F32.bytes(rows, width)?)?)
        .u64(call.kv_table.expect(NAME, "the table of caches in bytes", rows.saturating_mul(16))?)
        .u64(call.positions.expect(NAME, "the positions in bytes", rows.saturating_mul(4))?)
        .u64(call.out.expect(NAME, "the output in bytes", Form::Split.bytes(rows, width)?)?)
        .u64(call.partials.expect(NAME, "the partial results in bytes", plan.workspace.partials)?)
        .u64(call.tickets.expect(NAME, "the tickets in bytes", plan.workspace.tickets)?)
        .f32(call.scale * LOG2_E)
        // A window past the greatest number is none.
        .i32(window.and_then(|window| i32::try_from(window).ok()).unwrap_or(0))
        .i32(int(heads)?)
        .i32(int(kv_heads)?)
        .i32(int(head_width)?)
        .i32(int(plan.head_blocks)?)
        .i32(int(plan.most_chunks)?);
    let grid = [plan.chunks as u32, int(kv_heads * plan.head_blocks)? as u32, int(rows)? as u32];
    gpu.launch(&gpu.function("attention_few", kernel)?, Launch { grid, threads: THREADS, shared_bytes: 0 }, arguments)
}
