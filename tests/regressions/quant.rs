//! Public faults of packed weight formats, each as a test named by project and number.

use ironloom_core::{DType, Philox};
use ironloom_quant::formats::blocks64::{BLOCK, BLOCK_BYTES, CodeBook, pack_row, row_blocks, unpack_row};
use ironloom_quant::formats::int8_rows;
use ironloom_quant::{Error, pack, unpack};

/// A weight count that is not whole blocks: the tail's absmax came from memory that was never written, and the round trip
/// gave NaN. Here tails are padded with zeros where a row format pads, whatever the buffers held before, and the formats
/// that cannot pad refuse.
#[test]
fn bitsandbytes_1884_tail_of_a_block() {
    let mut draws = Philox::new(1884, 0);
    for code_book in [CodeBook::Int4, CodeBook::Nf4] {
        for cols in (1..=2 * BLOCK + 1).chain([255, 1000]) {
            let row: Vec<f32> = (0..cols).map(|_| draws.next_normal()).collect();
            let blocks = row_blocks(cols);
            let (mut codes, mut absmax) = (vec![0xa5; blocks * BLOCK_BYTES], vec![f32::NAN; blocks]);
            pack_row(code_book, &row, &mut codes, &mut absmax).unwrap();

            let tail = &row[(blocks - 1) * BLOCK..];
            let expected = tail.iter().fold(0.0f32, |absmax, value| absmax.max(value.abs()));
            assert_eq!(absmax[blocks - 1], expected, "{code_book:?}, {cols} columns: the tail's own absmax");
            // The padding itself reads as zeros: unpack the row as whole blocks.
            let mut read = vec![f32::NAN; blocks * BLOCK];
            unpack_row(code_book, &codes, &absmax, &mut read).unwrap();
            assert!(read[cols..].iter().all(|&value| value == 0.0), "{code_book:?}, {cols} columns");
            for (i, (value, read)) in row.iter().zip(&read).enumerate() {
                // The widest gap between levels is 0.304 of absmax (NF4, next to -1).
                let bound = 0.153 * absmax[i / BLOCK];
                assert!((value - read).abs() <= bound, "{code_book:?}, {cols} columns: {value} became {read}");
            }
        }
    }
    for cols in 1..40 {
        let row: Vec<f32> = (0..cols).map(|_| draws.next_normal()).collect();
        let (mut codes, mut read) = (vec![-1; cols], vec![f32::NAN; cols]);
        let scale = int8_rows::pack_row(&row, &mut codes).unwrap();
        int8_rows::unpack_row(&codes, scale, &mut read).unwrap();
        assert!(row.iter().zip(&read).all(|(value, read)| (value - read).abs() <= 0.51 * scale), "{cols} columns");
    }
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0, DType::Q4_K, DType::Q6_K] {
        let values = vec![1.0; dtype.block_elements() + 1];
        assert!(matches!(pack(dtype, &values), Err(Error::Core(ironloom_core::Error::PartialBlock { .. }))), "{dtype}");
        let mut packed = pack(dtype, &values[1..]).unwrap();
        packed.push(0);
        let mut read = vec![0.0; dtype.block_elements()];
        assert!(matches!(unpack(dtype, &packed, &mut read), Err(Error::NotWhole { .. })), "{dtype}");
    }
}
