//! Rotation, head norms and the append to a sequence's cache.

use ironloom_kernels::{RopeAppend, rope_append};

use crate::{buffer, gpu, normals, read_bf16, relative_error, round_bf16, upload_bf16, upload_f32};

struct Case {
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    half: usize,
    norms: bool,
}

const EPSILON: f32 = 1e-5;
const CAPACITY: usize = 12;

/// `[rows, heads + 2 kv_heads, head_width]`: the projections after norm and rotation, in double precision.
fn expected(case: &Case, qkv: &[f32], phases: &[f32], q_norm: &[f32], k_norm: &[f32]) -> Vec<f64> {
    let Case { heads, kv_heads, head_width, half, norms } = *case;
    let all_heads = heads + 2 * kv_heads;
    let mut out = Vec::new();
    for (index, head) in qkv.chunks_exact(head_width).enumerate() {
        let (row, place) = (index / all_heads, index % all_heads);
        let mut x: Vec<f64> = head.iter().map(|&x| x.into()).collect();
        if place < heads + kv_heads {
            if norms {
                let weight = if place < heads { q_norm } else { k_norm };
                let mean = x.iter().map(|x| x * x).sum::<f64>() / head_width as f64;
                let factor = 1.0 / (mean + f64::from(EPSILON)).sqrt();
                for (x, &w) in x.iter_mut().zip(weight) {
                    *x *= factor * f64::from(w);
                }
            }
            for i in 0..half {
                let cosine = f64::from(phases[row * 2 * half + i]);
                let sine = f64::from(phases[row * 2 * half + half + i]);
                let (a, b) = (x[i], x[half + i]);
                x[i] = a * cosine - b * sine;
                x[half + i] = b * cosine + a * sine;
            }
        }
        out.extend(x);
    }
    out
}

/// The heads `from .. to` of each of `rows`.
fn heads_of(all: &[f64], case: &Case, row: usize, from: usize, to: usize) -> Vec<f64> {
    let all_heads = case.heads + 2 * case.kv_heads;
    all[(row * all_heads + from) * case.head_width..(row * all_heads + to) * case.head_width].to_vec()
}

fn cases() -> Vec<Case> {
    let shapes = [(16, 2, 128, 64), (4, 4, 64, 32), (5, 1, 80, 16), (3, 3, 67, 33), (8, 4, 256, 128), (2, 1, 96, 0)];
    [false, true]
        .into_iter()
        .flat_map(|norms| {
            shapes.map(|(heads, kv_heads, head_width, half)| Case { heads, kv_heads, head_width, half, norms })
        })
        .collect()
}

/// Positions that the cache's read-back must leave as they were: NaN.
fn assert_untouched(cache: &[f32], width: usize, written: std::ops::Range<usize>) {
    for (position, row) in cache.chunks_exact(width).enumerate() {
        if !written.contains(&position) {
            assert!(row.iter().all(|x| x.is_nan()), "position {position} was written, not {written:?} alone");
        }
    }
}

#[test]
fn rows_of_a_sequence_go_to_consecutive_positions() {
    let Some(gpu) = gpu() else { return };
    let (rows, first) = (5, 4);
    for case in &cases() {
        let Case { heads, kv_heads, head_width, half, norms } = *case;
        let kv_width = kv_heads * head_width;
        let qkv: Vec<f32> =
            normals(1, rows * (heads + 2 * kv_heads) * head_width).into_iter().map(round_bf16).collect();
        let (phases, q_norm, k_norm) = (normals(2, rows * 2 * half), normals(3, head_width), normals(4, head_width));
        let expected = expected(case, &qkv, &phases, &q_norm, &k_norm);

        let (keys, values) = (buffer(&gpu, CAPACITY * kv_width * 2), buffer(&gpu, CAPACITY * kv_width * 2));
        let queries = buffer(&gpu, rows * heads * head_width * 2);
        let (q_norm, k_norm) = (upload_f32(&gpu, &q_norm), upload_f32(&gpu, &k_norm));
        let (qkv, phases) = (upload_bf16(&gpu, &qkv), upload_f32(&gpu, &phases));
        let call = RopeAppend {
            qkv: qkv.slice(),
            q_norm: norms.then(|| q_norm.slice()),
            k_norm: norms.then(|| k_norm.slice()),
            epsilon: EPSILON,
            phases: phases.slice(),
            queries: queries.slice(),
            keys: keys.slice(),
            values: values.slice(),
            first_position: first,
            rows,
            heads,
            kv_heads,
            head_width,
            half,
        };
        rope_append(&gpu, &call).unwrap();
        assert!(rope_append(&gpu, &RopeAppend { half: head_width, ..call }).is_err());

        let found = read_bf16(&gpu, &queries, rows * heads * head_width);
        let (keys, values) =
            (read_bf16(&gpu, &keys, CAPACITY * kv_width), read_bf16(&gpu, &values, CAPACITY * kv_width));
        for row in 0..rows {
            let own = &found[row * heads * head_width..][..heads * head_width];
            let error = relative_error(own, &heads_of(&expected, case, row, 0, heads));
            assert!(error < 4e-3, "width {head_width}, norms {norms}, row {row}: queries {error:.2e}");
            for (cache, from) in [(&keys, heads), (&values, heads + kv_heads)] {
                assert_untouched(cache, kv_width, first..first + rows);
                let own = &cache[(first + row) * kv_width..][..kv_width];
                let error = relative_error(own, &heads_of(&expected, case, row, from, from + kv_heads));
                assert!(error < 4e-3, "width {head_width}, norms {norms}, row {row}: cache {error:.2e}");
            }
        }
    }
}
