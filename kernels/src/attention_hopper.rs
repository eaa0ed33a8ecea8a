//! Attention forward on Hopper's own instructions, for [`crate::attention`] and [`crate::attention_training`]: the
//! launcher of `cuda/attention_hopper.cu`.

use bytemuck::NoUninit;

use crate::{
    Error, Gpu, Result,
    checks::int,
    launch::{Arguments, Function, Launch},
    tensor_map::{Tensor, TensorMap},
};

/// Which kernels a launcher chooses from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernels {
    /// The fastest that the card has.
    Fastest,
    /// Those that every card has, which the others are compared with.
    Portable,
}

/// A kernel of `cuda/attention_hopper.cu`.
struct Tiling {
    kernel: &'static str,
    head_width: usize,
    /// Warpgroups that multiply, of 64 query rows each.
    consumers: usize,
    /// Tiles of keys, and tiles of values, in shared memory.
    stages: usize,
}

const TILINGS: [Tiling; 2] = [
    Tiling { kernel: "attention_hopper_64", head_width: 64, consumers: 3, stages: 4 },
    Tiling { kernel: "attention_hopper_128", head_width: 128, consumers: 2, stages: 2 },
];

const NAME: &str = "attention on Hopper";
const WARPGROUP: usize = 128;
/// Keys of a tile.
const KEYS: usize = 128;
/// To align shared memory, and for what lies behind the operands.
const EXTRA_SHARED_BYTES: usize = 1024 + 4096;
/// Row tiles that a block can put in order.
const MOST_ORDERED_TILES: usize = 512;

impl Tiling {
    fn rows(&self) -> usize {
        64 * self.consumers
    }

    fn shared_bytes(&self) -> usize {
        (self.rows() + 2 * self.stages * KEYS) * self.head_width * 2 + EXTRA_SHARED_BYTES
    }
}

/// What a query row sees.
pub(crate) enum Sees {
    /// Keys from one bound to the other: addresses of i32 `[rows]`, which ascend.
    Bounds { first_key: u64, end_key: u64 },
    /// The last `window` positions up to its own, which is `keys - rows + row`.
    Causal { window: usize },
    /// All keys.
    All,
}

/// What has been checked by a launcher. `queries` has `heads * head_width` columns, `keys` and `values` have `kv_heads *
/// head_width`.
pub(crate) struct AttentionHopper {
    pub(crate) queries: Tensor,
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    /// The address of bfloat16 rows, and the strides between them and between the rows of a batch, in elements.
    pub(crate) out: u64,
    pub(crate) out_stride: usize,
    pub(crate) out_batch_stride: usize,
    /// The address of F32 `[batch, heads, rows]`, or 0.
    pub(crate) log_sum_exp: u64,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) sees: Sees,
    /// The factor on scores, times the binary logarithm of e.
    pub(crate) scale: f32,
}

/// The kernel for heads of this width, where card and build have one.
fn kernel(gpu: &Gpu, head_width: usize) -> Result<Option<(&'static Tiling, Function)>> {
    let tiling = TILINGS.iter().find(|tiling| tiling.head_width == head_width);
    let Some(tiling) = tiling.filter(|_| gpu.properties().compute_capability == (9, 0)) else { return Ok(None) };
    match gpu.function("attention_hopper", tiling.kernel) {
        Ok(function) => Ok(Some((tiling, function))),
        Err(Error::NoKernel { .. } | Error::NoCode { .. }) => Ok(None),
        Err(other) => Err(other),
    }
}

/// Launches the kernel if there is one for this card and this width; else says no. Rows and keys may not be empty.
pub(crate) fn attention_hopper(gpu: &Gpu, call: &AttentionHopper) -> Result<bool> {
    let AttentionHopper { queries, keys, values, heads, kv_heads, .. } = call;
    let Some((tiling, function)) = kernel(gpu, queries.columns / heads)? else { return Ok(false) };
    let row_tiles = queries.rows.div_ceil(tiling.rows());
    let columns = heads.checked_mul(queries.batch).ok_or(Error::SizeOverflow)?;
    let pieces = row_tiles.checked_mul(columns).ok_or(Error::SizeOverflow)?;
    let multiprocessors = gpu.properties().multiprocessors as usize;
    // Where work is little, the long pieces come first; where there is much of it, the heads one by one, so that their
    // keys and values stay in the second-level cache.
    let by_length = row_tiles <= MOST_ORDERED_TILES && pieces <= 16 * multiprocessors;
    let (first_key, end_key) = match call.sees {
        Sees::Bounds { first_key, end_key } => (first_key, end_key),
        _ => (0, 0),
    };
    let (causal, window) = match call.sees {
        Sees::Causal { window } => (1, i32::try_from(window).unwrap_or(i32::MAX)),
        _ => (0, i32::MAX),
    };
    let arguments = Arguments::new()
        .value(TensorMap::new(queries, tiling.rows() as u32)?)
        .value(TensorMap::new(keys, KEYS as u32)?)
        .value(TensorMap::new(values, KEYS as u32)?)
        .value(Call {
            out: call.out,
            log_sum_exp: call.log_sum_exp,
            first_key,
            end_key,
            out_stride: call.out_stride as u64,
            out_batch_stride: call.out_batch_stride as u64,
            rows: int(NAME, queries.rows)?,
            keys: int(NAME, keys.rows)?,
            heads: int(NAME, *heads)?,
            kv_heads: int(NAME, *kv_heads)?,
            batch: int(NAME, queries.batch)?,
            scale: call.scale,
            causal,
            window,
            by_length: i32::from(by_length),
            padding: 0,
        });
    // A block stays on its multiprocessor and takes the next piece when it is done with one.
    let launch = Launch {
        grid: [int(NAME, pieces)?.min(int(NAME, multiprocessors)?) as u32, 1, 1],
        threads: ((tiling.consumers + 1) * WARPGROUP) as u32,
        shared_bytes: tiling.shared_bytes() as u32,
    };
    gpu.launch(&function, launch, arguments)?;
    Ok(true)
}

/// The kernels' last argument: `HopperCall` in `cuda/attention/hopper_forward.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Call {
    out: u64,
    log_sum_exp: u64,
    first_key: u64,
    end_key: u64,
    out_stride: u64,
    out_batch_stride: u64,
    rows: i32,
    keys: i32,
    heads: i32,
    kv_heads: i32,
    batch: i32,
    scale: f32,
    causal: i32,
    window: i32,
    by_length: i32,
    padding: i32,
}

// SAFETY: six numbers of eight bytes, then ten of four: without a gap.
unsafe impl NoUninit for Call {}
