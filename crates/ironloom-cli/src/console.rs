//! Output: results to stdout, and notes, warnings and progress to stderr.
//!
//! Nothing here panics when a stream is closed: results give their error up, and what stderr cannot take is dropped. Progress
//! bars appear only on a terminal, and only once the work has taken a while.

use std::{
    cell::RefCell,
    fmt::Display,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// Work that takes less than this shows no bar.
const PATIENCE: Duration = Duration::from_millis(400);

/// Where a command's words go.
#[derive(Debug)]
pub(crate) struct Console {
    quiet: bool,
}

impl Console {
    /// A console; a quiet one drops notes, warnings and progress.
    pub(crate) fn new(quiet: bool) -> Self {
        Self { quiet }
    }

    /// Says something about the work on stderr.
    pub(crate) fn note(&self, text: impl Display) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    /// Says on stderr that something may not be as it should.
    pub(crate) fn warn(&self, text: impl Display) {
        self.note(format_args!("warning: {text}"));
    }

    /// Prints a result and a line end.
    pub(crate) fn print(&self, text: impl Display) -> anyhow::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}").and_then(|()| out.flush()).context("cannot print")
    }

    /// Prints a part of a result at once.
    pub(crate) fn print_part(&self, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// Prints a result as one JSON value.
    pub(crate) fn print_json(&self, value: &impl Serialize) -> anyhow::Result<()> {
        self.print(serde_json::to_string_pretty(value).context("cannot write the result as JSON")?)
    }

    /// Progress of work that is counted in `unit`.
    pub(crate) fn progress(&self, what: &'static str, unit: Unit) -> Progress {
        let shown = !self.quiet && io::stderr().is_terminal();
        Progress { what, unit, shown, start: Instant::now(), bar: RefCell::new(None) }
    }
}

/// What progress counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Bytes,
    Tokens,
    Tests,
    Steps,
}

/// A bar that appears when its work takes long, and goes when it is dropped.
pub(crate) struct Progress {
    what: &'static str,
    unit: Unit,
    shown: bool,
    start: Instant,
    bar: RefCell<Option<ProgressBar>>,
}

impl Progress {
    /// So much is done of so much. The bar goes when all is.
    pub(crate) fn set(&self, done: u64, total: u64) {
        if done >= total {
            return self.clear();
        }
        if self.shown && self.start.elapsed() >= PATIENCE {
            self.bar.borrow_mut().get_or_insert_with(|| self.new_bar(total)).set_position(done);
        }
    }

    /// Says something beside the bar.
    pub(crate) fn say(&self, text: &str) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.set_message(text.to_owned());
        }
    }

    /// Lets other lines be printed without the bar in their way.
    pub(crate) fn aside(&self, print: impl FnOnce()) {
        match &*self.bar.borrow() {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Whether there is someone to show a bar to.
    pub(crate) fn is_shown(&self) -> bool {
        self.shown
    }

    fn clear(&self) {
        if let Some(bar) = self.bar.borrow_mut().take() {
            bar.finish_and_clear();
        }
    }

    fn new_bar(&self, total: u64) -> ProgressBar {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        let template = match self.unit {
            Unit::Bytes => "{msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {eta}",
            Unit::Tokens => "{msg} [{bar:30}] {pos}/{len} tokens {eta}",
            Unit::Tests => "{msg} [{bar:30}] {pos}/{len}",
            Unit::Steps => "[{bar:20}] {pos}/{len} {msg}",
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.progress_chars("=> "));
        bar.set_message(self.what);
        bar
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_appears_late_where_it_is_wanted_and_goes_at_the_end() {
        let progress = |shown, age| {
            let start = Instant::now().checked_sub(age).unwrap();
            let progress = Progress { what: "loading", unit: Unit::Bytes, shown, start, bar: RefCell::new(None) };
            progress.set(1, 2);
            let appeared = progress.bar.borrow().is_some();
            progress.set(2, 2);
            assert!(progress.bar.borrow().is_none());
            appeared
        };
        assert!(progress(true, PATIENCE));
        assert!(!progress(true, Duration::ZERO));
        assert!(!progress(false, PATIENCE));
    }
}
