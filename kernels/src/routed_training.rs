//! Routed experts in training: the launchers of `cuda/routed_training.cu`.
//!
//! [`routed_sort`](crate::routed_sort) gives each slot (a row's j-th expert) a place, in ascending order of expert.
//! [`grouped_product`] multiplies the places of each expert by its matrix; [`grouped_input_gradient`] and
//! [`grouped_weight_gradient`] go back through that. [`routed_sum`] adds up what a row's places hold: the experts' outputs
//! by their gates on the way forward, their inputs' gradients on the way back; [`routed_spread`] brings a row's gradient to
//! its places. How many places an expert has is known on the device alone: every grid is as large as can be
//! needed, so a launch can be captured and replayed with other routes.

use crate::{
    Buffer, Error, Form, Gpu, Output, Result, Slice,
    checks::{aligned_to, int, multiple, strided_by_eight},
    gemm::{TileRows, operand, result},
    launch::{Arguments, Launch},
    routed::{COLUMNS, expert_matrices, most_row_tiles, slots, tile_rows},
};

/// What [`grouped_product`] works on.
#[derive(Clone, Copy, Debug)]
pub struct GroupedProduct<'a> {
    /// `[x_rows, inputs]` bfloat16; starts at a multiple of 16 bytes.
    pub x: Slice<'a>,
    /// Rows of `x`: `places` where there are no sources.
    pub x_rows: usize,
    /// Elements from one row of `x` to the next, a multiple of 8.
    pub x_stride: usize,
    /// `[places]` of i32, of [`RoutedSort`](crate::RoutedSort): the row of `x` of each place; none where `x` is by place.
    pub sources: Option<Slice<'a>>,
    /// `[experts + 1]` of i32, of [`RoutedSort`](crate::RoutedSort): the first place of each expert, then their number.
    pub offsets: Slice<'a>,
    /// `[experts][outputs, inputs]` bfloat16; starts at a multiple of 16 bytes.
    pub weight: Slice<'a>,
    /// Elements from one row of a matrix to the next, a multiple of 8.
    pub weight_stride: usize,
    /// Elements from one expert's matrix to the next, a multiple of 8.
    pub expert_stride: usize,
    /// `[places, outputs]` in `form`, written; starts at a multiple of 16 bytes. Places that no expert has stay as they are.
    pub out: Slice<'a>,
    /// F32 or bfloat16.
    pub form: Form,
    /// Whether `out` is added to.
    pub add: bool,
    /// Elements from one row of `out` to the next, a multiple of 8.
    pub out_stride: usize,
    /// The most places there can be: rows times experts a row.
    pub places: usize,
    /// Experts there are.
    pub experts: usize,
    /// Rows of a matrix, a multiple of 8.
    pub outputs: usize,
    /// The summed dimension, a multiple of 8.
    pub inputs: usize,
}

/// What [`grouped_input_gradient`] works on.
#[derive(Clone, Copy, Debug)]
pub struct GroupedInputGradient<'a> {
    /// `[places, outputs]` bfloat16; starts at a multiple of 16 bytes.
    pub dy: Slice<'a>,
    /// Elements from one row of `dy` to the next, a multiple of 8.
    pub dy_stride: usize,
    /// As in [`GroupedProduct`].
    pub offsets: Slice<'a>,
    /// `[experts][outputs, inputs]` bfloat16; starts at a multiple of 16 bytes.
    pub weight: Slice<'a>,
    /// Elements from one row of a matrix to the next, a multiple of 8.
    pub weight_stride: usize,
    /// Elements from one expert's matrix to the next, a multiple of 8.
    pub expert_stride: usize,
    /// `[places, inputs]` in `form`, written; starts at a multiple of 16 bytes.
    pub dx: Slice<'a>,
    /// F32 or bfloat16.
    pub form: Form,
    /// Whether `dx` is added to.
    pub add: bool,
    /// Elements from one row of `dx` to the next, a multiple of 8.
    pub dx_stride: usize,
    /// The most places there can be.
    pub places: usize,
    /// Experts there are.
    pub experts: usize,
    /// The summed dimension, a multiple of 8.
    pub outputs: usize,
    /// Columns of a matrix, a multiple of 8.
    pub inputs: usize,
}

/// What [`grouped_weight_gradient`] works on.
#[derive(Clone, Copy, Debug)]
pub struct GroupedWeightGradient<'a> {
    /// `[places, outputs]` bfloat16; starts at a multiple of 16 bytes.
    pub dy: Slice<'a>,
    /// Elements from one row of `dy` to the next, a multiple of 8.
    pub dy_stride: usize,
    /// `[places, inputs]` bfloat16, by place; starts at a multiple of 16 bytes.
    pub x: Slice<'a>,
    /// Elements from one row of `x` to the next, a multiple of 8.
    pub x_stride: usize,
    /// As in [`GroupedProduct`].
    pub offsets: Slice<'a>,
    /// `[experts][outputs, inputs]` in F32; starts at a multiple of 16 bytes. All of it is written, also where an expert has
    /// no places.
    pub gradient: Slice<'a>,
    /// Elements from one row of an expert's gradient to the next, a multiple of 4.
    pub gradient_stride: usize,
    /// Elements from one expert's gradient to the next, a multiple of 4.
    pub expert_stride: usize,
    /// [`Output::F32`] or [`Output::AddF32`].
    pub output: Output,
    /// At least [`grouped_weight_gradient_workspace`] bytes.
    pub workspace: Slice<'a>,
    /// The most places there can be.
    pub places: usize,
    /// Experts there are.
    pub experts: usize,
    /// Rows of a matrix, a multiple of 8.
    pub outputs: usize,
    /// Columns of a matrix, a multiple of 8.
    pub inputs: usize,
}

/// What [`routed_spread`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RoutedSpread<'a> {
    /// `[rows, width]` in F32: the gradient of what [`routed_sum`] wrote.
    pub dout: Slice<'a>,
    /// `[rows, per_row]` of i32, of [`RoutedSort`](crate::RoutedSort): the place of each slot, or -1.
    pub places: Slice<'a>,
    /// `[rows, per_row]` in F32.
    pub gates: Slice<'a>,
    /// `[places, width]` bfloat16, written: the gradient of what was added up.
    pub dy: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Experts of a row.
    pub per_row: usize,
    /// Elements of a row, a multiple of 8.
    pub width: usize,
}

/// What [`routed_sum`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RoutedSum<'a> {
    /// `[places, width]` bfloat16, by place.
    pub y: Slice<'a>,
    /// `[rows, per_row]` of i32, of [`RoutedSort`](crate::RoutedSort): the place of each slot, or -1.
    pub places: Slice<'a>,
    /// `[rows, per_row]` in F32: the weight of each slot; none: all are 1.
    pub gates: Option<Slice<'a>>,
    /// `[rows, width]` in `form`, what is added to; none: zeros. It may be `out`.
    pub before: Option<Slice<'a>>,
    /// `[rows, width]` in `form`, written.
    pub out: Slice<'a>,
    /// F32 or bfloat16.
    pub form: Form,
    /// Rows.
    pub rows: usize,
    /// Experts of a row.
    pub per_row: usize,
    /// Elements of a row, a multiple of 8.
    pub width: usize,
}

const ROW_THREADS: usize = 256;
const SUM_THREADS: usize = 256;

/// `out[p] (+)= x[sources[p]] weight_e^T` (or `x[p]`), e the expert of place p, sums in F32.
///
/// # Errors
/// A slice is too short, a size, a stride or an address is not aligned, a size does not fit, the form is [`Form::Split`], or the
/// driver fails.
pub fn grouped_product(gpu: &Gpu, call: &GroupedProduct<'_>) -> Result<()> {
    const NAME: &str = "product of routed experts in training";
    let GroupedProduct { x_rows, x_stride, weight_stride, expert_stride, out_stride, .. } = *call;
    let GroupedProduct { places, experts, outputs, inputs, .. } = *call;
    slots(NAME, places, 1, experts)?;
    let sources = match call.sources {
        Some(sources) => sources.expect(NAME, "the sources in bytes", places * 4)?,
        None if x_rows < places => {
            return Err(Error::Shape { operation: NAME, what: "the rows of x", expected: places, found: x_rows });
        }
        None => 0,
    };
    let out = formed_result(NAME, call.out, call.form, [places, out_stride, outputs])?;
    let places_of = PlacesProduct {
        x: operand(NAME, "x's size in bytes", call.x, [x_rows, x_stride, inputs])?,
        x_stride,
        sources,
        offsets: call.offsets.expect(NAME, "the offsets in bytes", (experts + 1) * 4)?,
        weight: expert_matrices(NAME, call.weight, experts, expert_stride, outputs, weight_stride, inputs)?,
        weight_stride,
        expert_stride,
        out,
        out_stride,
        places,
        experts,
        columns: outputs,
        depth: inputs,
        before: if call.add { out } else { 0 },
    };
    places_of.launch(gpu, NAME, product_kernels(call.form))
}

/// `dx[p] (+)= dy[p] weight_e`, e the expert of place p, sums in F32: the gradient of `x[p]` where `y[p] = x[p] weight_e^T`.
///
/// # Errors
/// As [`grouped_product`].
pub fn grouped_input_gradient(gpu: &Gpu, call: &GroupedInputGradient<'_>) -> Result<()> {
    const NAME: &str = "gradient of routed experts' inputs";
    let GroupedInputGradient { dy_stride, weight_stride, expert_stride, dx_stride, .. } = *call;
    let GroupedInputGradient { places, experts, outputs, inputs, .. } = *call;
    slots(NAME, places, 1, experts)?;
    let dx = formed_result(NAME, call.dx, call.form, [places, dx_stride, inputs])?;
    let places_of = PlacesProduct {
        x: operand(NAME, "dy's size in bytes", call.dy, [places, dy_stride, outputs])?,
        x_stride: dy_stride,
        sources: 0,
        offsets: call.offsets.expect(NAME, "the offsets in bytes", (experts + 1) * 4)?,
        weight: expert_matrices(NAME, call.weight, experts, expert_stride, outputs, weight_stride, inputs)?,
        weight_stride,
        expert_stride,
        out: dx,
        out_stride: dx_stride,
        places,
        experts,
        columns: inputs,
        depth: outputs,
        before: if call.add { dx } else { 0 },
    };
    places_of.launch(gpu, NAME, input_gradient_kernels(call.form))
}

/// `gradient_e (+)= sum over the places p of expert e of dy[p] x[p]^T`, in F32: the gradient of `weight_e` where
/// `y[p] = x[p] weight_e^T`. The order of the sums depends on the sizes, on the number of the card's multiprocessors and on
/// the expert's places alone.
///
/// # Errors
/// A slice is too short, a size, a stride or an address is not aligned, a size does not fit, the output is bfloat16, or the
/// driver fails.
pub fn grouped_weight_gradient(gpu: &Gpu, call: &GroupedWeightGradient<'_>) -> Result<()> {
    const NAME: &str = "gradient of routed experts' weights";
    let GroupedWeightGradient { dy_stride, x_stride, gradient_stride, expert_stride, output, .. } = *call;
    let GroupedWeightGradient { places, experts, outputs, inputs, .. } = *call;
    slots(NAME, places, 1, experts)?;
    if output == Output::Bf16 {
        return Err(Error::Unsupported { operation: NAME, what: "gradients in bfloat16".to_owned() });
    }
    multiple(NAME, "the elements of an expert (needed: a multiple of)", expert_stride, 4)?;
    let before = (experts - 1).checked_mul(expert_stride).and_then(|count| count.checked_mul(4));
    let before = before.ok_or(Error::SizeOverflow)?;
    let gradient = call.gradient.expect(NAME, "the experts' gradients in bytes", before)?;
    let last = call.gradient.part(before, call.gradient.bytes() - before)?;
    wide_result(NAME, last, [outputs, gradient_stride, inputs])?;
    let sums = WeightGradient {
        dy: operand(NAME, "dy's size in bytes", call.dy, [places, dy_stride, outputs])?,
        dy_stride,
        x: operand(NAME, "x's size in bytes", call.x, [places, x_stride, inputs])?,
        x_stride,
        offsets: call.offsets.expect(NAME, "the offsets in bytes", (experts + 1) * 4)?,
        out: gradient,
        out_stride: gradient_stride,
        expert_stride,
        workspace: Some(call.workspace),
        places,
        experts,
        rows: outputs,
        columns: inputs,
        before: if output == Output::AddF32 { gradient } else { 0 },
    };
    sums.launch(gpu, NAME)
}

/// Bytes of workspace that [`grouped_weight_gradient`] needs: none where the gradients alone fill the card.
///
/// # Errors
/// There are no experts, or a size does not fit.
pub fn grouped_weight_gradient_workspace(
    gpu: &Gpu,
    places: usize,
    experts: usize,
    outputs: usize,
    inputs: usize,
) -> Result<usize> {
    slots("workspace of routed experts' gradients", places, 1, experts)?;
    Pieces::of(gpu, places, experts, outputs, inputs).bytes(outputs, inputs)
}

/// `dy[p] = gates[i, j] dout[i]`, where p is the place of slot (i, j).
///
/// # Errors
/// A slice is too short, an address or the width is not aligned, a size does not fit, or the driver fails.
pub fn routed_spread(gpu: &Gpu, call: &RoutedSpread<'_>) -> Result<()> {
    const NAME: &str = "spreading a gradient to routed experts";
    let RoutedSpread { rows, per_row, width, .. } = *call;
    let slots = slots(NAME, rows, per_row, 1)?;
    multiple(NAME, "the width (needed: a multiple of)", width, 8)?;
    let arguments = Arguments::new()
        .u64(result(NAME, call.dout, Form::F32, [rows, width, width])?)
        .u64(call.places.expect(NAME, "the places in bytes", slots * 4)?)
        .u64(call.gates.expect(NAME, "the gates in bytes", slots * 4)?)
        .u64(result(NAME, call.dy, Form::Bf16, [slots, width, width])?)
        .i32(int(NAME, slots)?)
        .i32(int(NAME, per_row)?)
        .i32(int(NAME, width)?);
    let grid = [slots.div_ceil(ROW_THREADS / 32) as u32, 1, 1];
    let launch = Launch { grid, threads: ROW_THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("routed_training", "routed_spread")?, launch, arguments)
}

/// `out[i] = before[i] + sum over j, ascending, of gates[i, j] y[places[i, j]]`, in F32 before it is stored.
///
/// # Errors
/// A slice is too short, an address or the width is not aligned, the form is [`Form::Split`], a size does not fit, or the
/// driver fails.
pub fn routed_sum(gpu: &Gpu, call: &RoutedSum<'_>) -> Result<()> {
    const NAME: &str = "adding up routed experts";
    let RoutedSum { form, rows, per_row, width, .. } = *call;
    let slots = slots(NAME, rows, per_row, 1)?;
    multiple(NAME, "the width (needed: a multiple of)", width, 8)?;
    let name = match form {
        Form::F32 => "routed_sum_f32",
        Form::Bf16 => "routed_sum_bf16",
        Form::Split => {
            return Err(Error::Unsupported { operation: NAME, what: "a sum in two parts".to_owned() });
        }
    };
    let gates = Slice::expect_optional(call.gates, NAME, "the gates in bytes", slots * 4)?;
    let before = match call.before {
        Some(before) => result(NAME, before, form, [rows, width, width])?,
        None => 0,
    };
    let arguments = Arguments::new()
        .u64(result(NAME, call.y, Form::Bf16, [slots, width, width])?)
        .u64(call.places.expect(NAME, "the places in bytes", slots * 4)?)
        .u64(gates)
        .u64(before)
        .u64(result(NAME, call.out, form, [rows, width, width])?)
        .i32(int(NAME, rows)?)
        .i32(int(NAME, per_row)?)
        .i32(int(NAME, width)?);
    let threads = rows.checked_mul(width / 8).ok_or(Error::SizeOverflow)?;
    // A thread's number, up to the end of its block, is an i32 in the kernel.
    int(NAME, threads.next_multiple_of(ROW_THREADS))?;
    let launch =
        Launch { grid: [threads.div_ceil(ROW_THREADS) as u32, 1, 1], threads: ROW_THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("routed_training", name)?, launch, arguments)
}

/// A product of places, checked. `offsets` 0: every expert has `places`.
pub(crate) struct PlacesProduct {
    pub(crate) x: u64,
    pub(crate) x_stride: usize,
    pub(crate) sources: u64,
    pub(crate) offsets: u64,
    pub(crate) weight: u64,
    pub(crate) weight_stride: usize,
    pub(crate) expert_stride: usize,
    pub(crate) out: u64,
    pub(crate) out_stride: usize,
    pub(crate) places: usize,
    pub(crate) experts: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    /// What is added to, laid out as `out`, or 0.
    pub(crate) before: u64,
}

impl PlacesProduct {
    /// `names`: the kernels of the large and of the small tile.
    pub(crate) fn launch(&self, gpu: &Gpu, operation: &'static str, names: [&'static str; 2]) -> Result<()> {
        multiple(operation, "the columns of a result (needed: a multiple of)", self.columns, 8)?;
        let tile = tile_rows(self.places, self.experts);
        let row_tiles = most_row_tiles(self.places, self.experts, tile);
        let arguments = Arguments::new()
            .u64(self.x)
            .u64(self.sources)
            .u64(self.offsets)
            .u64(self.weight)
            .u64(self.out)
            .u64(self.before)
            .u64(self.expert_stride as u64)
            .i32(int(operation, self.x_stride)?)
            .i32(int(operation, self.weight_stride)?)
            .i32(int(operation, self.out_stride)?)
            .i32(int(operation, self.experts)?)
            .i32(int(operation, self.places)?)
            .i32(int(operation, self.columns)?)
            .i32(int(operation, self.depth)?)
            .i32(int(operation, row_tiles)?);
        let name = names[usize::from(tile == TileRows::Small)];
        let launch = tile.launch(operation, row_tiles, self.columns.div_ceil(COLUMNS))?;
        let size = [self.places, self.columns, self.depth];
        gpu.launch_product(&gpu.function("routed_training", name)?, launch, arguments, size)
    }
}

/// A gradient of weights, checked but for its workspace, which it takes itself where it is given none. `offsets` 0: every
/// expert has `places`.
pub(crate) struct WeightGradient<'a> {
    pub(crate) dy: u64,
    pub(crate) dy_stride: usize,
    pub(crate) x: u64,
    pub(crate) x_stride: usize,
    pub(crate) offsets: u64,
    pub(crate) out: u64,
    pub(crate) out_stride: usize,
    pub(crate) expert_stride: usize,
    pub(crate) workspace: Option<Slice<'a>>,
    pub(crate) places: usize,
    pub(crate) experts: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// What is added to, laid out as `out`, or 0.
    pub(crate) before: u64,
}

impl WeightGradient<'_> {
    pub(crate) fn launch(&self, gpu: &Gpu, operation: &'static str) -> Result<()> {
        let WeightGradient { places, experts, rows, columns, .. } = *self;
        let pieces = Pieces::of(gpu, places, experts, rows, columns);
        let bytes = pieces.bytes(rows, columns)?;
        // Memory that is given back here is not used by anything else until what is in the stream now is done.
        let own = match self.workspace {
            None if bytes > 0 => Some(gpu.allocate(bytes, operation)?),
            _ => None,
        };
        let (workspace, what) = (self.workspace.or(own.as_ref().map(Buffer::slice)), "the workspace in bytes");
        let workspace = aligned_to(16, operation, what, Slice::expect_optional(workspace, operation, what, bytes)?)?;
        let sizes = |arguments: Arguments| -> Result<Arguments> {
            let arguments = arguments.i32(int(operation, self.out_stride)?).i32(int(operation, experts)?);
            let arguments = arguments.i32(int(operation, places)?).i32(int(operation, rows)?);
            Ok(arguments.i32(int(operation, columns)?).i32(pieces.most_places))
        };
        let arguments = Arguments::new()
            .u64(self.dy)
            .u64(self.x)
            .u64(self.offsets)
            .u64(self.out)
            .u64(self.before)
            .u64(workspace)
            .u64(self.expert_stride as u64)
            .i32(int(operation, self.dy_stride)?)
            .i32(int(operation, self.x_stride)?);
        let tiles = pieces.count.checked_mul(rows.div_ceil(TileRows::Large.rows())).ok_or(Error::SizeOverflow)?;
        let launch = TileRows::Large.launch(operation, tiles, columns.div_ceil(COLUMNS))?;
        let function = gpu.function("routed_training", "grouped_weight_gradient")?;
        gpu.launch_product(&function, launch, sizes(arguments)?, [rows, columns, places])?;
        if pieces.most_places == i32::MAX {
            return Ok(());
        }
        let arguments = Arguments::new()
            .u64(workspace)
            .u64(self.offsets)
            .u64(self.out)
            .u64(self.before)
            .u64(self.expert_stride as u64);
        let blocks = int(operation, (rows * columns / 4).div_ceil(SUM_THREADS))? as u32;
        // There are pieces only where experts are few: far fewer than a grid's rows.
        let launch = Launch { grid: [blocks, experts as u32, 1], threads: SUM_THREADS as u32, shared_bytes: 0 };
        gpu.launch(&gpu.function("routed_training", "grouped_weight_gradient_sum")?, launch, sizes(arguments)?)
    }
}

/// How the sums over an expert's places are cut: pieces of at most `most_places` (`i32::MAX`: in one), of which there are
/// at most `count` in all.
struct Pieces {
    most_places: i32,
    count: usize,
}

impl Pieces {
    /// What takes least time, as a card's multiprocessors share the tiles of all pieces out: in units of one step of a tile
    /// (64 places), a piece takes two to begin, and one of several takes about seven to be written and read again. A tile
    /// that has a multiprocessor for itself waits about a third of its time.
    fn of(gpu: &Gpu, places: usize, experts: usize, rows: usize, columns: usize) -> Self {
        const LARGEST_CUT: usize = 32;
        const FEWEST_PLACES: usize = 256;
        let processors = (gpu.properties().multiprocessors as usize).max(1);
        let tiles = experts * rows.div_ceil(TileRows::Large.rows()) * columns.div_ceil(COLUMNS);
        let mean = places.div_ceil(experts);
        let time = |cut: usize| {
            let waves = tiles.saturating_mul(cut).div_ceil(processors);
            let alone = if waves == 1 { 4 } else { 3 };
            waves * (mean.div_ceil(64 * cut) + if cut == 1 { 2 } else { 9 }) * alone
        };
        let cut = (1..=LARGEST_CUT).filter(|&cut| cut == 1 || mean / cut >= FEWEST_PLACES).min_by_key(|&cut| time(cut));
        let cut = cut.unwrap_or(1);
        // Experts differ in their places: one with an eighth more than the mean still goes into as many pieces.
        let most = if experts == 1 { mean } else { mean + mean / 8 }.div_ceil(cut).next_multiple_of(64);
        match i32::try_from(most) {
            Ok(most_places) if cut > 1 => Self { most_places, count: places / most + experts },
            _ => Self { most_places: i32::MAX, count: experts },
        }
    }

    /// Of the pieces' sums.
    fn bytes(&self, rows: usize, columns: usize) -> Result<usize> {
        if self.most_places == i32::MAX {
            return Ok(0);
        }
        self.count
            .checked_mul(rows)
            .and_then(|n| n.checked_mul(columns))
            .and_then(|n| n.checked_mul(4))
            .ok_or(Error::SizeOverflow)
    }
}

/// The kernels of `x weight^T` with results in a form, for tiles of 128 and of 64 rows.
pub(crate) fn product_kernels(form: Form) -> [&'static str; 2] {
    match form {
        Form::F32 => ["grouped_product_f32_rows128", "grouped_product_f32_rows64"],
        _ => ["grouped_product_rows128", "grouped_product_rows64"],
    }
}

/// As [`product_kernels`], of `dy weight`.
pub(crate) fn input_gradient_kernels(form: Form) -> [&'static str; 2] {
    match form {
        Form::F32 => ["grouped_input_gradient_f32_rows128", "grouped_input_gradient_f32_rows64"],
        _ => ["grouped_input_gradient_rows128", "grouped_input_gradient_rows64"],
    }
}

/// The address of a result in F32 or bfloat16.
pub(crate) fn formed_result(operation: &'static str, slice: Slice<'_>, form: Form, shape: [usize; 3]) -> Result<u64> {
    match form {
        Form::F32 => wide_result(operation, slice, shape),
        Form::Bf16 => narrow_result(operation, slice, shape),
        Form::Split => Err(Error::Unsupported { operation, what: "a result in two parts".to_owned() }),
    }
}

/// The address of a result in bfloat16 that is written by sixteen bytes.
pub(crate) fn narrow_result(operation: &'static str, slice: Slice<'_>, shape: [usize; 3]) -> Result<u64> {
    strided_by_eight(operation, "the result's size in bytes", slice, shape)
}

/// The address of a result in F32 that is written by pairs and by sixteen bytes.
pub(crate) fn wide_result(operation: &'static str, slice: Slice<'_>, [rows, stride, width]: [usize; 3]) -> Result<u64> {
    multiple(operation, "the columns of a result (needed: a multiple of)", width, 8)?;
    multiple(operation, "the stride of a result's rows (needed: a multiple of)", stride, 4)?;
    result(operation, slice, Form::F32, [rows, stride, width])
}
