//! Turns at the driver: while one thread records a graph, the calls of all other threads wait.
//!
//! What a thread puts into a stream that another one records would become part of the graph, with the addresses of its host
//! memory. And a call for which the driver waits for the whole context spoils every recording under way, of any stream: such
//! as the first launch of a kernel that needs more stack than there is room for. The recording then fails with error 901.

use std::{
    cell::Cell,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

static DRIVER: RwLock<()> = RwLock::new(());

thread_local! {
    /// How many turns of this thread are under way, one within the other: the outermost has the lock.
    static UNDER_WAY: Cell<usize> = const { Cell::new(0) };
}

/// A turn of this thread, which ends when it is dropped.
#[must_use]
pub(crate) struct Turn {
    _lock: Lock,
}

#[expect(dead_code, reason = "guards are held, not read")]
enum Lock {
    Shared(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
    /// That of the turn it lies in.
    Outer,
}

impl Turn {
    /// A turn beside those of other threads.
    pub(crate) fn shared() -> Self {
        Self::begin(|| Lock::Shared(DRIVER.read().unwrap_or_else(PoisonError::into_inner)))
    }

    /// A turn beside none. It may not lie within a shared one.
    pub(crate) fn alone() -> Self {
        debug_assert_eq!(UNDER_WAY.get(), 0, "others may be at the driver");
        Self::begin(|| Lock::Alone(DRIVER.write().unwrap_or_else(PoisonError::into_inner)))
    }

    fn begin(lock: impl FnOnce() -> Lock) -> Self {
        let lock = if UNDER_WAY.get() > 0 { Lock::Outer } else { lock() };
        UNDER_WAY.set(UNDER_WAY.get() + 1);
        Self { _lock: lock }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        UNDER_WAY.set(UNDER_WAY.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Barrier,
            atomic::{AtomicBool, Ordering::Relaxed},
        },
        thread,
        time::Duration,
    };

    use super::*;

    #[test]
    fn turns_lie_within_turns_and_nobody_is_beside_one_alone() {
        let (alone, begun) = (AtomicBool::new(false), Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                let recording = Turn::alone();
                alone.store(true, Relaxed);
                begun.wait();
                // Within it the thread's own calls go on.
                drop((Turn::shared(), Turn::shared()));
                thread::sleep(Duration::from_millis(20));
                alone.store(false, Relaxed);
                drop(recording);
            });
            begun.wait();
            let outer = Turn::shared();
            assert!(!alone.load(Relaxed), "a turn beside one alone");
            // A thread that waits to be alone does not keep an inner turn from ending.
            let waiting = scope.spawn(|| drop(Turn::alone()));
            thread::sleep(Duration::from_millis(20));
            drop(Turn::shared());
            assert!(!waiting.is_finished());
            drop(outer);
        });
        drop(Turn::alone());
    }
}
