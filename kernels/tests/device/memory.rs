//! Buffers, budgets, graphs.

use ironloom_kernels::{Buffer, Error, Gpu};

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
    assert!(gpu.peak_bytes() >= before + (1 << 20));
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

#[test]
fn a_graph_that_has_no_room_for_all_of_its_memory_is_refused() {
    let Some(gpu) = gpu() else { return };
    let work = || {
        let first = gpu.allocate(8 << 20, "a test")?;
        let second = gpu.allocate(12 << 20, "a test")?;
        gpu.clear(first.slice())?;
        gpu.clear(second.slice())
    };
    gpu.trim();
    gpu.set_budget(gpu.held_bytes() + (19 << 20));
    assert!(matches!(gpu.capture(work).err(), Some(Error::OverBudget { .. })));
    // What lies unused beside a graph's memory is given back for it.
    gpu.set_budget(gpu.held_bytes() + (24 << 20));
    drop(gpu.allocate(16 << 20, "a test").unwrap());
    let (graph, ()) = gpu.capture(work).unwrap();
    graph.replay().unwrap();
    gpu.synchronize().unwrap();
    assert_eq!(graph.workspace_bytes(), 20 << 20);
}

#[test]
fn buffers_of_a_pass_use_the_same_memory_whatever_their_sizes() {
    let Some(gpu) = gpu() else { return };
    gpu.trim();
    let before = gpu.held_bytes();
    let contents = |byte: u8, bytes: usize| vec![byte; bytes];
    let filled = |byte: u8, bytes: usize| {
        let buffer = gpu.allocate(bytes, "a test").unwrap();
        gpu.write(buffer.slice(), &contents(byte, bytes)).unwrap();
        buffer
    };
    let holds = |buffer: &Buffer, byte: u8| {
        let mut found = vec![0; buffer.bytes()];
        gpu.read(buffer.slice(), &mut found).unwrap();
        assert!(found == contents(byte, buffer.bytes()), "{byte}");
    };
    let kept = filled(1, 3 << 20);
    drop([filled(2, 5 << 20), filled(3, 6 << 20)]);
    let buffers = [filled(4, 1 << 20), filled(5, 7 << 20), filled(6, 1000)];
    holds(&kept, 1);
    (4..).zip(&buffers).for_each(|(byte, buffer)| holds(buffer, byte));
    // Whole pieces of 2 MiB.
    assert!(gpu.held_bytes() - before <= (3 + 5 + 6 + 2) << 20, "{}", gpu.held_bytes() - before);
    drop(buffers);
    gpu.trim();
    // What is in use lies first and stays.
    assert!(gpu.held_bytes() - before <= 4 << 20);
    holds(&kept, 1);
    drop(kept);
    gpu.trim();
    assert_eq!(gpu.held_bytes(), before);
}
