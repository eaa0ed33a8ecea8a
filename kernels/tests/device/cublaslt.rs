//! Products of many rows by cuBLASLt, with the cases of `gemm.rs`.

use ironloom_kernels::{CublasLt, Error, Gpu, Multiply, Operand, Output, Product};

use crate::{
    buffer,
    gemm::{TIMED, check_products, check_rows_stand_alone, filled, seconds},
    gpu, normals, read_bf16, read_f32, relative_error, round_bf16, upload_bf16, upload_f32,
};

/// None where the library is not there.
fn cublaslt(gpu: &Gpu, choice_rows: usize) -> Option<CublasLt> {
    match CublasLt::open(gpu, choice_rows) {
        Ok(library) => Some(library),
        Err(error @ Error::CublasLtMissing) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn products_agree_with_double_precision() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
    check_products(&gpu, |call| library.matmul(&gpu, call).unwrap());
}

#[test]
fn a_row_has_the_same_bits_in_any_product() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
    for (outputs, inputs) in [(2048, 2048), (256, 2048), (5504, 640), (2048, 5504), (200, 1096), (1001, 576)] {
        check_rows_stand_alone(&gpu, 18, outputs, inputs, |call| library.matmul(&gpu, call).unwrap());
    }
}

/// The library is asked while a stream is captured too: no memory is taken and nothing is waited for.
#[test]
fn a_product_can_be_captured() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
    let (rows, outputs, inputs) = (100, 256, 512);
    let (x, weight) = (filled(&gpu, rows, inputs), filled(&gpu, outputs, inputs));
    let (first, second) = (buffer(&gpu, rows * outputs * 4), buffer(&gpu, rows * outputs * 4));
    let product = |out| {
        library.matmul(
            &gpu,
            &Product {
                x: x.slice(),
                x_stride: inputs,
                weight: weight.slice(),
                weight_stride: inputs,
                bias: None,
                out,
                out_stride: outputs,
                output: Output::F32,
                rows,
                outputs,
                inputs,
            },
        )
    };
    product(first.slice()).unwrap();
    let (graph, ()) = gpu.capture(|| product(second.slice())).unwrap();
    gpu.clear(second.slice()).unwrap();
    graph.replay().unwrap();
    let bits = |buffer| -> Vec<u32> { crate::read_u32(&gpu, buffer, rows * outputs) };
    assert_eq!(bits(&first), bits(&second));
}

/// Every way round, with strides wider than rows, set and added.
#[test]
fn operands_as_they_are_and_transposed_agree_with_double_precision() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
    for [m, n, k] in [[64, 48, 32], [200, 72, 1000], [768, 512, 4096], [33, 40, 17]] {
        for (transposed_a, transposed_b) in [(false, true), (false, false), (true, false)] {
            for output in [Output::F32, Output::Bf16, Output::AddF32] {
                let stored = |transposed: bool, rows: usize, columns: usize| match transposed {
                    true => [columns, rows],
                    false => [rows, columns],
                };
                let [(a, a_stride), (b, b_stride)] = [stored(transposed_a, m, k), stored(transposed_b, k, n)]
                    .map(|[rows, width]| ((rows, width), width.next_multiple_of(8) + 8));
                let values = |seed, rows: usize, stride: usize| -> Vec<f32> {
                    normals(seed, rows * stride).into_iter().map(round_bf16).collect()
                };
                let (a_values, b_values) = (values(1, a.0, a_stride), values(2, b.0, b_stride));
                let at = |values: &[f32], stride: usize, transposed: bool, row: usize, column: usize| {
                    f64::from(if transposed { values[column * stride + row] } else { values[row * stride + column] })
                };
                let start = normals(3, m * n);
                let mut expected = vec![0.0f64; m * n];
                for row in 0..m {
                    for column in 0..n {
                        let product = |i| {
                            at(&a_values, a_stride, transposed_a, row, i)
                                * at(&b_values, b_stride, transposed_b, i, column)
                        };
                        let added = if output != Output::Bf16 { f64::from(start[row * n + column]) } else { 0.0 };
                        expected[row * n + column] = (0..k).map(product).sum::<f64>() + added;
                    }
                }
                let (a_held, b_held) = (upload_bf16(&gpu, &a_values), upload_bf16(&gpu, &b_values));
                let (out, held) = (buffer(&gpu, m * n * 4), upload_f32(&gpu, &start));
                if output == Output::AddF32 {
                    gpu.copy(out.slice(), held.slice()).unwrap();
                }
                let call = Multiply {
                    a: Operand { slice: a_held.slice(), stride: a_stride, transposed: transposed_a },
                    b: Operand { slice: b_held.slice(), stride: b_stride, transposed: transposed_b },
                    out: out.slice(),
                    out_stride: n,
                    output,
                    start: (output == Output::F32).then(|| held.slice()),
                    size: [m, n, k],
                };
                library.multiply(&gpu, &call).unwrap();
                let bf16 = output == Output::Bf16;
                let found = if bf16 { read_bf16(&gpu, &out, m * n) } else { read_f32(&gpu, &out, m * n) };
                let error = relative_error(&found, &expected);
                assert!(
                    error < if bf16 { 4e-3 } else { 1e-5 },
                    "{m} {n} {k} {transposed_a} {transposed_b} {output:?}: {error}"
                );
            }
        }
    }
}

/// The algorithm is chosen by time, so that two choices may differ; what they give may not. A choice leaves what it adds to as
/// it was, and none is made of a product of zeros or while a graph is captured.
#[test]
fn a_size_has_the_same_bits_however_its_algorithm_is_chosen() {
    let Some(gpu) = gpu() else { return };
    let sizes =
        [([768, 512, 4096], [true, false]), ([512, 768, 640], [false, true]), ([300, 640, 768], [false, false])];
    for ([m, n, k], transposed) in sizes {
        let stored = |transposed: bool, rows: usize, columns: usize| {
            let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
            (filled(&gpu, rows, columns.next_multiple_of(8)), columns.next_multiple_of(8))
        };
        let ((a, a_stride), (b, b_stride)) = (stored(transposed[0], m, k), stored(transposed[1], k, n));
        let zeros = upload_bf16(&gpu, &vec![0.0; a.bytes() / 2]);
        let start = upload_f32(&gpu, &normals(3, m * n));
        for output in [Output::Bf16, Output::F32, Output::AddF32] {
            for with_start in [false, true] {
                if with_start && output != Output::F32 {
                    continue;
                }
                let out = buffer(&gpu, m * n * 4);
                let run = |library: &CublasLt, zero: bool| {
                    let call = Multiply {
                        a: Operand {
                            slice: if zero { zeros.slice() } else { a.slice() },
                            stride: a_stride,
                            transposed: transposed[0],
                        },
                        b: Operand { slice: b.slice(), stride: b_stride, transposed: transposed[1] },
                        out: out.slice(),
                        out_stride: n,
                        output,
                        start: with_start.then(|| start.slice()),
                        size: [m, n, k],
                    };
                    gpu.copy(out.slice(), start.slice())?;
                    library.multiply(&gpu, &call)
                };
                let bits = || crate::read_u32(&gpu, &out, if output == Output::Bf16 { m * n / 2 } else { m * n });
                let Some(known) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
                run(&known, false).unwrap();
                let expected = bits();
                run(&known, false).unwrap();
                assert_eq!(bits(), expected, "{m} {n} {k} {output:?} again");
                for zero_first in [false, false, true] {
                    let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
                    if zero_first {
                        run(&library, true).unwrap();
                    }
                    run(&library, false).unwrap();
                    assert_eq!(bits(), expected, "{m} {n} {k} {output:?} by another choice");
                }
                let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
                let mut before = true;
                let (graph, ()) = gpu
                    .capture(|| run(if std::mem::replace(&mut before, false) { &known } else { &library }, false))
                    .unwrap();
                graph.replay().unwrap();
                assert_eq!(bits(), expected, "{m} {n} {k} {output:?} chosen while capturing");
            }
        }
    }
}

/// Once as it is, and once with `IRONLOOM_OFF=timed-products` for the library's first proposals.
#[test]
#[ignore = "prints times"]
fn speed_of_products_of_training() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu, CublasLt::CHOICE_ROWS) else { return };
    let (mut total, layers) = (0.0, [(1280, 768), (768, 768), (2816, 768), (768, 1408), (32_000, 768)]);
    for rows in [4096, 32_768] {
        for (outputs, inputs) in layers {
            // The head's products are made for some of the rows at a time.
            let rows = if outputs == 32_000 { rows.min(8192) } else { rows };
            let [x, dy, weight] =
                [(rows, inputs), (rows, outputs), (outputs, inputs)].map(|(rows, columns)| filled(&gpu, rows, columns));
            let forward = if outputs == 768 { Output::AddF32 } else { Output::Bf16 };
            let (by_rows, by_columns) = (Operand::rows, Operand::columns);
            let products = [
                (
                    "forward",
                    by_rows(x.slice(), inputs),
                    by_columns(weight.slice(), inputs),
                    forward,
                    [rows, outputs, inputs],
                ),
                (
                    "to x",
                    by_rows(dy.slice(), outputs),
                    by_rows(weight.slice(), inputs),
                    Output::Bf16,
                    [rows, inputs, outputs],
                ),
                (
                    "to weight",
                    by_columns(dy.slice(), outputs),
                    by_rows(x.slice(), inputs),
                    Output::F32,
                    [outputs, inputs, rows],
                ),
            ];
            for (name, a, b, output, size) in products {
                let out = gpu.upload(&vec![0; size[0] * size[1] * 4], "a test").unwrap();
                let call = Multiply { a, b, out: out.slice(), out_stride: size[1], output, start: None, size };
                let began = std::time::Instant::now();
                library.multiply(&gpu, &call).unwrap();
                gpu.synchronize().unwrap();
                let choice = began.elapsed().as_secs_f64();
                let time = seconds(&gpu, || library.multiply(&gpu, &call).unwrap());
                total += choice;
                println!(
                    "{size:?} {output:?} {name}: {:.1} us, {:.0} TFLOP/s, chosen in {:.1} ms",
                    time * 1e6,
                    2.0 * size.iter().map(|&n| n as f64).product::<f64>() / time / 1e12,
                    choice * 1e3
                );
            }
        }
    }
    println!("all choices: {total:.2} s");
}

#[test]
#[ignore = "prints times"]
fn speed_by_the_rows_of_choice() {
    let Some(gpu) = gpu() else { return };
    for (outputs, inputs) in TIMED {
        let weight = filled(&gpu, outputs, inputs);
        let inputs_of = [512, 1024, 4096].map(|rows| (rows, filled(&gpu, rows, inputs)));
        let out = buffer(&gpu, 4096 * outputs * 4);
        for output in [Output::Bf16, Output::AddF32] {
            for choice_rows in [256, 512, 1024, 2048, 4096] {
                let Some(library) = cublaslt(&gpu, choice_rows) else { return };
                let mut line = format!("cublaslt {outputs} x {inputs} {output:?}, chosen for {choice_rows}:");
                for (rows, x) in &inputs_of {
                    let call = Product {
                        x: x.slice(),
                        x_stride: inputs,
                        weight: weight.slice(),
                        weight_stride: inputs,
                        bias: None,
                        out: out.slice(),
                        out_stride: outputs,
                        output,
                        rows: *rows,
                        outputs,
                        inputs,
                    };
                    let time = seconds(&gpu, || library.matmul(&gpu, &call).unwrap());
                    line +=
                        &format!(" {rows} rows {:.0} TFLOP/s,", 2.0 * (rows * outputs * inputs) as f64 / time / 1e12);
                    if *rows == 4096 {
                        line += &format!(" {:?}", library.algorithm(&call).unwrap());
                    }
                }
                println!("{line}");
            }
        }
    }
}
