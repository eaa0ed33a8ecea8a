//! Routed experts for many rows, without a word to the host: the launchers of `cuda/routed.cu`.
//!
//! [`routed_sort`] gives each slot (a row's j-th expert) a place, in ascending order of expert; [`routed_gated`] and
//! [`routed_down`] multiply each expert's places by its matrices; [`routed_combine`] adds to each row what its experts
//! give, in ascending order of j. A row's result depends on the row, its experts and its gates only.

use crate::{
    Activation, Error, Form, Gpu, Result, Slice,
    checks::{int, multiple},
    gemm::{TileRows, operand, result},
    launch::{Arguments, Launch},
};

/// What [`routed_sort`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RoutedSort<'a> {
    /// `[rows, per_row]` of i32: the experts of a row. One that is not in `0..experts` has no place and adds nothing.
    pub ids: Slice<'a>,
    /// `[rows, per_row]` of i32, written: the place of each slot, or -1.
    pub places: Slice<'a>,
    /// `[rows * per_row]` of i32, written: the row of each place.
    pub sources: Slice<'a>,
    /// `[experts + 1]` of i32, written: the first place of each expert, then the number of places.
    pub offsets: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Experts of a row.
    pub per_row: usize,
    /// Experts there are.
    pub experts: usize,
}

/// What [`routed_gated`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RoutedGated<'a> {
    /// `[rows, inputs]` bfloat16; starts at a multiple of 16 bytes.
    pub x: Slice<'a>,
    /// Elements from one row of `x` to the next, a multiple of 8.
    pub x_stride: usize,
    /// Of [`RoutedSort`].
    pub sources: Slice<'a>,
    /// Of [`RoutedSort`].
    pub offsets: Slice<'a>,
    /// `[experts][outputs, inputs]` bfloat16; starts at a multiple of 16 bytes.
    pub gate: Slice<'a>,
    /// As `gate`.
    pub up: Slice<'a>,
    /// Elements from one row of a matrix to the next, a multiple of 8.
    pub weight_stride: usize,
    /// Elements from one expert's matrix to the next, a multiple of 8.
    pub expert_stride: usize,
    /// `[rows * per_row, outputs]` bfloat16, by place; starts at a multiple of 16 bytes.
    pub out: Slice<'a>,
    /// Elements from one row of `out` to the next.
    pub out_stride: usize,
    /// What the gate goes through.
    pub activation: Activation,
    /// Rows of `x`.
    pub rows: usize,
    /// Experts of a row.
    pub per_row: usize,
    /// Experts there are.
    pub experts: usize,
    /// Rows of a matrix: the inner width.
    pub outputs: usize,
    /// The summed dimension, a multiple of 8.
    pub inputs: usize,
}

/// What [`routed_down`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RoutedDown<'a> {
    /// `[rows * per_row, inputs]` bfloat16, by place: what [`routed_gated`] wrote.
    pub x: Slice<'a>,
    /// Elements from one row of `x` to the next, a multiple of 8.
    pub x_stride: usize,
    /// Of [`RoutedSort`].
    pub offsets: Slice<'a>,
    /// `[experts][outputs, inputs]` bfloat16; starts at a multiple of 16 bytes.
    pub weight: Slice<'a>,
    /// Elements from one row of a matrix to the next, a multiple of 8.
    pub weight_stride: usize,
    /// Elements from one expert's matrix to the next, a multiple of 8.
    pub expert_stride: usize,
    /// `[rows * per_row, outputs]` in F32, by place; starts at a multiple of 16 bytes.
    pub out: Slice<'a>,
    /// Rows of the layer's input.
    pub rows: usize,
    /// Experts of a row.
    pub per_row: usize,
    /// Experts there are.
    pub experts: usize,
    /// Rows of a matrix: the layer's width.
    pub outputs: usize,
    /// The summed dimension, the inner width, a multiple of 8.
    pub inputs: usize,
}

/// What [`routed_combine`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RoutedCombine<'a> {
    /// `[rows * per_row, width]` in F32, by place: what [`routed_down`] wrote.
    pub y: Slice<'a>,
    /// Of [`RoutedSort`].
    pub places: Slice<'a>,
    /// `[rows, per_row]` in F32: the weight of each slot.
    pub gates: Slice<'a>,
    /// `[rows, width]` in F32, added to: the residual stream.
    pub out: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Experts of a row.
    pub per_row: usize,
    /// Elements of a row, a multiple of 4.
    pub width: usize,
}

const SORT_THREADS: usize = 1024;
const COMBINE_THREADS: usize = 128;
/// Columns of a block's tile, and of the two matrices of a gated one: as in `gemm/tile.cuh`.
pub(crate) const COLUMNS: usize = 128;
const GATED_COLUMNS: usize = 64;
/// Up to this many places an expert, on average, the smaller tile leaves less of itself empty.
const SMALL_PLACES: usize = 96;

/// The places of all slots, in ascending order of expert, then of row.
///
/// # Errors
/// A slice is too short, a size does not fit, there are no experts, or the driver fails.
pub fn routed_sort(gpu: &Gpu, call: &RoutedSort<'_>) -> Result<()> {
    const NAME: &str = "sorting rows by expert";
    let RoutedSort { rows, per_row, experts, .. } = *call;
    let slots = slots(NAME, rows, per_row, experts)?;
    // As many parts as the card runs at once, two blocks a multiprocessor: each part's blocks read all ids.
    let most_parts = (2 * gpu.properties().multiprocessors as usize / experts).max(1);
    let part_slots = slots.div_ceil(most_parts).next_multiple_of(SORT_THREADS).max(SORT_THREADS);
    let arguments = Arguments::new()
        .u64(call.ids.expect(NAME, "the ids in bytes", slots * 4)?)
        .u64(call.places.expect(NAME, "the places in bytes", slots * 4)?)
        .u64(call.sources.expect(NAME, "the sources in bytes", slots * 4)?)
        .u64(call.offsets.expect(NAME, "the offsets in bytes", (experts + 1) * 4)?)
        .i32(int(NAME, slots)?)
        .i32(int(NAME, per_row.max(1))?)
        .i32(int(NAME, experts)?)
        .i32(int(NAME, part_slots)?);
    let grid = [experts as u32, slots.div_ceil(part_slots).max(1) as u32, 1];
    let launch = Launch { grid, threads: SORT_THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("routed", "routed_sort")?, launch, arguments)
}

/// `out[place] = act(x[sources[place]] gate_e^T) * (x[sources[place]] up_e^T)`, e the expert of the place.
///
/// # Errors
/// A slice is too short, a stride or an address is not aligned, a size does not fit, or the driver fails.
pub fn routed_gated(gpu: &Gpu, call: &RoutedGated<'_>) -> Result<()> {
    const NAME: &str = "gated product of routed experts";
    let RoutedGated {
        x_stride, weight_stride, expert_stride, out_stride, rows, per_row, experts, outputs, inputs, ..
    } = *call;
    let slots = slots(NAME, rows, per_row, experts)?;
    let matrix = |slice| expert_matrices(NAME, slice, experts, expert_stride, outputs, weight_stride, inputs);
    let tile = tile_rows(slots, experts);
    let row_tiles = most_row_tiles(slots, experts, tile);
    let arguments = Arguments::new()
        .u64(operand(NAME, "x's size in bytes", call.x, [rows, x_stride, inputs])?)
        .u64(call.sources.expect(NAME, "the sources in bytes", slots * 4)?)
        .u64(call.offsets.expect(NAME, "the offsets in bytes", (experts + 1) * 4)?)
        .u64(matrix(call.gate)?)
        .u64(matrix(call.up)?)
        .u64(result(NAME, call.out, Form::Bf16, [slots, out_stride, outputs])?)
        .u64(expert_stride as u64)
        .i32(int(NAME, x_stride)?)
        .i32(int(NAME, weight_stride)?)
        .i32(int(NAME, out_stride)?)
        .i32(int(NAME, experts)?)
        .i32(int(NAME, outputs)?)
        .i32(int(NAME, inputs)?)
        .i32(int(NAME, row_tiles)?)
        .i32(call.activation as i32);
    let name = match tile {
        TileRows::Large => "routed_gated_rows128",
        TileRows::Small => "routed_gated_rows64",
    };
    let launch = tile.launch(NAME, row_tiles, outputs.div_ceil(GATED_COLUMNS))?;
    gpu.launch(&gpu.function("routed", name)?, launch, arguments)
}

/// `out[place] = x[place] weight_e^T`, e the expert of the place.
///
/// # Errors
/// A slice is too short, a stride or an address is not aligned, a size does not fit, or the driver fails.
pub fn routed_down(gpu: &Gpu, call: &RoutedDown<'_>) -> Result<()> {
    const NAME: &str = "product of routed experts";
    let RoutedDown { x_stride, weight_stride, expert_stride, rows, per_row, experts, outputs, inputs, .. } = *call;
    let slots = slots(NAME, rows, per_row, experts)?;
    let tile = tile_rows(slots, experts);
    let row_tiles = most_row_tiles(slots, experts, tile);
    let arguments = Arguments::new()
        .u64(operand(NAME, "x's size in bytes", call.x, [slots, x_stride, inputs])?)
        .u64(call.offsets.expect(NAME, "the offsets in bytes", (experts + 1) * 4)?)
        .u64(expert_matrices(NAME, call.weight, experts, expert_stride, outputs, weight_stride, inputs)?)
        .u64(result(NAME, call.out, Form::F32, [slots, outputs, outputs])?)
        .u64(expert_stride as u64)
        .i32(int(NAME, x_stride)?)
        .i32(int(NAME, weight_stride)?)
        .i32(int(NAME, outputs)?)
        .i32(int(NAME, experts)?)
        .i32(int(NAME, outputs)?)
        .i32(int(NAME, inputs)?)
        .i32(int(NAME, row_tiles)?);
    let name = match tile {
        TileRows::Large => "routed_down_rows128",
        TileRows::Small => "routed_down_rows64",
    };
    let launch = tile.launch(NAME, row_tiles, outputs.div_ceil(COLUMNS))?;
    gpu.launch(&gpu.function("routed", name)?, launch, arguments)
}

/// `out[i] += sum over j, ascending, of gates[i, j] * y[places[i, j]]`.
///
/// # Errors
/// A slice is too short, a size does not fit, or the driver fails.
pub fn routed_combine(gpu: &Gpu, call: &RoutedCombine<'_>) -> Result<()> {
    const NAME: &str = "adding what routed experts give";
    let RoutedCombine { rows, per_row, width, .. } = *call;
    let slots = rows.checked_mul(per_row).ok_or(Error::SizeOverflow)?;
    let y = result(NAME, call.y, Form::F32, [slots, width, width])?;
    let out = result(NAME, call.out, Form::F32, [rows, width, width])?;
    let arguments = Arguments::new()
        .u64(y)
        .u64(call.places.expect(NAME, "the places in bytes", slots * 4)?)
        .u64(call.gates.expect(NAME, "the gates in bytes", slots * 4)?)
        .u64(out)
        .i32(int(NAME, per_row)?)
        .i32(int(NAME, width)?);
    multiple(NAME, "the width (needed: a multiple of)", width, 4)?;
    let grid = [int(NAME, rows)? as u32, int(NAME, width.div_ceil(4 * COMBINE_THREADS))? as u32, 1];
    let launch = Launch { grid, threads: COMBINE_THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("routed", "routed_combine")?, launch, arguments)
}

/// Slots of all rows. There has to be an expert.
pub(crate) fn slots(operation: &'static str, rows: usize, per_row: usize, experts: usize) -> Result<usize> {
    if experts == 0 {
        return Err(Error::Shape { operation, what: "the number of experts (at least)", expected: 1, found: 0 });
    }
    int(operation, experts)?;
    let slots = rows.checked_mul(per_row).ok_or(Error::SizeOverflow)?;
    int(operation, slots)?;
    Ok(slots)
}

/// The address of every expert's matrix, `expert_stride` elements apart.
pub(crate) fn expert_matrices(
    operation: &'static str,
    slice: Slice<'_>,
    experts: usize,
    expert_stride: usize,
    rows: usize,
    stride: usize,
    width: usize,
) -> Result<u64> {
    multiple(operation, "the elements of an expert (needed: a multiple of)", expert_stride, 8)?;
    let before = (experts - 1).checked_mul(expert_stride).and_then(|count| count.checked_mul(2));
    let before = before.ok_or(Error::SizeOverflow)?;
    let first = slice.expect(operation, "the experts' size in bytes", before)?;
    let last = slice.part(before, slice.bytes() - before)?;
    operand(operation, "the last expert's size in bytes", last, [rows, stride, width])?;
    Ok(first)
}

pub(crate) fn tile_rows(slots: usize, experts: usize) -> TileRows {
    if slots / experts <= SMALL_PLACES { TileRows::Small } else { TileRows::Large }
}

/// As many tiles of rows as there can be, however the slots are spread over the experts.
pub(crate) fn most_row_tiles(slots: usize, experts: usize, tile: TileRows) -> usize {
    slots / tile.rows() + experts.min(slots)
}
