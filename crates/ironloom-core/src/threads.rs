//! A small thread pool for regions of microseconds.
//!
//! A decoding step is a few hundred parallel regions of 5 to 50 microseconds, so waking threads through the system for each
//! would cost more than the work. Workers spin for a while after a region, then sleep. Tasks are claimed from a shared
//! counter; which thread runs a task never changes its result, as a task writes only its own outputs.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{JoinHandle, Thread},
    time::{Duration, Instant},
};

/// How long an idle worker spins before it sleeps: longer than the serial gaps inside a decoding step.
const SPIN: Duration = Duration::from_micros(200);

/// A pool of threads that run numbered tasks. Cloning shares it; the threads end with the last clone.
#[derive(Clone)]
pub struct Threads {
    pool: Arc<Pool>,
}

struct Pool {
    shared: Arc<Shared>,
    /// Held while a region runs, so that one region runs at a time.
    region: Mutex<()>,
    workers: Vec<(Thread, Option<JoinHandle<()>>)>,
}

#[derive(Default)]
struct Shared {
    /// The region's number (upper half), whether it is open ([`OPEN`]), and how many workers are in it (lower bits). A
    /// worker enters an open region only; the caller closes it and waits for those inside, so a worker that the system has
    /// put aside holds nobody up.
    gate: AtomicU64,
    next_task: OwnLine<AtomicUsize>,
    sleeping: AtomicUsize,
    stop: AtomicBool,
    job: Mutex<Option<Job>>,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

/// Keeps a counter that all threads write off the cache line that idle ones read.
#[derive(Default)]
#[repr(align(128))]
struct OwnLine<T>(T);

const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

impl Shared {
    /// Enters the open region unless it is the one numbered `seen`; its number.
    fn enter(&self, seen: u64) -> Option<u64> {
        let gate = self.gate.load(Ordering::SeqCst);
        let enters = gate & OPEN != 0
            && gate >> 32 != seen
            && self.gate.compare_exchange(gate, gate + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        enters.then_some(gate >> 32)
    }
}

#[derive(Clone, Copy)]
struct Job {
    task: &'static (dyn Fn(usize) + Sync),
    tasks: usize,
}

impl Threads {
    /// A pool that runs regions on `count` threads, the caller's among them; 0 counts as 1.
    pub fn new(count: usize) -> Self {
        let shared = Arc::new(Shared::default());
        let workers = (1..count.max(1))
            .filter_map(|i| {
                let shared = shared.clone();
                let builder = std::thread::Builder::new().name(format!("ironloom-{i}"));
                // A system that refuses a thread leaves a smaller pool, not a failure.
                let handle = builder.spawn(move || work(&shared)).ok()?;
                Some((handle.thread().clone(), Some(handle)))
            })
            .collect();
        Self { pool: Arc::new(Pool { shared, region: Mutex::new(()), workers }) }
    }

    /// A pool of as many threads as this process may run at once.
    pub fn all() -> Self {
        Self::new(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// How many threads run a region.
    pub fn count(&self) -> usize {
        self.pool.workers.len() + 1
    }

    /// Runs `task(0)` to `task(tasks - 1)`, each once, and returns when all are done. A region must not start another
    /// on the same pool.
    ///
    /// # Panics
    /// A task's panic is passed on, after the other tasks' threads have ended the region.
    pub fn run(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.pool.workers.is_empty() {
            (0..tasks).for_each(task);
            return;
        }
        let _region = self.pool.region.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let shared = &*self.pool.shared;
        let task: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: workers use the reference only inside the region, and this call returns (or unwinds) after it is closed and
        // empty.
        let task: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(task) };
        *shared.job.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(Job { task, tasks });
        shared.next_task.0.store(0, Ordering::Relaxed);
        // The last region was closed with nobody inside, so nothing but its number is left in the gate.
        let number = (shared.gate.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        shared.gate.store(number << 32 | OPEN, Ordering::SeqCst);
        if shared.sleeping.load(Ordering::SeqCst) > 0 {
            self.pool.workers.iter().for_each(|(thread, _)| thread.unpark());
        }
        let own = catch_unwind(AssertUnwindSafe(|| claim(shared, Job { task, tasks })));
        shared.gate.fetch_and(!OPEN, Ordering::SeqCst);
        let mut spins = 0u32;
        while shared.gate.load(Ordering::Acquire) & INSIDE > 0 {
            spins += 1;
            if spins > 2048 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        let theirs = shared.panic.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Splits `0..items` into ranges of at least `grain` and runs `task` on each; several ranges per thread, so that an
    /// uneven load evens out.
    pub fn run_ranges(&self, items: usize, grain: usize, task: impl Fn(std::ops::Range<usize>) + Sync) {
        let pieces = (items / grain.max(1)).clamp(1, self.count() * 4);
        let pieces = if self.count() == 1 { 1 } else { pieces };
        self.run(pieces, |i| {
            let range = items * i / pieces..items * (i + 1) / pieces;
            if !range.is_empty() {
                task(range);
            }
        });
    }
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Threads({})", self.count())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for (thread, handle) in &mut self.workers {
            thread.unpark();
            if let Some(handle) = handle.take() {
                let _ = handle.join();
            }
        }
    }
}

fn claim(shared: &Shared, job: Job) {
    loop {
        let i = shared.next_task.0.fetch_add(1, Ordering::Relaxed);
        if i >= job.tasks {
            return;
        }
        (job.task)(i);
    }
}

fn work(shared: &Shared) {
    let mut seen = 0;
    while let Some(number) = wait_for_region(shared, seen) {
        seen = number;
        let job = *shared.job.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(job) = job
            && let Err(payload) = catch_unwind(AssertUnwindSafe(|| claim(shared, job)))
        {
            // Nothing more of this region needs to start.
            shared.next_task.0.store(usize::MAX / 2, Ordering::Relaxed);
            *shared.panic.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(payload);
        }
        shared.gate.fetch_sub(1, Ordering::Release);
    }
}

/// Enters the next region: spins for a while, then sleeps until a region wakes it. `None` when the pool ends.
fn wait_for_region(shared: &Shared, seen: u64) -> Option<u64> {
    loop {
        let start = Instant::now();
        while start.elapsed() < SPIN {
            for _ in 0..64 {
                if let Some(number) = shared.enter(seen) {
                    return Some(number);
                }
                std::hint::spin_loop();
            }
        }
        shared.sleeping.fetch_add(1, Ordering::SeqCst);
        if shared.stop.load(Ordering::SeqCst) {
            return None;
        }
        let entered = shared.enter(seen);
        if entered.is_none() {
            std::thread::park();
        }
        shared.sleeping.fetch_sub(1, Ordering::SeqCst);
        if entered.is_some() {
            return entered;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_also_after_sleep() {
        for count in [1, 2, 5] {
            let threads = Threads::new(count);
            for round in 0..300 {
                let hits: Vec<AtomicUsize> = (0..37).map(|_| AtomicUsize::new(0)).collect();
                threads.run(hits.len(), |i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
                if round % 100 == 0 {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        }
    }

    #[test]
    fn ranges_cover_everything_once() {
        let threads = Threads::new(3);
        for items in [0, 1, 7, 100] {
            let hits: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            threads.run_ranges(items, 8, |range| {
                range.for_each(|i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                })
            });
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let threads = Threads::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| threads.run(8, |i| assert_ne!(i, 5, "task five"))));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        threads.run(8, |i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 28);
    }
}
