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
        for bytes in [8 << 20, 12 << 20] {
            gpu.clear(gpu.allocate(bytes, "a test")?.slice())?;
        }
        Ok::<_, Error>(())
    };
    // Room for the one after the other: the first would have to be given back while the graph still works in it.
    gpu.trim();
    gpu.set_budget(gpu.held_bytes() + (13 << 20));
    assert!(matches!(gpu.capture(work).err(), Some(Error::OverBudget { .. })));
    // What lies unused beside a graph's memory is given back for it.
    gpu.set_budget(gpu.held_bytes() + (24 << 20));
    drop(gpu.allocate(16 << 20, "a test").unwrap());
    let (graph, ()) = gpu.capture(work).unwrap();
    graph.replay().unwrap();
    gpu.synchronize().unwrap();
    assert_eq!(graph.workspace_bytes(), 20 << 20);
}
