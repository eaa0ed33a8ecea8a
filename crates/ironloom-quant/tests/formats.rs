//! Stored formats against what other implementations read and pack (tests/golden/quant.py), and their behaviour at the edges.

use std::path::PathBuf;

use ironloom_core::{DType, Philox};
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
            let unit = dtype.block_elements();
            for (block, values) in values.chunks(unit).enumerate() {
                let part = block * unit..(block + 1) * unit;
                let (found, limit) = (rms_error(values, &ours[part.clone()]), rms_error(values, &theirs[part]));
                if found > limit * 1.0 {
                    println!("{dtype} block {block}: {found:e} {limit:e}");
                }
            }
        }
    }
}
