//! Ctrl-C: the first one asks the work to stop, a later one ends the program.
//!
//! A command says with [`Work`] that it is doing something it can stop by itself; outside of that, Ctrl-C ends the program at
//! once. Commands that only read headers do not listen: the signal itself ends them.

use std::{
    ops::ControlFlow,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};

use anyhow::{Context, Result};

/// What a shell expects of a program that SIGINT ended: 128 + 2.
pub(crate) const EXIT_CODE: u8 = 130;

/// How many more Ctrl-C are asked to stop the work rather than the program; 0 when nobody listens. One number says both how
/// many are left and whether one came: with two, work that ends between the reading of one and of the other ends the program.
static PATIENCE: AtomicUsize = AtomicUsize::new(0);

/// Starts listening; to be called once.
pub(crate) fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        if !ask() {
            std::process::exit(i32::from(EXIT_CODE));
        }
    })
    .context("cannot listen for Ctrl-C")
}

/// Notes a Ctrl-C; false when the program is to end.
fn ask() -> bool {
    PATIENCE.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
}

/// Work that looks at [`Work::flow`] often enough to stop by itself.
#[derive(Debug)]
pub(crate) struct Work {
    patience: usize,
    /// What was left to the work around this one.
    around: usize,
}

impl Work {
    /// Begins work that the first `patience` Ctrl-C ask to stop; the next ends the program.
    pub(crate) fn begin(patience: usize) -> Self {
        Self { patience, around: PATIENCE.swap(patience, SeqCst) }
    }

    /// Whether to go on.
    pub(crate) fn flow(&self) -> ControlFlow<()> {
        if self.is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Whether a Ctrl-C came.
    pub(crate) fn is_interrupted(&self) -> bool {
        PATIENCE.load(SeqCst) < self.patience
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        PATIENCE.store(self.around, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_stops_the_work_and_the_next_the_program() {
        assert!(!ask(), "nobody listens yet");
        let work = Work::begin(1);
        assert!(work.flow().is_continue());
        assert!(ask() && work.is_interrupted() && work.flow().is_break());
        assert!(!ask());
        drop(work);
        let again = Work::begin(1);
        assert!(!again.is_interrupted());
        let within = Work::begin(1);
        assert!(ask() && within.is_interrupted());
        drop(within);
        assert!(!again.is_interrupted(), "that one was for the work within");
        drop(again);
        assert!(!ask());
    }
}
