//! [`PackedMatrix`]: what a packed matrix is, and reading single rows of it.

use half::{bf16, f16};

use super::{
    kernels::Kind,
    lanes::LANES,
    layout::{CodeKind, STEP, ScaleKind},
};
use crate::{Error, Result};

/// How a weight matrix is held for computing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// As it is stored.
    #[default]
    Keep,
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// Signed bytes with one f32 scale per row.
    Int8,
    /// Four-bit integers in blocks of 64 with an f32 absmax.
    Int4,
    /// NormalFloat4 in blocks of 64 with an f32 absmax.
    Nf4,
}

/// One cache line; a matrix is allocated in these, so that panels start on one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u8; 64]);

// SAFETY: any bytes are a line, and it has no padding.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: any bytes are a line, and it has no padding.
unsafe impl bytemuck::Pod for Line {}

/// A weight matrix `[rows, cols]` in panels of sixteen rows, for [`matmul`](super::matmul()) on the CPU.
pub struct PackedMatrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) kind: Kind,
    /// What the sixteen nibbles stand for.
    pub(super) table: [f32; LANES],
    /// Records of a panel.
    pub(super) records: usize,
    /// From one panel to the next.
    pub(super) panel_bytes: usize,
    pub(super) data: Box<[Line]>,
}

impl PackedMatrix {
    /// A matrix of zero bytes, to be filled.
    pub(super) fn empty(rows: usize, cols: usize, kind: Kind, table: [f32; LANES]) -> Result<Self> {
        let layout = kind.layout;
        let records = cols.div_ceil(layout.record());
        let overflow = || Error::Core(ironloom_core::Error::SizeOverflow);
        let panel_bytes = records
            .checked_mul(layout.record_bytes())
            .and_then(|bytes| bytes.checked_add(layout.head_bytes()))
            .and_then(|bytes| bytes.checked_next_multiple_of(size_of::<Line>()))
            .ok_or_else(overflow)?;
        let lines = rows.div_ceil(LANES).checked_mul(panel_bytes).ok_or_else(overflow)? / size_of::<Line>();
        // One more, as kernels may read three bytes past the last code.
        let lines = lines.checked_add(1).ok_or_else(overflow)?;
        // Refuses rows or columns whose products elsewhere (`n * rows`) could not be addressed either.
        rows.checked_mul(cols).ok_or_else(overflow)?;
        let data = bytemuck::allocation::try_zeroed_slice_box(lines).map_err(|()| overflow())?;
        Ok(Self { rows, cols, kind, table, records, panel_bytes, data })
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes held, which a product of one row reads once.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.data)
    }

    /// The format's name, such as `Q4_1` or `NF4`.
    pub fn name(&self) -> &'static str {
        self.kind.name
    }

    /// Unpacks row `row` into `out`: an embedding look-up.
    ///
    /// # Errors
    /// There is no such row, or `out` is not `cols` long.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        if row >= self.rows {
            return Err(Error::Row { row, rows: self.rows });
        }
        if out.len() != self.cols {
            return Err(Error::Length { what: "a row's weights", expected: self.cols, found: out.len() });
        }
        let (panel, lane) = (self.panel(row / LANES), row % LANES);
        let layout = self.kind.layout;
        for (group, out) in out.chunks_mut(layout.group).enumerate() {
            let record = &panel[layout.head_bytes() + group / layout.groups * layout.record_bytes()..];
            let g = group % layout.groups;
            let (scale, min) = self.scale(panel, record, g, lane);
            let codes = &record[layout.scale_bytes() + g * layout.group_bytes()..];
            for (k, out) in out.iter_mut().enumerate() {
                let code = self.code(&codes[k / STEP * layout.codes.step_bytes()..], k % STEP, lane);
                *out = if layout.scales.has_min() { scale * code + min } else { scale * code };
            }
        }
        Ok(())
    }

    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    pub(super) fn panel(&self, panel: usize) -> &[u8] {
        let bytes: &[u8] = bytemuck::cast_slice(&self.data);
        &bytes[panel * self.panel_bytes..][..self.panel_bytes]
    }

    /// Columns with the last record's padding.
    pub(super) fn padded_cols(&self) -> usize {
        self.records * self.kind.layout.record()
    }

    fn code(&self, step: &[u8], k: usize, lane: usize) -> f32 {
        let at = k * LANES + lane;
        match self.kind.layout.codes {
            CodeKind::Nibble => self.table[usize::from(step[lane * 4 + k / 2] >> (k % 2 * 4) & 15)],
            CodeKind::Byte => f32::from(step[at] as i8),
            CodeKind::F16 => f16_at(step, at),
            CodeKind::Bf16 => bf16::from_le_bytes([step[at * 2], step[at * 2 + 1]]).to_f32(),
            CodeKind::F32 => f32_at(step, at),
        }
    }

    fn scale(&self, panel: &[u8], record: &[u8], g: usize, lane: usize) -> (f32, f32) {
        let sub = |at: usize| f32::from(record[at * LANES + lane] as i8);
        match self.kind.layout.scales {
            ScaleKind::None => (1.0, 0.0),
            ScaleKind::Rows => (f32_at(panel, lane), 0.0),
            ScaleKind::F16 => (f16_at(record, lane), 0.0),
            ScaleKind::F16Min => (f16_at(record, lane), f16_at(record, LANES + lane)),
            ScaleKind::F32 => (f32_at(record, lane), 0.0),
            ScaleKind::Sub => (f16_at(record, lane) * sub(2 + g), 0.0),
            ScaleKind::SubMin => {
                (f16_at(record, lane) * sub(4 + 2 * g), f16_at(record, LANES + lane) * sub(4 + 2 * g + 1))
            }
        }
    }
}

impl std::fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PackedMatrix({} [{}, {}], {} bytes)", self.kind.name, self.rows, self.cols, self.bytes())
    }
}

pub(super) fn f16_at(bytes: &[u8], index: usize) -> f32 {
    f16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32()
}

pub(super) fn f32_at(bytes: &[u8], index: usize) -> f32 {
    let at = index * 4;
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
