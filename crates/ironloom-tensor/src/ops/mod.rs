//! The operations. Each lives in the file of its name, with its shapes, its formula and its tests.

mod add;
mod attention;
mod cross_entropy;
mod cuda;
mod document_attention;
mod dropout;
mod embedding;
mod gated_activation;
mod kv_buffer;
mod kv_table;
mod linear;
mod next_ids;
mod rmsnorm;
mod rope;
mod rope_append;
mod route_experts;
mod routed_experts;
mod rows;

pub use add::{add, add_bias, scale};
pub use attention::{AttentionOptions, AttentionSpan, attention, attention_rows, attention_takes_many_rows};
pub use cross_entropy::{CrossEntropy, CrossEntropyOptions, Targets, cross_entropy};
pub use cuda::{
    cross_entropy::logits_rows,
    figures::{DocumentBounds, Figures, PassNumbers, StepTotals},
};
pub use document_attention::{
    DocumentAttentionOptions, DocumentSpan, Documents, Mask, RotatedAttention, document_attention, rotated_attention,
};
pub use dropout::{DropoutKey, dropout};
pub use embedding::embedding;
pub use gated_activation::gated_activation;
pub use ironloom_kernels::Activation;
pub use kv_buffer::KvBuffer;
pub use kv_table::{KvTable, TableRow};
pub use linear::{LowRank, Projection, gated_linear, linear, linear_add, linear_many};
pub use next_ids::{Choose, NextIds};
pub use rmsnorm::{rmsnorm, rmsnorm_add};
pub use rope::{rope, rope_phases};
pub use rope_append::{KvSpan, RopeAppend, rope_append};
pub use route_experts::{RouterLosses, Routing, route_experts, router_losses};
pub use routed_experts::{ExpertWeights, RoutedTraining, routed_experts, routed_training};
pub use rows::{RowWeights, add_gated_rows, concat_rows, gather_rows, scale_rows_by_sigmoid, scatter_add_rows};

use std::ops::Range;

use crate::CpuDevice;

/// Elements below which a region is not worth starting.
const SERIAL_ELEMENTS: usize = 8192;

/// Splits `out` into whole rows of `width` over the threads; `work` gets the numbers of its rows and their elements.
fn for_rows(cpu: &CpuDevice, out: &mut [f32], width: usize, work: impl Fn(Range<usize>, &mut [f32]) + Sync) {
    let rows = out.len().checked_div(width).unwrap_or(0);
    if rows == 0 {
        return;
    }
    if out.len() <= SERIAL_ELEMENTS || rows == 1 {
        return work(0..rows, out);
    }
    let shared = Disjoint::new(out);
    cpu.threads.run_ranges(rows, (SERIAL_ELEMENTS / 2 / width).max(1), |range| {
        // SAFETY: the ranges of one region do not overlap.
        let part = unsafe { shared.slice(range.start * width..range.end * width) };
        work(range, part);
    });
}

/// Rows of one partial sum of [`sum_over_rows`].
const SUMMED_ROWS: usize = 256;

/// Sets (`first`) or adds to `out` a sum over `rows` rows: `part` adds the rows of a range to zeros. Ranges depend on the number
/// of rows alone and their sums are added in order, so the bits are the same on any number of threads.
fn sum_over_rows(
    cpu: &CpuDevice,
    out: &mut [f32],
    first: bool,
    rows: usize,
    part: impl Fn(Range<usize>, &mut [f32]) + Sync,
) {
    let width = out.len();
    let mut partial = vec![0.0; rows.div_ceil(SUMMED_ROWS) * width];
    for_rows(cpu, &mut partial, width, |ranges, sums| {
        for (range, sums) in ranges.zip(sums.chunks_exact_mut(width)) {
            part(range * SUMMED_ROWS..((range + 1) * SUMMED_ROWS).min(rows), sums);
        }
    });
    if first {
        out.fill(0.0);
    }
    for sums in partial.chunks_exact(width.max(1)) {
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
    }
}

/// A mutable slice whose disjoint parts are written by several threads.
pub(crate) struct Disjoint<'a> {
    start: *mut f32,
    length: usize,
    lifetime: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: `slice` hands out parts that its callers keep disjoint.
unsafe impl Sync for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    pub(crate) fn new(slice: &'a mut [f32]) -> Self {
        Self { start: slice.as_mut_ptr(), length: slice.len(), lifetime: std::marker::PhantomData }
    }

    /// # Safety
    /// No two parts that live at the same time overlap.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.length);
        // SAFETY: the range is inside the slice, and disjoint from every other part by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Where `rows` rows of `columns` elements, `stride` apart, begin.
    ///
    /// # Safety
    /// No two places that are used at the same time have an element in common.
    pub(crate) unsafe fn pointer(&self, start: usize, rows: usize, columns: usize, stride: usize) -> *mut f32 {
        assert!(rows == 0 || start + (rows - 1) * stride + columns <= self.length);
        // SAFETY: the start is inside the slice.
        unsafe { self.start.add(start.min(self.length)) }
    }
}
