//! The inner loops of the products, and their choice by SIMD level and layout.
//!
//! The order of the sums is the same everywhere, so every level, every number of rows of x and every split of the work gives
//! the same bits. For output row r, with `fma(a, b, c) = a * b + c` rounded once:
//!
//! ```text
//! grouped:   for each group: s = 0; for k in group: s = fma(code[k], x[k], s)
//!            total = fma(scale, s, total);  with minima: total = fma(min, sum of the group's x, total)
//! otherwise: for each k: total = fma(code[k], x[k], total);  int8 rows: total * scale at the end
//! ```
//!
//! Scaling the sum of a group, not each weight, costs one operation per group: measured on 4-bit codes, a weight is a shift,
//! a table look-up (`vpermps`) and a fused multiply-add.

use ironloom_core::SimdLevel;

use super::{
    lanes::{LANES, Lanes, Scalar},
    layout::{
        Brains, Bytes, F16MinScales, F16Scales, F32Scales, Format, Grouped, Halves, Layout, Levels, Nibbles, RowScales,
        STEP, Singles, SubMinScales, SubScales, Unscaled,
    },
};

/// Panels a strip of unpacked codes holds.
pub(super) const STRIP_PANELS: usize = 4;
/// Consecutive k a strip holds: 4 panels of 128 f32 columns are 32 KiB, two thirds of a first-level cache.
pub(super) const STRIP_COLS: usize = 128;
/// Groups of a strip: the smallest group is 16.
pub(super) const STRIP_GROUPS: usize = STRIP_COLS / 16;

/// Codes of up to four panels as f32, with their groups' scales and minima, sixteen rows side by side.
#[repr(C, align(64))]
pub(super) struct Strip {
    pub(super) codes: [[[f32; LANES]; STRIP_PANELS]; STRIP_COLS],
    pub(super) scales: [[[f32; LANES]; STRIP_GROUPS]; STRIP_PANELS],
    pub(super) mins: [[[f32; LANES]; STRIP_GROUPS]; STRIP_PANELS],
}

/// One row of x against `P` panels.
pub(super) struct VectorArguments<'a> {
    /// The first record of the first panel; the others follow at `panel_bytes`.
    pub(super) records: *const u8,
    pub(super) panel_bytes: usize,
    /// Records of a panel.
    pub(super) count: usize,
    pub(super) table: &'a [f32; LANES],
    /// One row, padded to whole records.
    pub(super) x: *const f32,
    /// Sum of x per group, where the format has minima.
    pub(super) sums: *const f32,
    /// 16 results per panel.
    pub(super) out: *mut [f32; LANES],
}

/// Columns of one panel to be unpacked into a strip.
pub(super) struct UnpackArguments<'a> {
    /// The panel's first record.
    pub(super) records: *const u8,
    pub(super) table: &'a [f32; LANES],
    /// The first group, counted over the panel, and how many.
    pub(super) first_group: usize,
    pub(super) groups: usize,
    pub(super) strip: *mut Strip,
    /// Which panel of the strip.
    pub(super) panel: usize,
}

/// Rows of x against a strip.
pub(super) struct TileArguments {
    pub(super) strip: *const Strip,
    /// Panels of the strip in use.
    pub(super) panels: usize,
    /// Columns of the strip in use, and the length of a group.
    pub(super) cols: usize,
    pub(super) group: usize,
    /// x at the strip's first column, and the distance between its rows.
    pub(super) x: *const f32,
    pub(super) x_stride: usize,
    /// Sums of x at the strip's first group, and the distance between rows.
    pub(super) sums: *const f32,
    pub(super) sums_stride: usize,
    /// Rows of x.
    pub(super) rows: usize,
    /// Totals per row of x and panel of the strip.
    pub(super) totals: *mut [[f32; LANES]; STRIP_PANELS],
}

/// One row of x against a fixed number of panels.
pub(super) type VectorKernel = unsafe fn(VectorArguments<'_>);

/// The kernels of one level and layout.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    /// One row of x against so many panels, the most first and one last. More panels at once keep more memory streams and
    /// sums in flight: int8 1536 × 576 from memory took 137, 112, 87 and 71 us with 1, 2, 4 and 8.
    pub(super) vector: &'static [(usize, VectorKernel)],
    pub(super) unpack: unsafe fn(UnpackArguments<'_>),
    pub(super) tiles: unsafe fn(TileArguments),
}

/// What a tile does with its sums.
trait Ending {
    const GROUPED: bool;
    const MINIMA: bool;
}
struct Straight;
struct Scaled;
struct ScaledMin;
impl Ending for Straight {
    const GROUPED: bool = false;
    const MINIMA: bool = false;
}
impl Ending for Scaled {
    const GROUPED: bool = true;
    const MINIMA: bool = false;
}
impl Ending for ScaledMin {
    const GROUPED: bool = true;
    const MINIMA: bool = true;
}

#[inline(always)]
unsafe fn vector<L: Lanes, F: Format, const P: usize>(arguments: VectorArguments<'_>) {
    let VectorArguments { records, panel_bytes, count, table, x, sums, out } = arguments;
    let layout = F::LAYOUT;
    // SAFETY: the caller gives `P` panels of `count` records, and x and sums for as many columns and groups.
    unsafe {
        let table = L::load(table.as_ptr());
        let mut totals = [L::splat(0.0); P];
        for record in 0..count {
            let base = records.add(record * layout.record_bytes());
            for g in 0..layout.groups {
                let group = record * layout.groups + g;
                let x = x.add(group * layout.group);
                let mut partial = if layout.scales.is_grouped() { [L::splat(0.0); P] } else { totals };
                for step in 0..layout.group / STEP {
                    let offset = layout.scale_bytes() + g * layout.group_bytes() + step * layout.codes.step_bytes();
                    for p in 0..P {
                        let codes = base.add(p * panel_bytes + offset);
                        let codes = F::codes::<L>(codes, table);
                        for j in 0..STEP {
                            partial[p] = L::fma(codes[j], L::splat(*x.add(step * STEP + j)), partial[p]);
                        }
                    }
                }
                if !layout.scales.is_grouped() {
                    totals = partial;
                    continue;
                }
                for p in 0..P {
                    let (scale, min) = F::scale::<L>(base.add(p * panel_bytes), g);
                    totals[p] = L::fma(scale, partial[p], totals[p]);
                    if layout.scales.has_min() {
                        totals[p] = L::fma(min, L::splat(*sums.add(group)), totals[p]);
                    }
                }
            }
        }
        for p in 0..P {
            L::store(out.add(p).cast(), totals[p]);
        }
    }
}

#[inline(always)]
unsafe fn unpack<L: Lanes, F: Format>(arguments: UnpackArguments<'_>) {
    let UnpackArguments { records, table, first_group, groups, strip, panel } = arguments;
    let layout = F::LAYOUT;
    // SAFETY: the caller's groups lie inside the panel and fit the strip, which is written and never read.
    unsafe {
        let codes = (&raw mut (*strip).codes).cast::<f32>();
        let scales = (&raw mut (*strip).scales).cast::<f32>().add(panel * STRIP_GROUPS * LANES);
        let mins = (&raw mut (*strip).mins).cast::<f32>().add(panel * STRIP_GROUPS * LANES);
        let table = L::load(table.as_ptr());
        for i in 0..groups {
            let group = first_group + i;
            let base = records.add(group / layout.groups * layout.record_bytes());
            let g = group % layout.groups;
            let from = base.add(layout.scale_bytes() + g * layout.group_bytes());
            for step in 0..layout.group / STEP {
                let values = F::codes::<L>(from.add(step * layout.codes.step_bytes()), table);
                for j in 0..STEP {
                    let k = i * layout.group + step * STEP + j;
                    L::store(codes.add((k * STRIP_PANELS + panel) * LANES), values[j]);
                }
            }
            if layout.scales.is_grouped() {
                let (scale, min) = F::scale::<L>(base, g);
                L::store(scales.add(i * LANES), scale);
                L::store(mins.add(i * LANES), min);
            }
        }
    }
}

/// All rows of x against the strip, in register tiles of `P` panels by up to six rows: with AVX-512, 4 × 6 sums take 24 of 32
/// registers and ten loads feed 24 multiply-adds.
#[inline(always)]
unsafe fn tiles<L: Lanes, E: Ending, const P: usize>(arguments: TileArguments) {
    let mut row = 0;
    // SAFETY: passed on.
    unsafe {
        while row < arguments.rows {
            let rows = match arguments.rows - row {
                0..=1 => 1,
                2..=3 => 2,
                4..=5 => 4,
                _ => 6,
            };
            let mut panel = 0;
            while panel < arguments.panels {
                let wide = panel + P <= arguments.panels;
                match (rows, wide) {
                    (6, true) => tile::<L, E, P, 6>(&arguments, row, panel),
                    (4, true) => tile::<L, E, P, 4>(&arguments, row, panel),
                    (2, true) => tile::<L, E, P, 2>(&arguments, row, panel),
                    (_, true) => tile::<L, E, P, 1>(&arguments, row, panel),
                    (6, false) => tile::<L, E, 1, 6>(&arguments, row, panel),
                    (4, false) => tile::<L, E, 1, 4>(&arguments, row, panel),
                    (2, false) => tile::<L, E, 1, 2>(&arguments, row, panel),
                    (_, false) => tile::<L, E, 1, 1>(&arguments, row, panel),
                }
                panel += if wide { P } else { 1 };
            }
            row += rows;
        }
    }
}

#[inline(always)]
unsafe fn tile<L: Lanes, E: Ending, const P: usize, const T: usize>(
    arguments: &TileArguments,
    row: usize,
    panel: usize,
) {
    let &TileArguments { strip, cols, group, x, x_stride, sums, sums_stride, totals, .. } = arguments;
    // SAFETY: rows `row..row + T` and panels `panel..panel + P` are inside what the caller described.
    unsafe {
        let x = x.add(row * x_stride);
        let codes = (&raw const (*strip).codes).cast::<f32>();
        let scales = (&raw const (*strip).scales).cast::<f32>();
        let mins = (&raw const (*strip).mins).cast::<f32>();
        let total = |t: usize, p: usize| totals.add(row + t).cast::<f32>().add((panel + p) * LANES);
        let span = if E::GROUPED { group } else { cols };
        for i in 0..cols / span {
            let mut partial = [[L::splat(0.0); P]; T];
            if !E::GROUPED {
                for t in 0..T {
                    for p in 0..P {
                        partial[t][p] = L::load(total(t, p));
                    }
                }
            }
            for k in i * span..(i + 1) * span {
                let mut weights = [L::splat(0.0); P];
                for p in 0..P {
                    weights[p] = L::load(codes.add((k * STRIP_PANELS + panel + p) * LANES));
                }
                for t in 0..T {
                    let value = L::splat(*x.add(t * x_stride + k));
                    for p in 0..P {
                        partial[t][p] = L::fma(weights[p], value, partial[t][p]);
                    }
                }
            }
            for p in 0..P {
                for t in 0..T {
                    if E::GROUPED {
                        let scale = L::load(scales.add(((panel + p) * STRIP_GROUPS + i) * LANES));
                        partial[t][p] = L::fma(scale, partial[t][p], L::load(total(t, p)));
                    }
                    if E::MINIMA {
                        let min = L::load(mins.add(((panel + p) * STRIP_GROUPS + i) * LANES));
                        let sum = L::splat(*sums.add((row + t) * sums_stride + i));
                        partial[t][p] = L::fma(min, sum, partial[t][p]);
                    }
                    L::store(total(t, p), partial[t][p]);
                }
            }
        }
    }
}

/// A way to hold a matrix: its name, its bytes, and its kernels.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    pub(super) name: &'static str,
    pub(super) layout: Layout,
    /// The kernels of a level, which the processor must have.
    pub(super) kernels: fn(SimdLevel) -> Kernels,
}

macro_rules! kinds {
    ($($constant:ident = $name:literal: $codes:ident, $scales:ident, $group:expr => $ending:ident;)*) => {
        impl Kind {
            $(pub(super) const $constant: Self = Self {
                name: $name,
                layout: <Grouped<$codes, $scales, { $group }> as Format>::LAYOUT,
                kernels: kernels::<Grouped<$codes, $scales, { $group }>, $ending>,
            };)*
        }
    };
}

kinds! {
    F32 = "F32": Singles, Unscaled, STEP => Straight;
    F16 = "F16": Halves, Unscaled, STEP => Straight;
    BF16 = "BF16": Brains, Unscaled, STEP => Straight;
    INT8 = "int8": Bytes, RowScales, STEP => Straight;
    INT4 = "int4": Levels, F32Scales, 64 => Scaled;
    NF4 = "NF4": Levels, F32Scales, 64 => Scaled;
    Q4_0 = "Q4_0": Nibbles, F16Scales, 32 => Scaled;
    Q4_1 = "Q4_1": Nibbles, F16MinScales, 32 => ScaledMin;
    Q5_0 = "Q5_0": Bytes, F16Scales, 32 => Scaled;
    Q5_1 = "Q5_1": Bytes, F16MinScales, 32 => ScaledMin;
    Q8_0 = "Q8_0": Bytes, F16Scales, 32 => Scaled;
    Q2_K = "Q2_K": Nibbles, SubMinScales, 16 => ScaledMin;
    Q3_K = "Q3_K": Nibbles, SubScales, 16 => Scaled;
    Q4_K = "Q4_K": Nibbles, SubMinScales, 32 => ScaledMin;
    Q5_K = "Q5_K": Bytes, SubMinScales, 32 => ScaledMin;
    Q6_K = "Q6_K": Bytes, SubScales, 16 => Scaled;
}

fn kernels<F: Format, E: Ending>(level: SimdLevel) -> Kernels {
    match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => Kernels {
            vector: &[(8, avx512::vector::<F, 8>), (4, avx512::vector::<F, 4>), (1, avx512::vector::<F, 1>)],
            unpack: avx512::unpack::<F>,
            tiles: avx512::tiles::<E>,
        },
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => Kernels {
            vector: &[(4, avx2::vector::<F, 4>), (1, avx2::vector::<F, 1>)],
            unpack: avx2::unpack::<F>,
            tiles: avx2::tiles::<E>,
        },
        _ => Kernels {
            vector: &[(1, vector::<Scalar, F, 1>)],
            unpack: unpack::<Scalar, F>,
            tiles: tiles::<Scalar, E, 1>,
        },
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! level {
    ($module:ident, $lanes:ident, $panels:literal, $features:literal) => {
        mod $module {
            use super::{super::x86::$lanes, Ending, Format, TileArguments, UnpackArguments, VectorArguments};

            #[target_feature(enable = $features)]
            pub(super) unsafe fn vector<F: Format, const P: usize>(arguments: VectorArguments<'_>) {
                // SAFETY: the caller's promise, and this function's instructions.
                unsafe { super::vector::<$lanes, F, P>(arguments) }
            }
            #[target_feature(enable = $features)]
            pub(super) unsafe fn unpack<F: Format>(arguments: UnpackArguments<'_>) {
                // SAFETY: the caller's promise, and this function's instructions.
                unsafe { super::unpack::<$lanes, F>(arguments) }
            }
            #[target_feature(enable = $features)]
            pub(super) unsafe fn tiles<E: Ending>(arguments: TileArguments) {
                // SAFETY: the caller's promise, and this function's instructions.
                unsafe { super::tiles::<$lanes, E, $panels>(arguments) }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
level!(avx2, Avx2, 1, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
level!(avx512, Avx512, 4, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
