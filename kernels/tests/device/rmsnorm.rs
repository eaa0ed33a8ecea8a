//! Root-mean-square norms of every width class, in every form, also of runs in strided rows, and with the residual's sum.

use ironloom_kernels::{Form, Gpu, RmsNorm, RmsNormAdd, rmsnorm, rmsnorm_add};

use crate::{buffer, gpu, normals, read_bf16, read_f32, read_split, relative_error, round_bf16, upload_f32};

fn expected(x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f64> {
    x.chunks_exact(weight.len())
        .flat_map(|run| {
            let mean = run.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / run.len() as f64;
            let factor = 1.0 / (mean + f64::from(epsilon)).sqrt();
            run.iter().zip(weight).map(move |(&x, &w)| f64::from(x) * factor * f64::from(w)).collect::<Vec<_>>()
        })
        .collect()
}

struct Case {
    rows: usize,
    runs: usize,
    width: usize,
    /// Elements between a row's end and the next row's start.
    gap: usize,
    form: Form,
}

fn normed(gpu: &Gpu, case: &Case, x: &[f32], weight: &[f32]) -> Vec<f32> {
    let Case { rows, runs, width, gap, form } = *case;
    let row_width = runs * width;
    let padded: Vec<f32> =
        x.chunks_exact(row_width).flat_map(|row| row.iter().copied().chain(vec![f32::NAN; gap])).collect();
    let (x, weight) = (upload_f32(gpu, &padded), upload_f32(gpu, weight));
    let out = buffer(gpu, form.bytes(rows, row_width).unwrap());
    let call = RmsNorm {
        x: x.slice(),
        x_form: Form::F32,
        x_stride: row_width + gap,
        weight: weight.slice(),
        out: out.slice(),
        form,
        copy: None,
        rows,
        runs,
        width,
        epsilon: 1e-5,
    };
    rmsnorm(gpu, &call).unwrap();
    match form {
        Form::F32 => read_f32(gpu, &out, rows * row_width),
        Form::Bf16 => read_bf16(gpu, &out, rows * row_width),
        Form::Split => read_split(gpu, &out, rows, row_width),
    }
}

#[test]
fn norms_equal_double_precision() {
    let Some(gpu) = gpu() else { return };
    let widths = [1, 6, 64, 128, 200, 256, 576, 1024, 2048, 2560, 4096, 5120, 8192, 16384, 16388, 4098];
    for width in widths {
        for (rows, runs, gap) in [(1, 1, 0), (5, 3, 0), (70, 2, 4), (3, 1, 3)] {
            for (form, bound) in [(Form::F32, 5e-7), (Form::Bf16, 3e-3), (Form::Split, 6e-6)] {
                let x = normals(width as u64, rows * runs * width);
                let weight: Vec<f32> = normals(7, width).iter().map(|w| 1.0 + 0.2 * w).collect();
                let found = normed(&gpu, &Case { rows, runs, width, gap, form }, &x, &weight);
                let error = relative_error(&found, &expected(&x, &weight, 1e-5));
                assert!(error < bound, "{rows} rows of {runs} x {width}, gap {gap}, {form:?}: {error:e}");
            }
        }
    }
}

#[test]
fn a_training_norm_copies_its_rows_and_gives_the_norm_of_the_copy_again() {
    let Some(gpu) = gpu() else { return };
    for width in [1, 6, 64, 200, 256, 512, 768, 904, 1024, 1152, 2048, 4096, 8192, 16384, 16388, 4098] {
        for (rows, runs, gap) in [(1, 1, 0), (5, 1, 0), (3, 3, 0), (70, 2, 4), (3, 1, 3)] {
            let (row_width, count) = (runs * width, rows * runs * width);
            let x = normals(width as u64, count);
            let factors: Vec<f32> = normals(7, width).iter().map(|w| 1.0 + 0.2 * w).collect();
            let plain = normed(&gpu, &Case { rows, runs, width, gap, form: Form::Bf16 }, &x, &factors);
            let padded: Vec<f32> =
                x.chunks_exact(row_width).flat_map(|row| row.iter().copied().chain(vec![f32::NAN; gap])).collect();
            let (input, weight) = (upload_f32(&gpu, &padded), upload_f32(&gpu, &factors));
            let (out, copy, again) = (buffer(&gpu, 2 * count), buffer(&gpu, 2 * count), buffer(&gpu, 2 * count));
            let call = RmsNorm {
                x: input.slice(),
                x_form: Form::F32,
                x_stride: row_width + gap,
                weight: weight.slice(),
                out: out.slice(),
                form: Form::Bf16,
                copy: Some(copy.slice()),
                rows,
                runs,
                width,
                epsilon: 1e-5,
            };
            rmsnorm(&gpu, &call).unwrap();
            let name = format!("{rows} rows of {runs} x {width}, gap {gap}");
            let rounded: Vec<f32> = x.iter().map(|&x| round_bf16(x)).collect();
            assert_eq!(read_bf16(&gpu, &copy, count), rounded, "{name}: the copy");
            let error =
                relative_error(&read_bf16(&gpu, &out, count), &plain.iter().map(|&y| y.into()).collect::<Vec<_>>());
            assert!(error < 3e-3, "{name}: {error:e}");

            let of_copy = RmsNorm {
                x: copy.slice(),
                x_form: Form::Bf16,
                x_stride: row_width,
                out: again.slice(),
                copy: None,
                ..call
            };
            rmsnorm(&gpu, &of_copy).unwrap();
            let error = relative_error(&read_bf16(&gpu, &again, count), &expected(&rounded, &factors, 1e-5));
            assert!(error < 3e-3, "{name}, of the copy: {error:e}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let Some(gpu) = gpu() else { return };
    for width in [128, 1024, 2048, 8192] {
        let (x, weight) = (normals(3, 64 * width), normals(4, width));
        let case = |rows| Case { rows, runs: 1, width, gap: 0, form: Form::F32 };
        let together = normed(&gpu, &case(64), &x, &weight);
        for row in [0, 17, 63] {
            let span = row * width..(row + 1) * width;
            assert_eq!(normed(&gpu, &case(1), &x[span.clone()], &weight), together[span], "row {row} of width {width}");
        }
    }
}

#[test]
fn a_norm_adds_to_the_residual() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in [(1, 1152), (9, 128), (4, 2560), (33, 2048), (2, 12000), (3, 777)] {
        let (x, before, factors) = (normals(1, rows * width), normals(2, rows * width), normals(3, width));
        let (input, weight, residual) = (upload_f32(&gpu, &x), upload_f32(&gpu, &factors), upload_f32(&gpu, &before));
        let call = RmsNormAdd {
            x: input.slice(),
            weight: weight.slice(),
            residual: residual.slice(),
            rows,
            width,
            epsilon: 1e-6,
        };
        rmsnorm_add(&gpu, &call).unwrap();
        let sums: Vec<f64> =
            expected(&x, &factors, 1e-6).iter().zip(&before).map(|(y, &before)| y + f64::from(before)).collect();
        let error = relative_error(&read_f32(&gpu, &residual, rows * width), &sums);
        assert!(error < 5e-7, "{rows} x {width}: {error:e}");
    }
}

#[test]
fn a_norm_of_memory_that_is_too_small_is_refused() {
    let Some(gpu) = gpu() else { return };
    let (x, weight, out) = (buffer(&gpu, 4 * 64), buffer(&gpu, 4 * 32), buffer(&gpu, 4 * 64));
    let call = RmsNorm {
        x: x.slice(),
        x_form: Form::F32,
        x_stride: 32,
        weight: weight.slice(),
        out: out.slice(),
        form: Form::F32,
        copy: None,
        rows: 2,
        runs: 1,
        width: 32,
        epsilon: 0.0,
    };
    rmsnorm(&gpu, &call).unwrap();
    rmsnorm(&gpu, &RmsNorm { rows: 0, ..call }).unwrap();
    assert!(rmsnorm(&gpu, &RmsNorm { rows: 3, ..call }).is_err());
    assert!(rmsnorm(&gpu, &RmsNorm { x_stride: 31, ..call }).is_err());
    assert!(rmsnorm(&gpu, &RmsNorm { x_form: Form::Split, ..call }).is_err());
    assert!(rmsnorm(&gpu, &RmsNorm { copy: Some(x.slice().part(0, 127).unwrap()), ..call }).is_err());
    assert!(rmsnorm(&gpu, &RmsNorm { width: 64, x_stride: 64, rows: 1, ..call }).is_err());
}
