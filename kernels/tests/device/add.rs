//! Elementwise kernels: each equals the same F32 arithmetic on the host, bit for bit where no exponential is in it.

use ironloom_kernels::{AddGatedRows, Form, add, add_bias, add_gated_rows, convert, scale};

use crate::{
    buffer, gpu, normals, read_bf16, read_f32, read_split, relative_error, round_bf16, upload_bf16, upload_f32,
};

const SHAPES: [(usize, usize); 5] = [(1, 2048), (3, 7), (64, 576), (70_000, 12), (200, 1025)];

#[test]
fn sums_and_factors_are_those_of_the_host() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in SHAPES {
        let count = rows * width;
        let (x, y) = (normals(1, count), normals(2, count));
        let residual = upload_f32(&gpu, &x);
        add(&gpu, residual.slice(), upload_f32(&gpu, &y).slice(), Form::F32, count).unwrap();
        let sums: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        assert!(read_f32(&gpu, &residual, count) == sums, "{rows} x {width}");
        add(&gpu, residual.slice(), upload_bf16(&gpu, &y).slice(), Form::Bf16, count).unwrap();
        let sums: Vec<f32> = sums.iter().zip(&y).map(|(x, y)| x + round_bf16(*y)).collect();
        assert!(read_f32(&gpu, &residual, count) == sums, "{rows} x {width}, bfloat16");
        scale(&gpu, residual.slice(), 50.596_443, count).unwrap();
        let scaled: Vec<f32> = sums.iter().map(|x| x * 50.596_443).collect();
        assert!(read_f32(&gpu, &residual, count) == scaled, "{rows} x {width}, scaled");
        assert!(add(&gpu, residual.slice(), residual.slice(), Form::F32, count + 1).is_err());
        assert!(add(&gpu, residual.slice(), residual.slice(), Form::Split, count).is_err());
    }
}

#[test]
fn a_bias_is_added_to_every_row() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in SHAPES {
        let (x, bias) = (normals(3, rows * width), normals(4, width));
        let device_bias = upload_f32(&gpu, &bias);
        let rows_f32 = upload_f32(&gpu, &x);
        add_bias(&gpu, rows_f32.slice(), Form::F32, device_bias.slice(), rows, width).unwrap();
        let sums: Vec<f32> = x.iter().enumerate().map(|(i, x)| x + bias[i % width]).collect();
        assert!(read_f32(&gpu, &rows_f32, rows * width) == sums, "{rows} x {width}");
        let rows_bf16 = upload_bf16(&gpu, &x);
        add_bias(&gpu, rows_bf16.slice(), Form::Bf16, device_bias.slice(), rows, width).unwrap();
        let sums: Vec<f32> = x.iter().enumerate().map(|(i, x)| round_bf16(round_bf16(*x) + bias[i % width])).collect();
        assert!(read_bf16(&gpu, &rows_bf16, rows * width) == sums, "{rows} x {width}, bfloat16");
    }
}

#[test]
fn gated_rows_are_added() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in SHAPES {
        let (x, y, mut gates) = (normals(5, rows * width), normals(6, rows * width), normals(7, rows));
        gates[0] = -1000.0;
        let gate = upload_f32(&gpu, &gates);
        for form in [Form::F32, Form::Bf16] {
            let residual = upload_f32(&gpu, &x);
            let term = if form == Form::F32 { upload_f32(&gpu, &y) } else { upload_bf16(&gpu, &y) };
            let call =
                AddGatedRows { residual: residual.slice(), y: term.slice(), form, gate: gate.slice(), rows, width };
            add_gated_rows(&gpu, &call).unwrap();
            let expected: Vec<f64> = (0..rows * width)
                .map(|i| {
                    let y = if form == Form::F32 { y[i] } else { round_bf16(y[i]) };
                    f64::from(x[i]) + f64::from(y) / (1.0 + (-f64::from(gates[i / width])).exp())
                })
                .collect();
            let error = relative_error(&read_f32(&gpu, &residual, rows * width), &expected);
            assert!(error < 2e-7, "{rows} x {width}, {form:?}: {error:e}");
        }
    }
}

#[test]
fn conversions_round_to_nearest() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in SHAPES {
        let x = normals(8, rows * width);
        let input = upload_f32(&gpu, &x);
        let out = buffer(&gpu, Form::Bf16.bytes(rows, width).unwrap());
        convert(&gpu, input.slice(), out.slice(), Form::Bf16, rows, width).unwrap();
        let rounded: Vec<f32> = x.iter().map(|&x| round_bf16(x)).collect();
        assert!(read_bf16(&gpu, &out, rows * width) == rounded, "{rows} x {width}");
        let out = buffer(&gpu, Form::Split.bytes(rows, width).unwrap());
        convert(&gpu, input.slice(), out.slice(), Form::Split, rows, width).unwrap();
        let parts: Vec<f32> = x.iter().map(|&x| round_bf16(x) + round_bf16(x - round_bf16(x))).collect();
        assert!(read_split(&gpu, &out, rows, width) == parts, "{rows} x {width}, two parts");
        assert!(convert(&gpu, input.slice(), out.slice(), Form::F32, rows, width).is_err());
    }
}
