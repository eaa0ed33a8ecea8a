//! The way back through rows weighted by a sigmoid, against double precision.

use ironloom_kernels::{GatedRowsBackward, gated_rows_backward};

use crate::{buffer, gpu, normals, read_bf16, relative_error, upload_f32};

#[test]
fn gradients_equal_double_precision() {
    let Some(gpu) = gpu() else { return };
    for (rows, width) in [(1, 4), (9, 36), (1000, 512), (33, 2048)] {
        let (g, y, gate) = (normals(1, rows * width), normals(2, rows * width), normals(3, rows));
        let (y_gradient, gate_gradient) = (buffer(&gpu, 2 * rows * width), buffer(&gpu, 16 * rows));
        let held = [&g, &y, &gate].map(|values| upload_f32(&gpu, values));
        let call = GatedRowsBackward {
            gradient: held[0].slice(),
            y: held[1].slice(),
            gate: held[2].slice(),
            y_gradient: y_gradient.slice(),
            gate_gradient: gate_gradient.slice(),
            rows,
            width,
        };
        gated_rows_backward(&gpu, &call).unwrap();
        assert!(gated_rows_backward(&gpu, &GatedRowsBackward { rows: rows + 1, ..call }).is_err());
        let sigmoid = |row: usize| 1.0 / (1.0 + (-f64::from(gate[row])).exp());
        let to_y: Vec<f64> = (0..rows * width).map(|i| sigmoid(i / width) * f64::from(g[i])).collect();
        let to_gate: Vec<f64> = (0..rows)
            .map(|row| {
                let range = row * width..(row + 1) * width;
                let dot: f64 = g[range.clone()].iter().zip(&y[range]).map(|(g, y)| f64::from(*g) * f64::from(*y)).sum();
                sigmoid(row) * (1.0 - sigmoid(row)) * dot
            })
            .collect();
        let found = read_bf16(&gpu, &gate_gradient, 8 * rows);
        assert!(found.chunks_exact(8).all(|row| row[1..].iter().all(|&x| x == 0.0)));
        let found: Vec<f32> = found.iter().copied().step_by(8).collect();
        let errors =
            [relative_error(&read_bf16(&gpu, &y_gradient, rows * width), &to_y), relative_error(&found, &to_gate)];
        assert!(errors.iter().all(|&error| error < 4e-3), "{rows} x {width}: {errors:?}");
    }
}
