//! Products of few rows, 1 to 64, straight from the weights as they lie: the launchers of `cuda/linear_*.cu`.
//!
//! [`linear`] multiplies one input by up to three matrices of one format in one pass, and stores the result, adds it to
//! a residual, or makes a gated activation of a pair. [`linear_routed_gated`] and [`linear_routed_down`] are the two
//! products of routed experts, with the experts' numbers read on the device.
//!
//! A row's result depends on the row and the matrices only, bit for bit: not on the number of rows, nor on the card.

use bytemuck::NoUninit;

use crate::{
    Activation, Error, Form, Gpu, Properties, Result, Slice,
    checks::{aligned, at_most, padded_int},
    gpu::CLUSTERS_FROM,
    launch::{Arguments, Launch},
    weights::{TILE_ROWS, TileFormat, WeightLayout},
};

/// One matrix of a [`linear`] call.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// `[rows, cols]` in the call's format, at an address that is a multiple of 16.
    pub weights: Slice<'a>,
    /// Output features.
    pub rows: usize,
    /// f32 `[rows]`.
    pub bias: Option<Slice<'a>>,
    /// The column of the output where the first feature goes; 0 for a gated pair.
    pub column: usize,
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It takes the place of what the output holds: f32 `[n, width]`.
    Store,
    /// It is added to what the output holds: f32 `[n, width]`.
    Add,
    /// `act(gate) * up` of two matrices of equal size takes the place of what the output holds: [`Form::Split`]
    /// `[n, 2, width]`.
    Gated(Activation),
}

/// The sizes and places of a [`linear`] call.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// [`Form::Split`] `[n, 2, cols]`, at an address that is a multiple of 16.
    pub x: Slice<'a>,
    /// Rows of x, 1 to [`MOST_ROWS`].
    pub n: usize,
    /// Input features, a multiple of 8; of 256 for K-quants.
    pub cols: usize,
    /// How the matrices lie.
    pub format: TileFormat,
    /// One to three; gate and up for [`Then::Gated`].
    pub matrices: &'a [Matrix<'a>],
    /// What becomes of the result.
    pub then: Then,
    /// As `then` says.
    pub out: Slice<'a>,
    /// Features of a row of the output.
    pub width: usize,
}

/// The rows that a call takes at most.
pub const MOST_ROWS: usize = 64;

/// `out[i, column + r] = sum_k x[i, k] W[r, k] + bias[r]` for each matrix, or what [`Then`] makes of it.
///
/// How the sum is split over warps depends on the rows of all matrices of the call together, and on the columns: the
/// same call on more rows of x gives each row the same bits.
///
/// # Errors
/// There are more than [`MOST_ROWS`] rows or three matrices, the columns are no multiple of 8 (or 256), a gated pair is
/// none, a matrix reaches past the output's width, a slice is too small, or the launch fails.
pub fn linear(gpu: &Gpu, call: &Linear<'_>) -> Result<()> {
    const OPERATION: &str = "linear";
    let Linear { x, n, cols, format, matrices, then, out, width } = *call;
    at_most(OPERATION, "the rows of x, at most", MOST_ROWS, n)?;
    at_most(OPERATION, "the matrices, at most", 3, matrices.len())?;
    let mut product = Product::new(OPERATION, format, cols, width, then)?;
    product.n = n as i32;
    product.x = aligned(OPERATION, "the operand in bytes", x, Form::Split.bytes(n, cols)?)?;
    product.out = out.expect(OPERATION, "the output in bytes", Form::F32.bytes(n, width)?)?;
    if matches!(then, Then::Gated(_)) {
        equal(OPERATION, "the matrices of a gated pair", 2, matrices.len())?;
        for matrix in matrices {
            equal(OPERATION, "the rows of a matrix of a gated pair", width, matrix.rows)?;
            equal(OPERATION, "the column of a matrix of a gated pair", 0, matrix.column)?;
        }
    }
    for (index, matrix) in matrices.iter().enumerate() {
        let end = matrix.column.checked_add(matrix.rows).ok_or(Error::SizeOverflow)?;
        at_most(OPERATION, "the column after a matrix's last, at most", width, end)?;
        let bytes = WeightLayout::Tiles(format).bytes(matrix.rows, cols)?;
        product.weights[index] = aligned(OPERATION, "a matrix in bytes", matrix.weights, bytes)?;
        product.rows[index] = padded_int(OPERATION, "the rows of a matrix", matrix.rows)?;
        product.column[index] = matrix.column as i32;
        let bias_bytes = Form::F32.bytes(1, matrix.rows)?;
        product.bias[index] = Slice::expect_optional(matrix.bias, OPERATION, "a bias in bytes", bias_bytes)?;
    }
    if n == 0 || cols == 0 || matrices.iter().all(|matrix| matrix.rows == 0) {
        return if cols == 0 { Err(empty(OPERATION)) } else { Ok(()) };
    }
    let row_tiles = matrices.iter().map(|matrix| matrix.rows.div_ceil(TILE_ROWS)).sum();
    let team = Team::new(row_tiles, records(cols), then);
    product.split_log2 = team.split_log2;
    let tasks = if matches!(then, Then::Gated(_)) { row_tiles / 2 } else { row_tiles };
    if matches!(n, 9..=16)
        && let Some(blocks) = team.blocks_of_pairs(row_tiles, then, gpu.properties().multiprocessors as usize)
    {
        return launch(gpu, format, Kernel::Rows16Paired, PAIRED_WARPS, [blocks, 1], Arguments::new().value(product));
    }
    if matches!(n, 9..=16)
        && let Some(clusters) = team.clusters(row_tiles, then, gpu.properties())
    {
        let grid = [CLUSTER * clusters, 1];
        return launch(gpu, format, Kernel::Rows16InCluster, CLUSTER_WARPS, grid, Arguments::new().value(product));
    }
    // Rows past a kernel's go to blocks of the same matrices beside the first, so that weights come from memory once. Where
    // those fit on the card too, few rows a block are faster: a warp waits less for its operands.
    let (blocks, at_once) =
        (tasks.div_ceil(team.of_block()), gpu.properties().multiprocessors as usize * team.blocks_of_multiprocessor());
    let kernels = [Kernel::Rows4, Kernel::Rows8, Kernel::Rows16, Kernel::Rows32];
    let fits = |kernel: &Kernel| n <= kernel.rows() || blocks * n.div_ceil(kernel.rows()) <= at_once;
    let kernel = kernels.into_iter().find(fits).unwrap_or(Kernel::Rows32);
    let groups = n.div_ceil(kernel.rows());
    let blocks = blocks.min((at_once / groups).max(1));
    launch(gpu, format, kernel, team.warps_of_block(), [blocks, groups], Arguments::new().value(product))
}

/// The sizes and places of a [`linear_routed_gated`] call.
#[derive(Clone, Copy, Debug)]
pub struct LinearRoutedGated<'a> {
    /// [`Form::Split`] `[n, 2, cols]`, at an address that is a multiple of 16.
    pub x: Slice<'a>,
    /// Rows of x, 1 to [`MOST_ROWS`].
    pub n: usize,
    /// Input features, a multiple of 8; of 256 for K-quants.
    pub cols: usize,
    /// How the matrices lie.
    pub format: TileFormat,
    /// The experts' gate matrices `[rows, cols]`, one after the other.
    pub gate: Slice<'a>,
    /// As `gate`.
    pub up: Slice<'a>,
    /// How many experts there are.
    pub experts: usize,
    /// Output features of an expert.
    pub rows: usize,
    /// i32 `[n, per_row]`: the experts of each row; rows whose experts are negative are skipped.
    pub ids: Slice<'a>,
    /// Experts of a row.
    pub per_row: usize,
    /// What the gate goes through.
    pub activation: Activation,
    /// [`Form::Split`] `[n * per_row, 2, rows]`.
    pub out: Slice<'a>,
}

/// `out[i * per_row + j] = act(gate_e x[i]) * (up_e x[i])` with e the expert `ids[i, j]`.
///
/// # Errors
/// There are more than [`MOST_ROWS`] rows, the columns are no multiple of 8 (or 256), a slice is too small, or the launch
/// fails.
pub fn linear_routed_gated(gpu: &Gpu, call: &LinearRoutedGated<'_>) -> Result<()> {
    const OPERATION: &str = "linear routed gated";
    let LinearRoutedGated { x, n, cols, format, gate, up, experts, rows, ids, per_row, activation, out } = *call;
    at_most(OPERATION, "the rows of x, at most", MOST_ROWS, n)?;
    let slots = n.checked_mul(per_row).ok_or(Error::SizeOverflow)?;
    let then = Then::Gated(activation);
    let mut product = Product::new(OPERATION, format, cols, rows, then)?;
    product.x = aligned(OPERATION, "the operand in bytes", x, Form::Split.bytes(n, cols)?)?;
    product.out = out.expect(OPERATION, "the output in bytes", Form::Split.bytes(slots, rows)?)?;
    let (expert_bytes, all_bytes) = expert_bytes(format, rows, cols, experts)?;
    product.weights[0] = aligned(OPERATION, "the gate matrices in bytes", gate, all_bytes)?;
    product.weights[1] = aligned(OPERATION, "the up matrices in bytes", up, all_bytes)?;
    product.rows = [product.width, product.width, 0];
    let ids = ids.expect(OPERATION, "the experts of the rows in bytes", Form::F32.bytes(n, per_row)?)?;
    let routing = Routing {
        experts: ids,
        gates: 0,
        expert_bytes,
        per_row: padded_int(OPERATION, "experts", per_row)?,
        padding: 0,
    };
    if slots == 0 || rows == 0 {
        return Ok(());
    }
    if cols == 0 {
        return Err(empty(OPERATION));
    }
    let row_tiles = rows.div_ceil(TILE_ROWS);
    let team = Team::new(2 * row_tiles * per_row, records(cols), then);
    product.split_log2 = team.split_log2;
    let grid = [row_tiles.div_ceil(team.of_block()), slots];
    let arguments = Arguments::new().value(product).value(routing);
    launch(gpu, format, Kernel::RoutedGated, team.warps_of_block(), grid, arguments)
}

/// The sizes and places of a [`linear_routed_down`] call.
#[derive(Clone, Copy, Debug)]
pub struct LinearRoutedDown<'a> {
    /// [`Form::Split`] `[n * per_row, 2, cols]`, at an address that is a multiple of 16: what [`linear_routed_gated`]
    /// gave.
    pub x: Slice<'a>,
    /// Rows of the output, 1 to [`MOST_ROWS`].
    pub n: usize,
    /// Input features of an expert, a multiple of 8; of 256 for K-quants.
    pub cols: usize,
    /// How the matrices lie.
    pub format: TileFormat,
    /// The experts' matrices `[rows, cols]`, one after the other.
    pub down: Slice<'a>,
    /// How many experts there are.
    pub experts: usize,
    /// Output features.
    pub rows: usize,
    /// i32 `[n, per_row]`: the experts of each row; rows whose experts are negative are skipped.
    pub ids: Slice<'a>,
    /// f32 `[n, per_row]`: what each expert's result is multiplied by.
    pub gates: Slice<'a>,
    /// Experts of a row.
    pub per_row: usize,
    /// Whether the result is added to what `out` holds (a residual) or takes its place.
    pub add: bool,
    /// f32 `[n, rows]`.
    pub out: Slice<'a>,
}

/// `out[i] = sum_j gates[i, j] * (down_e x[i * per_row + j])` with e the expert `ids[i, j]`, or added to `out[i]`.
///
/// # Errors
/// There are more than [`MOST_ROWS`] rows, the columns are no multiple of 8 (or 256), a slice is too small, or the launch
/// fails.
pub fn linear_routed_down(gpu: &Gpu, call: &LinearRoutedDown<'_>) -> Result<()> {
    const OPERATION: &str = "linear routed down";
    let LinearRoutedDown { x, n, cols, format, down, experts, rows, ids, gates, per_row, add, out } = *call;
    at_most(OPERATION, "the rows of the output, at most", MOST_ROWS, n)?;
    let slots = n.checked_mul(per_row).ok_or(Error::SizeOverflow)?;
    let then = if add { Then::Add } else { Then::Store };
    let mut product = Product::new(OPERATION, format, cols, rows, then)?;
    product.x = aligned(OPERATION, "the operand in bytes", x, Form::Split.bytes(slots, cols)?)?;
    product.out = out.expect(OPERATION, "the output in bytes", Form::F32.bytes(n, rows)?)?;
    let (expert_bytes, all_bytes) = expert_bytes(format, rows, cols, experts)?;
    product.weights[0] = aligned(OPERATION, "the matrices in bytes", down, all_bytes)?;
    product.rows[0] = product.width;
    let ids = ids.expect(OPERATION, "the experts of the rows in bytes", Form::F32.bytes(n, per_row)?)?;
    let gates = gates.expect(OPERATION, "the weights of the experts in bytes", Form::F32.bytes(n, per_row)?)?;
    let routing =
        Routing { experts: ids, gates, expert_bytes, per_row: padded_int(OPERATION, "experts", per_row)?, padding: 0 };
    if slots == 0 || rows == 0 {
        return Ok(());
    }
    if cols == 0 {
        return Err(empty(OPERATION));
    }
    let row_tiles = rows.div_ceil(TILE_ROWS);
    let team = Team::new(row_tiles, records(cols) * per_row, then);
    product.split_log2 = team.split_log2;
    let grid = [row_tiles.div_ceil(team.of_block()), n];
    let arguments = Arguments::new().value(product).value(routing);
    launch(gpu, format, Kernel::RoutedDown, team.warps_of_block(), grid, arguments)
}

/// The kernels' first argument: `Product` in `cuda/linear/finish.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Product {
    weights: [u64; 3],
    bias: [u64; 3],
    x: u64,
    out: u64,
    rows: [i32; 3],
    column: [i32; 3],
    n: i32,
    cols: i32,
    width: i32,
    then: i32,
    split_log2: i32,
    padding: i32,
}

// SAFETY: eight integers of eight bytes, then twelve of four: without a gap.
unsafe impl NoUninit for Product {}

/// The kernels' second argument: `Routing` in `cuda/linear/product.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Routing {
    experts: u64,
    gates: u64,
    expert_bytes: u64,
    per_row: i32,
    padding: i32,
}

// SAFETY: integers of eight bytes, then two of four: without a gap.
unsafe impl NoUninit for Routing {}

impl Product {
    fn new(operation: &'static str, format: TileFormat, cols: usize, width: usize, then: Then) -> Result<Self> {
        let multiple = match format {
            TileFormat::Q4_K | TileFormat::Q6_K => 256,
            _ => 8,
        };
        if !cols.is_multiple_of(multiple) {
            return Err(Error::Unsupported {
                operation,
                what: format!("{cols} input features: products of few rows take multiples of {multiple} in {format:?}"),
            });
        }
        Ok(Self {
            weights: [0; 3],
            bias: [0; 3],
            x: 0,
            out: 0,
            rows: [0; 3],
            column: [0; 3],
            n: 1,
            cols: padded_int(operation, "the input features", cols)?,
            width: padded_int(operation, "the features of the output", width)?,
            then: match then {
                Then::Store => 0,
                Then::Add => 1,
                Then::Gated(Activation::Silu) => 2,
                Then::Gated(Activation::GeluTanh) => 3,
            },
            split_log2: 0,
            padding: 0,
        })
    }
}

/// How warps share the columns of a row tile. It depends on the matrices alone, as the order of sums does.
#[derive(Clone, Copy)]
struct Team {
    split_log2: i32,
    warps: usize,
}

impl Team {
    /// Warps on all row tiles together that keep a large card busy: twice what the largest now holds.
    const ENOUGH_WARPS: usize = 4096;
    /// The most warps of a block.
    const MOST_WARPS: usize = 16;
    /// The warps of a block of small teams.
    const BLOCK_WARPS: usize = 8;

    /// Doubles the warps on a row tile until there are enough of them, while each has a record.
    fn new(row_tiles: usize, records: usize, then: Then) -> Self {
        let halves = if matches!(then, Then::Gated(_)) { 2 } else { 1 };
        let mut split_log2 = 0;
        while 2 << split_log2 <= records.min(Self::MOST_WARPS / halves) && row_tiles << split_log2 < Self::ENOUGH_WARPS
        {
            split_log2 += 1;
        }
        Self { split_log2, warps: halves << split_log2 }
    }

    fn warps_of_block(self) -> usize {
        self.warps.max(Self::BLOCK_WARPS)
    }

    /// The blocks of products with two row tiles to a warp, where those fill the card.
    fn blocks_of_pairs(self, row_tiles: usize, then: Then, multiprocessors: usize) -> Option<usize> {
        let shares = 1 << self.split_log2;
        let tasks = if matches!(then, Then::Gated(_)) { row_tiles / 2 } else { row_tiles.div_ceil(2) };
        let fills = PAIRED_WARPS.is_multiple_of(shares) && tasks * shares >= PAIRED_WARPS * multiprocessors;
        fills.then(|| multiprocessors.min(tasks.div_ceil(PAIRED_WARPS / shares)))
    }

    /// The clusters of products with two row tiles to a cluster of two blocks, where sixteen warps share a tile and the
    /// clusters fill three quarters of the card at least.
    fn clusters(self, row_tiles: usize, then: Then, card: &Properties) -> Option<usize> {
        let shares = 1 << self.split_log2;
        let clusters = row_tiles.div_ceil(2);
        let takes = shares == CLUSTER * CLUSTER_WARPS
            && !matches!(then, Then::Gated(_))
            && card.compute_capability >= CLUSTERS_FROM
            && 4 * CLUSTER * clusters >= 3 * card.multiprocessors as usize;
        takes.then_some(clusters)
    }

    fn of_block(self) -> usize {
        self.warps_of_block() / self.warps
    }

    /// Sixteen warps of 128 registers a thread fill a multiprocessor.
    fn blocks_of_multiprocessor(self) -> usize {
        Self::MOST_WARPS / self.warps_of_block()
    }
}

/// The warps of a block that has two row tiles to a warp: `cuda/linear/paired.cuh`.
const PAIRED_WARPS: usize = 12;
/// The blocks of a cluster that shares two row tiles, and the warps of each.
const CLUSTER: usize = 2;
const CLUSTER_WARPS: usize = 8;
/// What such a block receives: `PairSums` in `cuda/linear/paired.cuh`.
const CLUSTER_BYTES: usize = CLUSTER * CLUSTER_WARPS * 8 * 32 * 4 + 16;

/// Pieces of 16 rows and 256 columns in a row tile.
fn records(cols: usize) -> usize {
    cols.div_ceil(256)
}

fn launch(
    gpu: &Gpu,
    format: TileFormat,
    kernel: Kernel,
    warps: usize,
    grid: [usize; 2],
    arguments: Arguments,
) -> Result<()> {
    let (image, name) = kernel.of(format);
    // The warps' sums of 64 outputs a group, behind the table of NF4: of two tiles, or twice as `SUMS_TWICE` in the
    // kernels says.
    let times = if kernel.groups() < 8 { 2 } else { 1 };
    let sums = match kernel {
        Kernel::Rows16InCluster => CLUSTER_BYTES,
        _ => times * warps * kernel.groups() * 64 * 4,
    };
    let table = if format == TileFormat::Nf4 { 256 * 256 } else { 0 };
    let launch = Launch {
        grid: [grid[0] as u32, grid[1] as u32, 1],
        threads: 32 * warps as u32,
        shared_bytes: (table + sums) as u32,
    };
    gpu.launch(&gpu.function(image, name)?, launch, arguments)
}

#[derive(Clone, Copy)]
enum Kernel {
    Rows4,
    Rows8,
    Rows16,
    Rows16Paired,
    Rows16InCluster,
    Rows32,
    RoutedGated,
    RoutedDown,
}

macro_rules! names {
    ($kernel:expr, $image:literal) => {
        (
            $image,
            match $kernel {
                Kernel::Rows4 => concat!($image, "_4"),
                Kernel::Rows8 => concat!($image, "_8"),
                Kernel::Rows16 => concat!($image, "_16"),
                Kernel::Rows16Paired => concat!($image, "_16_paired"),
                Kernel::Rows16InCluster => concat!($image, "_16_in_cluster"),
                Kernel::Rows32 => concat!($image, "_32"),
                Kernel::RoutedGated => concat!($image, "_routed_gated"),
                Kernel::RoutedDown => concat!($image, "_routed_down"),
            },
        )
    };
}

impl Kernel {
    /// The image and the name in it.
    fn of(self, format: TileFormat) -> (&'static str, &'static str) {
        match format {
            TileFormat::Bf16 => names!(self, "linear_bf16"),
            TileFormat::Int8 => names!(self, "linear_int8"),
            TileFormat::Nf4 => names!(self, "linear_nf4"),
            TileFormat::Int4 => names!(self, "linear_int4"),
            TileFormat::Q4_0 => names!(self, "linear_q4_0"),
            TileFormat::Q4_1 => names!(self, "linear_q4_1"),
            TileFormat::Q8_0 => names!(self, "linear_q8_0"),
            TileFormat::Q4_K => names!(self, "linear_q4_k"),
            TileFormat::Q6_K => names!(self, "linear_q6_k"),
        }
    }

    /// Rows of x in a block.
    fn rows(self) -> usize {
        4 * self.groups()
    }

    /// Groups of four rows of x in a block.
    fn groups(self) -> usize {
        match self {
            Self::Rows4 | Self::RoutedGated | Self::RoutedDown => 1,
            Self::Rows8 => 2,
            Self::Rows16 | Self::Rows16Paired | Self::Rows16InCluster => 4,
            Self::Rows32 => 8,
        }
    }
}

/// Bytes of one expert's matrix, and of all.
fn expert_bytes(format: TileFormat, rows: usize, cols: usize, experts: usize) -> Result<(u64, usize)> {
    let one = WeightLayout::Tiles(format).bytes(rows, cols)?;
    Ok((one as u64, one.checked_mul(experts).ok_or(Error::SizeOverflow)?))
}

fn equal(operation: &'static str, what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::Shape { operation, what, expected, found }) }
}

fn empty(operation: &'static str) -> Error {
    Error::Unsupported { operation, what: "no input features".to_owned() }
}
