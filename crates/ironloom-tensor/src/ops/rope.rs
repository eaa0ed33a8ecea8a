//! Rotary position embedding (Su et al., arXiv 2104.09864), in the half-split form of the Hugging Face checkpoints: element
//! `i` of a head pairs with element `i + half`, and the pair turns by `position * inverse_frequency[i]`.
//!
//! Phases are products in single precision, as the reference computes them; their sines and cosines are taken in double
//! precision by `libm`, so that they do not depend on the system's mathematics library.

use ironloom_kernels::{self as kernels, Form};

use super::for_rows;
use crate::{Context, CpuDevice, Indices, Result, Tensor, error::expect_shape, lanes::per_level};

/// The sines and cosines of `positions`: `[n, 2 * half]`, a row being `half` cosines, then `half` sines, both times `factor`
/// (YaRN's attention factor; 1 otherwise). `inverse_frequencies` is `[half]`.
///
/// # Errors
/// `inverse_frequencies` is not a vector.
pub fn rope_phases(cx: &Context, inverse_frequencies: &Tensor, factor: f32, positions: &Indices) -> Result<Tensor> {
    const NAME: &str = "rope phases";
    let half = inverse_frequencies.width();
    expect_shape("rope phases", "the frequencies", [half], inverse_frequencies.shape())?;
    if let Some(gpu) = cx.gpu() {
        let out = Tensor::allocate(gpu, Form::F32, [positions.len(), 2 * half], NAME)?;
        let call = kernels::RopePhases {
            positions: positions.cuda(NAME)?,
            inverse_frequencies: inverse_frequencies.cuda(NAME, Form::F32)?,
            factor,
            phases: out.cuda(NAME, Form::F32)?,
            rows: positions.len(),
            half,
        };
        kernels::rope_phases(gpu, &call)?;
        return Ok(out);
    }
    let (frequencies, positions) = (inverse_frequencies.as_f32()?, positions.cpu(NAME)?);
    let mut out = vec![0.0; positions.len() * 2 * half];
    for_rows(cx.cpu(NAME)?, &mut out, 2 * half, |rows, out| {
        for (row, out) in rows.zip(out.chunks_exact_mut(2 * half)) {
            let position = positions[row] as f32;
            let (cosines, sines) = out.split_at_mut(half);
            for ((cosine, sine), frequency) in cosines.iter_mut().zip(sines).zip(frequencies) {
                let (s, c) = libm::sincos(f64::from(position * frequency));
                *cosine = c as f32 * factor;
                *sine = s as f32 * factor;
            }
        }
    });
    Tensor::from_f32(out, [positions.len(), 2 * half])
}

/// `x [n, heads * head_width]` with every head turned by its row's `phases [n, 2 * half]`; elements of a head past
/// `2 * half` stay. Writes into `x` when nothing else shares it. Gradient: turned back.
///
/// # Errors
/// `x` is not whole heads, or the phases are wider than a head or not one row for each row of `x`.
pub fn rope(cx: &Context, x: Tensor, head_width: usize, phases: &Tensor) -> Result<Tensor> {
    let (shape, width, turned) = (*x.shape(), x.width(), phases.width());
    if head_width == 0 || !width.is_multiple_of(head_width) {
        expect_shape("rope", "the input", [x.rows(), head_width], &shape)?;
    }
    if turned > head_width || phases.rows() != x.rows() {
        expect_shape("rope", "the phases", [x.rows(), head_width], phases.shape())?;
    }
    let (cpu, slots) = (cx.cpu("rope")?, cx.slots([&x]));
    let mut out = x.into_f32()?;
    turn_rows(cpu, &mut out, width, head_width, phases, 1.0)?;
    let out = Tensor::from_f32(out, shape)?;
    if let Some((tape, [Some(slot)])) = slots {
        let (cpu, phases) = (cpu.clone(), phases.clone());
        tape.record(&out, move |gradient, gradients| {
            let mut back = gradient.as_f32()?.to_vec();
            turn_rows(&cpu, &mut back, width, head_width, &phases, -1.0)?;
            gradients.add(&slot, Tensor::from_f32(back, shape)?)
        });
    }
    Ok(out)
}

/// Turns every head forth (`direction` 1) or back (-1).
fn turn_rows(
    cpu: &CpuDevice,
    rows: &mut [f32],
    width: usize,
    head_width: usize,
    phases: &Tensor,
    direction: f32,
) -> Result<()> {
    let (turned, phases) = (phases.width(), phases.as_f32()?);
    for_rows(cpu, rows, width, |rows, out| {
        for (row, out) in rows.zip(out.chunks_exact_mut(width)) {
            turn(cpu.level, out, head_width, &phases[row * turned..(row + 1) * turned], direction);
        }
    });
    Ok(())
}

per_level! {
    fn turn(row: &mut [f32], head_width: usize, phases: &[f32], direction: f32) {
        let half = phases.len() / 2;
        let (cosines, sines) = phases.split_at(half);
        for head in row.chunks_exact_mut(head_width) {
            let (first, rest) = head.split_at_mut(half);
            for (((a, b), cosine), sine) in first.iter_mut().zip(rest).zip(cosines).zip(sines) {
                let (x, y) = (*a, *b);
                let sine = direction * sine;
                *a = x * cosine - y * sine;
                *b = y * cosine + x * sine;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn a_turn_keeps_length_and_depends_on_distance_only() {
        let device = Device::cpu(1);
        let cx = Context::inference(&device);
        let frequencies = Tensor::from_f32(vec![1.0, 0.1, 0.01], [3]).unwrap();
        let head: Vec<f32> = vec![0.3, -1.0, 2.0, 0.7, 0.1, -0.4, 9.0, 8.0];
        let turned = |position: u32| {
            let phases = rope_phases(&cx, &frequencies, 1.0, &Indices::new(&device, &[position]).unwrap()).unwrap();
            let x = Tensor::from_f32(head.repeat(2), [1, 16]).unwrap();
            rope(&cx, x, 8, &phases).unwrap().into_f32().unwrap()
        };
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        let (at_3, at_10) = (turned(3), turned(10));
        assert_eq!(at_3[..8], at_3[8..], "both heads turn alike");
        assert_eq!(at_3[6..8], [9.0, 8.0], "elements past the turned part stay");
        assert!((dot(&at_3, &at_3) - dot(&at_10, &at_10)).abs() < 1e-3);
        assert!((dot(&at_3, &at_10) - dot(&turned(103), &turned(110))).abs() < 1e-3);
        assert_ne!(at_3, at_10);
    }

    #[test]
    fn shapes_are_checked() {
        let device = Device::cpu(1);
        let cx = Context::inference(&device);
        let x = Tensor::zeros([2, 12]).unwrap();
        assert!(rope(&cx, x.clone(), 5, &Tensor::zeros([2, 4]).unwrap()).is_err());
        assert!(rope(&cx, x.clone(), 6, &Tensor::zeros([2, 8]).unwrap()).is_err());
        assert!(rope(&cx, x.clone(), 6, &Tensor::zeros([3, 6]).unwrap()).is_err());
        assert!(rope(&cx, x, 6, &Tensor::zeros([2, 6]).unwrap()).is_ok());
    }
}
