//! The loss and its gradient: rows that registers hold, that shared memory helps to hold, that nothing holds, and odd ones;
//! rows that do not count, right answers, and equal logits before and behind the target's.

use ironloom_kernels::{CrossEntropy, Form, Gpu, LogitsBecome, cross_entropy};

use crate::{
    buffer, gpu, normals, read_bf16, read_f32, relative_error,
    rows::{Rows, bound, same_bits},
    upload_f32, upload_i32,
};

const SCALE: f32 = 0.37;

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    vocabulary: usize,
    gap: usize,
    z_loss: f32,
}

/// Logits and targets: every fifth row does not count, every third one is right.
fn inputs(case: Case) -> (Vec<f32>, Vec<i32>) {
    let Case { rows, vocabulary, .. } = case;
    let mut logits: Vec<f32> = normals(vocabulary as u64, rows * vocabulary).iter().map(|x| 2.0 * x).collect();
    let mut targets = Vec::with_capacity(rows);
    for (row, logits) in logits.chunks_exact_mut(vocabulary).enumerate() {
        let target = if row % 4 == 2 { vocabulary - 1 } else { row * 7919 % vocabulary };
        let (before, behind) = (target.checked_sub(1), Some(target + 1).filter(|&at| at < vocabulary));
        if row % 3 == 0 {
            logits[target] = 12.0;
        }
        // An equal one: before, so that the target is not the first, or behind.
        if row % 12 == 3
            && let Some(before) = before
        {
            logits[before] = 12.0;
        }
        if row % 12 == 6
            && let Some(behind) = behind
        {
            logits[behind] = 12.0;
        }
        targets.push(match row % 5 {
            1 if row % 2 == 0 => vocabulary as i32,
            1 => -100,
            _ => target as i32,
        });
    }
    (logits, targets)
}

/// The gradient and the totals.
fn expected(case: Case, logits: &[f32], targets: &[i32]) -> (Vec<f64>, [f64; 4]) {
    let (mut slopes, mut totals) = (Vec::with_capacity(logits.len()), [0.0; 4]);
    for (x, &target) in logits.chunks_exact(case.vocabulary).zip(targets) {
        let Some(target) = usize::try_from(target).ok().filter(|&target| target < case.vocabulary) else {
            slopes.extend(x.iter().map(|_| 0.0));
            continue;
        };
        let largest = x.iter().fold(f32::MIN, |a, &b| a.max(b));
        let sum: f64 = x.iter().map(|&x| (f64::from(x) - f64::from(largest)).exp()).sum();
        let lse = f64::from(largest) + sum.ln();
        let factor = 1.0 + 2.0 * f64::from(case.z_loss) * lse;
        slopes.extend(x.iter().enumerate().map(|(j, &x)| {
            f64::from(SCALE) * ((f64::from(x) - lse).exp() * factor - f64::from(u8::from(j == target)))
        }));
        let correct = x.iter().position(|&x| x == largest) == Some(target);
        let figures = [lse - f64::from(x[target]), lse * lse, 1.0, f64::from(u8::from(correct))];
        totals.iter_mut().zip(figures).for_each(|(total, figure)| *total += figure);
    }
    (slopes, totals)
}

fn read_f64(gpu: &Gpu, buffer: &ironloom_kernels::Buffer) -> [f64; 4] {
    let mut values = [0.0; 4];
    gpu.read(buffer.slice(), bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

fn run(gpu: &Gpu, case: Case) -> Vec<f32> {
    let Case { rows, vocabulary, gap, z_loss } = case;
    let stride = vocabulary + gap;
    let (mut values, target_values) = inputs(case);
    values.iter_mut().for_each(|x| *x = crate::round_bf16(*x));
    let logits = Rows::of(gpu, Form::Bf16, [rows, vocabulary, stride], &values);
    let (targets, scale) = (upload_i32(gpu, &target_values), upload_f32(gpu, &[SCALE]));
    let figures = buffer(gpu, 16 * rows);
    let totals = gpu.upload(bytemuck::cast_slice(&[1.0f64; 4]), "a test").unwrap();
    let call = CrossEntropy {
        logits: logits.slice(),
        logits_stride: stride,
        targets: targets.slice(),
        scale: scale.slice(),
        z_loss,
        logits_become: LogitsBecome::Logits,
        row_figures: figures.slice(),
        totals: totals.slice(),
        rows,
        vocabulary,
    };
    cross_entropy(gpu, &call).unwrap();
    assert!(same_bits(&logits.read(gpu), &values), "{case:?}: logits changed");
    let alone = read_f32(gpu, &figures, 4 * rows);
    cross_entropy(gpu, &CrossEntropy { logits_become: LogitsBecome::Slopes, ..call }).unwrap();
    assert!(cross_entropy(gpu, &CrossEntropy { rows: rows + 1, ..call }).is_err());
    assert!(cross_entropy(gpu, &CrossEntropy { vocabulary: stride + 1, ..call }).is_err());
    assert!(same_bits(&read_f32(gpu, &figures, 4 * rows), &alone), "{case:?}: other figures with slopes");

    let all = read_bf16(gpu, &logits.buffer, rows * stride);
    assert!(all.chunks_exact(stride).all(|row| row[vocabulary..].iter().all(|&x| x == 0.0)), "{case:?}: the gap");
    let found: Vec<f32> = all.chunks_exact(stride).flat_map(|row| row[..vocabulary].to_vec()).collect();
    let (slopes, sums) = expected(case, &values, &target_values);
    // Beside one large logit a slope is a small difference of numbers near the scale.
    let size = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = size(&mut found.iter().zip(&slopes).map(|(&found, slope)| f64::from(found) - slope));
    let error = difference / size(&mut slopes.iter().copied()).max(1e-3 * f64::from(SCALE));
    assert!(error < bound(Form::Bf16), "{case:?}: {error:e}");
    // The probabilities too, beside which the targets' slopes weigh much.
    let others = |values: &mut dyn Iterator<Item = (usize, f64)>| -> Vec<f64> {
        let is_target = |i: usize| target_values[i / vocabulary] == (i % vocabulary) as i32;
        values.filter(|(i, _)| !is_target(*i)).map(|(_, x)| x).collect()
    };
    let found_others = others(&mut found.iter().map(|&x| f64::from(x)).enumerate());
    let found_others: Vec<f32> = found_others.iter().map(|&x| x as f32).collect();
    if rows > 1 && vocabulary > 1 {
        let error = relative_error(&found_others, &others(&mut slopes.iter().copied().enumerate()));
        assert!(error < bound(Form::Bf16), "{case:?}, probabilities: {error:e}");
    }
    for (found, sum) in read_f64(gpu, &totals).iter().zip(sums) {
        let expected = 1.0 + 2.0 * sum;
        assert!((found - expected).abs() < 2e-6 * expected.abs(), "{case:?}: {found} instead of {expected}");
    }
    found
}

#[test]
fn losses_and_slopes_equal_double_precision() {
    let Some(gpu) = gpu() else { return };
    let sizes = [
        (1, 2, 6),
        (13, 37, 4),
        (13, 37, 3),
        (40, 5, 3),
        (30, 1000, 0),
        (25, 8192, 0),
        (25, 8190, 10),
        (24, 32_000, 0),
        (300, 9_001, 7),
        (15, 32_001, 63),
        (14, 50_257, 47),
        (13, 100_003, 5),
        (13, 128_256, 0),
        (13, 151_936, 0),
        (7, 262_144, 0),
        (7, 300_001, 7),
        (7, 60_001, 0),
    ];
    for (rows, vocabulary, gap) in sizes {
        for z_loss in [0.0, 0.05] {
            run(&gpu, Case { rows, vocabulary, gap, z_loss });
        }
    }
}

#[test]
fn many_rows_give_the_same_bits_again() {
    let Some(gpu) = gpu() else { return };
    let case = Case { rows: 2100, vocabulary: 2000, gap: 48, z_loss: 1e-4 };
    assert!(same_bits(&run(&gpu, case), &run(&gpu, case)));
}
