//! Root-mean-square norm: `out[i, j] = x[i, j] / sqrt(mean_j(x[i, j]^2) + epsilon) * weight[j]`
//! (Zhang and Sennrich, arXiv 1910.07467).

use ironloom_kernels::{self as kernels, Form};

use super::{add, add::owned, for_rows};
use crate::{
    Context, Result, Tensor,
    error::expect_shape,
    lanes::{per_level, sum_of_squares},
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
        cx.without_gradient("rmsnorm")?;
        let form = cx.operand_form();
        let (rows, place) = (x.rows(), x.cuda_rows("rmsnorm")?);
        if place.form != Form::F32 {
            x.cuda("rmsnorm", Form::F32)?;
        }
        let out = Tensor::allocate(gpu, form, [rows, x.width()], "rmsnorm")?;
        let call = kernels::RmsNorm {
            x: place.slice,
            x_stride: place.stride,
            weight: weight.cuda("rmsnorm", Form::F32)?,
            out: out.cuda("rmsnorm", form)?,
            form,
            rows,
            runs: x.width() / width,
            width,
            epsilon,
        };
        kernels::rmsnorm(gpu, &call)?;
        return out.reshape(*x.shape());
    }
    let (cpu, input, factors) = (cx.cpu("rmsnorm")?, x.as_f32()?, weight.as_f32()?);
    let mut out = vec![0.0; input.len()];
    for_rows(cpu, &mut out, width, |rows, out| {
        normalize(cpu.level, &input[rows.start * width..rows.end * width], factors, epsilon, out);
    });
    let out = Tensor::from_f32(out, *x.shape())?;
    if let Some(tape) = cx.tape {
        let (kept, kept_weight) = (x.clone(), weight.clone());
        tape.record(&out, &[x, weight], move |gradient| backward(gradient, &kept, &kept_weight, epsilon));
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
    cx.without_gradient(NAME)?;
    expect_shape(NAME, "the rows to norm", *residual.shape(), x.shape())?;
    expect_shape(NAME, "the weight", [x.width()], weight.shape())?;
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

/// With `h = x r`, `r = 1 / sqrt(mean x^2 + e)`: `dx = r (g w - h mean(g w h))`, `dw = sum over rows of g h`.
fn backward(gradient: &Tensor, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Vec<Tensor>> {
    let (g, w, width) = (gradient.as_f32()?, weight.as_f32()?, weight.width());
    let mut to_x = Vec::with_capacity(g.len());
    let mut to_weight = vec![0.0f32; width];
    for (g, x) in g.chunks_exact(width).zip(x.as_f32()?.chunks_exact(width)) {
        let r = 1.0 / (sum_of_squares(x) / width as f32 + epsilon).sqrt();
        let mean = g.iter().zip(w).zip(x).map(|((g, w), x)| g * w * x * r).sum::<f32>() / width as f32;
        for j in 0..width {
            to_x.push(r * (g[j] * w[j] - x[j] * r * mean));
            to_weight[j] += g[j] * x[j] * r;
        }
    }
    Ok(vec![Tensor::from_f32(to_x, *x.shape())?, Tensor::from_f32(to_weight, [width])?])
}

#[cfg(test)]
mod tests {
    use ironloom_core::Philox;

    use super::*;
    use crate::{Device, Tape};

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
        let out = rmsnorm(&Context::training(&device, &tape), &x_tensor, &w_tensor, 1e-5).unwrap();
        let gradients = tape.backward(&out, Tensor::from_f32(g.clone(), [3, 4]).unwrap()).unwrap();
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
            check(gradients[&x_tensor.id()].as_f32().unwrap()[i], loss(&moved(step), &w), loss(&moved(-step), &w));
        }
        for i in 0..4 {
            let moved =
                |by: f32| w.iter().enumerate().map(|(j, v)| if i == j { v + by } else { *v }).collect::<Vec<_>>();
            check(gradients[&w_tensor.id()].as_f32().unwrap()[i], loss(&x, &moved(step)), loss(&x, &moved(-step)));
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
