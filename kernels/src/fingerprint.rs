//! A number for what rows hold: the launcher of `cuda/fingerprint.cu`.

use crate::{
    Form, Gpu, Result, Slice,
    checks::{int, strided},
    launch::{Arguments, Launch},
};

/// Blocks at most; each takes rows in turn.
const MOST_BLOCKS: usize = 1024;
const THREADS: u32 = 256;

/// Adds to `sum`, eight bytes, a number that tells what `rows` rows of `width` numbers in `form`, `stride` numbers apart, hold.
/// Rows of zeros add 0; other rows that differ in a bit add, but for a chance in 2^64, another number.
///
/// # Errors
/// A slice is too small, rows overlap, the form is [`Form::Split`], or the launch fails.
pub fn fingerprint(
    gpu: &Gpu,
    slice: Slice<'_>,
    form: Form,
    [rows, stride, width]: [usize; 3],
    sum: Slice<'_>,
) -> Result<()> {
    const NAME: &str = "fingerprint";
    let address = strided(NAME, "the rows in bytes", slice, form, [rows, stride, width])?;
    let sum = sum.expect(NAME, "the sum in bytes", 8)?;
    let halves = if form == Form::F32 { 2 } else { 1 };
    let arguments = Arguments::new()
        .u64(address)
        .u64((halves * stride) as u64)
        .i32(int(NAME, rows)?)
        .i32(int(NAME, halves * width)?)
        .u64(sum);
    let launch = Launch { grid: [rows.min(MOST_BLOCKS) as u32, 1, 1], threads: THREADS, shared_bytes: 0 };
    gpu.launch(&gpu.function("fingerprint", "fingerprint")?, launch, arguments)
}
