//! [`matmul`]: checks, sums of x for the minima, and the split of the work over threads.
//!
//! All products of a call share x and one parallel region. One row of x goes straight from packed bytes to registers; for
//! more rows, a task unpacks the codes of four panels by 128 columns into a strip that stays in the first-level cache, and
//! reuses it for its rows of x. Work is split over outputs only, never over a sum.

use std::{borrow::Cow, mem::MaybeUninit};

use ironloom_core::{SimdLevel, Threads};

use super::{
    PackedMatrix,
    kernels::{Kernels, STRIP_COLS, STRIP_PANELS, Strip, TileArguments, UnpackArguments, VectorArguments},
    lanes::LANES,
    layout::ScaleKind,
    matrix::f32_at,
};
use crate::{Error, Result};

/// Rows of x a task of several rows takes: enough to hide the unpacking of its strip.
const ROW_BLOCK: usize = 128;

/// The most panels a kernel for one row of x takes.
const MOST_PANELS: usize = 8;

/// One matrix product of a [`matmul`] call.
pub struct Product<'a> {
    /// The weights `[rows, cols]`.
    pub matrix: &'a PackedMatrix,
    /// Where the result `[n, rows]` goes.
    pub out: &'a mut [f32],
}

/// Products of `n` rows of `x` (`[n, cols]`, row-major) with each matrix: `out[i][r] = sum over k of x[i][k] * w[r][k]`.
///
/// The matrices share `x` and so have the same number of columns. A row's result does not depend on the other rows, on the
/// threads or on the processor's vector instructions.
///
/// # Errors
/// `x` is not `n * cols` long, an `out` is not `n * rows` long, or a matrix has other columns than the first.
pub fn matmul(threads: &Threads, x: &[f32], n: usize, products: &mut [Product<'_>]) -> Result<()> {
    matmul_at(SimdLevel::detect(), threads, x, n, products)
}

/// [`matmul`] at a chosen level, for tests and benches; a level the processor lacks falls back to the reference.
#[doc(hidden)]
pub fn matmul_at(level: SimdLevel, threads: &Threads, x: &[f32], n: usize, products: &mut [Product<'_>]) -> Result<()> {
    let Some(first) = products.first() else { return Ok(()) };
    let cols = first.matrix.cols;
    check(x, n, cols, products)?;
    if n == 0 {
        return Ok(());
    }
    let level = if SimdLevel::supported().contains(&level) { level } else { SimdLevel::Scalar };
    let padded_cols = products.iter().map(|product| product.matrix.padded_cols()).max().unwrap_or(cols);
    let x = Input { values: pad_columns(x, n, cols, padded_cols), stride: padded_cols };
    let sums = GroupSums::new(threads, &x, n, products);
    let jobs = products
        .iter_mut()
        .filter(|product| product.matrix.rows > 0)
        .map(|product| Job::new(level, product, &x, &sums))
        .collect::<Vec<_>>();
    if n == 1 {
        run_vector(threads, &jobs);
    } else {
        run_tiles(threads, &jobs, n);
    }
    Ok(())
}

fn check(x: &[f32], n: usize, cols: usize, products: &[Product<'_>]) -> Result<()> {
    for (index, product) in products.iter().enumerate() {
        let (matrix, found) = (product.matrix, product.out.len());
        let wrong =
            matrix.cols != cols || n.checked_mul(cols) != Some(x.len()) || n.checked_mul(matrix.rows) != Some(found);
        if wrong {
            return Err(Error::Product { index, n, x: x.len(), rows: matrix.rows, cols: matrix.cols, out: found });
        }
    }
    Ok(())
}

/// x with rows of whole records.
struct Input<'a> {
    values: Cow<'a, [f32]>,
    stride: usize,
}

fn pad_columns(x: &[f32], n: usize, cols: usize, padded: usize) -> Cow<'_, [f32]> {
    if padded == cols {
        return Cow::Borrowed(x);
    }
    let mut values = vec![0.0; n * padded];
    for (to, from) in values.chunks_exact_mut(padded).zip(x.chunks_exact(cols.max(1))) {
        to[..cols].copy_from_slice(from);
    }
    Cow::Owned(values)
}

/// Sums of x over groups of 16 and of 32, where a product has minima: `[n, stride / group]`.
struct GroupSums {
    by_16: Vec<f32>,
    by_32: Vec<f32>,
}

impl GroupSums {
    fn new(threads: &Threads, x: &Input<'_>, n: usize, products: &[Product<'_>]) -> Self {
        let wanted = |group: usize| {
            let wants = |p: &Product<'_>| p.matrix.kind.layout.scales.has_min() && p.matrix.kind.layout.group == group;
            products.iter().any(wants)
        };
        Self {
            by_16: if wanted(16) { group_sums::<16>(threads, x, n) } else { Vec::new() },
            by_32: if wanted(32) { group_sums::<32>(threads, x, n) } else { Vec::new() },
        }
    }

    fn of(&self, matrix: &PackedMatrix) -> &[f32] {
        match (matrix.kind.layout.scales.has_min(), matrix.kind.layout.group) {
            (false, _) => &[],
            (true, 16) => &self.by_16,
            (true, _) => &self.by_32,
        }
    }
}

fn group_sums<const GROUP: usize>(threads: &Threads, x: &Input<'_>, n: usize) -> Vec<f32> {
    let per_row = x.stride / GROUP;
    let mut sums = vec![0.0; n * per_row];
    let out = Pointer(sums.as_mut_ptr());
    // A region costs about as much as sixteen rows.
    threads.run_ranges(n, 16, |rows| {
        for row in rows {
            for (i, group) in x.values[row * x.stride..][..x.stride].as_chunks::<GROUP>().0.iter().enumerate() {
                // SAFETY: the ranges are disjoint, and `row` and `i` are inside `sums`, which nothing else touches.
                unsafe { out.get().add(row * per_row + i).write(sum(group)) };
            }
        }
    });
    sums
}

/// The sum of a group in a fixed order: eight strided sums, then a tree.
fn sum<const GROUP: usize>(group: &[f32; GROUP]) -> f32 {
    let mut lanes = [0.0; 8];
    for chunk in group.as_chunks::<8>().0 {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// A product made ready: its kernels, and where its inputs and outputs are.
struct Job<'a> {
    matrix: &'a PackedMatrix,
    kernels: Kernels,
    x: &'a Input<'a>,
    sums: &'a [f32],
    out: Pointer,
}

/// A pointer that tasks write disjoint parts through.
#[derive(Clone, Copy)]
struct Pointer(*mut f32);
// SAFETY: every task writes its own elements, and the slice behind the pointer is borrowed mutably for the whole call.
unsafe impl Send for Pointer {}
// SAFETY: as for `Send`.
unsafe impl Sync for Pointer {}

impl Pointer {
    fn get(self) -> *mut f32 {
        self.0
    }
}

impl<'a> Job<'a> {
    fn new(level: SimdLevel, product: &'a mut Product<'_>, x: &'a Input<'a>, sums: &'a GroupSums) -> Self {
        let matrix = product.matrix;
        let kernels = (matrix.kind.kernels)(level);
        Self { matrix, kernels, x, sums: sums.of(matrix), out: Pointer(product.out.as_mut_ptr()) }
    }

    fn records(&self, panel: usize) -> *const u8 {
        self.matrix.panel(panel)[self.matrix.kind.layout.head_bytes()..].as_ptr()
    }

    /// Writes 16 totals of `panel` as results of row `row` of x.
    fn finish(&self, row: usize, panel: usize, totals: &[f32; LANES]) {
        let mut totals = *totals;
        if self.matrix.kind.layout.scales == ScaleKind::Rows {
            let head = self.matrix.panel(panel);
            for (lane, total) in totals.iter_mut().enumerate() {
                *total *= f32_at(head, lane);
            }
        }
        let start = panel * LANES;
        let count = LANES.min(self.matrix.rows - start);
        // SAFETY: `out` holds `n * rows` floats, row and panel are inside, and this task alone has this panel and row.
        unsafe {
            let to = self.out.get().add(row * self.matrix.rows + start);
            std::ptr::copy_nonoverlapping(totals.as_ptr(), to, count);
        }
    }

    /// One row of x against `count` panels.
    fn vector(&self, mut panel: usize, count: usize) {
        let end = panel + count;
        while panel < end {
            // The last kernel takes a single panel.
            let Some(&(width, kernel)) = self.kernels.vector.iter().find(|(width, _)| panel + width <= end) else {
                return;
            };
            let mut out = [[0.0; LANES]; MOST_PANELS];
            // SAFETY: the level was checked; the panels are the matrix's, x and sums cover its padded columns.
            unsafe {
                kernel(VectorArguments {
                    records: self.records(panel),
                    panel_bytes: self.matrix.panel_bytes,
                    count: self.matrix.records,
                    table: &self.matrix.table,
                    x: self.x.values.as_ptr(),
                    sums: self.sums.as_ptr(),
                    out: out.as_mut_ptr(),
                });
            }
            for (i, totals) in out[..width].iter().enumerate() {
                self.finish(0, panel + i, totals);
            }
            panel += width;
        }
    }

    /// Rows `first_row..first_row + rows` of x (at most [`ROW_BLOCK`]) against the strip of panels from `panel`.
    fn tiles(&self, scratch: &mut MaybeUninit<Scratch>, panel: usize, first_row: usize, rows: usize) {
        let matrix = self.matrix;
        let panels = STRIP_PANELS.min(matrix.panels() - panel);
        let group = matrix.kind.layout.group;
        // Not cleared as a whole: that took a twentieth of a task.
        let scratch = scratch.as_mut_ptr();
        // SAFETY: the pointer is to the caller's scratch; the totals in use are written before the slice is made.
        let (strip, totals) = unsafe {
            let totals = (&raw mut (*scratch).totals).cast::<[[f32; LANES]; STRIP_PANELS]>();
            totals.write_bytes(0, rows);
            (&raw mut (*scratch).strip, std::slice::from_raw_parts_mut(totals, rows))
        };
        let padded = matrix.padded_cols();
        for col in (0..padded).step_by(STRIP_COLS) {
            let cols = STRIP_COLS.min(padded - col);
            for i in 0..panels {
                let arguments = UnpackArguments {
                    records: self.records(panel + i),
                    table: &matrix.table,
                    first_group: col / group,
                    groups: cols / group,
                    strip,
                    panel: i,
                };
                // SAFETY: the level was checked; the groups are inside the panel and fill at most the strip.
                unsafe { (self.kernels.unpack)(arguments) };
            }
            let sums_stride = if self.sums.is_empty() { 0 } else { self.x.stride / group };
            let sums = self.sums.get(first_row * sums_stride + col / group..).unwrap_or_default();
            let arguments = TileArguments {
                strip,
                panels,
                cols,
                group,
                x: self.x.values[first_row * self.x.stride + col..].as_ptr(),
                x_stride: self.x.stride,
                sums: sums.as_ptr(),
                sums_stride,
                rows,
                totals: totals.as_mut_ptr(),
            };
            // SAFETY: the level was checked; x and sums have these rows and columns, totals these rows.
            unsafe { (self.kernels.tiles)(arguments) };
        }
        for (row, totals) in totals.iter().enumerate() {
            for (i, totals) in totals[..panels].iter().enumerate() {
                self.finish(first_row + row, panel + i, totals);
            }
        }
    }
}

/// A task's working memory, 72 KiB on its stack.
#[repr(C, align(64))]
struct Scratch {
    strip: Strip,
    totals: [[[f32; LANES]; STRIP_PANELS]; ROW_BLOCK],
}

fn run_vector(threads: &Threads, jobs: &[Job<'_>]) {
    let panels: usize = jobs.iter().map(|job| job.matrix.panels()).sum();
    // Four tasks per thread or more even out the load, of a kernel's full width where there are enough panels.
    let chunk = match panels / (threads.count() * 4) {
        0 => 1,
        few @ 1..4 => few,
        4..8 => 4,
        many => (many / MOST_PANELS * MOST_PANELS).min(32),
    };
    let tasks = |job: &Job<'_>| job.matrix.panels().div_ceil(chunk);
    threads.run(jobs.iter().map(tasks).sum(), |mut task| {
        for job in jobs {
            if task < tasks(job) {
                let panel = task * chunk;
                return job.vector(panel, chunk.min(job.matrix.panels() - panel));
            }
            task -= tasks(job);
        }
    });
}

fn run_tiles(threads: &Threads, jobs: &[Job<'_>], n: usize) {
    let strips = |job: &Job<'_>| job.matrix.panels().div_ceil(STRIP_PANELS);
    let all: usize = jobs.iter().map(strips).sum();
    let blocks = n.div_ceil(ROW_BLOCK);
    // Strips are the inner index: a block of x stays in the second-level cache while the weights pass by.
    threads.run(all * blocks, |task| {
        let (block, mut strip) = (task / all, task % all);
        let (first, end) = (n * block / blocks, n * (block + 1) / blocks);
        for job in jobs {
            if strip < strips(job) {
                return job.tiles(&mut MaybeUninit::uninit(), strip * STRIP_PANELS, first, end - first);
            }
            strip -= strips(job);
        }
    });
}
