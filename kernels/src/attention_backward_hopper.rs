//! The backward pass of attention for training on Hopper's own instructions, for [`crate::attention_training_backward`]: the
//! launcher of `cuda/attention_backward_hopper.cu`.

use crate::{
    Error, Gpu, Result,
    attention_training::BackwardCall,
    checks::int,
    launch::{Arguments, Function, Launch},
    tensor_map::{Tensor, TensorMap},
};

/// A kernel of `cuda/attention_backward_hopper.cu`.
struct Tiling {
    kernel: &'static str,
    head_width: usize,
    /// Tiles in the ring.
    stages: usize,
}

const TILINGS: [Tiling; 2] = [
    Tiling { kernel: "attention_backward_hopper_64", head_width: 64, stages: 6 },
    Tiling { kernel: "attention_backward_hopper_128", head_width: 128, stages: 4 },
];

const NAME: &str = "attention's backward pass on Hopper";
const THREADS: u32 = 384;
/// Rows of an item, and of a tile that passes by.
const BLOCK: usize = 128;
const TILE: usize = 64;
/// Row tiles that can be put in order.
const MOST_ORDERED_TILES: usize = 512;
const PREPARE_THREADS: usize = 256;

impl Tiling {
    /// `HopperBackward::Shared`: rows of two tensors, and a query's terms for each row of a stage; what is known of rows,
    /// and less than 256 bytes of barriers.
    fn shared_bytes(&self) -> usize {
        let row_bytes = 2 * self.head_width * 2;
        BLOCK * (row_bytes + 16) + self.stages * TILE * (row_bytes + 8) + 256
    }
}

/// What stays or passes by.
pub(crate) struct Operands {
    pub(crate) queries: Tensor,
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) gradient: Tensor,
}

/// The two kernels for heads of this width, where card and build have them.
fn kernels(gpu: &Gpu, head_width: usize) -> Result<Option<(&'static Tiling, Function, Function)>> {
    let tiling = TILINGS.iter().find(|tiling| tiling.head_width == head_width);
    let Some(tiling) = tiling.filter(|_| gpu.properties().compute_capability == (9, 0)) else { return Ok(None) };
    let function = |name| gpu.function("attention_backward_hopper", name);
    match (function("attention_backward_hopper_prepare"), function(tiling.kernel)) {
        (Ok(prepare), Ok(kernel)) => Ok(Some((tiling, prepare, kernel))),
        (Err(Error::NoKernel { .. } | Error::NoCode { .. }), _) => Ok(None),
        (Err(other), _) | (_, Err(other)) => Err(other),
    }
}

/// Launches both kernels if there are some for this card and this width; else says no. Rows and keys may not be empty.
/// How many blocks the grid has, and the order of their work, is decided here.
pub(crate) fn attention_backward_hopper(gpu: &Gpu, mut call: BackwardCall, operands: &Operands) -> Result<bool> {
    let Operands { queries, keys, values, gradient } = operands;
    let (heads, kv_heads) = (call.forward.heads as usize, call.forward.kv_heads as usize);
    let head_width = call.forward.width as usize;
    let Some((tiling, prepare, kernel)) = kernels(gpu, head_width)? else { return Ok(false) };
    let (key_tiles, query_tiles) = (keys.rows.div_ceil(BLOCK), queries.rows.div_ceil(BLOCK));
    let key_items = key_tiles.checked_mul(kv_heads).ok_or(Error::SizeOverflow)?;
    let items = query_tiles.checked_mul(heads).and_then(|n| n.checked_add(key_items)).ok_or(Error::SizeOverflow)?;
    let multiprocessors = gpu.properties().multiprocessors as usize;
    // Where work is little, the long items come first; where there is much of it, the heads one by one, so that what passes
    // by stays in the second-level cache.
    let by_length = key_tiles.max(query_tiles) <= MOST_ORDERED_TILES && items <= 16 * multiprocessors;
    call.key_blocks = int(NAME, key_items)?;
    call.forward.by_length = i32::from(by_length);

    let pieces = queries.rows.checked_mul(heads * head_width / 8).ok_or(Error::SizeOverflow)?;
    let blocks = int(NAME, pieces.div_ceil(PREPARE_THREADS).saturating_add(2))? as u32;
    let launch = Launch { grid: [blocks, 1, 1], threads: PREPARE_THREADS as u32, shared_bytes: 0 };
    gpu.launch(&prepare, launch, Arguments::new().value(call))?;

    let arguments = Arguments::new()
        .value(call)
        .value(TensorMap::new(queries, TILE as u32)?)
        .value(TensorMap::new(keys, TILE as u32)?)
        .value(TensorMap::new(values, TILE as u32)?)
        .value(TensorMap::new(gradient, TILE as u32)?);
    // A block stays on its multiprocessor and takes the next item when it is done with one.
    let grid = [int(NAME, items.min(multiprocessors))? as u32, 1, 1];
    let launch = Launch { grid, threads: THREADS, shared_bytes: tiling.shared_bytes() as u32 };
    gpu.launch(&kernel, launch, arguments)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::TILINGS;

    #[test]
    fn shared_memory_holds_what_the_kernels_lay_out() {
        // `sizeof(HopperBackward<64>::Shared)` and of 128, and the most that a block has.
        for (tiling, least) in TILINGS.iter().zip([136_328, 200_808]) {
            let bytes = tiling.shared_bytes();
            assert!((least..=227 << 10).contains(&bytes), "{}: {bytes}", tiling.kernel);
        }
    }
}
