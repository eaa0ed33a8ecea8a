//! Muon's steps against its formula in double precision: wide and tall matrices, of like and of very unlike singular values.

use ironloom_kernels::{CublasLt, Error, Gpu, Muon, ParameterRange, StepValues, muon, muon_workspace};

use crate::{
    buffer, gpu, normals,
    optimizer::{bits, step_values},
    read_bf16, read_f32, relative_error, round_bf16, upload_f32,
};

/// None where there is no library.
fn cublaslt(gpu: &Gpu) -> Option<CublasLt> {
    match CublasLt::open(gpu, CublasLt::CHOICE_ROWS) {
        Ok(library) => Some(library),
        Err(error @ Error::CublasLtMissing) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// `a b` of matrices in rows, `[m, k]` and `[k, n]`.
fn times(a: &[f64], b: &[f64], k: usize, n: usize) -> Vec<f64> {
    let mut out = vec![0.0; a.len() / k * n];
    for (row, out) in a.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
        for (&x, terms) in row.iter().zip(b.chunks_exact(n)) {
            out.iter_mut().zip(terms).for_each(|(out, term)| *out += x * term);
        }
    }
    out
}

fn transposed(x: &[f64], cols: usize) -> Vec<f64> {
    (0..cols).flat_map(|col| x.iter().skip(col).step_by(cols).copied()).collect()
}

/// The iteration as it is written, on the matrix as it lies.
fn orthogonal(u: &[f32], rows: usize, cols: usize) -> Vec<f64> {
    let norm = u.iter().map(|&u| f64::from(u).powi(2)).sum::<f64>().sqrt() + 1e-7;
    let mut x: Vec<f64> = u.iter().map(|&u| f64::from(u) / norm).collect();
    for _ in 0..5 {
        let gram = times(&x, &transposed(&x, cols), cols, rows);
        let square = times(&gram, &gram, rows, rows);
        let sum: Vec<f64> = gram.iter().zip(&square).map(|(a, b)| -4.7750 * a + 2.0315 * b).collect();
        let change = times(&sum, &x, rows, cols);
        x.iter_mut().zip(&change).for_each(|(x, change)| *x = 3.4445 * *x + change);
    }
    x
}

/// A gradient of a step: plain noise, or a few strong directions in weak noise, as gradients are.
fn gradient(number: usize, rows: usize, cols: usize, strong: bool) -> Vec<f32> {
    let noise = normals(7 + number as u64, rows * cols);
    if !strong {
        return noise;
    }
    let widen = |values: Vec<f32>| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let (left, right) = (widen(normals(50 + number as u64, rows * 4)), widen(normals(90 + number as u64, 4 * cols)));
    times(&left, &right, 4, cols).iter().zip(&noise).map(|(x, noise)| *x as f32 + 0.01 * noise).collect()
}

fn upload_step(gpu: &Gpu, values: &StepValues) -> ironloom_kernels::Buffer {
    gpu.upload(bytemuck::bytes_of(values), "a test").unwrap()
}

#[test]
fn steps_follow_the_orthogonalized_momentum() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu) else { return };
    for (rows, cols) in [(8, 8), (64, 96), (96, 64), (16, 136), (128, 128)] {
        for (nesterov, strong) in [(true, false), (false, false), (true, true)] {
            let case = format!("{rows} x {cols}, nesterov {nesterov}, strong {strong}");
            let count = rows * cols;
            let mut momentum = vec![0.0f32; count];
            let weights = upload_f32(&gpu, &normals(1, count));
            let (state, rounded) = (upload_f32(&gpu, &momentum), buffer(&gpu, 2 * count));
            let workspace = buffer(&gpu, muon_workspace(rows, cols).unwrap());
            for number in 1..=6 {
                let refused = number == 4;
                let g = if refused { vec![f32::NAN; count] } else { gradient(number, rows, cols, strong) };
                let values = step_values(number, u32::from(!refused));
                let (step, gradient) = (upload_step(&gpu, &values), upload_f32(&gpu, &g));
                let before = read_f32(&gpu, &weights, count);
                let range = ParameterRange {
                    weights: weights.slice(),
                    gradient: gradient.slice(),
                    rounded: Some(rounded.slice()),
                    step: step.slice(),
                    count,
                };
                let call = Muon {
                    range,
                    momentum: state.slice(),
                    workspace: workspace.slice(),
                    rows,
                    cols,
                    mu: 0.95,
                    nesterov,
                    weight_decay: 0.1,
                };
                muon(&gpu, &call, |product| library.multiply(&gpu, product)).unwrap();
                let after = read_f32(&gpu, &weights, count);
                if refused {
                    assert!(bits(&after) == bits(&before), "{case}");
                    assert!(bits(&read_f32(&gpu, &state, count)) == bits(&momentum), "{case}");
                    continue;
                }
                let mu = 0.95f32;
                let directions: Vec<f32> = g
                    .iter()
                    .zip(&mut momentum)
                    .map(|(&g, b)| {
                        let g = g * values.gradient_factor;
                        *b += (1.0 - mu) * (g - *b);
                        if nesterov { g + mu * (*b - g) } else { *b }
                    })
                    .collect();
                assert!(bits(&read_f32(&gpu, &state, count)) == bits(&momentum), "{case}, step {number}");
                let (rate, root) = (f64::from(values.learning_rate), (rows.max(cols) as f64).sqrt());
                // What the step does beside the decay.
                let found: Vec<f32> = (0..count)
                    .map(|i| (f64::from(before[i]) * (1.0 - rate * 0.1) - f64::from(after[i])) as f32)
                    .collect();
                let expected: Vec<f64> =
                    orthogonal(&directions, rows, cols).iter().map(|x| rate * 0.2 * root * x).collect();
                let error = relative_error(&found, &expected);
                // Roundings of operands, which average out where there are many: about 0.015, and of 8 by 8 up to 0.04.
                assert!(error < if rows == 8 { 0.08 } else { 0.04 }, "{case}, step {number}: {error:e}");
                let copies: Vec<f32> = after.iter().map(|&w| round_bf16(w)).collect();
                assert!(read_bf16(&gpu, &rounded, count) == copies, "{case}");
            }
        }
    }
}

#[test]
fn a_matrix_without_a_gradient_only_decays() {
    let Some(gpu) = gpu() else { return };
    let Some(library) = cublaslt(&gpu) else { return };
    let (weights, zeros) = (upload_f32(&gpu, &[1.0; 128]), upload_f32(&gpu, &[0.0; 128]));
    let (state, values) = (upload_f32(&gpu, &[0.0; 128]), step_values(1, 1));
    let (step, workspace) = (upload_step(&gpu, &values), buffer(&gpu, muon_workspace(8, 16).unwrap()));
    let range = ParameterRange {
        weights: weights.slice(),
        gradient: zeros.slice(),
        rounded: None,
        step: step.slice(),
        count: 128,
    };
    let call = Muon {
        range,
        momentum: state.slice(),
        workspace: workspace.slice(),
        rows: 8,
        cols: 16,
        mu: 0.95,
        nesterov: true,
        weight_decay: 0.1,
    };
    let run = |call: &Muon<'_>| muon(&gpu, call, |product| library.multiply(&gpu, product));
    run(&call).unwrap();
    let expected = 1.0 - (f64::from(values.learning_rate) * 0.1) as f32;
    assert_eq!(read_f32(&gpu, &weights, 128), [expected; 128]);
    assert!(run(&Muon { rows: 16, ..call }).is_err());
    let odd = Muon { range: ParameterRange { count: 120, ..range }, rows: 10, cols: 12, ..call };
    assert!(run(&odd).is_err());
    assert!(run(&Muon { workspace: workspace.part(0, 256).unwrap(), ..call }).is_err());
}
