//! The slow product against sums in double precision, and against itself with other numbers of rows.

use ironloom_core::DType;
use ironloom_kernels::{LinearPlain, WeightLayout, linear_plain};

use crate::{
    buffer,
    dequantize::{Case, PLAIN, plain, widths},
    gpu, normals, read_f32, relative_error, round_bf16, upload_f32, upload_split,
};

/// What the operand's two parts add up to.
fn split(x: f32) -> f64 {
    f64::from(round_bf16(x)) + f64::from(round_bf16(x - round_bf16(x)))
}

#[test]
fn products_are_those_of_the_stored_weights_and_ignore_the_other_rows() {
    let Some(gpu) = gpu() else { return };
    for dtype in PLAIN {
        // Narrow matrices of F32 take one or four rows of x to a warp, by their number.
        let router = (dtype == DType::F32).then_some((509, 1352));
        for (rows, cols) in widths(dtype).iter().flat_map(|&cols| [1, 37].map(|rows| (rows, cols))).chain(router) {
            let case: Case = plain(dtype, rows, cols);
            assert_eq!(case.layout, WeightLayout::Plain(dtype));
            let matrix = gpu.upload(&case.bytes, "a test").unwrap();
            let n = 19;
            let (x, bias, before) = (normals(1, n * cols), normals(2, rows), normals(3, n * rows));
            let device_bias = upload_f32(&gpu, &bias);
            let run = |x: &[f32], before: Option<&[f32]>, with_bias: bool| {
                let n = x.len() / cols;
                let device_x = upload_split(&gpu, x, cols);
                let out = before.map_or_else(|| buffer(&gpu, n * rows * 4), |before| upload_f32(&gpu, before));
                let call = LinearPlain {
                    x: device_x.slice(),
                    n,
                    matrix: matrix.slice(),
                    dtype,
                    rows,
                    cols,
                    bias: with_bias.then(|| device_bias.slice()),
                    add: before.is_some(),
                    out: out.slice(),
                    out_stride: rows,
                };
                linear_plain(&gpu, &call).unwrap();
                read_f32(&gpu, &out, n * rows)
            };
            let expected = |with_bias: bool, with_before: bool| -> Vec<f64> {
                let one = |i: usize, row: usize| {
                    let weights = &case.weights[row * cols..][..cols];
                    let products = x[i * cols..][..cols].iter().zip(weights).map(|(&x, &w)| split(x) * f64::from(w));
                    products.sum::<f64>()
                        + if with_bias { f64::from(bias[row]) } else { 0.0 }
                        + if with_before { f64::from(before[i * rows + row]) } else { 0.0 }
                };
                (0..n * rows).map(|at| one(at / rows, at % rows)).collect()
            };
            let all = run(&x, None, false);
            let error = relative_error(&all, &expected(false, false));
            assert!(error < 2e-6, "{dtype} [{rows}, {cols}]: {error}");
            let error = relative_error(&run(&x, Some(&before), true), &expected(true, true));
            assert!(error < 2e-6, "{dtype} [{rows}, {cols}] with a bias and a sum before: {error}");
            for part in [1, 2, 8, 9] {
                for (index, x) in x.chunks(part * cols).enumerate() {
                    let found = run(x, None, false);
                    let alone = &all[index * part * rows..][..found.len()];
                    let same = found.iter().zip(alone).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{dtype} [{rows}, {cols}]: {part} rows at a time");
                }
            }
        }
    }
}
