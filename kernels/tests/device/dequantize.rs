//! Unpacked rows against the host's reading of the same bytes, rounded: bit for bit, in every layout.

use half::{bf16, f16};
use ironloom_core::{DType, Philox, Threads};
use ironloom_kernels::{Dequantize, Error, TileFormat, WeightLayout, dequantize};
use ironloom_quant::{DeviceFormat, StoredMatrix, TiledMatrix, WeightFormat, tiles};

use crate::{buffer, gpu, read_bf16};

/// Every way to hold a matrix: what is stored, and how it is held.
pub(crate) const FORMATS: [(DType, WeightFormat); 18] = [
    (DType::F32, WeightFormat::Keep),
    (DType::F16, WeightFormat::Keep),
    (DType::BF16, WeightFormat::Keep),
    (DType::Q4_0, WeightFormat::Keep),
    (DType::Q4_1, WeightFormat::Keep),
    (DType::Q5_0, WeightFormat::Keep),
    (DType::Q5_1, WeightFormat::Keep),
    (DType::Q8_0, WeightFormat::Keep),
    (DType::Q2_K, WeightFormat::Keep),
    (DType::Q3_K, WeightFormat::Keep),
    (DType::Q4_K, WeightFormat::Keep),
    (DType::Q5_K, WeightFormat::Keep),
    (DType::Q6_K, WeightFormat::Keep),
    (DType::F32, WeightFormat::Bf16),
    (DType::F32, WeightFormat::Int8),
    (DType::F32, WeightFormat::Nf4),
    (DType::F32, WeightFormat::Int4),
    (DType::Q8_0, WeightFormat::F32),
];

/// The stored types that the device reads without tiles, whatever the packer would make of them.
pub(crate) const PLAIN: [DType; 13] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// Stored weights of any codes and finite factors.
pub(crate) fn stored(dtype: DType, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let mut draws = Philox::new(seed, 0);
    if matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        let values = (0..rows * cols).map(|_| draws.next_normal());
        return match dtype {
            DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
            DType::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
            _ => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        };
    }
    let mut bytes: Vec<u8> = (0..dtype.bytes_for(rows * cols).unwrap()).map(|_| draws.next_u32() as u8).collect();
    let halves: &[usize] = match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => &[0],
    };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for &at in halves {
            block[at..at + 2].copy_from_slice(&f16::from_f32(draws.next_normal()).to_le_bytes());
        }
        if dtype == DType::Q8_0 {
            // The one code that tiles cannot hold.
            block[2..].iter_mut().for_each(|code| *code = if *code == 0x80 { 0x81 } else { *code });
        }
    }
    bytes
}

/// Widths that are whole blocks of a type: parts of a chunk, of a record, and more.
pub(crate) fn widths(dtype: DType) -> &'static [usize] {
    match dtype.block_elements() {
        1 => &[8, 65, 352, 576],
        32 => &[32, 352, 576],
        _ => &[256, 1280],
    }
}

pub(crate) fn layout(format: DeviceFormat) -> WeightLayout {
    match format {
        DeviceFormat::Plain(dtype) => WeightLayout::Plain(dtype),
        DeviceFormat::Tiles(format) => WeightLayout::Tiles(match format {
            tiles::TileFormat::Bf16 => TileFormat::Bf16,
            tiles::TileFormat::Int8 => TileFormat::Int8,
            tiles::TileFormat::Nf4 => TileFormat::Nf4,
            tiles::TileFormat::Int4 => TileFormat::Int4,
            tiles::TileFormat::Q4_0 => TileFormat::Q4_0,
            tiles::TileFormat::Q4_1 => TileFormat::Q4_1,
            tiles::TileFormat::Q8_0 => TileFormat::Q8_0,
            tiles::TileFormat::Q4_K => TileFormat::Q4_K,
            tiles::TileFormat::Q6_K => TileFormat::Q6_K,
        }),
    }
}

/// A matrix on the device: its layout, its bytes, and its weights as the host reads them.
pub(crate) struct Case {
    pub(crate) layout: WeightLayout,
    pub(crate) bytes: Vec<u8>,
    pub(crate) weights: Vec<f32>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

/// A matrix as the packer holds it.
pub(crate) fn packed(dtype: DType, format: WeightFormat, rows: usize, cols: usize) -> Case {
    let bytes = stored(dtype, rows, cols, 11);
    let source = StoredMatrix { dtype, bytes: &bytes, rows, cols, row_order: None };
    let matrix = TiledMatrix::from_stored(&source, format, &Threads::new(2)).unwrap();
    let mut weights = vec![0.0; rows * cols];
    for (row, out) in weights.chunks_exact_mut(cols).enumerate() {
        matrix.row(row, out).unwrap();
    }
    Case { layout: layout(matrix.format()), bytes: matrix.into_bytes(), weights, rows, cols }
}

/// A matrix as it is stored.
pub(crate) fn plain(dtype: DType, rows: usize, cols: usize) -> Case {
    let bytes = stored(dtype, rows, cols, 12);
    let mut weights = vec![0.0; rows * cols];
    ironloom_quant::unpack(dtype, &bytes, &mut weights).unwrap();
    Case { layout: WeightLayout::Plain(dtype), bytes, weights, rows, cols }
}

/// Every layout in a few shapes.
pub(crate) fn cases() -> impl Iterator<Item = Case> {
    let shapes = |dtype| widths(dtype).iter().flat_map(|&cols| [1, 17, 48].map(|rows| (rows, cols)));
    let packed = FORMATS
        .into_iter()
        .flat_map(move |(dtype, format)| shapes(dtype).map(move |(rows, cols)| packed(dtype, format, rows, cols)));
    packed
        .chain(PLAIN.into_iter().flat_map(move |dtype| shapes(dtype).map(move |(rows, cols)| plain(dtype, rows, cols))))
}

#[test]
fn unpacked_rows_are_the_rounded_weights() {
    let Some(gpu) = gpu() else { return };
    for case in cases() {
        let Case { layout, rows, cols, .. } = case;
        let matrix = gpu.upload(&case.bytes, "a test").unwrap();
        let padded = WeightLayout::padded_cols(cols);
        for (first_row, count) in [(0, rows), (rows / 2, rows - rows / 2), (rows - 1, 1), (0, rows.min(16)), (rows, 0)]
        {
            let out = buffer(&gpu, count * padded * 2);
            let call = Dequantize { matrix: matrix.slice(), layout, rows, cols, first_row, count, out: out.slice() };
            dequantize(&gpu, &call).unwrap();
            let found = read_bf16(&gpu, &out, count * padded);
            for (i, found) in found.into_iter().enumerate() {
                let (row, col) = (first_row + i / padded, i % padded);
                let expected = if col < cols { bf16::from_f32(case.weights[row * cols + col]).to_f32() } else { 0.0 };
                assert!(found == expected, "{layout:?} [{rows}, {cols}] at ({row}, {col}): {found}, {expected}");
            }
        }
    }
}

/// Needs no device: the kernels' side and the packer's side count the same bytes.
#[test]
fn layouts_take_what_the_packer_makes() {
    for (dtype, format) in FORMATS {
        for &cols in widths(dtype) {
            for rows in [0, 1, 16, 17, 100] {
                let device = DeviceFormat::of(dtype, format).unwrap();
                assert_eq!(
                    layout(device).bytes(rows, cols).unwrap(),
                    device.bytes_for(rows, cols).unwrap(),
                    "{device:?}"
                );
            }
        }
    }
    assert!(matches!(WeightLayout::Plain(DType::Q4_K).bytes(1, 64), Err(Error::Unsupported { .. })));
    assert!(WeightLayout::Tiles(TileFormat::Int8).bytes(usize::MAX, 64).is_err());
}

#[test]
fn rows_that_are_not_there_are_refused() {
    let Some(gpu) = gpu() else { return };
    let case = packed(DType::F32, WeightFormat::Nf4, 20, 64);
    let (matrix, out) = (gpu.upload(&case.bytes, "a test").unwrap(), buffer(&gpu, 20 * 64 * 2));
    let call = Dequantize {
        matrix: matrix.slice(),
        layout: case.layout,
        rows: 20,
        cols: 64,
        first_row: 0,
        count: 20,
        out: out.slice(),
    };
    dequantize(&gpu, &call).unwrap();
    for bad in [
        Dequantize { first_row: 1, ..call },
        Dequantize { rows: 40, ..call },
        Dequantize { cols: 65, ..call },
        Dequantize { layout: WeightLayout::Plain(DType::I32), ..call },
        Dequantize { out: out.part(0, 100).unwrap(), ..call },
    ] {
        assert!(dequantize(&gpu, &bad).is_err(), "{bad:?}");
    }
}
