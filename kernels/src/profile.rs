//! Which kernels a pass spends its time in: events around each launch, summed by the kernel's name.
//!
//! Two things would falsify such times. The host takes longer to launch a small kernel than the card to run it, so the
//! card would wait between a kernel and its event: the stream is first given some milliseconds of other work, behind which
//! the whole pass queues up. And consecutive kernels overlap: while a profile is taken they don't. So the sum of a profile
//! is more than the pass takes when it is replayed, by what the overlap saves.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use crate::{Event, Gpu, Result};

/// What the launches of one kernel took together.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel's name; products by cuBLASLt have one name together.
    pub name: &'static str,
    /// How often it ran.
    pub launches: usize,
    /// Seconds on the card, of all launches.
    pub seconds: f64,
}

/// Events around launches, while a profile is taken.
#[derive(Default)]
pub(crate) struct Recorder {
    active: AtomicBool,
    launches: Mutex<Vec<Launched>>,
}

struct Launched {
    name: &'static str,
    from: Event,
    to: Event,
}

// SAFETY: an event is a handle that any thread may use with its context bound, as its methods do.
unsafe impl Send for Launched {}

/// Times a pass is measured; of each launch the shortest time counts.
const ROUNDS: usize = 5;
/// What the stream is given first: about 10 ms of clearing memory, in pieces that take longer than their launch.
const BACKLOG_BYTES: usize = 64 << 20;
const BACKLOG_PIECES: usize = 400;
/// Pairs of events with nothing between, whose time is taken off.
const EMPTY_PAIRS: usize = 8;

impl Gpu {
    /// The time of each kernel that `work` launches, the longest first. `work` runs several times and launches the same
    /// each time.
    ///
    /// # Errors
    /// Those of `work`; the driver fails, or is older than CUDA 12.8.
    pub fn profile<E: From<crate::Error>>(
        &self,
        mut work: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Vec<KernelTime>, E> {
        // Once before: kernels are loaded and memory is there.
        work()?;
        let backlog = self.allocate(BACKLOG_BYTES, "a profile")?;
        let mut best: Vec<(&'static str, f64)> = Vec::new();
        for _ in 0..ROUNDS {
            self.synchronize()?;
            for _ in 0..BACKLOG_PIECES {
                self.clear(backlog.slice())?;
            }
            for (index, (name, seconds)) in self.profile_once(&mut work)?.into_iter().enumerate() {
                match best.get_mut(index) {
                    Some(launch) if launch.0 == name => launch.1 = launch.1.min(seconds),
                    Some(_) => {}
                    None => best.push((name, seconds)),
                }
            }
        }
        Ok(sum_by_name(&best))
    }

    fn profile_once<E: From<crate::Error>>(
        &self,
        work: &mut impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Vec<(&'static str, f64)>, E> {
        let empty = (0..EMPTY_PAIRS).map(|_| Ok((self.record_event()?, self.record_event()?)));
        let empty = empty.collect::<Result<Vec<_>>>()?;
        let recorder = &self.inner.recorder;
        recorder.active.store(true, Relaxed);
        let done = work();
        recorder.active.store(false, Relaxed);
        let launches = std::mem::take(&mut *recorder.launches.lock().unwrap_or_else(PoisonError::into_inner));
        done?;
        let nothing = empty.iter().map(|(from, to)| to.seconds_since(from)).collect::<Result<Vec<f64>>>()?;
        let nothing = nothing.into_iter().fold(f64::INFINITY, f64::min);
        let seconds =
            |launch: &Launched| Ok((launch.name, (launch.to.seconds_since(&launch.from)? - nothing).max(0.0)));
        Ok(launches.iter().map(seconds).collect::<Result<Vec<_>>>()?)
    }

    /// Whether a profile is being taken.
    pub(crate) fn is_profiling(&self) -> bool {
        self.inner.recorder.active.load(Relaxed)
    }

    /// Puts something into the stream, between events while a profile is taken.
    pub(crate) fn timed(&self, name: &'static str, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        if !self.is_profiling() {
            return launch();
        }
        let from = self.record_event()?;
        launch()?;
        let to = self.record_event()?;
        let mut launches = self.inner.recorder.launches.lock().unwrap_or_else(PoisonError::into_inner);
        launches.push(Launched { name, from, to });
        Ok(())
    }
}

fn sum_by_name(launches: &[(&'static str, f64)]) -> Vec<KernelTime> {
    let mut kernels: Vec<KernelTime> = Vec::new();
    for &(name, seconds) in launches {
        match kernels.iter_mut().find(|kernel| kernel.name == name) {
            Some(kernel) => {
                kernel.launches += 1;
                kernel.seconds += seconds;
            }
            None => kernels.push(KernelTime { name, launches: 1, seconds }),
        }
    }
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_summed_by_name_and_the_longest_comes_first() {
        let kernels = sum_by_name(&[("norm", 1.0), ("product", 4.0), ("norm", 2.0)]);
        let shown: Vec<_> = kernels.iter().map(|kernel| (kernel.name, kernel.launches, kernel.seconds)).collect();
        assert_eq!(shown, [("product", 1, 4.0), ("norm", 2, 3.0)]);
    }
}
