//! Root-mean-square norm: `out[i, j] = x[i, j] / sqrt(mean_j(x[i, j]^2) + epsilon) * weight[j]`
//! (Zhang and Sennrich, arXiv 1910.07467).

use ironloom_kernels::{self as kernels, Form};

use super::{add, add::owned, for_rows, sum_over_rows};
use crate::{
    Context, CpuDevice, Result, Tensor,
    error::expect_shape,
    lanes::{LANES, add_lanes, per_level, sum_of_squares},
};

/// The norm of each run of `weight`'s length in `x`; a row may hold several runs (the heads of a query, say).
/// Has a gradient for `x` and `weight`.
///
/// # Errors
/// A row of `x` is not whole runs of `weight`'s length.
pub fn rmsnorm(cx: &Context, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
    let width = weight.width();
    if width == 0 || !x.width().is_multiple_of(width) {
        expect_shape("rmsnorm", "the weight", [x.width()], weight.shape())?;
    }
    expect_shape("rmsnorm", "the weight", [width], weight.shape())?;
    if let Some(gpu) = cx.gpu() {
        return super::cuda::rows::rmsnorm(cx, gpu, x, weight, epsilon);
    }
    let (cpu, input, factors) = (cx.cpu("rmsnorm")?, x.as_f32()?, weight.as_f32()?);
    let mut out = vec![0.0; input.len()];
    for_rows(cpu, &mut out, width, |rows, out| {
        normalize(cpu.level, &input[rows.start * width..rows.end * width], factors, epsilon, out);
    });
    let out = Tensor::from_f32(out, *x.shape())?;
    if let Some((tape, [to_x, to_weight])) = cx.slots([x, weight]) {
        let (cpu, x, weight) = (cpu.clone(), x.clone(), weight.clone());
        tape.record(&out, move |gradient, gradients| {
            let (g, x, w) = (gradient.as_f32()?, x.as_f32()?, weight.as_f32()?);
            if let Some(slot) = &to_weight {
                gradients.write(slot, |out, first| {
                    sum_over_rows(&cpu, out, first, g.len() / width, |rows, sums| {
                        let range = rows.start * width..rows.end * width;
                        backward_weight(cpu.level, &g[range.clone()], &x[range], epsilon, sums);
                    });
                    Ok(())
                })?;
            }
            match &to_x {
                Some(slot) => gradients.add(slot, backward_x(&cpu, gradient, x, w, epsilon)?),
                None => Ok(()),
            }
        });
    }
    Ok(out)
}

/// `residual + rmsnorm(x)`: a norm after a block. Writes into `residual` when nothing else shares it.
///
/// # Errors
/// The shapes differ, or the weight is not as long as a row.
pub fn rmsnorm_add(cx: &Context, residual: Tensor, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
    const NAME: &str = "rmsnorm and add";
    let Some(gpu) = cx.gpu() else { return add(cx, residual, &rmsnorm(cx, x, weight, epsilon)?) };
    expect_shape(NAME, "the rows to norm", *residual.shape(), x.shape())?;
    expect_shape(NAME, "the weight", [x.width()], weight.shape())?;
    // What is recorded has to stay what it is known by.
    let before = cx.tape.map(|_| residual.clone());
    let out = owned(gpu, residual, NAME)?;
    let call = kernels::RmsNormAdd {
        x: x.cuda(NAME, Form::F32)?,
        weight: weight.cuda(NAME, Form::F32)?,
        residual: out.cuda(NAME, Form::F32)?,
        rows: x.rows(),
        width: x.width(),
        epsilon,
    };
    kernels::rmsnorm_add(gpu, &call)?;
    if let Some(before) = before {
        super::cuda::rows::record_rmsnorm_add(cx, gpu, &before, [x, weight], epsilon, &out);
    }
    Ok(out)
}

per_level! {
    fn normalize(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
        let width = weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let factor = 1.0 / (sum_of_squares(x) / width as f32 + epsilon).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * factor * weight;
            }
        }
    }
}

/// With `h = x r`, `r = 1 / sqrt(mean x^2 + e)`: `dx = r (g w - h mean(g w h))`.
fn backward_x(cpu: &CpuDevice, gradient: &Tensor, x: &[f32], weight: &[f32], epsilon: f32) -> Result<Tensor> {
    let (g, width) = (gradient.as_f32()?, weight.len());
    let mut out = vec![0.0; g.len()];
    for_rows(cpu, &mut out, width, |rows, out| {
        let range = rows.start * width..rows.end * width;
        turn_back(cpu.level, &g[range.clone()], &x[range], weight, epsilon, out);
    });
    Tensor::from_f32(out, *gradient.shape())
}

per_level! {
    fn turn_back(g: &[f32], x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
        let width = weight.len();
        for ((g, x), out) in g.chunks_exact(width).zip(x.chunks_exact(width)).zip(out.chunks_exact_mut(width)) {
            let r = 1.0 / (sum_of_squares(x) / width as f32 + epsilon).sqrt();
            let mut lanes = [0.0f32; LANES];
            for j in 0..width {
                lanes[j % LANES] = (g[j] * weight[j]).mul_add(x[j], lanes[j % LANES]);
            }
            let mean = add_lanes(lanes) * r / width as f32;
            for j in 0..width {
                out[j] = r * (g[j] * weight[j] - x[j] * r * mean);
            }
        }
    }
}

per_level! {
    /// `dw = sum over rows of g h`.
    fn backward_weight(g: &[f32], x: &[f32], epsilon: f32, sums: &mut [f32]) {
        let width = sums.len();
        for (g, x) in g.chunks_exact(width).zip(x.chunks_exact(width)) {
            let r = 1.0 / (sum_of_squares(x) / width as f32 + epsilon).sqrt();
            for j in 0..width {
                sums[j] += g[j] * (x[j] * r);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ironloom_core::Philox;

    use super::*;
    use crate::{Device, Gradients, Tape};

    fn exact(x: &[f32], weight: &[f32], epsilon: f64) -> Vec<f64> {
        let width = weight.len();
        x.chunks_exact(width)
            .flat_map(|x| {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
                let r = 1.0 / (mean + epsilon).sqrt();
                x.iter().zip(weight).map(move |(&x, &w)| f64::from(x) * r * f64::from(w)).collect::<Vec<_>>()
            })
            .collect()
    }

    #[test]
    fn values_equal_double_precision_also_per_head() {
        let device = Device::cpu(2);
        let mut draws = Philox::new(5, 0);
        for (rows, width, runs) in [(1, 576, 1), (3, 7, 1), (200, 64, 3), (2, 1, 1)] {
            let x: Vec<f32> = (0..rows * width * runs).map(|_| draws.next_normal()).collect();
            let w: Vec<f32> = (0..width).map(|_| 1.0 + 0.1 * draws.next_normal()).collect();
            let out = rmsnorm(
                &Context::inference(&device),
                &Tensor::from_f32(x.clone(), [rows, width * runs]).unwrap(),
                &Tensor::from_f32(w.clone(), [width]).unwrap(),
                1e-5,
            )
            .unwrap();
            for (out, exact) in out.as_f32().unwrap().iter().zip(exact(&x, &w, 1e-5)) {
                assert!((f64::from(*out) - exact).abs() < 1e-6 * (1.0 + exact.abs()));
            }
        }
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let (device, tape) = (Device::cpu(1), Tape::new());
        let mut draws = Philox::new(6, 0);
        let x: Vec<f32> = (0..12).map(|_| draws.next_normal()).collect();
        let w: Vec<f32> = (0..4).map(|_| 1.0 + 0.2 * draws.next_normal()).collect();
        let g: Vec<f32> = (0..12).map(|_| draws.next_normal()).collect();
        let x_tensor = Tensor::from_f32(x.clone(), [3, 4]).unwrap();
        let w_tensor = Tensor::from_f32(w.clone(), [4]).unwrap();
        [&x_tensor, &w_tensor].into_iter().for_each(|leaf| tape.watch(leaf));
        let out = rmsnorm(&Context::training(&device, &tape), &x_tensor, &w_tensor, 1e-5).unwrap();
        let mut gradients = Gradients::new();
        tape.backward(&out, Tensor::from_f32(g.clone(), [3, 4]).unwrap(), &mut gradients).unwrap();
        let loss = |x: &[f32], w: &[f32]| -> f64 {
            exact(x, w, 1e-5).iter().zip(&g).map(|(out, g)| out * f64::from(*g)).sum()
        };
        let step = 1.0 / 1024.0;
        let check = |got: f32, up: f64, down: f64| {
            let slope = (up - down) / (2.0 * f64::from(step));
            assert!((f64::from(got) - slope).abs() < 1e-4 * (1.0 + slope.abs()), "{got} {slope}");
        };
        for i in 0..12 {
            let moved =
                |by: f32| x.iter().enumerate().map(|(j, v)| if i == j { v + by } else { *v }).collect::<Vec<_>>();
            check(
                gradients.get(x_tensor.id()).unwrap().as_f32().unwrap()[i],
                loss(&moved(step), &w),
                loss(&moved(-step), &w),
            );
        }
        for i in 0..4 {
            let moved =
                |by: f32| w.iter().enumerate().map(|(j, v)| if i == j { v + by } else { *v }).collect::<Vec<_>>();
            check(
                gradients.get(w_tensor.id()).unwrap().as_f32().unwrap()[i],
                loss(&x, &moved(step)),
                loss(&x, &moved(-step)),
            );
        }
    }

    #[test]
    fn a_wrong_weight_is_refused() {
        let device = Device::cpu(1);
        let x = Tensor::zeros([2, 6]).unwrap();
        for width in [0, 4, 12] {
            assert!(rmsnorm(&Context::inference(&device), &x, &Tensor::zeros([width]).unwrap(), 1e-5).is_err());
        }
    }
}
