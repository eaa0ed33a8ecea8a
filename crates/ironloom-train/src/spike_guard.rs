//! Whether a step's loss may be learned from.
//!
//! One damaged batch or one overflow can undo days of training. Before the optimizer moves, the loss is held against a moving
//! mean `m` of the losses accepted so far, with the bias of its start corrected as in Adam:
//!
//! ```text
//! m ← β m + (1 - β) loss         after each accepted loss, from m = 0
//! mean = m / (1 - βⁿ)            after n accepted losses
//! refuse when loss or gradient norm is not finite, or loss > ratio · mean
//! ```
//!
//! A refused step is skipped and does not enter the mean; when several in a row are refused, the weights themselves
//! are suspected, and the answer is to go back to a checkpoint.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// When a loss is refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpikeGuardOptions {
    /// How many times the moving mean a loss may be.
    pub ratio: f64,
    /// The moving mean's decay β.
    pub decay: f64,
    /// How many refused steps in a row lead back to a checkpoint.
    pub patience: u32,
    /// How many losses must have been accepted before a finite one can be refused: first losses differ by themselves.
    pub settle_steps: u64,
}

impl Default for SpikeGuardOptions {
    fn default() -> Self {
        Self { ratio: 2.0, decay: 0.98, patience: 5, settle_steps: 20 }
    }
}

/// What to do with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// Learn from it.
    Accept,
    /// Leave the weights as they are, and go on with the next batch.
    Skip,
    /// Load the last checkpoint.
    RollBack,
}

/// Judges each step's loss. What it has learned is [`SpikeGuardState`], a part of a checkpoint.
///
/// ```
/// use ironloom_train::{SpikeGuard, SpikeGuardOptions, Verdict};
/// let options = SpikeGuardOptions { ratio: 1.5, patience: 2, settle_steps: 1, ..Default::default() };
/// let mut guard = SpikeGuard::new(options)?;
/// assert_eq!(guard.judge(4.0, 1.0), Verdict::Accept);
/// assert_eq!(guard.judge(9.0, 1.0), Verdict::Skip);
/// assert_eq!(guard.judge(f64::NAN, 1.0), Verdict::RollBack);
/// # Ok::<(), ironloom_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SpikeGuard {
    options: SpikeGuardOptions,
    state: SpikeGuardState,
}

/// What a [`SpikeGuard`] has seen. Its one real number is kept as bits, so that no text format rounds it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpikeGuardState {
    accepted: u64,
    refused_in_a_row: u32,
    mean_bits: u64,
}

impl SpikeGuard {
    /// A guard that has seen nothing.
    ///
    /// # Errors
    /// An option is out of its range.
    pub fn new(options: SpikeGuardOptions) -> Result<Self> {
        let invalid = |option, value, limits| Err(Error::InvalidOption { option, value, limits });
        if !options.ratio.is_finite() || options.ratio <= 1.0 {
            return invalid("spike_guard.ratio", options.ratio, "above 1");
        }
        if !(0.0..1.0).contains(&options.decay) {
            return invalid("spike_guard.decay", options.decay, "from 0 to below 1");
        }
        if options.patience == 0 {
            return invalid("spike_guard.patience", 0.0, "1 or more");
        }
        Ok(Self { options, state: SpikeGuardState::default() })
    }

    /// The same guard with what an earlier one had seen.
    pub fn with_state(mut self, state: SpikeGuardState) -> Self {
        self.state = state;
        self
    }

    /// What it has seen, for a checkpoint.
    pub fn state(&self) -> &SpikeGuardState {
        &self.state
    }

    /// The largest loss that the next step may have; infinity where every finite one is accepted.
    pub fn limit(&self) -> f64 {
        match self.mean() {
            Some(mean) if self.state.accepted >= self.options.settle_steps => self.options.ratio * mean,
            _ => f64::INFINITY,
        }
    }

    /// Judges a step before the optimizer takes it. After [`Verdict::RollBack`] the count of refused steps starts again: also
    /// when the checkpoint's own state isn't restored, each new run of refusals gets the same patience.
    pub fn judge(&mut self, loss: f64, gradient_norm: f64) -> Verdict {
        if loss.is_finite() && gradient_norm.is_finite() && loss <= self.limit() {
            let mean = self.options.decay * f64::from_bits(self.state.mean_bits) + (1.0 - self.options.decay) * loss;
            self.state =
                SpikeGuardState { accepted: self.state.accepted + 1, refused_in_a_row: 0, mean_bits: mean.to_bits() };
            return Verdict::Accept;
        }
        self.state.refused_in_a_row += 1;
        if self.state.refused_in_a_row < self.options.patience {
            return Verdict::Skip;
        }
        self.state.refused_in_a_row = 0;
        Verdict::RollBack
    }

    /// The moving mean of accepted losses; none before the first.
    pub fn mean(&self) -> Option<f64> {
        let mean = f64::from_bits(self.state.mean_bits);
        let weight = 1.0 - libm::pow(self.options.decay, self.state.accepted as f64);
        (self.state.accepted > 0).then(|| mean / weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(ratio: f64, patience: u32, settle_steps: u64) -> SpikeGuard {
        SpikeGuard::new(SpikeGuardOptions { ratio, patience, settle_steps, decay: 0.9 }).unwrap()
    }

    #[test]
    fn the_mean_is_that_of_exponential_weights() {
        let (mut guard, losses) = (guard(100.0, 3, 0), [5.0, 4.0, 3.5, 3.0]);
        assert_eq!(guard.mean(), None);
        for (count, &loss) in losses.iter().enumerate() {
            assert_eq!(guard.judge(loss, 1.0), Verdict::Accept);
            let weights: Vec<f64> = (0..=count).map(|age| 0.9f64.powi((count - age) as i32)).collect();
            let sum: f64 = weights.iter().zip(&losses).map(|(weight, loss)| weight * loss).sum();
            let expected = sum / weights.iter().sum::<f64>();
            assert!((guard.mean().unwrap() - expected).abs() < 1e-12, "{count}");
        }
    }

    #[test]
    fn a_spike_is_skipped_and_stays_out_of_the_mean() {
        let mut guard = guard(2.0, 3, 1);
        assert_eq!(guard.judge(3.0, 1.0), Verdict::Accept);
        let mean = guard.mean();
        assert_eq!(guard.judge(6.01, 1.0), Verdict::Skip);
        assert_eq!(guard.mean(), mean);
        assert_eq!(guard.judge(5.99, 1.0), Verdict::Accept);
    }

    #[test]
    fn refusals_in_a_row_lead_back_and_one_accepted_step_forgets_them() {
        let mut guard = guard(2.0, 3, 1);
        assert_eq!(guard.judge(1.0, 1.0), Verdict::Accept);
        let verdicts =
            [f64::NAN, f64::INFINITY, 1.0, f64::NAN, 9.0, f64::NEG_INFINITY, 9.0].map(|l| guard.judge(l, 1.0));
        use Verdict::{Accept, RollBack, Skip};
        assert_eq!(verdicts, [Skip, Skip, Accept, Skip, Skip, RollBack, Skip]);
    }

    #[test]
    fn a_gradient_that_is_not_finite_is_refused_at_once() {
        let mut guard = guard(2.0, 2, 100);
        assert_eq!(guard.judge(1.0, f64::INFINITY), Verdict::Skip);
        assert_eq!(guard.judge(1.0, f64::NAN), Verdict::RollBack);
    }

    #[test]
    fn before_it_settles_only_what_is_not_finite_is_refused() {
        let mut guard = guard(2.0, 3, 2);
        assert_eq!(guard.judge(1.0, 1.0), Verdict::Accept);
        assert_eq!(guard.judge(50.0, 1.0), Verdict::Accept);
        assert_eq!(guard.judge(500.0, 1.0), Verdict::Skip);
    }

    #[test]
    fn a_restored_guard_judges_as_the_one_that_went_on() {
        let mut one = guard(1.3, 4, 3);
        let losses =
            |step: u64| 2.0 + ((step * 7919) % 13) as f64 * 0.1 + f64::from(u8::from(step.is_multiple_of(5))) * 0.7;
        for step in 0..17 {
            let _ = one.judge(losses(step), 1.0);
        }
        let text = serde_json::to_string(one.state()).unwrap();
        let mut two = guard(1.3, 4, 3).with_state(serde_json::from_str(&text).unwrap());
        for step in 17..60 {
            assert_eq!(one.judge(losses(step), 1.0), two.judge(losses(step), 1.0), "{step}");
            assert_eq!(one.mean().unwrap().to_bits(), two.mean().unwrap().to_bits());
        }
    }

    #[test]
    fn options_out_of_range_are_refused() {
        let with = |change: fn(&mut SpikeGuardOptions)| {
            let mut options = SpikeGuardOptions::default();
            change(&mut options);
            SpikeGuard::new(options)
        };
        assert!(with(|options| options.ratio = 1.0).is_err());
        assert!(with(|options| options.ratio = f64::NAN).is_err());
        assert!(with(|options| options.decay = 1.0).is_err());
        assert!(with(|options| options.patience = 0).is_err());
    }
}
