//! From stored weights to a [`PackedMatrix`].
//!
//! A row's codes are read by [`unpack_codes`] (or quantized from f32) and laid into its lane of a panel, panels in parallel.
//! Eight codes of four bits are squeezed into their word by three shift-or steps on a 64-bit integer, so repacking runs at
//! the speed of reading the codes.

use std::sync::OnceLock;

use half::{bf16, f16};
use ironloom_core::{DType, Threads};

use super::{
    PackedMatrix, WeightFormat,
    kernels::Kind,
    lanes::LANES,
    layout::{CodeKind, STEP, ScaleKind},
};
use crate::{
    Error, Result, StoredMatrix,
    formats::{
        blocks64::{self, CodeBook},
        codes::{self, unpack_codes},
        int8_rows, unpack,
    },
};

impl PackedMatrix {
    /// Packs stored weights. [`WeightFormat::Keep`] holds exactly the stored ones; any other format converts them.
    ///
    /// # Errors
    /// The type holds no weights, the columns are not whole blocks of it, the bytes have another length, the row order has
    /// another length or names a row that is not there, or a weight cannot be packed.
    pub fn from_stored(stored: &StoredMatrix<'_>, format: WeightFormat, threads: &Threads) -> Result<Self> {
        stored.checked()?;
        let (kind, table) = kind(stored.dtype, format)?;
        let mut matrix = Self::empty(stored.rows, stored.cols, kind, table)?;
        matrix.fill(threads, |row, scratch, panel| pack_row(stored, format, kind, row, scratch, panel))?;
        Ok(matrix)
    }

    /// Packs f32 weights, row-major; [`WeightFormat::Keep`] is F32.
    ///
    /// # Errors
    /// `values` is not `rows * cols` long, or a weight cannot be packed.
    pub fn from_f32(values: &[f32], rows: usize, cols: usize, format: WeightFormat, threads: &Threads) -> Result<Self> {
        Self::from_stored(&StoredMatrix::from_f32(values, rows, cols), format, threads)
    }

    /// Calls `pack(row, ..)` for each row with the bytes of its panel.
    fn fill(
        &mut self,
        threads: &Threads,
        pack: impl Fn(usize, &mut RowScratch, &mut [u8]) -> Result<()> + Sync,
    ) -> Result<()> {
        let (rows, panels, panel_bytes) = (self.rows, self.panels(), self.panel_bytes);
        let data = Data(bytemuck::cast_slice_mut::<_, u8>(&mut self.data).as_mut_ptr());
        let failure = OnceLock::new();
        threads.run_ranges(panels, 1, |range| {
            let mut scratch = RowScratch::default();
            for panel in range {
                // SAFETY: panels do not overlap, each is visited once, and `self` is borrowed mutably meanwhile.
                let bytes = unsafe { std::slice::from_raw_parts_mut(data.get().add(panel * panel_bytes), panel_bytes) };
                for row in panel * LANES..rows.min((panel + 1) * LANES) {
                    if let Err(error) = pack(row, &mut scratch, bytes) {
                        let _ = failure.set(error);
                        return;
                    }
                }
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }
}

/// The bytes of a matrix being filled.
#[derive(Clone, Copy)]
struct Data(*mut u8);
// SAFETY: tasks write disjoint panels, see `fill`.
unsafe impl Send for Data {}
// SAFETY: as for `Send`.
unsafe impl Sync for Data {}
impl Data {
    fn get(self) -> *mut u8 {
        self.0
    }
}

/// One row between its stored and its packed form; kept from row to row.
#[derive(Default)]
struct RowScratch {
    values: Vec<f32>,
    codes: Vec<i8>,
    nibbles: Vec<u8>,
    scales: Vec<f32>,
    mins: Vec<f32>,
}

fn kind(dtype: DType, format: WeightFormat) -> Result<(Kind, [f32; LANES])> {
    let kind = match (format, dtype) {
        (WeightFormat::F32, _) | (WeightFormat::Keep, DType::F32) => Kind::F32,
        (WeightFormat::Bf16, _) | (WeightFormat::Keep, DType::BF16) => Kind::BF16,
        (WeightFormat::Int8, _) => Kind::INT8,
        (WeightFormat::Int4, _) => Kind::INT4,
        (WeightFormat::Nf4, _) => Kind::NF4,
        (WeightFormat::Keep, DType::F16) => Kind::F16,
        (WeightFormat::Keep, DType::Q4_0) => Kind::Q4_0,
        (WeightFormat::Keep, DType::Q4_1) => Kind::Q4_1,
        (WeightFormat::Keep, DType::Q5_0) => Kind::Q5_0,
        (WeightFormat::Keep, DType::Q5_1) => Kind::Q5_1,
        (WeightFormat::Keep, DType::Q8_0) => Kind::Q8_0,
        (WeightFormat::Keep, DType::Q2_K) => Kind::Q2_K,
        (WeightFormat::Keep, DType::Q3_K) => Kind::Q3_K,
        (WeightFormat::Keep, DType::Q4_K) => Kind::Q4_K,
        (WeightFormat::Keep, DType::Q5_K) => Kind::Q5_K,
        (WeightFormat::Keep, DType::Q6_K) => Kind::Q6_K,
        (WeightFormat::Keep, _) => {
            let supported = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K";
            return Err(Error::Unsupported { operation: "multiply by", dtype, supported });
        }
    };
    let lowest = codes::layout(dtype).map_or(0, |layout| layout.lowest);
    let table = match format {
        WeightFormat::Nf4 => *CodeBook::Nf4.levels(),
        WeightFormat::Int4 => *CodeBook::Int4.levels(),
        _ => std::array::from_fn(|i| f32::from(lowest) + i as f32),
    };
    Ok((kind, table))
}

fn pack_row(
    source: &StoredMatrix<'_>,
    format: WeightFormat,
    kind: Kind,
    row: usize,
    scratch: &mut RowScratch,
    panel: &mut [u8],
) -> Result<()> {
    let (bytes, lane) = (source.row(row), row % LANES);
    if let Some(stored) = codes::layout(source.dtype)
        && format == WeightFormat::Keep
    {
        let groups = source.cols / stored.group;
        scratch.codes.resize(source.cols, 0);
        scratch.scales.resize(groups, 0.0);
        scratch.mins.resize(groups, 0.0);
        unpack_codes(source.dtype, bytes, &mut scratch.codes, &mut scratch.scales, &mut scratch.mins)?;
        lay_codes(kind, &scratch.codes, stored.lowest, lane, panel);
        lay_scales(kind, scratch, blocks(source.dtype, bytes), lane, panel);
        return Ok(());
    }
    scratch.values.resize(source.cols, 0.0);
    unpack(source.dtype, bytes, &mut scratch.values)?;
    match format {
        WeightFormat::Int8 => {
            scratch.codes.resize(source.cols, 0);
            let scale = int8_rows::pack_row(&scratch.values, &mut scratch.codes)?;
            panel[lane * 4..][..4].copy_from_slice(&scale.to_le_bytes());
            lay_codes(kind, &scratch.codes, 0, lane, panel);
        }
        WeightFormat::Int4 => pack_blocks64(CodeBook::Int4, kind, scratch, lane, panel)?,
        WeightFormat::Nf4 => pack_blocks64(CodeBook::Nf4, kind, scratch, lane, panel)?,
        WeightFormat::Keep | WeightFormat::F32 | WeightFormat::Bf16 => lay_values(kind, &scratch.values, lane, panel),
    }
    Ok(())
}

/// Quantizes the row in `scratch.values` to blocks of 64.
fn pack_blocks64(
    code_book: CodeBook,
    kind: Kind,
    scratch: &mut RowScratch,
    lane: usize,
    panel: &mut [u8],
) -> Result<()> {
    let blocks = blocks64::row_blocks(scratch.values.len());
    scratch.nibbles.resize(blocks * blocks64::BLOCK_BYTES, 0);
    scratch.scales.resize(blocks, 0.0);
    scratch.mins.resize(blocks, 0.0);
    blocks64::pack_row(code_book, &scratch.values, &mut scratch.nibbles, &mut scratch.scales)?;
    scratch.codes.clear();
    for block in scratch.nibbles.chunks_exact(blocks64::BLOCK_BYTES) {
        scratch.codes.extend(block.iter().map(|byte| (byte & 15) as i8));
        scratch.codes.extend(block.iter().map(|byte| (byte >> 4) as i8));
    }
    lay_codes(kind, &scratch.codes, 0, lane, panel);
    lay_scales(kind, scratch, std::iter::empty(), lane, panel);
    Ok(())
}

/// FP16 scale and minus the FP16 minimum of each block of 256.
fn blocks(dtype: DType, bytes: &[u8]) -> impl Iterator<Item = (f16, f16)> {
    let (scale, min) = match dtype {
        DType::Q2_K => (80, Some(82)),
        DType::Q3_K => (108, None),
        DType::Q4_K | DType::Q5_K => (0, Some(2)),
        _ => (208, None),
    };
    bytes.chunks_exact(dtype.block_bytes()).map(move |block| {
        let at = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
        (at(scale), min.map_or(f16::ZERO, |min| -at(min)))
    })
}

/// Writes a row's integer codes into its lane.
fn lay_codes(kind: Kind, codes: &[i8], lowest: i8, lane: usize, panel: &mut [u8]) {
    let layout = kind.layout;
    let records = panel[layout.head_bytes()..].chunks_exact_mut(layout.record_bytes());
    for (record, codes) in records.zip(codes.chunks(layout.record())) {
        let steps = record[layout.scale_bytes()..].chunks_exact_mut(layout.codes.step_bytes());
        for (step, codes) in steps.zip(codes.chunks(STEP)) {
            if layout.codes == CodeKind::Nibble {
                let mut bytes = [0; STEP];
                for (byte, &code) in bytes.iter_mut().zip(codes) {
                    *byte = code.wrapping_sub(lowest) as u8;
                }
                step[lane * 4..][..4].copy_from_slice(&squeeze(u64::from_le_bytes(bytes)).to_le_bytes());
            } else {
                for (k, &code) in codes.iter().enumerate() {
                    step[k * LANES + lane] = code as u8;
                }
            }
        }
    }
}

/// Eight bytes below 16 as eight nibbles, the first lowest.
fn squeeze(bytes: u64) -> u32 {
    let pairs = (bytes | bytes >> 4) & 0x00ff_00ff_00ff_00ff;
    let fours = (pairs | pairs >> 8) & 0x0000_ffff_0000_ffff;
    (fours | fours >> 16) as u32
}

/// Writes a row's scales and minima into its lane. `blocks` are the FP16 factors of sub-scales.
fn lay_scales(kind: Kind, row: &RowScratch, blocks: impl Iterator<Item = (f16, f16)>, lane: usize, panel: &mut [u8]) {
    let layout = kind.layout;
    let records = panel[layout.head_bytes()..].chunks_exact_mut(layout.record_bytes());
    let groups = row.scales.chunks(layout.groups).zip(row.mins.chunks(layout.groups));
    let halves = |record: &mut [u8], at: usize, value: f16| {
        record[(at * LANES + lane) * 2..][..2].copy_from_slice(&value.to_le_bytes());
    };
    match layout.scales {
        ScaleKind::None | ScaleKind::Rows => {}
        ScaleKind::F16 | ScaleKind::F16Min => {
            // The file's scales are f16, so the way back from f32 is exact.
            for (record, (scales, mins)) in records.zip(groups) {
                halves(record, 0, f16::from_f32(scales[0]));
                if layout.scales.has_min() {
                    halves(record, 1, f16::from_f32(mins[0]));
                }
            }
        }
        ScaleKind::F32 => {
            for (record, (scales, _)) in records.zip(groups) {
                record[lane * 4..][..4].copy_from_slice(&scales[0].to_le_bytes());
            }
        }
        ScaleKind::Sub | ScaleKind::SubMin => {
            for ((record, (scales, mins)), (scale, min)) in records.zip(groups).zip(blocks) {
                let (head, stride) = if layout.scales.has_min() { (4, 2) } else { (2, 1) };
                halves(record, 0, scale);
                if layout.scales.has_min() {
                    halves(record, 1, min);
                }
                for g in 0..layout.groups {
                    record[(head + g * stride) * LANES + lane] = factor(scales[g], scale);
                    if layout.scales.has_min() {
                        record[(head + g * stride + 1) * LANES + lane] = factor(mins[g], min);
                    }
                }
            }
        }
    }
}

/// The integer s of `product = whole * s`, a product of 11 and at most 8 bits and so exact in f32.
fn factor(product: f32, whole: f16) -> u8 {
    (product / whole.to_f32()) as i8 as u8
}

/// Writes a row's values into its lane as f32 or half-width numbers.
fn lay_values(kind: Kind, values: &[f32], lane: usize, panel: &mut [u8]) {
    let records = panel.chunks_exact_mut(kind.layout.record_bytes());
    for (record, values) in records.zip(values.chunks(kind.layout.record())) {
        for (k, &value) in values.iter().enumerate() {
            let at = k * LANES + lane;
            match kind.layout.codes {
                CodeKind::F16 => record[at * 2..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                CodeKind::Bf16 => record[at * 2..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                _ => record[at * 4..][..4].copy_from_slice(&value.to_le_bytes()),
            }
        }
    }
}
