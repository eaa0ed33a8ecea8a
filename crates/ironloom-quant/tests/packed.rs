//! Matrix products from packed weights: every SIMD level, thread count and number of rows against the scalar reference bit
//! for bit, and against f64 sums of the unpacked weights within the rounding of f32.

use half::f16;
use ironloom_core::{DType, Philox, SimdLevel, Threads};
use ironloom_quant::{Error, PackedMatrix, Product, StoredMatrix, WeightFormat, matmul, packed::matmul_at, unpack};

/// Every way to hold a matrix: what is stored, and how it is held.
const FORMATS: [(DType, WeightFormat); 16] = [
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
    (DType::F32, WeightFormat::Int8),
    (DType::BF16, WeightFormat::Int4),
    (DType::F32, WeightFormat::Nf4),
];

#[test]
fn every_level_thread_count_and_batch_gives_the_bits_of_the_reference() {
    let pools = [1, 2, 3].map(Threads::new);
    for (dtype, format) in FORMATS {
        for rows in [1, 15, 16, 17, 33, 100] {
            for cols in columns(dtype) {
                let matrix = packed(dtype, format, rows, cols);
                let x = normal(9, 20 * cols);
                let mut alone = vec![0.0; 20 * rows];
                for (x, out) in x.chunks(cols).zip(alone.chunks_mut(rows)) {
                    product(SimdLevel::Scalar, &pools[0], &matrix, x, 1, out);
                }
                for level in SimdLevel::supported() {
                    for (n, threads) in (1..=20).zip(pools.iter().cycle()) {
                        let mut out = vec![f32::NAN; n * rows];
                        product(level, threads, &matrix, &x[..n * cols], n, &mut out);
                        let same = out.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{matrix:?} at {level:?}, {n} rows, {threads:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn results_are_those_of_the_unpacked_weights() {
    let threads = Threads::new(2);
    for (dtype, format) in FORMATS {
        for (rows, cols) in columns(dtype).into_iter().map(|cols| (33, cols)).chain([(70, 1024)]) {
            let matrix = packed(dtype, format, rows, cols);
            let weights = weights(&matrix);
            let x = normal(3, 7 * cols);
            for level in SimdLevel::supported() {
                for n in [1, 7] {
                    let mut out = vec![f32::NAN; n * rows];
                    product(level, &threads, &matrix, &x[..n * cols], n, &mut out);
                    let wrong = outside_bound(&weights, &x, cols, &out);
                    assert_eq!(wrong, 0, "{matrix:?} at {level:?}, {n} rows: {wrong} results");
                }
            }
        }
    }
}

#[test]
fn dropping_one_weight_in_four_is_noticed() {
    let threads = Threads::new(1);
    let (rows, cols) = (33, 256);
    for (dtype, format) in FORMATS {
        let matrix = packed(dtype, format, rows, cols);
        let right = weights(&matrix);
        let keep = |(i, &weight): (usize, &f32)| if i % 4 == 3 { 0.0 } else { weight };
        let wrong: Vec<f32> = right.iter().enumerate().map(keep).collect();
        let mutant = PackedMatrix::from_f32(&wrong, rows, cols, WeightFormat::Keep, &threads).unwrap();
        let x = normal(4, cols);
        let mut out = vec![0.0; rows];
        product(SimdLevel::detect(), &threads, &mutant, &x, 1, &mut out);
        assert_eq!(outside_bound(&right, &x, cols, &out), rows, "the wrong kernel for {} passes", matrix.name());
    }
}

#[test]
fn kept_weights_are_exactly_the_stored_ones_in_the_order_asked_for() {
    let threads = Threads::new(2);
    for (dtype, format) in FORMATS {
        if format != WeightFormat::Keep {
            continue;
        }
        let (rows, cols) = (37, 512);
        let bytes = stored(dtype, rows, cols);
        let order: Vec<u32> = (0..rows as u32).map(|row| (row * 5 + 3) % rows as u32).collect();
        let source = StoredMatrix { dtype, bytes: &bytes, rows, cols, row_order: Some(&order) };
        let matrix = PackedMatrix::from_stored(&source, format, &threads).unwrap();
        let mut expected = vec![0.0; rows * cols];
        unpack(dtype, &bytes, &mut expected).unwrap();
        for (row, weights) in weights(&matrix).chunks(cols).enumerate() {
            assert_eq!(weights, &expected[order[row] as usize * cols..][..cols], "{dtype} row {row}");
        }
    }
}

#[test]
fn packed_sizes_stay_near_the_files() {
    let threads = Threads::new(1);
    for (dtype, most) in [
        (DType::Q4_0, 1.0),
        (DType::Q4_1, 1.0),
        (DType::Q8_0, 1.0),
        (DType::Q4_K, 1.03),
        (DType::Q5_1, 1.51),
        (DType::Q6_K, 1.31),
        (DType::BF16, 1.0),
    ] {
        let (rows, cols) = (64, 2048);
        let bytes = stored(dtype, rows, cols);
        let source = StoredMatrix { dtype, bytes: &bytes, rows, cols, row_order: None };
        let matrix = PackedMatrix::from_stored(&source, WeightFormat::Keep, &threads).unwrap();
        // Less the cache line that kernels may read into.
        let ratio = (matrix.bytes() - 64) as f64 / bytes.len() as f64;
        assert!(ratio <= most, "{dtype}: {ratio:.3} of the file's size");
    }
}

#[test]
fn products_of_one_call_share_x() {
    let threads = Threads::new(2);
    let (n, cols) = (5, 256);
    let matrices = [
        packed(DType::Q4_1, WeightFormat::Keep, 48, cols),
        packed(DType::Q2_K, WeightFormat::Keep, 17, cols),
        packed(DType::F32, WeightFormat::Nf4, 0, cols),
        packed(DType::F32, WeightFormat::Int8, 130, cols),
    ];
    let x = normal(5, n * cols);
    for n in [1, n] {
        let x = &x[..n * cols];
        let mut together: Vec<_> = matrices.iter().map(|matrix| vec![0.0; n * matrix.rows()]).collect();
        let pairs = matrices.iter().zip(&mut together);
        let mut products: Vec<_> = pairs.map(|(matrix, out)| Product { matrix, out }).collect();
        matmul(&threads, x, n, &mut products).unwrap();
        for (matrix, together) in matrices.iter().zip(together) {
            let mut alone = vec![0.0; n * matrix.rows()];
            product(SimdLevel::detect(), &threads, matrix, x, n, &mut alone);
            assert_eq!(together, alone);
        }
    }
}

#[test]
fn sizes_that_do_not_agree_are_errors() {
    let threads = Threads::new(1);
    let matrix = packed(DType::Q4_1, WeightFormat::Keep, 16, 64);
    let other = packed(DType::Q4_1, WeightFormat::Keep, 16, 32);
    let (x, mut out, mut second) = (vec![0.0; 128], vec![0.0; 32], vec![0.0; 32]);
    let run = |x: &[f32], n, out: &mut [f32]| matmul(&threads, x, n, &mut [Product { matrix: &matrix, out }]);
    assert!(matches!(run(&x[..127], 2, &mut out), Err(Error::Product { x: 127, .. })));
    assert!(matches!(run(&x, 2, &mut out[..31]), Err(Error::Product { out: 31, .. })));
    assert!(matches!(run(&x, usize::MAX, &mut out), Err(Error::Product { .. })));
    assert!(run(&[], 0, &mut []).is_ok());
    assert!(matmul(&threads, &x, 2, &mut []).is_ok());
    let mut products = [Product { matrix: &matrix, out: &mut out }, Product { matrix: &other, out: &mut second }];
    let error = matmul(&threads, &x, 2, &mut products).unwrap_err();
    assert!(matches!(error, Error::Product { index: 1, .. }));
    assert!(error.to_string().contains("[16, 32]"), "{error}");
}

#[test]
fn bad_stored_matrices_are_errors() {
    let threads = Threads::new(1);
    let pack = |dtype, bytes: &[u8], rows, cols, row_order: Option<&[u32]>| {
        let source = StoredMatrix { dtype, bytes, rows, cols, row_order };
        PackedMatrix::from_stored(&source, WeightFormat::Keep, &threads).map(|_| ())
    };
    let bytes = stored(DType::Q4_1, 2, 64);
    assert!(pack(DType::Q4_1, &bytes, 2, 64, None).is_ok());
    assert!(matches!(pack(DType::Q4_1, &bytes, 2, 63, None), Err(Error::Core(_))));
    assert!(matches!(pack(DType::Q4_1, &bytes, 3, 64, None), Err(Error::Length { .. })));
    assert!(matches!(pack(DType::Q4_1, &bytes, usize::MAX, 64, None), Err(Error::Core(_))));
    assert!(matches!(pack(DType::Q4_1, &bytes, 2, 64, Some(&[0])), Err(Error::Length { .. })));
    assert!(matches!(pack(DType::Q4_1, &bytes, 2, 64, Some(&[0, 2])), Err(Error::Row { row: 2, rows: 2 })));
    assert!(matches!(pack(DType::I64, &[0; 16], 2, 1, None), Err(Error::Unsupported { .. })));
    let matrix = packed(DType::Q4_1, WeightFormat::Keep, 2, 64);
    assert!(matches!(matrix.row(2, &mut [0.0; 64]), Err(Error::Row { row: 2, rows: 2 })));
    assert!(matches!(matrix.row(1, &mut [0.0; 63]), Err(Error::Length { .. })));
}

#[test]
fn empty_matrices_give_zeros_or_nothing() {
    let threads = Threads::new(2);
    let matrix = PackedMatrix::from_f32(&[], 5, 0, WeightFormat::Nf4, &threads).unwrap();
    for n in [1, 3] {
        let mut out = vec![f32::NAN; 5 * n];
        product(SimdLevel::detect(), &threads, &matrix, &[], n, &mut out);
        assert!(out.iter().all(|&value| value == 0.0));
    }
}

/// Columns to try: single, odd and past a block where the type allows it.
fn columns(dtype: DType) -> Vec<usize> {
    match dtype.block_elements() {
        1 => vec![1, 7, 8, 63, 65, 130],
        32 => vec![32, 96, 160],
        _ => vec![256, 512],
    }
}

fn packed(dtype: DType, format: WeightFormat, rows: usize, cols: usize) -> PackedMatrix {
    let bytes = stored(dtype, rows, cols);
    let source = StoredMatrix { dtype, bytes: &bytes, rows, cols, row_order: None };
    PackedMatrix::from_stored(&source, format, &Threads::new(2)).unwrap()
}

/// Random stored weights: random codes with sensible FP16 scales.
fn stored(dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
    let values = normal(rows as u64 * 1000 + cols as u64, rows * cols);
    match dtype {
        DType::F32 => return values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DType::F16 => return values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        DType::BF16 => return values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect(),
        _ => {}
    }
    let halves: &[usize] = match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => &[0],
    };
    let mut bytes = vec![0; dtype.bytes_for(rows * cols).unwrap()];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (values[i % values.len()].to_bits() >> 3) as u8 ^ (i / values.len()) as u8;
    }
    for (block, value) in bytes.chunks_exact_mut(dtype.block_bytes()).zip(values) {
        for (i, &at) in halves.iter().enumerate() {
            let scale = f16::from_f32(value * 0.05 + 0.01 * i as f32);
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    bytes
}

fn weights(matrix: &PackedMatrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows() * matrix.cols()];
    for (row, values) in values.chunks_mut(matrix.cols()).enumerate() {
        matrix.row(row, values).unwrap();
    }
    values
}

fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Philox::new(seed, 0);
    (0..count).map(|_| random.next_normal()).collect()
}

fn product(level: SimdLevel, threads: &Threads, matrix: &PackedMatrix, x: &[f32], n: usize, out: &mut [f32]) {
    matmul_at(level, threads, x, n, &mut [Product { matrix, out }]).unwrap();
}

/// How many results differ from the f64 sum by more than f32 sums of this length do: each step rounds by 2^-24 of a partial
/// sum, and those are below sum |x| · max |w| (twice that where a minimum cancels).
fn outside_bound(weights: &[f32], x: &[f32], cols: usize, out: &[f32]) -> usize {
    let rows = weights.len() / cols;
    let wrong = |(i, &found): (usize, &f32)| {
        let x = &x[i / rows * cols..][..cols];
        let weights = &weights[i % rows * cols..][..cols];
        let exact: f64 = x.iter().zip(weights).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
        let largest = weights.iter().fold(0f32, |largest, w| largest.max(w.abs()));
        let size: f64 = x.iter().map(|x| f64::from(x.abs())).sum::<f64>() * f64::from(largest);
        (f64::from(found) - exact).abs() > size * 1e-6
    };
    out.iter().enumerate().filter(|&result| wrong(result)).count()
}
