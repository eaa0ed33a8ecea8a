//! How a panel of sixteen rows lies in memory.
//!
//! A matrix is panels one after the other, the last padded with zero rows. A panel is an optional head (one f32 scale per
//! row) and then records along k. A record is one or more groups: first the scales of its groups, sixteen rows side by side,
//! then its codes, eight consecutive k at a time:
//!
//! | codes | eight k of sixteen rows |
//! |---|---|
//! | nibbles | 16 words; word r holds row r, weight k + j in bits 4j..4j+4, an index into a table of 16 f32 |
//! | bytes | 8 × 16 signed bytes |
//! | F16, BF16, F32 | 8 × 16 numbers |
//!
//! | scaling | scales of a record | weight |
//! |---|---|---|
//! | none | | code |
//! | rows | (in the panel's head) | scale[row] · code |
//! | f16 | 16 f16 | scale · code |
//! | f16 and minimum | 16 f16, 16 f16 | scale · code + min |
//! | f32 | 16 f32 | scale · code |
//! | sub | 16 f16 d, then 16 i8 s per group | (d · s) · code |
//! | sub and minimum | 16 f16 d, 16 f16 e, then 16 i8 s and 16 i8 t per group | (d · s) · code + (e · t) |
//!
//! Three bytes after a panel must be readable too: kernels read words at odd places, see `lookup_nibbles`.
//! Scales keep the precision of the file, so packing loses nothing, and a step reads one stream of bytes per panel.

use std::marker::PhantomData;

use super::lanes::{LANES, Lanes};

/// Consecutive k whose codes lie together.
pub(super) const STEP: usize = 8;

/// How one code is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CodeKind {
    Nibble,
    Byte,
    F16,
    Bf16,
    F32,
}

impl CodeKind {
    /// Bytes of [`STEP`] codes of sixteen rows.
    pub(super) const fn step_bytes(self) -> usize {
        match self {
            Self::Nibble => LANES * 4,
            Self::Byte => LANES * STEP,
            Self::F16 | Self::Bf16 => LANES * STEP * 2,
            Self::F32 => LANES * STEP * 4,
        }
    }
}

/// How a code becomes a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleKind {
    None,
    Rows,
    F16,
    F16Min,
    F32,
    Sub,
    SubMin,
}

impl ScaleKind {
    pub(super) const fn has_min(self) -> bool {
        matches!(self, Self::F16Min | Self::SubMin)
    }

    /// Whether each group is summed by itself and then scaled.
    pub(super) const fn is_grouped(self) -> bool {
        !matches!(self, Self::None | Self::Rows)
    }
}

/// The layout of a matrix's panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) codes: CodeKind,
    pub(super) scales: ScaleKind,
    /// Weights of a row that share a scale; [`STEP`] where there are no groups.
    pub(super) group: usize,
    /// Groups of a record.
    pub(super) groups: usize,
}

impl Layout {
    pub(super) const fn new(codes: CodeKind, scales: ScaleKind, group: usize) -> Self {
        let groups = match scales {
            ScaleKind::Sub | ScaleKind::SubMin => 256 / group,
            _ => 1,
        };
        Self { codes, scales, group, groups }
    }

    /// Weights of a row in a record.
    pub(super) const fn record(self) -> usize {
        self.group * self.groups
    }

    /// Bytes of a record's scales.
    pub(super) const fn scale_bytes(self) -> usize {
        match self.scales {
            ScaleKind::None | ScaleKind::Rows => 0,
            ScaleKind::F16 => LANES * 2,
            ScaleKind::F16Min | ScaleKind::F32 => LANES * 4,
            ScaleKind::Sub => LANES * (2 + self.groups),
            ScaleKind::SubMin => LANES * (4 + 2 * self.groups),
        }
    }

    pub(super) const fn group_bytes(self) -> usize {
        self.group / STEP * self.codes.step_bytes()
    }

    pub(super) const fn record_bytes(self) -> usize {
        self.scale_bytes() + self.groups * self.group_bytes()
    }

    /// Bytes of a panel's head.
    pub(super) const fn head_bytes(self) -> usize {
        if matches!(self.scales, ScaleKind::Rows) { LANES * 4 } else { 0 }
    }
}

/// A layout known at compile time, with the reading of it in a level's vectors.
pub(super) trait Format {
    const LAYOUT: Layout;

    /// The weights' codes at eight consecutive k, from [`CodeKind::step_bytes`] readable bytes.
    unsafe fn codes<L: Lanes>(from: *const u8, table: L::Floats) -> [L::Floats; STEP];

    /// Scale and minimum of group `g` of the record at `record`; the minimum is zero where there is none.
    unsafe fn scale<L: Lanes>(record: *const u8, g: usize) -> (L::Floats, L::Floats);
}

/// Reads one kind of code.
pub(super) trait Codes {
    const KIND: CodeKind;
    unsafe fn read<L: Lanes>(from: *const u8, table: L::Floats) -> [L::Floats; STEP];
}

/// Reads one kind of scale.
pub(super) trait Scales {
    const KIND: ScaleKind;
    unsafe fn read<L: Lanes>(record: *const u8, g: usize) -> (L::Floats, L::Floats);
}

/// The format of codes `C`, scales `S` and groups of `GROUP`.
pub(super) struct Grouped<C, S, const GROUP: usize>(PhantomData<(C, S)>);

impl<C: Codes, S: Scales, const GROUP: usize> Format for Grouped<C, S, GROUP> {
    const LAYOUT: Layout = Layout::new(C::KIND, S::KIND, GROUP);

    #[inline(always)]
    unsafe fn codes<L: Lanes>(from: *const u8, table: L::Floats) -> [L::Floats; STEP] {
        // SAFETY: the same promise.
        unsafe { C::read::<L>(from, table) }
    }
    #[inline(always)]
    unsafe fn scale<L: Lanes>(record: *const u8, g: usize) -> (L::Floats, L::Floats) {
        // SAFETY: the same promise.
        unsafe { S::read::<L>(record, g) }
    }
}

macro_rules! plain_codes {
    ($name:ident, $kind:ident, $bytes:literal, $from:ident => $load:expr) => {
        pub(super) struct $name;
        impl Codes for $name {
            const KIND: CodeKind = CodeKind::$kind;
            #[inline(always)]
            unsafe fn read<L: Lanes>(from: *const u8, _table: L::Floats) -> [L::Floats; STEP] {
                // SAFETY: eight runs of sixteen numbers are readable.
                unsafe {
                    let mut out = [L::splat(0.0); STEP];
                    for j in 0..STEP {
                        let $from = from.add(j * LANES * $bytes);
                        out[j] = $load;
                    }
                    out
                }
            }
        }
    };
}

plain_codes!(Bytes, Byte, 1, from => L::load_i8(from));
plain_codes!(Halves, F16, 2, from => L::load_f16(from));
plain_codes!(Brains, Bf16, 2, from => L::load_bf16(from));
plain_codes!(Singles, F32, 4, from => L::load(from.cast()));

macro_rules! nibbles {
    ($name:ident, $read:ident) => {
        pub(super) struct $name;
        impl Codes for $name {
            const KIND: CodeKind = CodeKind::Nibble;
            #[inline(always)]
            unsafe fn read<L: Lanes>(from: *const u8, table: L::Floats) -> [L::Floats; STEP] {
                // SAFETY: sixteen words, and three bytes more, are readable.
                unsafe { L::$read(table, from) }
            }
        }
    };
}

// Any sixteen numbers, and integers one after the other.
nibbles!(Levels, lookup_nibbles);
nibbles!(Nibbles, count_nibbles);

macro_rules! scales {
    ($name:ident, $kind:ident, $record:ident, $g:ident => $read:expr) => {
        pub(super) struct $name;
        impl Scales for $name {
            const KIND: ScaleKind = ScaleKind::$kind;
            #[inline(always)]
            unsafe fn read<L: Lanes>($record: *const u8, $g: usize) -> (L::Floats, L::Floats) {
                // SAFETY: the record's scales are readable.
                unsafe { $read }
            }
        }
    };
}

scales!(Unscaled, None, _record, _g => (L::splat(1.0), L::splat(0.0)));
scales!(RowScales, Rows, _record, _g => (L::splat(1.0), L::splat(0.0)));
scales!(F16Scales, F16, record, _g => (L::load_f16(record), L::splat(0.0)));
scales!(F16MinScales, F16Min, record, _g => (L::load_f16(record), L::load_f16(record.add(LANES * 2))));
scales!(F32Scales, F32, record, _g => (L::load(record.cast()), L::splat(0.0)));
scales!(SubScales, Sub, record, g => {
    let sub = L::load_i8(record.add(LANES * (2 + g)));
    (L::mul(L::load_f16(record), sub), L::splat(0.0))
});
scales!(SubMinScales, SubMin, record, g => {
    let sub = record.add(LANES * (4 + 2 * g));
    let scale = L::mul(L::load_f16(record), L::load_i8(sub));
    let min = L::mul(L::load_f16(record.add(LANES * 2)), L::load_i8(sub.add(LANES)));
    (scale, min)
});
