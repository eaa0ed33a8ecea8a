//! Cosines and sines of rotary position embedding: the launcher of `cuda/rope_phases.cu`.

use crate::{
    Form, Gpu, Result, Slice,
    add::row_grid,
    checks::int,
    launch::{Arguments, Launch},
};

/// What [`rope_phases`] works on.
#[derive(Clone, Copy, Debug)]
pub struct RopePhases<'a> {
    /// `[rows]` of i32; -1 for a row that is not in use.
    pub positions: Slice<'a>,
    /// `[half]` in F32; constant: it may be read before the kernel before has ended.
    pub inverse_frequencies: Slice<'a>,
    /// Multiplies cosines and sines (YaRN's attention factor; 1 otherwise).
    pub factor: f32,
    /// `[rows, 2 * half]` in F32: the cosines of a row, then its sines.
    pub phases: Slice<'a>,
    /// Rows.
    pub rows: usize,
    /// Pairs of a head that turn.
    pub half: usize,
}

const THREADS: usize = 128;

/// `phases[i] = factor * (cos, sin)(positions[i] * inverse_frequencies)`; zeros for rows that are not in use.
///
/// # Errors
/// A slice is too small, or the launch fails.
pub fn rope_phases(gpu: &Gpu, call: &RopePhases<'_>) -> Result<()> {
    const NAME: &str = "rope phases";
    let RopePhases { factor, rows, half, .. } = *call;
    let positions = call.positions.expect(NAME, "the positions in bytes", Form::F32.bytes(rows, 1)?)?;
    let frequencies = call.inverse_frequencies.expect(NAME, "the frequencies in bytes", Form::F32.bytes(1, half)?)?;
    let phases = call.phases.expect(NAME, "the phases in bytes", Form::F32.bytes(rows, half.saturating_mul(2))?)?;
    let arguments = Arguments::new()
        .u64(positions)
        .u64(frequencies)
        .f32(factor)
        .u64(phases)
        .i32(int(NAME, rows)?)
        .i32(int(NAME, half)?);
    let launch = Launch { grid: row_grid(half, THREADS, rows)?, threads: THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("rope_phases", "rope_phases")?, launch, arguments)
}
