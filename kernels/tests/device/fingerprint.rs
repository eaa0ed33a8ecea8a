//! The number for what rows hold: the same for the same rows, another one for any other bit.

use ironloom_kernels::{Buffer, Form, Gpu, fingerprint};

use crate::{gpu, normals, read_u32, upload_bf16, upload_f32};

fn number(gpu: &Gpu, rows: &Buffer, form: Form, shape: [usize; 3]) -> u64 {
    let sum = gpu.allocate_cleared(8, "a test").unwrap();
    fingerprint(gpu, rows.slice(), form, shape, sum.slice()).unwrap();
    let halves = read_u32(gpu, &sum, 2);
    u64::from(halves[1]) << 32 | u64::from(halves[0])
}

#[test]
fn rows_are_told_apart_by_any_bit() {
    let Some(gpu) = gpu() else { return };
    for (rows, stride, width) in [(1, 1, 1), (3, 24, 17), (2000, 72, 64), (5, 1000, 999)] {
        for form in [Form::F32, Form::Bf16] {
            let shape = [rows, stride, width];
            let upload = |values: &[f32]| match form {
                Form::F32 => upload_f32(&gpu, values),
                _ => upload_bf16(&gpu, values),
            };
            let mut values = normals(1, rows * stride);
            let whole = number(&gpu, &upload(&values), form, shape);
            assert_eq!(number(&gpu, &upload(&values), form, shape), whole, "{form:?} {shape:?}, two runs");
            // What lies between rows does not count.
            if stride > width {
                values[width] = 1.0;
                assert_eq!(number(&gpu, &upload(&values), form, shape), whole, "{form:?} {shape:?}, behind a row");
            }
            let last = (rows - 1) * stride + width - 1;
            values[last] = -values[last];
            assert_ne!(number(&gpu, &upload(&values), form, shape), whole, "{form:?} {shape:?}, a sign");
            values.swap(0, last);
            let swapped = number(&gpu, &upload(&values), form, shape);
            values.swap(0, last);
            assert_eq!(swapped == number(&gpu, &upload(&values), form, shape), last == 0, "{form:?} {shape:?}, places");
            values.fill(-0.0);
            assert_eq!(number(&gpu, &upload(&values), form, shape), 0, "{form:?} {shape:?}, zeros");
        }
    }
}

#[test]
fn slices_that_are_too_small_are_refused() {
    let Some(gpu) = gpu() else { return };
    let (rows, sum) = (upload_f32(&gpu, &[1.0; 32]), gpu.allocate_cleared(8, "a test").unwrap());
    let run = |form, shape| fingerprint(&gpu, rows.slice(), form, shape, sum.slice());
    assert!(run(Form::F32, [4, 8, 8]).is_ok());
    assert!(run(Form::F32, [5, 8, 8]).is_err());
    assert!(run(Form::F32, [4, 8, 9]).is_err());
    assert!(run(Form::Split, [1, 8, 8]).is_err());
    assert!(fingerprint(&gpu, rows.slice(), Form::F32, [4, 8, 8], sum.part(0, 4).unwrap()).is_err());
}
