//! The operations. Each lives in the file of its name, with its shapes, its formula and its tests.

mod add;
mod attention;
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
pub use embedding::embedding;
pub use gated_activation::{Activation, gated_activation};
pub use kv_buffer::KvBuffer;
pub use kv_table::{KvTable, TableRow};
pub use linear::{Norm, Projection, gated_linear, linear, linear_add, linear_add_norm, linear_many};
pub use next_ids::{Choose, NextIds};
pub use rmsnorm::{rmsnorm, rmsnorm_add};
pub use rope::{rope, rope_phases};
pub use rope_append::{KvRows, KvSpan, RopeAppend, rope_append};
pub use route_experts::{Routing, route_experts};
pub use routed_experts::{ExpertWeights, routed_experts};
pub use rows::{add_gated_rows, concat_rows, gather_rows, scale_rows_by_sigmoid, scatter_add_rows};

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

/// A mutable slice whose disjoint parts are written by several threads.
struct Disjoint<'a> {
    start: *mut f32,
    length: usize,
    lifetime: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: `slice` hands out parts that its callers keep disjoint.
unsafe impl Sync for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    fn new(slice: &'a mut [f32]) -> Self {
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
}
