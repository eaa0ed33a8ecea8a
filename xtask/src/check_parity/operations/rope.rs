//! `rope_phases` and `rope`: with `a_j = position f_j`, a head's pair `(x_j, x_{j + half})` turns by `a_j`.
//!
//! Phases are products in f32 by contract (another implementation's do the same), so the reference takes them as f32 too:
//! what is checked is the sine and cosine, and the turning.

use ironloom_tensor::{Device, Indices, ops};

use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::{Place, is_cpu},
    real::Real,
};

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for (half, base, positions) in [
        (2, 1e4, vec![1, 2]),
        (16, 1e4, vec![3, 8191, 77]),
        (32, 1e6, vec![131_071, 1, 5, 4096]),
        (64, 1e4, (1..=64).collect()),
    ] {
        let shape = format!("{} positions x {half}", positions.len());
        let frequencies: Vec<f32> = (0..half).map(|j| f64::powf(base, -(j as f64) / half as f64) as f32).collect();
        let place = Place::single(device);
        cases.push(Case::new("rope_phases", shape, Bound::TwicePlain, move |kernel| {
            let given = place.vector(kernel.inputs(&frequencies))?;
            let ours = ops::rope_phases(&place.context(), &given, 1.25, &Indices::new(&place.device, &positions)?)?;
            Ok(Results::new(
                phases::<f64>(&frequencies, &positions),
                phases::<f32>(&frequencies, &positions),
                ours.into_f32()?,
            ))
        }));
    }
    if !is_cpu(device) {
        // A card turns queries and keys where it appends them: `rope_append`.
        return cases;
    }
    // Rows, heads, width of a head, of which turned.
    for [rows, heads, width, turned] in [[1, 1, 2, 2], [1, 3, 64, 64], [5, 9, 64, 64], [3, 2, 80, 32], [7, 1, 34, 34]] {
        let shape = format!("[{rows}, {heads} x {width}], {turned} turned");
        let mut inputs = Inputs::of("rope", &shape);
        let x = inputs.normal(rows * heads * width);
        let phases = random_phases(&mut inputs, rows, turned);
        let place = Place::single(device);
        cases.push(Case::new("rope", shape, Bound::TwicePlain, move |kernel| {
            let given = place.tensor(kernel.inputs(&x), [rows, heads * width])?;
            let ours = ops::rope(&place.context(), given, width, &place.tensor(phases.clone(), [rows, turned])?)?;
            Ok(Results::new(
                turn(&f64::all(&x), heads, width, &phases, turned),
                turn::<f32>(&x, heads, width, &phases, turned),
                ours.into_f32()?,
            ))
        }));
    }
    cases
}

/// Phases `[rows, turned]` of random angles.
pub(super) fn random_phases(inputs: &mut Inputs, rows: usize, turned: usize) -> Vec<f32> {
    inputs.normal(rows * turned / 2).chunks(turned / 2).flat_map(cosines_and_sines).collect()
}

fn cosines_and_sines(angles: &[f32]) -> Vec<f32> {
    angles.iter().map(|angle| angle.cos()).chain(angles.iter().map(|angle| angle.sin())).collect()
}

fn phases<R: Real>(frequencies: &[f32], positions: &[u32]) -> Vec<R> {
    let mut out = Vec::new();
    for &position in positions {
        let angles = frequencies.iter().map(|frequency| R::of(f64::from(position as f32 * frequency)).sin_cos());
        let (sines, cosines): (Vec<R>, Vec<R>) = angles.unzip();
        out.extend(cosines.into_iter().chain(sines).map(|value| value * R::of(1.25)));
    }
    out
}

/// `x [rows, heads * width]` with every head turned by its row's phases.
pub(super) fn turn<R: Real>(x: &[R], heads: usize, width: usize, phases: &[f32], turned: usize) -> Vec<R> {
    let (mut out, phases, half) = (x.to_vec(), R::all(phases), turned / 2);
    for (i, head) in out.chunks_exact_mut(width).enumerate() {
        let phases = &phases[i / heads * turned..][..turned];
        for j in 0..half {
            let (a, b, cosine, sine) = (head[j], head[j + half], phases[j], phases[j + half]);
            head[j] = a * cosine - b * sine;
            head[j + half] = b * cosine + a * sine;
        }
    }
    out
}
