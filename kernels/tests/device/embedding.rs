//! Gathered rows against the host's reading of the table: bit for bit, in every layout.

use ironloom_core::DType;
use ironloom_kernels::{Embedding, embedding};
use ironloom_quant::WeightFormat;

use crate::{
    buffer,
    dequantize::{Case, cases, packed},
    gpu, read_f32, upload_u32,
};

#[test]
fn rows_are_the_scaled_weights() {
    let Some(gpu) = gpu() else { return };
    for case in cases() {
        let Case { layout, rows, cols: width, .. } = case;
        let table = gpu.upload(&case.bytes, "a test").unwrap();
        // The last two are no rows of the table.
        let mut ids: Vec<u32> = (0..11).map(|i| i * 5 % rows as u32).collect();
        ids.extend([rows as u32, u32::MAX]);
        let (n, scale) = (ids.len(), 1.5);
        let device_ids = upload_u32(&gpu, &ids);
        let out = buffer(&gpu, n * width * 4);
        let (table, ids_slice, out_slice) = (table.slice(), device_ids.slice(), out.slice());
        embedding(&gpu, &Embedding { table, layout, rows, width, ids: ids_slice, n, scale, out: out_slice }).unwrap();
        let found = read_f32(&gpu, &out, n * width);
        for (found, &id) in found.chunks_exact(width).zip(&ids) {
            if id as usize >= rows {
                assert!(found.iter().all(|x| x.is_nan()), "{layout:?} [{rows}, {width}], id {id}");
                continue;
            }
            let expected = case.weights[id as usize * width..][..width].iter().map(|&weight| weight * scale);
            for (col, (&found, expected)) in found.iter().zip(expected).enumerate() {
                assert!(found == expected, "{layout:?} [{rows}, {width}] at ({id}, {col}): {found}, {expected}");
            }
        }
    }
}

#[test]
fn slices_that_are_too_small_are_refused() {
    let Some(gpu) = gpu() else { return };
    let case = packed(DType::BF16, WeightFormat::Keep, 20, 64);
    let (table, ids) = (gpu.upload(&case.bytes, "a test").unwrap(), upload_u32(&gpu, &[1, 2, 3]));
    let out = buffer(&gpu, 3 * 64 * 4);
    let call = Embedding {
        table: table.slice(),
        layout: case.layout,
        rows: 20,
        width: 64,
        ids: ids.slice(),
        n: 3,
        scale: 1.0,
        out: out.slice(),
    };
    embedding(&gpu, &call).unwrap();
    for bad in [Embedding { rows: 21, ..call }, Embedding { n: 4, ..call }, Embedding { width: 65, ..call }] {
        assert!(embedding(&gpu, &bad).is_err(), "{bad:?}");
    }
}
