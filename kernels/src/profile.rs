//! Which kernels a pass spends its time in: events around each launch, summed by the kernel's name and a product's
//! size.
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
    /// Of a product by cuBLASLt or of experts in training: its rows, its columns and the products in each sum.
    pub size: Option<[usize; 3]>,
    /// How often it ran.
    pub launches: usize,
    /// Seconds on the card, of all launches.
    pub seconds: f64,
}

impl KernelTime {
    /// The name, with the size where there is one.
    pub fn label(&self) -> String {
        match self.size {
            Some([rows, columns, summed]) => format!("{} {rows}x{columns}x{summed}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// Two operations for each multiply-add of all launches; `None` where no size is known.
    pub fn operations(&self) -> Option<f64> {
        self.size.map(|size| 2.0 * size.iter().map(|&n| n as f64).product::<f64>() * self.launches as f64)
    }
}

/// Events around launches, while a profile is taken.
#[derive(Default)]
pub(crate) struct Recorder {
    active: AtomicBool,
    launches: Mutex<Vec<Launched>>,
}

struct Launched {
    kind: Kind,
    from: Event,
    to: Event,
}

/// A kernel's name, and a product's size.
type Kind = (&'static str, Option<[usize; 3]>);

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
        let mut best: Vec<(Kind, f64)> = Vec::new();
        for _ in 0..ROUNDS {
            self.synchronize()?;
            for _ in 0..BACKLOG_PIECES {
                self.clear(backlog.slice())?;
            }
            for (index, (kind, seconds)) in self.profile_once(&mut work)?.into_iter().enumerate() {
                match best.get_mut(index) {
                    Some(launch) if launch.0 == kind => launch.1 = launch.1.min(seconds),
                    Some(_) => {}
                    None => best.push((kind, seconds)),
                }
            }
        }
        Ok(sum_by_kind(&best))
    }

    fn profile_once<E: From<crate::Error>>(
        &self,
        work: &mut impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Vec<(Kind, f64)>, E> {
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
            |launch: &Launched| Ok((launch.kind, (launch.to.seconds_since(&launch.from)? - nothing).max(0.0)));
        Ok(launches.iter().map(seconds).collect::<Result<Vec<_>>>()?)
    }

    /// Whether a profile is being taken.
    pub(crate) fn is_profiling(&self) -> bool {
        self.inner.recorder.active.load(Relaxed)
    }

    /// Puts something into the stream, between events while a profile is taken; a product with its size.
    pub(crate) fn timed(
        &self,
        name: &'static str,
        size: Option<[usize; 3]>,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !self.is_profiling() {
            return launch();
        }
        let from = self.record_event()?;
        launch()?;
        let to = self.record_event()?;
        let mut launches = self.inner.recorder.launches.lock().unwrap_or_else(PoisonError::into_inner);
        launches.push(Launched { kind: (name, size), from, to });
        Ok(())
    }
}

fn sum_by_kind(launches: &[(Kind, f64)]) -> Vec<KernelTime> {
    let mut kernels: Vec<KernelTime> = Vec::new();
    for &((name, size), seconds) in launches {
        match kernels.iter_mut().find(|kernel| (kernel.name, kernel.size) == (name, size)) {
            Some(kernel) => {
                kernel.launches += 1;
                kernel.seconds += seconds;
            }
            None => kernels.push(KernelTime { name, size, launches: 1, seconds }),
        }
    }
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_summed_by_name_and_size_and_the_longest_comes_first() {
        let (large, small) = (Some([4, 3, 2]), Some([1, 3, 2]));
        let launches =
            [(("norm", None), 1.0), (("product", large), 4.0), (("norm", None), 2.0), (("product", small), 1.0)];
        let kernels = sum_by_kind(&launches);
        let shown: Vec<_> = kernels.iter().map(|kernel| (kernel.label(), kernel.launches, kernel.seconds)).collect();
        let expected = [("product 4x3x2", 1, 4.0), ("norm", 2, 3.0), ("product 1x3x2", 1, 1.0)];
        assert_eq!(shown, expected.map(|(label, launches, seconds)| (label.to_owned(), launches, seconds)));
        assert_eq!((kernels[0].operations(), kernels[1].operations()), (Some(48.0), None));
    }
}
