//! Stored formats against what other implementations read and pack (tests/golden/quant.py), and their behaviour at the edges.

use std::path::PathBuf;

use ironloom_core::{DType, Philox};
use ironloom_quant::formats::blocks64::{CodeBook, pack_row, unpack_row};
use ironloom_quant::formats::codes::{layout, unpack_codes};
use ironloom_quant::{Error, pack, unpack};
use proptest::prelude::*;

const READABLE: [DType; 13] = [
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
const PACKED: [DType; 7] = [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0, DType::Q4_K, DType::Q6_K];

fn golden(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/quant").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn golden_f32(name: &str) -> Vec<f32> {
    golden(name).as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn unpacked(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_elements()];
    unpack(dtype, bytes, &mut values).unwrap();
    values
}

fn rms_error(values: &[f32], approximation: &[f32]) -> f64 {
    assert_eq!(values.len(), approximation.len());
    let squares = values.iter().zip(approximation).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
    (squares.sum::<f64>() / values.len() as f64).sqrt()
}

fn normals(count: usize) -> Vec<f32> {
    let mut draws = Philox::new(2026, 11);
    (0..count).map(|_| draws.next_normal()).collect()
}

/// The first place where two runs of floats differ in a bit.
fn first_difference(found: &[f32], expected: &[f32]) -> Option<usize> {
    assert_eq!(found.len(), expected.len());
    (0..found.len()).find(|&i| found[i].to_bits() != expected[i].to_bits())
}

#[test]
fn reads_every_type_bit_for_bit_as_the_gguf_package() {
    for dtype in READABLE {
        let found = unpacked(dtype, &golden(&format!("read/{dtype}.packed")));
        let expected = golden_f32(&format!("read/{dtype}.f32"));
        if let Some(i) = first_difference(&found, &expected) {
            panic!("{dtype}: weight {i} is {:e}, expected {:e}", found[i], expected[i]);
        }
    }
}

/// The comparison above must notice a reader that drops one weight in four.
#[test]
fn dropping_one_weight_in_four_fails_the_comparison() {
    for dtype in READABLE {
        let mut found = unpacked(dtype, &golden(&format!("read/{dtype}.packed")));
        found.iter_mut().skip(3).step_by(4).for_each(|value| *value = 0.0);
        assert!(first_difference(&found, &golden_f32(&format!("read/{dtype}.f32"))).is_some(), "{dtype}");
    }
}

#[test]
fn codes_scales_and_minima_give_the_unpacked_weights_bit_for_bit() {
    for dtype in READABLE {
        let Some(layout) = layout(dtype) else {
            assert!(!dtype.is_packed(), "{dtype} has no codes");
            continue;
        };
        let bytes = golden(&format!("read/{dtype}.packed"));
        let expected = golden_f32(&format!("read/{dtype}.f32"));
        let mut codes = vec![0; expected.len()];
        let mut scales = vec![f32::NAN; expected.len() / layout.group];
        let mut mins = scales.clone();
        unpack_codes(dtype, &bytes, &mut codes, &mut scales, &mut mins).unwrap();
        for (i, (&code, &expected)) in codes.iter().zip(&expected).enumerate() {
            let found = scales[i / layout.group] * f32::from(code) + mins[i / layout.group];
            assert_eq!(found.to_bits(), expected.to_bits(), "{dtype} weight {i}: {found:e} and {expected:e}");
        }
        // Random bits reach both ends of the range of codes, and neither is passed.
        assert_eq!(codes.iter().min(), Some(&layout.lowest), "{dtype}");
        assert_eq!(codes.iter().max(), Some(&layout.highest), "{dtype}");
        assert_eq!(layout.bits == 4, i32::from(layout.highest) - i32::from(layout.lowest) < 16, "{dtype}");
        let symmetric = mins.iter().all(|min| min.to_bits() == (-0.0f32).to_bits());
        assert_eq!(symmetric, !layout.has_mins, "{dtype}");
    }
}

#[test]
fn packs_plain_types_as_the_gguf_package() {
    let values = golden_f32("pack/values.f32");
    assert_eq!(pack(DType::BF16, &values).unwrap(), golden("pack/numpy-BF16.packed"));
    assert_eq!(pack(DType::F32, &values).unwrap(), golden("pack/values.f32"));
    let halves = pack(DType::F16, &[1.0, -2.5, 65504.0, 6e-8, 1.0 + 1.0 / 2048.0]).unwrap();
    assert_eq!(halves, [0x00, 0x3c, 0x00, 0xc1, 0xff, 0x7b, 0x01, 0x00, 0x00, 0x3c]);
}

#[test]
fn packs_with_no_more_error_than_ggml() {
    let values = golden_f32("pack/values.f32");
    for dtype in PACKED {
        let ours = unpacked(dtype, &pack(dtype, &values).unwrap());
        for file in [format!("pack/{dtype}.packed"), format!("pack/numpy-{dtype}.packed")] {
            if file.contains("numpy") && dtype.block_elements() == 256 {
                continue; // the gguf package packs no super-blocks
            }
            let theirs = unpacked(dtype, &golden(&file));
            let (found, limit) = (rms_error(&values, &ours), rms_error(&values, &theirs));
            println!("{dtype}: RMS error {found:.6}, {file} {limit:.6}, ratio {:.4}", found / limit);
            assert!(found <= limit, "{dtype}: RMS error {found}, {file} has {limit}");
        }
    }
}

/// numpy's nearest levels, on rows with a tail; its NF4 levels come out of the quantiles, not out of a table.
#[test]
fn packs_int4_and_nf4_rows_as_numpy() {
    let values = golden_f32("pack/values.f32");
    for (name, code_book) in [("int4", CodeBook::Int4), ("nf4", CodeBook::Nf4)] {
        let (codes, absmax) = (golden(&format!("rows/{name}.codes")), golden_f32(&format!("rows/{name}.absmax")));
        let read = golden_f32(&format!("rows/{name}.f32"));
        let (mut found_codes, mut found_absmax, mut found) = ([0; 64], [0.0; 2], [0.0; 100]);
        for row in 0..40 {
            let expected = &read[100 * row..][..100];
            pack_row(code_book, &values[100 * row..][..100], &mut found_codes, &mut found_absmax).unwrap();
            assert_eq!(found_codes, codes[64 * row..][..64], "{name} row {row}");
            assert_eq!(found_absmax, absmax[2 * row..][..2], "{name} row {row}");
            unpack_row(code_book, &found_codes, &found_absmax, &mut found).unwrap();
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() <= 1e-6 * expected.abs(), "{name} row {row}: {found}, {expected}");
            }
        }
    }
}

/// Bounds half a percent above what the search reaches on a million normal weights. ggml's packers (llama-cpp-python 0.3.36)
/// reach 0.0859, 0.0781, 0.0426, 0.0378, 0.00535, 0.0713 and 0.0177.
#[test]
fn packing_normal_weights_stays_under_its_bounds() {
    let values = normals(1 << 20);
    let bounds = [
        (DType::Q4_0, 0.0814),
        (DType::Q4_1, 0.071),
        (DType::Q5_0, 0.0404),
        (DType::Q5_1, 0.0347),
        (DType::Q8_0, 0.00518),
        (DType::Q4_K, 0.0704),
        (DType::Q6_K, 0.0168),
    ];
    for (dtype, bound) in bounds {
        let found = rms_error(&values, &unpacked(dtype, &pack(dtype, &values).unwrap()));
        println!("{dtype}: RMS error {found:.6} on normal weights, bound {bound}");
        assert!(found < bound, "{dtype}: RMS error {found} on normal weights, bound {bound}");
    }
}

#[test]
fn zero_and_constant_weights_survive() {
    for dtype in PACKED {
        let zeros = vec![0.0; 256];
        let read = unpacked(dtype, &pack(dtype, &zeros).unwrap());
        assert!(read.iter().all(|&value| value == 0.0), "{dtype}: zeros");
        for constant in [1.0, -1.0, 0.3, -0.7, 1e-3, -65_504.0, 3.0e4] {
            let read = unpacked(dtype, &pack(dtype, &[constant; 256]).unwrap());
            let worst = read.iter().fold(0.0f32, |worst, value| worst.max((value - constant).abs()));
            // FP16 scales carry 11 bits; below 6.1e-5, as those of Q4_K here for 0.001, they lose them.
            assert!(worst <= constant.abs() / 1024.0 + 3e-6, "{dtype}: {constant} is off by {worst}");
        }
    }
}

#[test]
fn weights_below_the_smallest_scale_become_small() {
    for dtype in PACKED {
        for tiny in [1e-9, f32::MIN_POSITIVE, 1e-45] {
            let values: Vec<f32> = (0..256).map(|i| if i % 3 == 0 { tiny } else { -tiny }).collect();
            let read = unpacked(dtype, &pack(dtype, &values).unwrap());
            assert!(read.iter().all(|value| value.abs() <= 2.0 * tiny), "{dtype}: {tiny:e}");
        }
    }
}

#[test]
fn weights_that_no_format_holds_are_refused_by_index() {
    for dtype in PACKED.into_iter().chain([DType::F32, DType::F16, DType::BF16]) {
        let mut values = vec![0.5; 512];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            values[300] = bad;
            let error = pack(dtype, &values).unwrap_err();
            assert!(matches!(error, Error::NotFinite { index: 300, .. }), "{dtype}: {error}");
            assert!(error.to_string().contains("weight 300"), "{error}");
        }
        values[300] = -3.4e38;
        match pack(dtype, &values) {
            Ok(packed) => {
                assert!(dtype == DType::F32 || dtype == DType::BF16, "{dtype} cannot hold -3.4e38");
                assert!(unpacked(dtype, &packed)[300].is_finite());
            }
            Err(Error::OutOfRange { index, limit, .. }) => {
                assert_eq!(index, 300);
                // The largest weight that is said to fit does, alone and opposite another.
                for (weight, beside) in [(limit, 0.5), (-limit, 0.5), (limit, -limit)] {
                    (values[300], values[301]) = (weight, beside);
                    let read = unpacked(dtype, &pack(dtype, &values).unwrap());
                    assert!((read[300] / weight - 1.0).abs() < 0.1, "{dtype}: {weight} became {}", read[300]);
                    assert!(read.iter().all(|value| value.is_finite()), "{dtype}");
                }
            }
            Err(error) => panic!("{dtype}: {error}"),
        }
    }
}

#[test]
fn types_that_are_not_weights_are_refused_with_a_way_out() {
    let error = unpack(DType::I32, &[0; 4], &mut [0.0]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot unpack I32; unpack works on F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K"
    );
    for dtype in [DType::Q2_K, DType::Q3_K, DType::Q5_K, DType::F64] {
        assert!(matches!(pack(dtype, &[0.0; 256]), Err(Error::Unsupported { .. })), "{dtype}");
    }
    assert!(matches!(unpack_codes(DType::F32, &[], &mut [], &mut [], &mut []), Err(Error::Unsupported { .. })));
    for dtype in DType::ALL {
        let packed_or_plain = READABLE.contains(dtype);
        assert_eq!(
            unpack(*dtype, &[], &mut []).is_ok(),
            packed_or_plain,
            "{dtype}: nothing is whole blocks of any type"
        );
    }
}

fn any_packed() -> impl Strategy<Value = DType> {
    proptest::sample::select(PACKED.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    /// Lengths that are not whole blocks, or do not agree, are errors; all others work.
    #[test]
    fn lengths_are_checked(dtype in proptest::sample::select(READABLE.to_vec()), bytes in 0usize..700, count in 0usize..700) {
        let whole = bytes.is_multiple_of(dtype.block_bytes());
        let agree = whole && count == bytes / dtype.block_bytes() * dtype.block_elements();
        let packed = vec![0u8; bytes];
        prop_assert_eq!(unpack(dtype, &packed, &mut vec![0.0; count]).is_ok(), agree);
        let group = layout(dtype).map_or(1, |layout| layout.group);
        for groups in [count / group, count / group + 1] {
            let (mut codes, mut scales, mut mins) = (vec![0; count], vec![0.0; groups], vec![0.0; count / group]);
            let found = unpack_codes(dtype, &packed, &mut codes, &mut scales, &mut mins).is_ok();
            prop_assert_eq!(found, agree && dtype.is_packed() && groups == count / group);
        }
    }

    #[test]
    fn packing_whole_blocks_only(dtype in any_packed(), count in 0usize..700) {
        let packed = pack(dtype, &vec![0.25; count]);
        prop_assert_eq!(packed.is_ok(), count.is_multiple_of(dtype.block_elements()));
        if let Ok(packed) = packed {
            prop_assert_eq!(packed.len(), count / dtype.block_elements() * dtype.block_bytes());
        }
    }

    /// Blocks are packed alone: their neighbours change nothing.
    #[test]
    fn a_block_packs_the_same_beside_others(dtype in any_packed(), seed in any::<u64>(), scale in -12i32..12) {
        let mut draws = Philox::new(seed, 0);
        let values: Vec<f32> = (0..512).map(|_| draws.next_normal() * 2f32.powi(scale)).collect();
        let together = pack(dtype, &values).unwrap();
        let (first, second) = values.split_at(256);
        let apart = [pack(dtype, first).unwrap(), pack(dtype, second).unwrap()].concat();
        prop_assert_eq!(together, apart);
    }

    /// Values a type can hold exactly come back exactly.
    #[test]
    fn exact_values_round_trip(seed in any::<u64>()) {
        let mut draws = Philox::new(seed, 1);
        for (dtype, lowest, highest) in [(DType::Q4_0, -8, 7), (DType::Q5_0, -16, 15), (DType::Q8_0, -127, 127), (DType::Q4_1, 0, 15)] {
            let span = (highest - lowest + 1) as u32;
            let mut values: Vec<f32> =
                (0..32).map(|_| (lowest + (draws.next_u32() % span) as i32) as f32 * 0.125).collect();
            (values[0], values[1]) = (lowest as f32 * 0.125, highest as f32 * 0.125);
            prop_assert_eq!(&unpacked(dtype, &pack(dtype, &values).unwrap()), &values, "{}", dtype);
        }
    }

    /// No bytes make a reader panic, whatever numbers they spell.
    #[test]
    fn any_bytes_unpack(dtype in proptest::sample::select(READABLE.to_vec()), seed in any::<u64>()) {
        let mut draws = Philox::new(seed, 2);
        let bytes: Vec<u8> = (0..3 * dtype.block_bytes()).map(|_| draws.next_u32() as u8).collect();
        prop_assert_eq!(unpacked(dtype, &bytes).len(), 3 * dtype.block_elements());
    }
}
