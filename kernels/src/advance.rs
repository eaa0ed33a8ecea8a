//! The end of a decoding step on the device: the launcher of `cuda/advance.cu`.

use crate::{
    Error, Form, Gpu, Result, Slice,
    checks::int,
    launch::{Arguments, Launch},
};

/// What [`advance`] works on.
#[derive(Clone, Copy, Debug)]
pub struct Advance<'a> {
    /// `[rows]` of u32: what was sampled.
    pub ids: Slice<'a>,
    /// `[rows]` of u32: the next step's input.
    pub tokens: Slice<'a>,
    /// `[rows]` of i32: positions of the step's tokens, which move on by one; -1 for a row that is not in use.
    pub positions: Slice<'a>,
    /// `[rows]` of u64: where a row's ids so far lie on the device (u32, by position; room for one more), 0 for none.
    pub histories: Option<Slice<'a>>,
    /// One u64 on the device: steps done so far. It starts at 0, and `advance` adds 1.
    pub step: Slice<'a>,
    /// What the host reads.
    pub report: Report,
    /// Rows.
    pub rows: usize,
}

/// Where the device leaves the ids of each step for the host: pinned host memory, by the addresses the device has for it.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// u32 `[ring_length, rows]`: the ids of step `s`, counted from 0, lie at `s % ring_length`.
    pub ring: u64,
    /// Steps that the ring holds.
    pub ring_length: usize,
    /// One u64: how many steps' ids are in the ring. It is written after them.
    pub published: u64,
}

/// Makes the sampled ids the next step's tokens, moves the positions on, appends to the histories, and tells the host.
///
/// An id of `u32::MAX`, a row without a usable logit, is reported as it is and goes on as token 0. The caller keeps the
/// memory of the [`Report`] mapped until the step is done, and reads a ring's slot before `ring_length` more steps.
///
/// # Errors
/// A slice is too small, the ring has no length, an address is missing or not aligned, or the launch fails.
pub fn advance(gpu: &Gpu, call: &Advance<'_>) -> Result<()> {
    const NAME: &str = "advance";
    let (rows, report) = (call.rows, call.report);
    if report.ring == 0 || report.published == 0 || report.ring % 4 != 0 || report.published % 8 != 0 {
        return Err(Error::Unsupported { operation: NAME, what: "a report without aligned addresses".to_owned() });
    }
    if report.ring_length == 0 {
        return Err(Error::Shape { operation: NAME, what: "the ring's length", expected: 1, found: 0 });
    }
    let of_rows = Form::F32.bytes(rows, 1)?;
    let ids = call.ids.expect(NAME, "the ids in bytes", of_rows)?;
    let tokens = call.tokens.expect(NAME, "the tokens in bytes", of_rows)?;
    let positions = call.positions.expect(NAME, "the positions in bytes", of_rows)?;
    let history_bytes = Form::F32.bytes(rows, 2)?;
    let histories = Slice::expect_optional(call.histories, NAME, "the histories in bytes", history_bytes)?;
    let step = call.step.expect(NAME, "the step's number in bytes", 8)?;
    let arguments = Arguments::new()
        .u64(ids)
        .u64(tokens)
        .u64(positions)
        .u64(histories)
        .u64(report.ring)
        .i32(int(NAME, report.ring_length)?)
        .u64(step)
        .u64(report.published)
        .i32(int(NAME, rows)?);
    let launch = Launch { grid: [1, 1, 1], threads: 64, shared_bytes: 0 };
    gpu.launch(&gpu.function("advance", "advance")?, launch, arguments)
}
