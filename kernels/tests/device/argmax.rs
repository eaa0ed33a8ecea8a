//! The largest logit of a row, the lowest id among equals, with infinities and NaN.

use ironloom_kernels::{Argmax, Gpu, argmax, argmax_workspace};

use crate::{buffer, gpu, normals, read_u32, upload_f32};

fn expected(logits: &[f32]) -> u32 {
    let mut best: Option<usize> = None;
    for (id, &logit) in logits.iter().enumerate() {
        if !logit.is_nan() && best.is_none_or(|best| logit > logits[best]) {
            best = Some(id);
        }
    }
    best.map_or(u32::MAX, |id| id as u32)
}

fn found(gpu: &Gpu, logits: &[f32], vocabulary: usize) -> Vec<u32> {
    let rows = logits.len() / vocabulary;
    // For more rows than there are: fewer may share it.
    let workspace = buffer(gpu, argmax_workspace(rows + 3, vocabulary).unwrap());
    gpu.clear(workspace.slice()).unwrap();
    let (device_logits, ids) = (upload_f32(gpu, logits), buffer(gpu, rows * 4));
    let call =
        Argmax { logits: device_logits.slice(), ids: ids.slice(), workspace: workspace.slice(), rows, vocabulary };
    argmax(gpu, &call).unwrap();
    let first = read_u32(gpu, &ids, rows);
    gpu.clear(ids.slice()).unwrap();
    argmax(gpu, &call).unwrap();
    assert_eq!(read_u32(gpu, &ids, rows), first, "a second call finds the tickets as the first did");
    assert!(argmax(gpu, &Argmax { rows: rows + 1, ..call }).is_err());
    first
}

#[test]
fn the_lowest_id_of_the_largest_logit_wins() {
    let Some(gpu) = gpu() else { return };
    for (rows, vocabulary) in [(1, 151_936), (64, 49_152), (3, 262_145), (5, 1), (16, 2048), (7, 2049), (2, 333)] {
        let draws = normals(rows as u64, rows * vocabulary);
        // Few levels, so that the largest is found many times.
        let levels: Vec<f32> = draws.iter().map(|x| x.round()).collect();
        for logits in [draws, levels] {
            let expected: Vec<u32> = logits.chunks_exact(vocabulary).map(expected).collect();
            assert_eq!(found(&gpu, &logits, vocabulary), expected, "{rows} x {vocabulary}");
        }
    }
}

#[test]
fn infinities_and_numbers_that_are_none() {
    let Some(gpu) = gpu() else { return };
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let rows = [
        [nan, -inf, nan, -inf],
        [nan; 4],
        [-inf; 4],
        [-nan, -0.0, 0.0, -1.0],
        [1.0, inf, inf, nan],
        [-3.0, -2.0, -2.0, -5.0],
    ];
    assert_eq!(found(&gpu, rows.as_flattened(), 4), [1, u32::MAX, 0, 1, 1, 1]);
}
