//! A small thread pool for regions of microseconds.
//!
//! A decoding step is a few hundred parallel regions of 5 to 50 microseconds, so waking threads through the system for each
//! would cost more than the work. Workers spin for a while after a region, then sleep. Tasks are claimed from a shared
//! counter; which thread runs a task never changes its result, as a task writes only its own outputs.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
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
    /// Number of the current region; a change starts the workers.
    epoch: AtomicUsize,
    next_task: AtomicUsize,
    /// Workers that have not finished the current region.
    running: AtomicUsize,
    sleeping: AtomicUsize,
    stop: AtomicBool,
    job: Mutex<Option<Job>>,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
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
        // SAFETY: the workers use the reference only until `running` is 0, and this call returns (or unwinds) after that.
        let task: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(task) };
        *shared.job.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(Job { task, tasks });
        shared.next_task.store(0, Ordering::Relaxed);
        shared.running.store(self.pool.workers.len(), Ordering::Relaxed);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if shared.sleeping.load(Ordering::SeqCst) > 0 {
            self.pool.workers.iter().for_each(|(thread, _)| thread.unpark());
        }
        let own = catch_unwind(AssertUnwindSafe(|| claim(shared, Job { task, tasks })));
        let mut spins = 0u32;
        while shared.running.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
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
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
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
        let i = shared.next_task.fetch_add(1, Ordering::Relaxed);
        if i >= job.tasks {
            return;
        }
        (job.task)(i);
    }
}

fn work(shared: &Shared) {
    let mut seen = 0;
    loop {
        seen = wait_for_change(shared, seen);
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        let job = *shared.job.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(job) = job
            && let Err(payload) = catch_unwind(AssertUnwindSafe(|| claim(shared, job)))
        {
            // Nothing more of this region needs to start.
            shared.next_task.store(usize::MAX / 2, Ordering::Relaxed);
            *shared.panic.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(payload);
        }
        shared.running.fetch_sub(1, Ordering::Release);
    }
}

fn wait_for_change(shared: &Shared, seen: usize) -> usize {
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            let epoch = shared.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            break;
        }
    }
    shared.sleeping.fetch_add(1, Ordering::SeqCst);
    let epoch = loop {
        let epoch = shared.epoch.load(Ordering::SeqCst);
        if epoch != seen {
            break epoch;
        }
        std::thread::park();
    };
    shared.sleeping.fetch_sub(1, Ordering::SeqCst);
    epoch
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
