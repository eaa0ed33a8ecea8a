//! Products of training by the built-in kernels, with operands as they are and transposed, against double precision.

use ironloom_kernels::{Multiply, Operand, Output, gemm_transposed};

use crate::{
    buffer,
    gemm::{BF16_ERROR, F32_ERROR, filled, largest_error, seconds},
    gpu, normals, read_bf16, read_f32, round_bf16, upload_bf16, upload_f32,
};

/// Each row followed by NaN up to `stride`.
fn strided(values: &[f32], width: usize, stride: usize) -> Vec<f32> {
    values.chunks_exact(width).flat_map(|row| row.iter().copied().chain(vec![f32::NAN; stride - width])).collect()
}

test_each!(
    products_agree_with_double_precision,
    agree,
    as_they_are: [false, false],
    second_transposed: [false, true],
    first_transposed: [true, false],
);

fn agree([transposed_a, transposed_b]: [bool; 2]) {
    let Some(gpu) = gpu() else { return };
    // The last two have long sums of few tiles, which a transposed first operand cuts into pieces.
    for [m, n, k] in [[8, 8, 8], [40, 136, 72], [304, 264, 200], [129 * 8, 24, 328], [72, 64, 3000], [136, 136, 4104]] {
        let ([a_rows, a_width], [b_rows, b_width]) =
            (if transposed_a { [k, m] } else { [m, k] }, if transposed_b { [n, k] } else { [k, n] });
        let values = |seed, count| -> Vec<f32> { normals(seed, count).iter().map(|&x| round_bf16(x)).collect() };
        let (a, b) = (values(1, a_rows * a_width), values(2, b_rows * b_width));
        let (a_stride, b_stride, out_stride) = (a_width + 8, b_width + 16, n + 8);
        let (a_held, b_held) =
            (upload_bf16(&gpu, &strided(&a, a_width, a_stride)), upload_bf16(&gpu, &strided(&b, b_width, b_stride)));
        let mut sums = vec![0.0; m * n];
        for (row, sums) in sums.chunks_exact_mut(n).enumerate() {
            for i in 0..k {
                let a = f64::from(if transposed_a { a[i * m + row] } else { a[row * k + i] });
                for (column, sum) in sums.iter_mut().enumerate() {
                    *sum += a * f64::from(if transposed_b { b[column * k + i] } else { b[i * n + column] });
                }
            }
        }
        let start: Vec<f32> = values(3, m * out_stride).iter().map(|x| 8.0 * x).collect();
        for (output, starts) in [
            (Output::F32, false),
            (Output::F32, true),
            (Output::AddF32, false),
            (Output::Bf16, false),
            (Output::Bf16, true),
        ] {
            let narrow = output == Output::Bf16;
            let held = if narrow { upload_bf16(&gpu, &start) } else { upload_f32(&gpu, &start) };
            let name = format!("[{m}, {n}, {k}] {transposed_a} {transposed_b} {output:?} {starts}");
            let run = || {
                let out = match output {
                    Output::AddF32 => upload_f32(&gpu, &start),
                    _ => buffer(&gpu, m * out_stride * output_bytes(output)),
                };
                let call = Multiply {
                    a: Operand { slice: a_held.slice(), stride: a_stride, transposed: transposed_a },
                    b: Operand { slice: b_held.slice(), stride: b_stride, transposed: transposed_b },
                    out: out.slice(),
                    out_stride,
                    output,
                    start: starts.then(|| held.slice()),
                    size: [m, n, k],
                };
                gemm_transposed(&gpu, &call).map(|()| {
                    let count = m * out_stride;
                    if narrow { read_bf16(&gpu, &out, count) } else { read_f32(&gpu, &out, count) }
                })
            };
            if narrow && transposed_a {
                assert!(run().is_err(), "{name}");
                continue;
            }
            let found = run().unwrap();
            assert!(run().unwrap().iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}: two runs");
            let added = starts || output == Output::AddF32;
            let (mut written, mut expected) = (Vec::new(), Vec::new());
            for ((found, start), sums) in
                found.chunks_exact(out_stride).zip(start.chunks_exact(out_stride)).zip(sums.chunks_exact(n))
            {
                let kept = |(found, start): (&f32, &f32)| match output {
                    Output::AddF32 => found.to_bits() == start.to_bits(),
                    _ => found.is_nan(),
                };
                assert!(found[n..].iter().zip(&start[n..]).all(kept), "{name}: written behind a row's end");
                written.extend_from_slice(&found[..n]);
                expected.extend(sums.iter().zip(start).map(|(sum, &x)| sum + if added { x.into() } else { 0.0 }));
            }
            let error = largest_error(&written, &expected);
            assert!(error < if narrow { BF16_ERROR } else { F32_ERROR }, "{name}: {error:.2e}");
        }
    }
}

fn output_bytes(output: Output) -> usize {
    if output == Output::Bf16 { 2 } else { 4 }
}

#[test]
fn what_the_kernels_cannot_take_is_refused() {
    let Some(gpu) = gpu() else { return };
    let memory = buffer(&gpu, 1 << 14);
    let rows = Operand::rows(memory.slice(), 32);
    let columns = Operand::columns(memory.slice(), 32);
    let call = Multiply {
        a: rows,
        b: rows,
        out: memory.slice(),
        out_stride: 32,
        output: Output::F32,
        start: None,
        size: [16, 16, 16],
    };
    for wrong in [
        Multiply { a: columns, b: columns, ..call },
        Multiply { a: columns, output: Output::Bf16, ..call },
        Multiply { size: [16, 12, 16], ..call },
        Multiply { size: [16, 16, 12], ..call },
        Multiply { a: columns, size: [12, 16, 16], ..call },
        Multiply { out_stride: 18, ..call },
        Multiply { size: [512, 16, 16], ..call },
    ] {
        assert!(gemm_transposed(&gpu, &wrong).is_err(), "{wrong:?}");
    }
    gemm_transposed(&gpu, &Multiply { size: [0, 16, 16], ..call }).unwrap();
}

#[test]
#[ignore = "prints times"]
fn speed_of_transposed_products() {
    let Some(gpu) = gpu() else { return };
    for (rows, outputs, inputs) in [(8192, 512, 512), (8192, 2816, 512), (32_768, 1024, 1024), (8192, 4096, 4096)] {
        let (x, dy, weight) = (filled(&gpu, rows, inputs), filled(&gpu, rows, outputs), filled(&gpu, outputs, inputs));
        let out = buffer(&gpu, (rows * inputs).max(outputs * inputs) * 4);
        let call = |a, b, output, size: [usize; 3]| Multiply {
            a,
            b,
            out: out.slice(),
            out_stride: size[1],
            output,
            start: None,
            size,
        };
        let (dy_rows, dy_columns) = (Operand::rows(dy.slice(), outputs), Operand::columns(dy.slice(), outputs));
        let back = call(dy_rows, Operand::rows(weight.slice(), inputs), Output::Bf16, [rows, inputs, outputs]);
        let gradient = call(dy_columns, Operand::rows(x.slice(), inputs), Output::F32, [outputs, inputs, rows]);
        let times = [&back, &gradient].map(|call| seconds(&gpu, || gemm_transposed(&gpu, call).unwrap()));
        let operations = 2.0 * (rows * outputs * inputs) as f64 / 1e12;
        println!(
            "{rows} rows, [{outputs}, {inputs}]: inputs' gradient {:.0} TFLOP/s, weights' gradient {:.0} TFLOP/s",
            operations / times[0],
            operations / times[1]
        );
    }
}
