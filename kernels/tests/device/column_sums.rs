//! Sums over rows of both forms, also of strided and odd columns, new or added.

use ironloom_kernels::{ColumnSums, Form, column_sums, column_sums_workspace};

use crate::{
    buffer, gpu, read_f32, relative_error,
    rows::{Rows, same_bits},
    upload_f32,
};

#[test]
fn column_sums_equal_double_precision() {
    let Some(gpu) = gpu() else { return };
    for (rows, columns, gap) in [(1, 128, 0), (33, 100, 4), (4096, 768, 8), (9000, 2304, 0), (700, 37, 3), (65, 6, 0)] {
        for form in [Form::F32, Form::Bf16] {
            let (x, values) = Rows::normals(&gpu, form, [rows, columns, columns + gap], 3, 1.0);
            let mut expected = vec![0.0f64; columns];
            for row in values.chunks_exact(columns) {
                expected.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
            }
            let bytes = column_sums_workspace(rows, columns).unwrap();
            let run = |add: bool| {
                let out = if add { upload_f32(&gpu, &vec![2.0; columns]) } else { buffer(&gpu, 4 * columns) };
                let workspace = buffer(&gpu, bytes);
                let call = ColumnSums {
                    x: x.slice(),
                    form,
                    stride: x.stride,
                    out: out.slice(),
                    add,
                    workspace: workspace.slice(),
                    rows,
                    columns,
                };
                column_sums(&gpu, &call).unwrap();
                assert!(column_sums(&gpu, &ColumnSums { rows: rows + 1, ..call }).is_err());
                assert!(column_sums(&gpu, &ColumnSums { stride: columns - 1, ..call }).is_err());
                read_f32(&gpu, &out, columns)
            };
            let found = run(false);
            let error = relative_error(&found, &expected);
            assert!(error < 2e-6, "{rows} x {columns}, {form:?}: {error:e}");
            assert!(same_bits(&run(false), &found));
            let added: Vec<f64> = expected.iter().map(|sum| sum + 2.0).collect();
            assert!(relative_error(&run(true), &added) < 2e-6);
        }
    }
}
