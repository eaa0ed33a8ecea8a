//! Training on a graphics card, held against the processor's: gradients, losses, the same bits however a run is cut, optimizers,
//! and what is refused.
//!
//! The processor's gradients are autograd's (`runs.rs`), and it works in single precision; products on a card round their operands
//! to bfloat16. So gradients there are held to three times what such a rounding of all weights makes of them (`gradients.rs`), and
//! losses to figures that this gives. Without a card each test says that it was skipped.

mod adapters;
mod bits;
mod compare;
mod gradients;
mod models;
mod optimizers;
mod plan;
mod refusals;
mod resumption;
mod steps;

use ironloom_tensor::{Device, Error};

/// The first card.
fn card() -> Option<Device> {
    match Device::cuda(0, 2) {
        Ok(device) => Some(device),
        Err(Error::Kernels(error @ (ironloom_kernels::Error::NoDriver | ironloom_kernels::Error::NoDevice { .. }))) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn processor() -> Device {
    Device::cpu(2)
}
