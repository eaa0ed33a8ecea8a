//! Threads on one device: what one does leaves the kernels, graphs and memory of the others alone.

use std::thread;

use ironloom_kernels::{Error, Gpu, Mask};

use crate::{
    attention::{BOTH, Case},
    gpu,
};

#[test]
fn kernels_run_on_while_the_device_is_opened_again() {
    let Some(gpu) = gpu() else { return };
    // Both kernels keep registers on the stack.
    let case = Case::new([4, 1024, 1024, 16, 4, 64], Mask::Causal);
    for kernels in BOTH {
        let alone = case.run(&gpu, kernels);
        let beside = thread::scope(|scope| {
            let opening = scope.spawn(|| (0..100).for_each(|_| drop(Gpu::open(0).unwrap())));
            let found = case.run_often(&gpu, kernels, 2000);
            opening.join().unwrap();
            found
        });
        assert!(alone == beside, "{kernels:?}");
    }
}

#[test]
fn a_graph_is_recorded_alone_whatever_other_threads_do() {
    const BYTES: usize = 1 << 16;
    let Some(gpu) = gpu() else { return };
    let kept = gpu.upload(&[9; BYTES], "a test").unwrap();
    thread::scope(|scope| {
        // On the same device, with memory of passes of the graph's size.
        scope.spawn(|| {
            for number in 0..500 {
                let sent = [number as u8 | 1; BYTES];
                let (lasting, pass) = (gpu.upload(&sent, "a test").unwrap(), gpu.allocate(BYTES, "a test").unwrap());
                gpu.copy(pass.slice(), lasting.slice()).unwrap();
                let mut back = [0; BYTES];
                gpu.read(pass.slice(), &mut back).unwrap();
                assert!(sent == back, "number {number}");
            }
        });
        // On others, whose first kernels the driver loads and makes room for.
        scope.spawn(|| {
            let case = Case::new([1, 100, 100, 4, 2, 128], Mask::Causal);
            for number in 0..20 {
                case.run(&Gpu::open(0).unwrap(), BOTH[number % 2]);
            }
        });
        // Two threads that record on one device.
        let record = || {
            for _ in 0..100 {
                let work = || {
                    let pass = gpu.allocate(BYTES, "a test")?;
                    gpu.clear(pass.slice())?;
                    let more = gpu.allocate(BYTES, "a test")?;
                    gpu.copy(more.slice(), kept.slice())?;
                    Ok::<_, Error>(more)
                };
                let (graph, result) = gpu.capture(work).unwrap();
                assert_eq!(graph.nodes(), 2, "{graph:?}");
                for _ in 0..5 {
                    graph.replay().unwrap();
                    let mut back = [0; BYTES];
                    gpu.read(result.slice(), &mut back).unwrap();
                    assert!(back == [9; BYTES]);
                }
            }
        };
        scope.spawn(record);
        scope.spawn(record);
    });
}
