//! Picked rows are those of the input; numbers outside give zeros.

use ironloom_kernels::{GatherRows, gather_rows};

use crate::{buffer, gpu, normals, read_f32, upload_f32, upload_i32};

#[test]
fn rows_are_picked_by_number() {
    let Some(gpu) = gpu() else { return };
    for (x_rows, width) in [(1, 2048), (40, 576), (300, 256), (300, 5), (9, 1)] {
        let x = normals(1, x_rows * width);
        let picked: Vec<i32> = (0..70).map(|i| i * 7 % (x_rows as i32 + 2) - 1).collect();
        let (input, numbers) = (upload_f32(&gpu, &x), upload_i32(&gpu, &picked));
        let out = buffer(&gpu, 70 * width * 4);
        let call = GatherRows {
            x: input.slice(),
            x_rows,
            rows: numbers.slice(),
            out: out.slice(),
            count: picked.len(),
            width,
        };
        gather_rows(&gpu, &call).unwrap();
        for (&row, found) in picked.iter().zip(read_f32(&gpu, &out, 70 * width).chunks_exact(width)) {
            match usize::try_from(row).ok().filter(|&row| row < x_rows) {
                Some(row) => assert_eq!(found, &x[row * width..(row + 1) * width]),
                None => assert!(found.iter().all(|&x| x == 0.0)),
            }
        }
        assert!(gather_rows(&gpu, &GatherRows { x_rows: x_rows + 1, ..call }).is_err());
    }
}
