//! Elementwise sums: `x + y`, a bias on every row, a constant factor.

use ironloom_kernels::{self as kernels, Form, Gpu};

use super::{for_rows, sum_over_rows};
use crate::{
    Context, Result, Tensor,
    error::{expect_count, expect_shape},
    lanes::per_level,
};

/// `x + y` of equal shapes; writes into `x` when nothing else shares it. Gradient: passed to both.
///
/// # Errors
/// The shapes differ, or a tape records on a graphics card.
pub fn add(cx: &Context, x: Tensor, y: &Tensor) -> Result<Tensor> {
    expect_shape("add", "the second operand", *x.shape(), y.shape())?;
    let (shape, width) = (*x.shape(), x.width());
    if let Some(gpu) = cx.gpu() {
        cx.without_gradient("add")?;
        let out = owned(gpu, x, "add")?;
        let form = y.form().unwrap_or(Form::F32);
        kernels::add(gpu, out.cuda("add", Form::F32)?, y.cuda("add", form)?, form, shape.elements()?)?;
        return Ok(out);
    }
    let slots = cx.slots([&x, y]);
    let mut out = x.into_f32()?;
    let (cpu, terms) = (cx.cpu("add")?, y.as_f32()?);
    for_rows(cpu, &mut out, width, |rows, out| add_into(cpu.level, out, &terms[rows.start * width..rows.end * width]));
    let out = Tensor::from_f32(out, shape)?;
    if let Some((tape, slots)) = slots {
        tape.record(&out, move |gradient, gradients| {
            slots.iter().flatten().try_for_each(|slot| gradients.add(slot, gradient.clone()))
        });
    }
    Ok(out)
}

/// `x[i, j] + bias[j]` for `x` of width `j`. Gradient: passed to `x`, summed over rows for the bias.
///
/// # Errors
/// The bias is not as long as a row, or a tape records on a graphics card.
pub fn add_bias(cx: &Context, x: Tensor, bias: &Tensor) -> Result<Tensor> {
    let (shape, width) = (*x.shape(), x.width());
    expect_shape("add bias", "the bias", [width], bias.shape())?;
    if let Some(gpu) = cx.gpu() {
        cx.without_gradient("add bias")?;
        let (out, terms) = (owned(gpu, x, "add bias")?, bias.cuda("add bias", Form::F32)?);
        kernels::add_bias(gpu, out.cuda("add bias", Form::F32)?, Form::F32, terms, out.rows(), width)?;
        return Ok(out);
    }
    let slots = cx.slots([&x, bias]);
    let mut out = x.into_f32()?;
    let (cpu, terms) = (cx.cpu("add bias")?, bias.as_f32()?);
    for_rows(cpu, &mut out, width, |_, out| {
        out.chunks_exact_mut(width).for_each(|row| add_into(cpu.level, row, terms))
    });
    let out = Tensor::from_f32(out, shape)?;
    if let Some((tape, [to_x, to_bias])) = slots {
        let cpu = cpu.clone();
        tape.record(&out, move |gradient, gradients| {
            if let Some(slot) = &to_bias {
                let g = gradient.as_f32()?;
                gradients.write(slot, |out, first| {
                    let rows = g.len().checked_div(width).unwrap_or(0);
                    sum_over_rows(&cpu, out, first, rows, |rows, sums| {
                        let rows = g[rows.start * width..rows.end * width].chunks_exact(width);
                        rows.for_each(|row| add_into(cpu.level, sums, row));
                    });
                    Ok(())
                })?;
            }
            match &to_x {
                Some(slot) => gradients.add(slot, gradient.clone()),
                None => Ok(()),
            }
        });
    }
    Ok(out)
}

/// `factor * x`. Gradient: `factor * g`.
///
/// # Errors
/// `x` is not single precision, or a tape records on a graphics card.
pub fn scale(cx: &Context, x: Tensor, factor: f32) -> Result<Tensor> {
    let shape = *x.shape();
    if let Some(gpu) = cx.gpu() {
        cx.without_gradient("scale")?;
        let out = owned(gpu, x, "scale")?;
        kernels::scale(gpu, out.cuda("scale", Form::F32)?, factor, shape.elements()?)?;
        return Ok(out);
    }
    let slots = cx.slots([&x]);
    let mut out = x.into_f32()?;
    out.iter_mut().for_each(|value| *value *= factor);
    expect_count("scale", "the number of elements", shape.elements()?, out.len())?;
    let out = Tensor::from_f32(out, shape)?;
    if let Some((tape, [Some(slot)])) = slots {
        tape.record(&out, move |gradient, gradients| {
            let scaled = gradient.as_f32()?.iter().map(|g| g * factor).collect();
            gradients.add(&slot, Tensor::from_f32(scaled, *gradient.shape())?)
        });
    }
    Ok(out)
}

/// `x` to write into: itself where nothing else shares its memory, a copy elsewhere.
pub(super) fn owned(gpu: &Gpu, x: Tensor, operation: &'static str) -> Result<Tensor> {
    if x.is_unique() {
        return Ok(x);
    }
    let from = x.cuda(operation, Form::F32)?;
    let copy = Tensor::allocate(gpu, Form::F32, [x.rows(), x.width()], operation)?.reshape(*x.shape())?;
    gpu.copy(copy.cuda(operation, Form::F32)?, from.part(0, copy.cuda(operation, Form::F32)?.bytes())?)?;
    Ok(copy)
}

per_level! {
    fn add_into(out: &mut [f32], terms: &[f32]) {
        for (out, term) in out.iter_mut().zip(terms) {
            *out += term;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Gradients, Tape};

    #[test]
    fn sums_and_gradients() {
        let (device, tape) = (Device::cpu(2), Tape::new());
        let x = Tensor::from_f32(vec![1.0, 2.0, 3.0, 4.0], [2, 2]).unwrap();
        let y = Tensor::from_f32(vec![10.0, 20.0, 30.0, 40.0], [2, 2]).unwrap();
        [&x, &y].into_iter().for_each(|leaf| tape.watch(leaf));
        let cx = Context::training(&device, &tape);
        let doubled = scale(&cx, x.clone(), 2.0).unwrap();
        let out = add(&cx, doubled, &x).unwrap();
        let out = add(&cx, out, &y).unwrap();
        assert_eq!(out.as_f32().unwrap(), &[13.0, 26.0, 39.0, 52.0]);
        let mut gradients = Gradients::new();
        tape.backward(&out, Tensor::from_f32(vec![1.0; 4], [2, 2]).unwrap(), &mut gradients).unwrap();
        assert_eq!(gradients.get(x.id()).unwrap().as_f32().unwrap(), &[3.0; 4]);
        assert_eq!(gradients.get(y.id()).unwrap().as_f32().unwrap(), &[1.0; 4]);
    }

    #[test]
    fn shapes_are_checked() {
        let device = Device::cpu(1);
        let cx = Context::inference(&device);
        let x = Tensor::zeros([2, 3]).unwrap();
        let error = add(&cx, x.clone(), &Tensor::zeros([3, 2]).unwrap()).unwrap_err().to_string();
        assert!(error.contains("[2, 3]") && error.contains("[3, 2]"), "{error}");
        assert!(add_bias(&cx, x.clone(), &Tensor::zeros([2]).unwrap()).is_err());
        let bias = Tensor::from_f32(vec![1.0, 2.0, 3.0], [3]).unwrap();
        assert_eq!(add_bias(&cx, x, &bias).unwrap().as_f32().unwrap(), &[1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
    }
}
