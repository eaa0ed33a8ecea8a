//! A router in training: the launchers of `cuda/route_training.cu`.
//!
//! [`route_experts`](crate::route_experts) chooses and [`routed_sort`](crate::routed_sort) counts; [`router_losses`] adds the
//! router's own losses to the step's and notes each expert's share; [`router_gradient`] goes back to the logits from those
//! losses and from the gradient of the chosen experts' weights, for which
//! [`gated_activation_backward_dots`](crate::gated_activation_backward_dots) gives the dots. A row that is padding (its ids are -1)
//! counts nowhere.

use bytemuck::NoUninit;

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::{aligned_to, int},
    launch::{Arguments, Launch},
};

/// What [`router_losses`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RouterLosses<'a> {
    /// `[rows, experts]` in F32.
    pub logits: Slice<'a>,
    /// `[rows, per_row]` of i32, of [`RouteExperts`](crate::RouteExperts).
    pub ids: Slice<'a>,
    /// `[experts + 1]` of i32, of [`RoutedSort`](crate::RoutedSort).
    pub offsets: Slice<'a>,
    /// One F32: what the losses are multiplied by, such as the part that these rows are of a step's.
    pub share: Slice<'a>,
    /// One F64, added to.
    pub side_loss: Slice<'a>,
    /// `[experts]` in F32, written: of all choices the share that fell on each expert.
    pub shares: Slice<'a>,
    /// At least [`router_losses_workspace`] bytes.
    pub workspace: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Experts there are, at most 512.
    pub experts: usize,
    /// Experts of a row.
    pub per_row: usize,
    /// The weight of the balance of loads.
    pub balance: f32,
    /// The weight of the mean square of the log-sum-exps.
    pub z: f32,
}

/// What [`router_gradient`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RouterGradient<'a> {
    /// `[rows, experts]` in F32.
    pub logits: Slice<'a>,
    /// `[rows, per_row]` of i32, of [`RouteExperts`](crate::RouteExperts).
    pub ids: Slice<'a>,
    /// `[rows, per_row]` of i32, of [`RoutedSort`](crate::RoutedSort).
    pub places: Slice<'a>,
    /// `[rows, per_row]` in F32, of [`RouteExperts`](crate::RouteExperts).
    pub gates: Slice<'a>,
    /// `[rows * per_row]` in F32, by place: the gradient of a chosen expert's weight times the weight, as
    /// [`gated_activation_backward_dots`](crate::gated_activation_backward_dots) has it of gradients that the weights multiplied.
    pub dots: Slice<'a>,
    /// `[experts + 1]` of i32, of [`RoutedSort`](crate::RoutedSort).
    pub offsets: Slice<'a>,
    /// `[experts]` in F32, of [`RouterLosses`].
    pub shares: Slice<'a>,
    /// One F32, as in [`RouterLosses`].
    pub share: Slice<'a>,
    /// `[rows, experts]` in bfloat16, written; 0 in a row that is padding.
    pub dlogits: Slice<'a>,
    /// Elements from one row of `dlogits` to the next; columns from `experts` on are set to zero up to a multiple of eight
    /// where the row has them.
    pub dlogits_stride: usize,
    /// Rows.
    pub rows: usize,
    /// Experts there are, at most 512.
    pub experts: usize,
    /// Experts of a row.
    pub per_row: usize,
    /// Whether a row's weights were divided by their sum.
    pub normalize: bool,
    /// As in [`RouterLosses`].
    pub balance: f32,
    /// As in [`RouterLosses`].
    pub z: f32,
}

/// The kernels by the largest number of experts they take: their names, and the lanes of a row.
const BY_EXPERTS: [(usize, &str, &str, usize); 7] = [
    (8, "router_figures_8", "router_gradient_8", 8),
    (16, "router_figures_16", "router_gradient_16", 16),
    (32, "router_figures_32", "router_gradient_32", 32),
    (64, "router_figures_64", "router_gradient_64", 32),
    (128, "router_figures_128", "router_gradient_128", 32),
    (256, "router_figures_256", "router_gradient_256", 32),
    (512, "router_figures_512", "router_gradient_512", 32),
];
const FIGURE_THREADS: usize = 512;
const LOSS_THREADS: u32 = 1024;
const GRADIENT_THREADS: usize = 256;
/// Blocks of the first stage of the sums over rows. It does not depend on the card: neither do the sums' bits.
const MOST_BLOCKS: usize = 256;

/// `side_loss += share (balance E sum_e f_e P_e + z mean_i l_i^2)`: `f_e` the share of choices that fell on expert e, `P_e`
/// its mean probability and `l_i` the log-sum-exp of a row's logits, over the rows that are no padding.
///
/// # Errors
/// A slice is too small or its numbers are not aligned, there are more than 512 experts or none, or a launch fails.
pub fn router_losses(gpu: &Gpu, call: &RouterLosses<'_>) -> Result<()> {
    const NAME: &str = "router losses";
    let RouterLosses { rows, experts, per_row, balance, z, .. } = *call;
    let (name, _, lanes) = kernels(NAME, experts, per_row)?;
    let logits = call.logits.expect(NAME, "the logits in bytes", Form::F32.bytes(rows, experts)?)?;
    let ids = call.ids.expect(NAME, "the ids in bytes", Form::F32.bytes(rows, per_row)?)?;
    let offsets = call.offsets.expect(NAME, "the offsets in bytes", 4 * (experts + 1))?;
    let share = call.share.expect(NAME, "the losses' share in bytes", 4)?;
    let side_loss = call.side_loss.expect(NAME, "the side loss in bytes", 8)?;
    let side_loss = aligned_to(8, NAME, "the side loss in bytes", side_loss)?;
    let shares = call.shares.expect(NAME, "the experts' shares in bytes", 4 * experts)?;
    let workspace = call.workspace.expect(NAME, "the workspace in bytes", router_losses_workspace(experts))?;
    let blocks = rows.div_ceil(FIGURE_THREADS / lanes).min(MOST_BLOCKS);
    // A row's number, up to the end of its block, is an i32 in the kernel.
    int(NAME, rows + MOST_BLOCKS * FIGURE_THREADS)?;
    let arguments = Arguments::new()
        .u64(logits)
        .u64(ids)
        .u64(workspace)
        .i32(int(NAME, rows)?)
        .i32(int(NAME, experts)?)
        .i32(int(NAME, per_row)?);
    let launch = Launch { grid: [blocks as u32, 1, 1], threads: FIGURE_THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("route_training", name)?, launch, arguments)?;
    let arguments = Arguments::new()
        .u64(workspace)
        .u64(offsets)
        .u64(share)
        .u64(side_loss)
        .u64(shares)
        .i32(int(NAME, blocks)?)
        .i32(int(NAME, experts)?)
        .i32(int(NAME, per_row)?)
        .f32(balance)
        .f32(z);
    let launch = Launch { grid: [1, 1, 1], threads: LOSS_THREADS, shared_bytes: 0 };
    gpu.launch(&gpu.function("route_training", "router_losses")?, launch, arguments)
}

/// Bytes of workspace that [`router_losses`] needs.
pub fn router_losses_workspace(experts: usize) -> usize {
    4 * MOST_BLOCKS * (experts + 1)
}

/// The gradient of a router's logits: through the softmax (and the division by the chosen experts' sum) from the gradient of
/// the weights, and from the router's losses.
///
/// # Errors
/// A slice is too small, there are more than 512 experts or none, or the launch fails.
pub fn router_gradient(gpu: &Gpu, call: &RouterGradient<'_>) -> Result<()> {
    const NAME: &str = "router gradient";
    let RouterGradient { dlogits_stride, rows, experts, per_row, normalize, balance, z, .. } = *call;
    let (_, name, lanes) = kernels(NAME, experts, per_row)?;
    let logits = call.logits.expect(NAME, "the logits in bytes", Form::F32.bytes(rows, experts)?)?;
    let ids = call.ids.expect(NAME, "the ids in bytes", Form::F32.bytes(rows, per_row)?)?;
    let places = call.places.expect(NAME, "the places in bytes", Form::F32.bytes(rows, per_row)?)?;
    let gates = call.gates.expect(NAME, "the weights in bytes", Form::F32.bytes(rows, per_row)?)?;
    let dots = call.dots.expect(NAME, "the dots in bytes", Form::F32.bytes(rows, per_row)?)?;
    let offsets = call.offsets.expect(NAME, "the offsets in bytes", 4 * (experts + 1))?;
    let shares = call.shares.expect(NAME, "the experts' shares in bytes", 4 * experts)?;
    let share = call.share.expect(NAME, "the losses' share in bytes", 4)?;
    if dlogits_stride < experts {
        let what = "the stride of the logits' gradient";
        return Err(Error::Shape { operation: NAME, what, expected: experts, found: dlogits_stride });
    }
    let dlogits =
        call.dlogits.expect(NAME, "the logits' gradient in bytes", Form::Bf16.bytes(rows, dlogits_stride)?)?;
    let rows_of_block = GRADIENT_THREADS / lanes;
    int(NAME, rows + rows_of_block)?;
    let arguments = Arguments::new().value(RouterGradientCall {
        logits,
        ids,
        places,
        gates,
        dots,
        offsets,
        shares,
        share,
        dlogits,
        dlogits_stride: int(NAME, dlogits_stride)?,
        rows: int(NAME, rows)?,
        experts: int(NAME, experts)?,
        per_row: int(NAME, per_row)?,
        normalize: i32::from(normalize),
        balance,
        z,
        unused: 0,
    });
    let grid = [rows.div_ceil(rows_of_block) as u32, 1, 1];
    let launch = Launch { grid, threads: GRADIENT_THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("route_training", name)?, launch, arguments)
}

/// The kernels' argument: `RouterGradient` in `cuda/route_training.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RouterGradientCall {
    logits: u64,
    ids: u64,
    places: u64,
    gates: u64,
    dots: u64,
    offsets: u64,
    shares: u64,
    share: u64,
    dlogits: u64,
    dlogits_stride: i32,
    rows: i32,
    experts: i32,
    per_row: i32,
    normalize: i32,
    balance: f32,
    z: f32,
    unused: i32,
}

// SAFETY: nine integers of eight bytes, then eight numbers of four: without a gap.
unsafe impl NoUninit for RouterGradientCall {}

/// The names of the kernels for this many experts, and the lanes of a row.
fn kernels(operation: &'static str, experts: usize, per_row: usize) -> Result<(&'static str, &'static str, usize)> {
    if per_row == 0 || per_row > experts {
        let what = "the number of experts a row";
        return Err(Error::Shape { operation, what, expected: experts, found: per_row });
    }
    match BY_EXPERTS.iter().find(|(largest, ..)| experts <= *largest) {
        Some(&(_, figures, gradient, lanes)) => Ok((figures, gradient, lanes)),
        None => Err(Error::Unsupported { operation, what: format!("{experts} experts; the most is 512") }),
    }
}
