//! Learning-rate schedules: how large a part of the peak rate a step uses.
//!
//! A schedule is a pure function of the step's number and the run's length, so a resumed run needs nothing but its step.
//! Steps count from 0. With `w` warm-up steps, `n` steps in all and a final ratio `r`:
//!
//! ```text
//! warm-up  (step < w)              (step + 1) / w                         the first step already moves; step w - 1 has the peak
//! cosine   p = (step + 1 - w) / (n - w)    r + (1 - r) (1 + cos π p) / 2          Loshchilov and Hutter, "SGDR", 2017
//! stable   step < n - d            1                                      Hu et al., "MiniCPM", 2024
//! decay    p = (step + 1 - (n - d)) / d    r + (1 - r) (1 - p)   or   r + (1 - r) (1 - √p)   Hägele et al., 2024
//! ```
//!
//! The last step (`n - 1`) has the final ratio exactly, and so has every step after it.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A learning-rate schedule. In a configuration: `kind = "warmup_cosine"`, with the fields beside it.
///
/// ```
/// use ironloom_train::Schedule;
/// let schedule = Schedule::WarmupCosine { warmup_steps: 10, final_ratio: 0.1 };
/// assert_eq!(schedule.factor(0, 100), 0.1);
/// assert_eq!(schedule.factor(9, 100), 1.0);
/// assert_eq!(schedule.factor(99, 100), 0.1);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// The peak rate after a warm-up.
    Constant {
        /// Steps until the peak.
        #[serde(default)]
        warmup_steps: u64,
    },
    /// Half a cosine from the peak to its final ratio.
    #[serde(alias = "warmup-cosine")]
    WarmupCosine {
        /// Steps until the peak.
        #[serde(default)]
        warmup_steps: u64,
        /// What is left of the peak at the last step.
        #[serde(default)]
        final_ratio: f64,
    },
    /// The peak rate until shortly before the end: a run can be prolonged from any step before the decay.
    #[serde(alias = "warmup-stable-decay", alias = "wsd")]
    WarmupStableDecay {
        /// Steps until the peak.
        #[serde(default)]
        warmup_steps: u64,
        /// Steps of the decay, the last ones of the run.
        decay_steps: u64,
        /// The decay's form.
        #[serde(default)]
        decay: Decay,
        /// What is left of the peak at the last step.
        #[serde(default)]
        final_ratio: f64,
    },
}

/// The form in which a rate goes down, over a progress `p` from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// `1 - p`.
    Linear,
    /// `1 - √p`, which Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", found better.
    #[default]
    #[serde(rename = "1-sqrt", alias = "one_minus_sqrt")]
    OneMinusSqrt,
}

impl Default for Schedule {
    fn default() -> Self {
        Self::WarmupCosine { warmup_steps: 0, final_ratio: 0.1 }
    }
}

impl Schedule {
    /// The part of the peak rate that step `step` of `steps` uses: from 0 to 1.
    pub fn factor(&self, step: u64, steps: u64) -> f64 {
        let warmup_steps = self.warmup_steps();
        if step < warmup_steps {
            return (step as f64 + 1.0) / warmup_steps as f64;
        }
        match *self {
            Self::Constant { .. } => 1.0,
            Self::WarmupCosine { final_ratio, .. } => {
                let progress = progress(step, warmup_steps, steps);
                let cosine = (1.0 + libm::cos(std::f64::consts::PI * progress)) / 2.0;
                final_ratio + (1.0 - final_ratio) * cosine
            }
            Self::WarmupStableDecay { decay_steps, decay, final_ratio, .. } => {
                let start = steps.saturating_sub(decay_steps).max(warmup_steps);
                if step < start {
                    return 1.0;
                }
                let progress = progress(step, start, steps);
                let left = match decay {
                    Decay::Linear => 1.0 - progress,
                    Decay::OneMinusSqrt => 1.0 - progress.sqrt(),
                };
                final_ratio + (1.0 - final_ratio) * left
            }
        }
    }

    /// The rate of step `step` of `steps`, from the peak rate.
    pub fn learning_rate(&self, peak: f64, step: u64, steps: u64) -> f64 {
        peak * self.factor(step, steps)
    }

    /// Whether the fields make sense for a run of `steps`.
    ///
    /// # Errors
    /// A final ratio outside of 0 to 1, or a warm-up and decay that take more steps than the run has.
    pub fn check(&self, steps: u64) -> Result<()> {
        let (decay_steps, final_ratio) = match *self {
            Self::Constant { .. } => (0, 0.0),
            Self::WarmupCosine { final_ratio, .. } => (0, final_ratio),
            Self::WarmupStableDecay { decay_steps, final_ratio, .. } => (decay_steps, final_ratio),
        };
        if !(0.0..=1.0).contains(&final_ratio) {
            return Err(Error::InvalidOption { option: "final_ratio", value: final_ratio, limits: "from 0 to 1" });
        }
        let warmup_steps = self.warmup_steps();
        match warmup_steps.checked_add(decay_steps) {
            Some(needed) if needed <= steps => Ok(()),
            _ => Err(Error::ScheduleLength { warmup_steps, decay_steps, steps }),
        }
    }

    fn warmup_steps(&self) -> u64 {
        match *self {
            Self::Constant { warmup_steps }
            | Self::WarmupCosine { warmup_steps, .. }
            | Self::WarmupStableDecay { warmup_steps, .. } => warmup_steps,
        }
    }
}

/// How much of `start..end` is done when `step` is: 1 from the last step on.
fn progress(step: u64, start: u64, end: u64) -> f64 {
    if step + 1 >= end || end <= start {
        return 1.0;
    }
    (step + 1 - start) as f64 / (end - start) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_warm_up_starts_above_zero_and_ends_at_the_peak() {
        for schedule in [
            Schedule::Constant { warmup_steps: 4 },
            Schedule::WarmupCosine { warmup_steps: 4, final_ratio: 0.0 },
            Schedule::WarmupStableDecay { warmup_steps: 4, decay_steps: 5, decay: Decay::Linear, final_ratio: 0.0 },
        ] {
            let factors: Vec<f64> = (0..4).map(|step| schedule.factor(step, 20)).collect();
            assert_eq!(factors, [0.25, 0.5, 0.75, 1.0]);
        }
    }

    #[test]
    fn known_points() {
        let cosine = Schedule::WarmupCosine { warmup_steps: 0, final_ratio: 0.2 };
        assert!((cosine.factor(4, 10) - 0.6).abs() < 1e-15, "half of the way is half of the fall");
        assert_eq!(cosine.factor(9, 10), 0.2);
        assert_eq!(cosine.factor(1_000, 10), 0.2);

        let linear =
            Schedule::WarmupStableDecay { warmup_steps: 2, decay_steps: 4, decay: Decay::Linear, final_ratio: 0.0 };
        let factors: Vec<f64> = (0..11).map(|step| linear.factor(step, 10)).collect();
        assert_eq!(factors, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);

        let root = Schedule::WarmupStableDecay {
            warmup_steps: 0,
            decay_steps: 4,
            decay: Decay::OneMinusSqrt,
            final_ratio: 0.0,
        };
        assert_eq!(root.factor(5, 10), 1.0);
        assert_eq!(root.factor(6, 10), 0.5);
        assert_eq!(root.factor(9, 10), 0.0);

        assert_eq!(Schedule::Constant { warmup_steps: 0 }.learning_rate(3e-4, 5, 6), 3e-4);
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let schedule = |warmup_steps, decay_steps| Schedule::WarmupStableDecay {
            warmup_steps,
            decay_steps,
            decay: Decay::Linear,
            final_ratio: 0.0,
        };
        assert!(schedule(5, 5).check(10).is_ok());
        assert!(matches!(schedule(5, 6).check(10), Err(Error::ScheduleLength { .. })));
        assert!(matches!(schedule(u64::MAX, 6).check(10), Err(Error::ScheduleLength { .. })));
        for final_ratio in [-0.1, 1.5, f64::NAN] {
            let schedule = Schedule::WarmupCosine { warmup_steps: 0, final_ratio };
            assert!(matches!(schedule.check(10), Err(Error::InvalidOption { option: "final_ratio", .. })));
        }
    }

    #[test]
    fn configurations_are_read_strictly() {
        let read = |json: &str| serde_json::from_str::<Schedule>(json);
        let cosine = Schedule::WarmupCosine { warmup_steps: 100, final_ratio: 0.1 };
        assert_eq!(read(r#"{"kind": "warmup-cosine", "warmup_steps": 100, "final_ratio": 0.1}"#).unwrap(), cosine);
        assert_eq!(read(&serde_json::to_string(&cosine).unwrap()).unwrap(), cosine);
        let decay = read(r#"{"kind": "wsd", "decay_steps": 10, "decay": "1-sqrt"}"#).unwrap();
        assert!(matches!(decay, Schedule::WarmupStableDecay { decay: Decay::OneMinusSqrt, decay_steps: 10, .. }));
        assert!(read(r#"{"kind": "warmup_cosine", "warmup": 100}"#).unwrap_err().to_string().contains("warmup"));
        assert!(read(r#"{"kind": "polynomial"}"#).is_err());
    }

    proptest! {
        #[test]
        fn factors_stay_between_0_and_1_and_only_fall_after_the_warm_up(
            warmup in 0u64..20, decay in 0u64..20, extra in 0u64..50, ratio in 0.0f64..=1.0,
            form in prop_oneof![Just(Decay::Linear), Just(Decay::OneMinusSqrt)],
        ) {
            let steps = warmup + decay + extra;
            for schedule in [
                Schedule::WarmupCosine { warmup_steps: warmup, final_ratio: ratio },
                Schedule::WarmupStableDecay { warmup_steps: warmup, decay_steps: decay, decay: form, final_ratio: ratio },
            ] {
                schedule.check(steps).unwrap();
                let mut last = 1.0;
                for step in 0..steps + 3 {
                    let factor = schedule.factor(step, steps);
                    prop_assert!((0.0..=1.0).contains(&factor));
                    if step >= warmup {
                        prop_assert!(factor <= last, "{schedule:?} rises at {step}");
                        prop_assert!(factor >= ratio - 1e-15);
                        last = factor;
                    }
                }
            }
        }
    }
}
