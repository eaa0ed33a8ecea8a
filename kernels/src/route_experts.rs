//! Which experts a row goes to: the launcher of `cuda/route_experts.cu`.

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::int,
    launch::{Arguments, Launch},
};

/// What [`route_experts`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RouteExperts<'a> {
    /// `[rows, experts]` in F32.
    pub logits: Slice<'a>,
    /// `[rows]` of i32, negative for a row that is not in use; none: all are.
    pub positions: Option<Slice<'a>>,
    /// `[rows, per_row]` of i32: the experts of a row, ascending; -1 in a row that is not in use.
    pub ids: Slice<'a>,
    /// `[rows, per_row]` in F32: their weights; 0 in a row that is not in use.
    pub gates: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Experts there are, at most 512.
    pub experts: usize,
    /// Experts of a row.
    pub per_row: usize,
    /// Whether a row's weights are divided by their sum.
    pub normalize: bool,
}

const ROWS_PER_BLOCK: usize = 4;

/// The `per_row` most probable experts of each row, in ascending order of their numbers.
///
/// # Errors
/// A slice is too small, `per_row` is 0 or more than there are experts, there are more than 512, or the launch fails.
pub fn route_experts(gpu: &Gpu, call: &RouteExperts<'_>) -> Result<()> {
    const NAME: &str = "route experts";
    let RouteExperts { rows, experts, per_row, normalize, .. } = *call;
    if per_row == 0 || per_row > experts {
        return Err(Error::Shape {
            operation: NAME,
            what: "the number of experts a row",
            expected: experts,
            found: per_row,
        });
    }
    let kernel = match experts {
        ..=32 => "route_experts_32",
        33..=64 => "route_experts_64",
        65..=128 => "route_experts_128",
        129..=256 => "route_experts_256",
        257..=512 => "route_experts_512",
        _ => return Err(Error::Unsupported { operation: NAME, what: format!("{experts} experts; the most is 512") }),
    };
    let logits = call.logits.expect(NAME, "the logits in bytes", Form::F32.bytes(rows, experts)?)?;
    let positions_bytes = Form::F32.bytes(rows, 1)?;
    let positions = Slice::expect_optional(call.positions, NAME, "the positions in bytes", positions_bytes)?;
    let ids = call.ids.expect(NAME, "the ids in bytes", Form::F32.bytes(rows, per_row)?)?;
    let gates = call.gates.expect(NAME, "the gates in bytes", Form::F32.bytes(rows, per_row)?)?;
    let arguments = Arguments::new()
        .u64(logits)
        .u64(positions)
        .u64(ids)
        .u64(gates)
        .i32(int(NAME, rows)?)
        .i32(int(NAME, experts)?)
        .i32(int(NAME, per_row)?)
        .i32(i32::from(normalize));
    let grid = [int(NAME, rows.div_ceil(ROWS_PER_BLOCK))? as u32, 1, 1];
    let launch = Launch { grid, threads: 32 * ROWS_PER_BLOCK as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("route_experts", kernel)?, launch, arguments)
}
