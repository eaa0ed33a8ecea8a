//! Laid-out matrices against the stored weights, and a few bytes against the layout written out by hand.

use half::{bf16, f16};
use ironloom_core::{DType, Philox, Threads};
use proptest::prelude::*;

use super::{DeviceFormat, TileFormat, TiledMatrix, layout::ROWS};
use crate::{
    Error, StoredMatrix, WeightFormat,
    formats::{
        blocks64::{self, CodeBook},
        int8_rows, unpack,
    },
};

const STORED: [DType; 13] = [
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
const CONVERTED: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4, WeightFormat::Nf4];

/// Any codes, with finite factors: every bit of a block counts.
fn stored(dtype: DType, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
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
            block[2..].iter_mut().for_each(|code| *code = if *code == 0x80 { 0x81 } else { *code });
        }
    }
    bytes
}

fn unpacked(dtype: DType, bytes: &[u8], count: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; count];
    unpack(dtype, bytes, &mut values).unwrap();
    values
}

fn read(matrix: &TiledMatrix) -> Vec<f32> {
    let mut values = vec![f32::NAN; matrix.rows() * matrix.cols()];
    for (row, out) in values.chunks_exact_mut(matrix.cols()).enumerate() {
        matrix.row(row, out).unwrap();
    }
    values
}

fn same_bits(found: &[f32], expected: &[f32], what: &str) {
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        // Blocks of scale zero may lose the sign of a zero.
        assert!(found.to_bits() == expected.to_bits() || found == expected, "{what}, weight {i}: {found}, {expected}");
    }
}

/// What a row of weights becomes in a format.
fn converted(values: &[f32], format: WeightFormat) -> Vec<f32> {
    let mut out = vec![f32::NAN; values.len()];
    match format {
        WeightFormat::Keep | WeightFormat::F32 => out.copy_from_slice(values),
        WeightFormat::Bf16 => {
            out.iter_mut().zip(values).for_each(|(out, &value)| *out = bf16::from_f32(value).to_f32());
        }
        WeightFormat::Int8 => {
            let mut codes = vec![0; values.len()];
            let scale = int8_rows::pack_row(values, &mut codes).unwrap();
            int8_rows::unpack_row(&codes, scale, &mut out).unwrap();
        }
        WeightFormat::Int4 | WeightFormat::Nf4 => {
            let book = if format == WeightFormat::Nf4 { CodeBook::Nf4 } else { CodeBook::Int4 };
            let blocks = blocks64::row_blocks(values.len());
            let (mut codes, mut absmax) = (vec![0; blocks * blocks64::BLOCK_BYTES], vec![0.0; blocks]);
            blocks64::pack_row(book, values, &mut codes, &mut absmax).unwrap();
            for (i, out) in out.iter_mut().enumerate() {
                let byte = codes[i / 64 * 32 + i % 32];
                let code = if i % 64 < 32 { byte & 15 } else { byte >> 4 };
                *out = match book {
                    CodeBook::Nf4 => absmax[i / 64] * bf16::from_f32(book.levels()[usize::from(code)]).to_f32(),
                    CodeBook::Int4 => absmax[i / 64] / 7.0 * (f32::from(code) - 8.0),
                };
            }
        }
    }
    out
}

/// Lays out, checks size and weights, in the stored order and in another.
fn check(dtype: DType, format: WeightFormat, rows: usize, cols: usize, seed: u64) {
    let threads = Threads::new(2);
    let bytes = stored(dtype, rows, cols, seed);
    let values = unpacked(dtype, &bytes, rows * cols);
    let expected: Vec<f32> = values.chunks_exact(cols).flat_map(|row| converted(row, format)).collect();
    let what = format!("{dtype} as {format:?} [{rows}, {cols}]");

    let source = StoredMatrix { dtype, bytes: &bytes, rows, cols, row_order: None };
    let matrix = TiledMatrix::from_stored(&source, format, &threads).unwrap();
    let device = DeviceFormat::of(dtype, format).unwrap();
    assert_eq!((matrix.rows(), matrix.cols(), matrix.format()), (rows, cols, device), "{what}");
    assert_eq!(matrix.bytes().len(), device.bytes_for(rows, cols).unwrap(), "{what}");
    same_bits(&read(&matrix), &expected, &what);

    let order: Vec<u32> = (0..rows as u32).map(|row| (row * 7 + 3) % rows as u32).collect();
    let reordered = StoredMatrix { row_order: Some(&order), ..source };
    let reordered = TiledMatrix::from_stored(&reordered, format, &threads).unwrap();
    let expected: Vec<f32> = order.iter().flat_map(|&row| &expected[row as usize * cols..][..cols]).copied().collect();
    same_bits(&read(&reordered), &expected, &format!("{what}, reordered"));
}

#[test]
fn kept_weights_are_the_stored_ones() {
    for dtype in STORED {
        let widths: &[usize] = match dtype.block_elements() {
            1 => &[1, 64, 65, 352, 576],
            32 => &[32, 64, 96, 352, 576],
            _ => &[256, 768],
        };
        for &cols in widths {
            for rows in [1, 15, 16, 17, 33] {
                check(dtype, WeightFormat::Keep, rows, cols, 1);
            }
        }
    }
}

#[test]
fn converted_weights_are_those_of_the_format() {
    for format in CONVERTED {
        for (dtype, cols) in [(DType::F32, 65), (DType::BF16, 576), (DType::Q4_0, 352), (DType::Q6_K, 256)] {
            for rows in [1, 17, 40] {
                check(dtype, format, rows, cols, 2);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_shape_reads_back(
        kind in 0..STORED.len() + CONVERTED.len(),
        rows in 1usize..50,
        blocks in 1usize..40,
        spare in 0usize..64,
        seed: u64,
    ) {
        let (dtype, format) = match kind.checked_sub(STORED.len()) {
            None => (STORED[kind], WeightFormat::Keep),
            Some(format) => (DType::F32, CONVERTED[format]),
        };
        let cols = match dtype.block_elements() {
            1 => blocks * 16 + spare,
            32 => blocks * 32,
            _ => (blocks / 10 + 1) * 256,
        };
        check(dtype, format, rows, cols, seed);
    }
}

/// The bytes of one weight, found by the layout's own words: row 9 = 8 + 1, column 64 + 32 + 2 * 8 + 4 + 2 + 1 = 119, so chunk
/// 1, g = 1, t = 2, lane 6, step 3, register 3, element 1.
#[test]
fn a_weight_lies_where_the_layout_says() {
    let (rows, cols, lane) = (16, 128, 6);
    let mut values = vec![0.0; rows * cols];
    values[9 * cols + 119] = 3.5;
    let threads = Threads::new(1);
    let tile = |format| TiledMatrix::from_f32(&values, rows, cols, format, &threads).unwrap().into_bytes();

    let int4 = tile(WeightFormat::Int4);
    assert_eq!(int4.len(), 2 * 512 + 256);
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(word(&int4, 512 + lane * 16 + 12), 0xf888_8888);
    assert_eq!(f32::from_bits(word(&int4, 1024 + (9 * 4 + 1) * 4)), 0.5);

    let nf4 = tile(WeightFormat::Nf4);
    assert_eq!(nf4[512 + lane * 16 + 12 + 3], 0xf7);
    assert_eq!(f32::from_bits(word(&nf4, 1024 + (9 * 4 + 1) * 4)), 3.5);
    assert_eq!(nf4[..1024].iter().filter(|&&byte| byte != 0x77).count(), 1);

    let int8 = tile(WeightFormat::Int8);
    assert_eq!(int8.len(), 2048 + 64);
    assert_eq!(int8[1024 + 512 + lane * 16 + 8 + 3 * 2 + 1], 127);
    assert_eq!(int8[..2048].iter().filter(|&&byte| byte != 0).count(), 1);
    assert_eq!(f32::from_bits(word(&int8, 2048 + 9 * 4)), 3.5 / 127.0);

    // A negative code is a sign and a magnitude.
    values[9 * cols + 119] = -3.5;
    let int8 = TiledMatrix::from_f32(&values, rows, cols, WeightFormat::Int8, &threads).unwrap();
    assert_eq!(int8.bytes()[1024 + 512 + lane * 16 + 8 + 3 * 2 + 1], 0xff);
}

/// Q6_K has columns of its own: row 9, column 64 + 2 * 16 + 3 * 4 + 2 + 1 = 111 is chunk 1, step 2, lane 7, register 3,
/// element 1. A weight of d * sc * (63 - 32) has all six bits.
#[test]
fn a_weight_of_q6_k_lies_where_the_layout_says() {
    let (rows, cols, lane) = (16, 256, 7);
    let mut bytes = vec![0u8; rows * 210];
    let block = &mut bytes[9 * 210..][..210];
    // Weight 111 is 3 * 32 + 15: the high nibble of byte 32 + 15, the upper bits of byte 15.
    block[32 + 15] = 15 << 4;
    block[128 + 15] = 3 << 6;
    block[192 + 6] = 5;
    block[208..].copy_from_slice(&f16::from_f32(2.0).to_le_bytes());
    let threads = Threads::new(1);
    let source = StoredMatrix { dtype: DType::Q6_K, bytes: &bytes, rows, cols, row_order: None };
    let matrix = TiledMatrix::from_stored(&source, WeightFormat::Keep, &threads).unwrap();
    let held = matrix.bytes();
    assert_eq!(held.len(), 4 * 768 + 288);
    // Bits 4 * 3 + 16 of the word of step 2.
    assert_eq!(held[768 + lane * 16 + 8..][..4], [0, 0, 0, 15 << 4]);
    // Bits 2 * 3 + 16 of the word of steps 2 and 3.
    assert_eq!(held[768 + 512 + lane * 8 + 4..][..4], [0, 0, 3 << 6, 0]);
    assert_eq!(held[4 * 768 + 9 * 2..][..2], f16::from_f32(2.0).to_le_bytes());
    assert_eq!(held[4 * 768 + 32 + 9 * 16 + 6], 5);
    let mut row = [0.0; 256];
    matrix.row(9, &mut row).unwrap();
    assert_eq!((row[111], row[110]), (310.0, -320.0));
}

#[test]
fn padding_is_zero_weights() {
    let threads = Threads::new(1);
    for (dtype, format) in [
        (DType::F32, WeightFormat::Int8),
        (DType::F32, WeightFormat::Int4),
        (DType::F32, WeightFormat::Nf4),
        (DType::F32, WeightFormat::Bf16),
        (DType::Q4_0, WeightFormat::Keep),
        (DType::Q4_1, WeightFormat::Keep),
        (DType::Q8_0, WeightFormat::Keep),
    ] {
        // One record of one chunk, half of it padding; read as if the padding were columns and rows.
        let bytes = stored(dtype, 5, 32, 3);
        let source = StoredMatrix { dtype, bytes: &bytes, rows: 5, cols: 32, row_order: None };
        let mut matrix = TiledMatrix::from_stored(&source, format, &threads).unwrap();
        matrix.cols = 64;
        if format != WeightFormat::Bf16 {
            matrix.rows = ROWS;
        }
        for (i, value) in read(&matrix).into_iter().enumerate() {
            assert!(value == 0.0 || (i / 64 < 5 && i % 64 < 32), "{matrix:?}: weight {i} is {value}");
        }
    }
}

#[test]
fn a_code_without_a_magnitude_keeps_the_stored_blocks() {
    let threads = Threads::new(2);
    let mut bytes = stored(DType::Q8_0, 20, 64, 4);
    *bytes.last_mut().unwrap() = 0x80;
    let source = StoredMatrix { dtype: DType::Q8_0, bytes: &bytes, rows: 20, cols: 64, row_order: None };
    let matrix = TiledMatrix::from_stored(&source, WeightFormat::Keep, &threads).unwrap();
    assert_eq!((matrix.format(), matrix.bytes()), (DeviceFormat::Plain(DType::Q8_0), &bytes[..]));
    // A scale of any bits is no code.
    let mut bytes = stored(DType::Q8_0, 1, 32, 4);
    bytes[..2].copy_from_slice(&[0x80, 0x80]);
    let source = StoredMatrix { dtype: DType::Q8_0, bytes: &bytes, rows: 1, cols: 32, row_order: None };
    let matrix = TiledMatrix::from_stored(&source, WeightFormat::Keep, &threads).unwrap();
    assert_eq!(matrix.format(), DeviceFormat::Tiles(TileFormat::Q8_0));
}

#[test]
fn bad_matrices_are_refused() {
    let threads = Threads::new(1);
    let make = |dtype, bytes: &[u8], cols, row_order: Option<&[u32]>, format| {
        let source = StoredMatrix { dtype, bytes, rows: 2, cols, row_order };
        TiledMatrix::from_stored(&source, format, &threads).unwrap_err()
    };
    let keep = WeightFormat::Keep;
    assert!(matches!(make(DType::I32, &[0; 8], 1, None, keep), Error::Unsupported { .. }));
    assert!(matches!(make(DType::F32, &[0; 9], 1, None, keep), Error::Length { expected: 8, found: 9, .. }));
    assert!(matches!(make(DType::Q4_K, &[0; 8], 64, None, keep), Error::Core(_)));
    assert!(matches!(make(DType::F32, &[0; 8], 1, Some(&[0]), keep), Error::Length { .. }));
    assert!(matches!(make(DType::F32, &[0; 8], 1, Some(&[0, 2]), keep), Error::Row { row: 2, rows: 2 }));
    assert!(matches!(make(DType::F32, &[0xff; 8], 1, None, WeightFormat::Int8), Error::NotFinite { .. }));
    let empty = TiledMatrix::from_f32(&[], 0, 7, WeightFormat::Nf4, &threads).unwrap();
    assert_eq!(empty.bytes().len(), 0);
    assert!(empty.row(0, &mut [0.0; 7]).is_err());
    let narrow = TiledMatrix::from_f32(&[], 3, 0, WeightFormat::Int8, &threads).unwrap();
    assert!(narrow.row(2, &mut []).is_ok());
    let matrix = TiledMatrix::from_f32(&[1.0; 4], 2, 2, WeightFormat::Bf16, &threads).unwrap();
    assert!(matches!(matrix.row(0, &mut [0.0; 3]), Err(Error::Length { .. })));
    assert!(DeviceFormat::Tiles(TileFormat::Bf16).bytes_for(usize::MAX, 64).is_err());
}
