//! Buffers, budgets, graphs.

use ironloom_kernels::{Error, Gpu};

use crate::gpu;

#[test]
fn what_is_dropped_is_given_back_and_what_is_too_much_is_refused() {
    let Some(gpu) = gpu() else { return };
    let before = gpu.held_bytes();
    let buffer = gpu.upload(&[7; 1000], "a test").unwrap();
    let part = buffer.part(990, 10).unwrap();
    let mut back = [0; 10];
    gpu.read(part, &mut back).unwrap();
    assert_eq!(back, [7; 10]);
    assert!(buffer.part(991, 10).is_err());
    gpu.clear(part).unwrap();
    gpu.read(part, &mut back).unwrap();
    assert_eq!(back, [0; 10]);
    assert_eq!(gpu.held_bytes(), before + 1024);
    drop(buffer);
    assert_eq!(gpu.held_bytes(), before);
    let pooled = gpu.allocate(1 << 20, "a test").unwrap();
    let address = pooled.slice().address();
    drop(pooled);
    assert_eq!(gpu.allocate(1 << 20, "a test").unwrap().slice().address(), address, "freed memory is used again");
    gpu.trim();
    assert_eq!(gpu.held_bytes(), before);
    let error = gpu.allocate_lasting(1 << 50, "a test").unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { operation: "a test", asked: 0x4000000000000, .. }), "{error}");
    gpu.set_budget(before + 4096);
    let error = gpu.allocate_lasting(8192, "a test").unwrap_err();
    assert!(matches!(error, Error::OverBudget { asked: 8192, budget: 4096, .. }), "{error}");
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let error = Gpu::open(1000).unwrap_err();
    assert!(matches!(error, Error::NoDriver | Error::NoDevice { ordinal: 1000, .. }), "{error}");
}
