//! AdamW whose moments take a byte each: the launcher of `cuda/adamw_8bit.cu`.

use crate::{
    AdamWRule, Error, Form, Gpu, ParameterRange, Result, Slice,
    checks::aligned,
    launch::{Arguments, Launch},
    optimizer::AdamWOptions,
};

/// What [`adamw_8bit`] works on. Everything is zeros before the first step.
#[derive(Clone, Copy, Debug)]
pub struct AdamW8bit<'a> {
    /// The parameters: whole blocks of [`AdamW8bit::BLOCK`] elements, so each parameter starts at a multiple of it, with zeros
    /// up to the next.
    pub range: ParameterRange<'a>,
    /// `[count]` of u8: codes of first moments.
    pub first: Slice<'a>,
    /// `[count / BLOCK]` in F32: the largest magnitude of each block's first moments.
    pub first_absmax: Slice<'a>,
    /// `[count]` of u8: codes of the roots of second moments.
    pub second: Slice<'a>,
    /// `[count / BLOCK]` in F32: the largest of each block's roots.
    pub second_absmax: Slice<'a>,
    /// How it is set.
    pub rule: AdamWRule,
}

impl AdamW8bit<'_> {
    /// Elements that share a scale.
    pub const BLOCK: usize = 256;
}

const THREADS: usize = 256;
/// A warp takes a block.
const BLOCKS_AT_ONCE: usize = THREADS / 32;
/// Two rounds of those that a multiprocessor holds: each begins with a copy of the tables.
const LAUNCHED_OF_MULTIPROCESSOR: usize = 8;

/// A step of [`adamw`](crate::adamw) between unpacking the moments and packing them again:
///
/// ```text
/// m = first_absmax · level(code),  √v = second_absmax · level(code)
/// ```
///
/// with the levels of the processor's 8-bit AdamW, whose bits these are.
///
/// # Errors
/// The number of elements is not one of whole blocks, a slice is too small or not aligned, or the launch fails.
pub fn adamw_8bit(gpu: &Gpu, call: &AdamW8bit<'_>) -> Result<()> {
    const NAME: &str = "8-bit AdamW";
    let range = call.range;
    let (count, blocks) = (range.count, range.count / AdamW8bit::BLOCK);
    if !count.is_multiple_of(AdamW8bit::BLOCK) {
        let expected = count.checked_next_multiple_of(AdamW8bit::BLOCK).ok_or(Error::SizeOverflow)?;
        return Err(Error::Shape { operation: NAME, what: "the number of elements", expected, found: count });
    }
    let at = range.addresses(NAME)?;
    let scales = Form::F32.bytes(1, blocks)?;
    let first = aligned(NAME, "the first moments' codes in bytes", call.first, count)?;
    let first_absmax = call.first_absmax.expect(NAME, "the first moments' scales in bytes", scales)?;
    let second = aligned(NAME, "the second moments' codes in bytes", call.second, count)?;
    let second_absmax = call.second_absmax.expect(NAME, "the second moments' scales in bytes", scales)?;
    let arguments = Arguments::new()
        .u64(at.weights)
        .u64(at.gradient)
        .u64(first)
        .u64(first_absmax)
        .u64(second)
        .u64(second_absmax)
        .u64(at.rounded)
        .u64(at.step)
        .value(AdamWOptions::from(call.rule))
        .u64(blocks as u64);
    let most = gpu.properties().multiprocessors as usize * LAUNCHED_OF_MULTIPROCESSOR;
    let grid = [blocks.div_ceil(BLOCKS_AT_ONCE).min(most) as u32, 1, 1];
    let launch = Launch { grid, threads: THREADS as u32, shared_bytes: 0 };
    gpu.launch(&gpu.function("adamw_8bit", "adamw_8bit")?, launch, arguments)
}
