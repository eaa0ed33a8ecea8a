//! Products of many rows against sums in double precision: by the built-in kernel here, by cuBLASLt with the same cases
//! in `cublaslt.rs`.

use ironloom_kernels::{Gpu, Output, Product, gemm};

use crate::{buffer, gpu, normals, read_bf16, read_f32, round_bf16, upload_bf16, upload_f32};

/// A product, with strides of its own.
pub(crate) struct Case {
    pub(crate) rows: usize,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    pub(crate) x_stride: usize,
    pub(crate) weight_stride: usize,
    pub(crate) out_stride: usize,
}

/// Odd and even sizes, fewer and more than a tile, a summed dimension that ends inside a stage, one shorter than a
/// stage.
pub(crate) const CASES: [Case; 6] = [
    Case { rows: 17, outputs: 192, inputs: 128, x_stride: 128, weight_stride: 128, out_stride: 192 },
    Case { rows: 100, outputs: 130, inputs: 72, x_stride: 80, weight_stride: 128, out_stride: 136 },
    Case { rows: 129, outputs: 257, inputs: 520, x_stride: 520, weight_stride: 576, out_stride: 257 },
    Case { rows: 18, outputs: 5, inputs: 8, x_stride: 8, weight_stride: 64, out_stride: 5 },
    Case { rows: 64, outputs: 64, inputs: 2048, x_stride: 2048, weight_stride: 2048, out_stride: 64 },
    Case { rows: 700, outputs: 3000, inputs: 192, x_stride: 192, weight_stride: 192, out_stride: 3001 },
];

/// `rows` rows of `width` numbers, rounded, each followed by NaN up to `stride`.
fn strided(values: &[f32], width: usize, stride: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len() / width * stride);
    for row in values.chunks_exact(width) {
        out.extend(row.iter().map(|&x| round_bf16(x)));
        out.resize(out.len() + stride - width, f32::NAN);
    }
    out
}

/// `x weight^T` in double precision, of numbers rounded to bfloat16.
pub(crate) fn expected_product(x: &[f32], weight: &[f32], inputs: usize) -> Vec<f64> {
    let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|&x| round_bf16(x).into()).collect() };
    let (x, weight) = (wide(x), wide(weight));
    x.chunks_exact(inputs)
        .flat_map(|x| weight.chunks_exact(inputs).map(move |weight| x.iter().zip(weight).map(|(x, w)| x * w).sum()))
        .collect()
}

/// The largest difference, in units of the expected numbers' root mean square.
pub(crate) fn largest_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let scale = (expected.iter().map(|e| e * e).sum::<f64>() / expected.len() as f64).sqrt();
    let differences = found.iter().zip(expected).map(|(&f, &e)| (f64::from(f) - e).abs());
    differences.fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most }) / scale
}

/// Single precision's sums of a few thousand products, on tensor cores.
pub(crate) const F32_ERROR: f64 = 2e-4;
/// One rounding to bfloat16 of a number a few times the root mean square.
pub(crate) const BF16_ERROR: f64 = 3e-2;

/// Every case with every output, with and without a bias: what is written is right, and what is not to be written is
/// not.
pub(crate) fn check_products(gpu: &Gpu, run: impl Fn(&Product<'_>)) {
    for (index, case) in CASES.iter().enumerate() {
        let Case { rows, outputs, inputs, x_stride, weight_stride, out_stride } = *case;
        let seed = 10 * index as u64;
        let (x, weight) = (normals(seed, rows * inputs), normals(seed + 1, outputs * inputs));
        let bias: Vec<f32> = normals(seed + 2, outputs).iter().map(|&x| round_bf16(10.0 * x)).collect();
        let before = normals(seed + 3, rows * out_stride);
        let product = expected_product(&x, &weight, inputs);
        let x = upload_bf16(gpu, &strided(&x, inputs, x_stride));
        let weight = upload_bf16(gpu, &strided(&weight, inputs, weight_stride));
        for output in [Output::F32, Output::Bf16, Output::AddF32] {
            let narrow = output == Output::Bf16;
            for with_bias in [false, true] {
                let uploaded_bias = if narrow { upload_bf16(gpu, &bias) } else { upload_f32(gpu, &bias) };
                let out = match output {
                    Output::F32 => buffer(gpu, rows * out_stride * 4),
                    Output::Bf16 => buffer(gpu, rows * out_stride * 2),
                    Output::AddF32 => upload_f32(gpu, &before),
                };
                run(&Product {
                    x: x.slice(),
                    x_stride,
                    weight: weight.slice(),
                    weight_stride,
                    bias: with_bias.then(|| uploaded_bias.slice()),
                    out: out.slice(),
                    out_stride,
                    output,
                    rows,
                    outputs,
                    inputs,
                });
                let count = rows * out_stride;
                let found = if narrow { read_bf16(gpu, &out, count) } else { read_f32(gpu, &out, count) };
                let mut expected = product.clone();
                for (row, sums) in expected.chunks_exact_mut(outputs).enumerate() {
                    for (column, sum) in sums.iter_mut().enumerate() {
                        if with_bias {
                            *sum += f64::from(bias[column]);
                        }
                        if output == Output::AddF32 {
                            *sum += f64::from(before[row * out_stride + column]);
                        }
                    }
                }
                let written: Vec<f32> =
                    found.chunks_exact(out_stride).flat_map(|row| row[..outputs].to_vec()).collect();
                let error = largest_error(&written, &expected);
                let bound = if narrow { BF16_ERROR } else { F32_ERROR };
                assert!(error < bound, "case {index}, {output:?}, bias {with_bias}: {error:.2e}");
                for (row, found) in found.chunks_exact(out_stride).enumerate() {
                    for (column, &x) in found.iter().enumerate().skip(outputs) {
                        let kept = match output {
                            Output::AddF32 => x.to_bits() == before[row * out_stride + column].to_bits(),
                            _ => x.is_nan(),
                        };
                        assert!(kept, "case {index}, {output:?}: row {row} wrote {x} behind its end, at {column}");
                    }
                }
            }
        }
    }
}

/// A row's bits in products of other numbers of rows, from `fewest` on, and at another place among them.
pub(crate) fn check_rows_stand_alone(
    gpu: &Gpu,
    fewest: usize,
    outputs: usize,
    inputs: usize,
    run: impl Fn(&Product<'_>),
) {
    const MOST: usize = 1100;
    let x = upload_bf16(gpu, &normals(1, MOST * inputs));
    let weight = upload_bf16(gpu, &normals(2, outputs * inputs));
    for output in [Output::F32, Output::Bf16, Output::AddF32] {
        let narrow = output == Output::Bf16;
        let product = |first: usize, rows: usize| {
            let out = gpu.allocate(rows * outputs * if narrow { 2 } else { 4 }, "a test").unwrap();
            gpu.clear(out.slice()).unwrap();
            run(&Product {
                x: x.part(first * inputs * 2, rows * inputs * 2).unwrap(),
                x_stride: inputs,
                weight: weight.slice(),
                weight_stride: inputs,
                bias: None,
                out: out.slice(),
                out_stride: outputs,
                output,
                rows,
                outputs,
                inputs,
            });
            if narrow { read_bf16(gpu, &out, rows * outputs) } else { read_f32(gpu, &out, rows * outputs) }
        };
        let whole = product(0, MOST);
        for (first, rows) in [(0, fewest), (0, 17), (0, 64), (0, 100), (0, 512), (5, 17), (37, 300), (76, 1024)] {
            let part = product(first, rows);
            let same = part.iter().zip(&whole[first * outputs..]).filter(|(a, b)| a.to_bits() == b.to_bits()).count();
            assert_eq!(same, part.len(), "{outputs} x {inputs}, {output:?}: rows {first}.. ({rows}) among {MOST}");
        }
    }
}

#[test]
fn products_agree_with_double_precision() {
    let Some(gpu) = gpu() else { return };
    check_products(&gpu, |call| gemm(&gpu, call).unwrap());
}

#[test]
fn a_row_has_the_same_bits_in_any_product() {
    let Some(gpu) = gpu() else { return };
    for (outputs, inputs) in [(2048, 2048), (200, 1096)] {
        check_rows_stand_alone(&gpu, 1, outputs, inputs, |call| gemm(&gpu, call).unwrap());
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let memory = buffer(&gpu, 64 * 64 * 4);
    let call = Product {
        x: memory.slice(),
        x_stride: 64,
        weight: memory.slice(),
        weight_stride: 64,
        bias: None,
        out: memory.slice(),
        out_stride: 64,
        output: Output::F32,
        rows: 64,
        outputs: 64,
        inputs: 64,
    };
    assert!(gemm(&gpu, &Product { rows: 65, ..call }).unwrap_err().to_string().contains("the result's size"));
    assert!(gemm(&gpu, &Product { inputs: 60, ..call }).unwrap_err().to_string().contains("summed dimension"));
    assert!(gemm(&gpu, &Product { x_stride: 68, ..call }).unwrap_err().to_string().contains("stride"));
    assert!(gemm(&gpu, &Product { out_stride: 63, ..call }).unwrap_err().to_string().contains("stride"));
    assert!(gemm(&gpu, &Product { x: memory.part(2, 9000).unwrap(), ..call }).is_err());
    gemm(&gpu, &Product { rows: 0, ..call }).unwrap();
}

/// Seconds of one `run` in the stream: the median of seven times ten runs, after two.
pub(crate) fn seconds(gpu: &Gpu, run: impl Fn()) -> f64 {
    run();
    run();
    let mut times: Vec<f64> = (0..7)
        .map(|_| {
            let start = gpu.record_event().unwrap();
            for _ in 0..10 {
                run();
            }
            gpu.record_event().unwrap().seconds_since(&start).unwrap() / 10.0
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[3]
}

/// `rows` by `width` bfloat16, for timing.
pub(crate) fn filled(gpu: &Gpu, rows: usize, width: usize) -> ironloom_kernels::Buffer {
    let pattern = normals(5, 1 << 16);
    upload_bf16(gpu, &pattern.into_iter().cycle().take(rows * width).collect::<Vec<_>>())
}

/// The products of a layer of width 2,048 and inner width 11,008, and a square.
pub(crate) const TIMED: [(usize, usize); 5] = [(2048, 2048), (512, 2048), (11_008, 2048), (2048, 11_008), (4096, 4096)];

#[test]
#[ignore = "prints times"]
fn speed_of_the_built_in_kernel() {
    let Some(gpu) = gpu() else { return };
    for (outputs, inputs) in TIMED {
        let weight = filled(&gpu, outputs, inputs);
        for rows in [64, 512, 4096] {
            let x = filled(&gpu, rows, inputs);
            let out = buffer(&gpu, rows * outputs * 4);
            let product = Product {
                x: x.slice(),
                x_stride: inputs,
                weight: weight.slice(),
                weight_stride: inputs,
                bias: None,
                out: out.slice(),
                out_stride: outputs,
                output: Output::Bf16,
                rows,
                outputs,
                inputs,
            };
            let rate = |time: f64| 2.0 * (rows * outputs * inputs) as f64 / time / 1e12;
            let narrow = rate(seconds(&gpu, || gemm(&gpu, &product).unwrap()));
            let added = Product { output: Output::AddF32, ..product };
            let added = rate(seconds(&gpu, || gemm(&gpu, &added).unwrap()));
            println!("gemm {rows} x {outputs} x {inputs}: bf16 {narrow:.0}, added {added:.0} TFLOP/s");
        }
    }
}
