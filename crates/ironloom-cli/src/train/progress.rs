//! What is said while a run goes: a bar on a terminal, a line now and then elsewhere, and a line a measurement.

use std::{
    cell::Cell,
    fmt::Write as _,
    time::{Duration, Instant},
};

use ironloom_core::{format_bytes, grouped};
use ironloom_train::{
    Meter, StepReport,
    run::{Event, load_range},
};

use crate::console::{Console, Progress, Unit};

/// Follows a run.
pub(super) struct Follower<'a> {
    console: &'a Console,
    bar: Progress,
    meter: Meter,
    steps: u64,
    /// Steps that were done before.
    first: u64,
    start: Instant,
    said: Cell<Instant>,
    /// Tokens and seconds of the last steps, the older the less.
    recent: (f64, f64),
    pub(super) last: Option<StepReport>,
    pub(super) held_out_loss: Option<f64>,
    pub(super) tokens: u64,
    pub(super) step_time: Duration,
}

impl<'a> Follower<'a> {
    /// Without a terminal a line is said this often.
    const PAUSE: Duration = Duration::from_secs(10);

    /// Follows a run that has done `first` of `steps` steps.
    pub(super) fn new(console: &'a Console, meter: Meter, first: u64, steps: u64) -> Self {
        Self {
            console,
            bar: console.progress("training", Unit::Steps),
            meter,
            steps,
            first,
            start: Instant::now(),
            said: Cell::new(Instant::now()),
            recent: (0.0, 0.0),
            last: None,
            held_out_loss: None,
            tokens: 0,
            step_time: Duration::ZERO,
        }
    }

    /// Takes note of an event, and says what is worth it.
    pub(super) fn see(&mut self, event: &Event<'_>) {
        match event {
            Event::Step { report, time } => self.step(report, *time),
            Event::Evaluated { step, loss } => {
                self.held_out_loss = Some(*loss);
                self.say(format_args!("step {step}/{}: held-out loss {loss:.4}{}", self.steps, self.training_loss()));
            }
            Event::RolledBack { from, to } => self.say(format_args!(
                "warning: the losses up to step {from} were refused; going on from the checkpoint of step {to} with other data"
            )),
            Event::Checkpoint { .. } => {}
        }
    }

    /// Tokens a second over all steps of this process.
    pub(super) fn tokens_per_second(&self) -> Option<f64> {
        Some(self.tokens as f64 / self.step_time.as_secs_f64()).filter(|rate| rate.is_finite())
    }

    /// Of all steps of this process: MFU, where it is known.
    pub(super) fn utilization(&self) -> Option<f64> {
        self.meter.utilization(self.tokens_per_second()?)
    }

    /// Memory that this process has of the card that it trains on.
    pub(super) fn device_bytes(&self) -> Option<u64> {
        self.meter.memory_bytes()
    }

    fn step(&mut self, report: &StepReport, time: Duration) {
        const KEPT: f64 = 0.95;
        self.tokens += report.tokens as u64;
        self.step_time += time;
        self.recent = (KEPT * self.recent.0 + report.tokens as f64, KEPT * self.recent.1 + time.as_secs_f64());
        self.last = Some(report.clone());
        let state = self.state(report);
        self.bar.set(report.step, self.steps);
        self.bar.say(&state);
        if !self.bar.is_shown() && self.said.get().elapsed() >= Self::PAUSE {
            self.say(format_args!("step {}/{}: {state}", report.step, self.steps));
        }
    }

    /// `loss 3.2104, 1,234 tok/s, MFU 31.6%, 310.0 MiB, expert load 0.4-1.9, 2 min left`.
    fn state(&self, report: &StepReport) -> String {
        let mut text = format!("loss {:.4}", report.loss);
        if !report.moved {
            text.push_str(" (refused)");
        }
        let (tokens, seconds) = self.recent;
        if seconds > 0.0 {
            let _ = write!(text, ", {} tok/s", grouped((tokens / seconds) as u64));
            if let Some(share) = self.meter.utilization(tokens / seconds) {
                let _ = write!(text, ", MFU {:.1}%", 100.0 * share);
            }
        }
        if let Some(bytes) = self.device_bytes().or_else(resident_bytes) {
            let _ = write!(text, ", {}", format_bytes(bytes));
        }
        if let Some((largest, smallest)) = load_range(&report.expert_loads) {
            let _ = write!(text, ", expert load {smallest:.1}-{largest:.1}");
        }
        let done = report.step.saturating_sub(self.first);
        if done > 0 {
            let left = self.steps.saturating_sub(report.step) as f64 / done as f64;
            let _ = write!(text, ", {} left", duration(self.start.elapsed().mul_f64(left)));
        }
        text
    }

    fn training_loss(&self) -> String {
        self.last.as_ref().map(|report| format!(", training loss {:.4}", report.loss)).unwrap_or_default()
    }

    fn say(&self, text: impl std::fmt::Display) {
        self.bar.aside(|| self.console.note(text));
        self.said.set(Instant::now());
    }
}

/// Memory that this process has now, where the system tells.
pub(super) fn resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// The most memory that this process has had, where the system tells.
pub(super) fn peak_bytes() -> Option<u64> {
    status_bytes("VmHWM:")
}

fn status_bytes(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// `45 s`, `12 min`, `3.5 h`.
fn duration(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..100 => format!("{seconds} s"),
        seconds @ 100..6000 => format!("{} min", (seconds + 30) / 60),
        seconds => format!("{:.1} h", seconds as f64 / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well() {
        let texts = [0, 99, 100, 5999, 6000].map(|seconds| duration(Duration::from_secs(seconds)));
        assert_eq!(texts, ["0 s", "99 s", "2 min", "100 min", "1.7 h"]);
    }
}
