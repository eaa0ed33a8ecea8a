//! Draws the same numbers in order and out of order: `cargo run -p ironloom-core --example random_streams`.

use ironloom_core::{Philox, Threads};

fn main() {
    let mut draws = Philox::new(42, 0);
    let in_order: Vec<u32> = (0..8).map(|_| draws.next_u32()).collect();
    let slots: Vec<std::sync::atomic::AtomicU32> = (0..8).map(|_| 0.into()).collect();
    Threads::all().run(slots.len(), |i| {
        let mut draws = Philox::new(42, 0);
        draws.seek(i as u64);
        slots[i].store(draws.next_u32(), std::sync::atomic::Ordering::Relaxed);
    });
    let any_order: Vec<u32> = slots.into_iter().map(|slot| slot.into_inner()).collect();
    assert_eq!(in_order, any_order);
    println!("eight numbers, drawn in order and by several threads: {in_order:x?}");
}
