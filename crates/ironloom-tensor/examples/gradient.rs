//! A gated activation after a norm, and its gradient: `cargo run -p ironloom-tensor --example gradient`.

use ironloom_tensor::{Context, Device, Gradients, Tape, Tensor, ops};

fn main() -> Result<(), ironloom_tensor::Error> {
    let (device, tape) = (Device::cpu(0), Tape::new());
    let cx = Context::training(&device, &tape);
    let x = Tensor::from_f32(vec![0.5, -1.0, 2.0, 0.25], [1, 4])?;
    let weight = Tensor::from_f32(vec![1.0; 4], [4])?;
    tape.watch(&x);
    let normed = ops::rmsnorm(&cx, &x, &weight, 1e-5)?;
    let out = ops::gated_activation(&cx, normed.clone(), &normed, ops::Activation::Silu)?;
    let mut gradients = Gradients::new();
    tape.backward(&out, Tensor::from_f32(vec![1.0; 4], [1, 4])?, &mut gradients)?;
    println!("on {}: {:?}", device.describe(), out.as_f32()?);
    if let Some(gradient) = gradients.get(x.id()) {
        println!("gradient of the input: {:?}", gradient.as_f32()?);
    }
    Ok(())
}
