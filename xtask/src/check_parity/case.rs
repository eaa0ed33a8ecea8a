//! One operation at one shape: how it is run, measured and judged.

use std::fmt;

use anyhow::{Result, ensure};

use super::place::Precision;

/// Which kernel a case runs as ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// The real one.
    Ours,
    /// A wrong one: every fourth input (or weight) counts as zero.
    OneInFourDropped,
}

impl Kernel {
    /// The inputs as this kernel sees them.
    pub(super) fn inputs(self, values: &[f32]) -> Vec<f32> {
        let kept = |(i, &value): (usize, &f32)| if self == Self::OneInFourDropped && i % 4 == 1 { 0.0 } else { value };
        values.iter().enumerate().map(kept).collect()
    }
}

/// The same quantity three times.
pub(super) struct Results {
    /// In double precision, by the plainest loop.
    pub(super) reference: Vec<f64>,
    /// By the same loop in the precision ours works in.
    pub(super) plain: Vec<f32>,
    /// By the operation under test.
    pub(super) ours: Vec<f32>,
    /// How much larger the terms of a sum are than the sum: rounding errors are of the terms' size.
    pub(super) condition: f64,
    /// The error of a rounding that ours may make wherever the plain version makes less, as a share of a term.
    pub(super) unit: f64,
}

impl Results {
    /// Results whose terms are of their own size.
    pub(super) fn new(reference: Vec<f64>, plain: Vec<f32>, ours: Vec<f32>) -> Self {
        Self { reference, plain, ours, condition: 1.0, unit: Precision::Single.unit() }
    }

    /// The same where ours and the plain version hold numbers in `precision`.
    pub(super) fn in_precision(self, precision: Precision) -> Self {
        Self { unit: precision.unit(), ..self }
    }
}

/// How far ours may be from the reference.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bound {
    /// Twice the plain version's own error.
    TwicePlain,
    /// Three times, for gradients.
    ThricePlain,
    /// A figure of its own, where there is no plain version.
    Fixed(f64),
    /// The same numbers to the bit.
    Exact,
}

type Compute = Box<dyn Fn(Kernel) -> Result<Results>>;

/// One operation at one shape.
pub(super) struct Case {
    /// The operation's name, the same in every room.
    pub(super) operation: String,
    /// Its sizes, for a reader.
    pub(super) shape: String,
    bound: Bound,
    compute: Compute,
}

impl Case {
    /// A case judged by `bound`.
    pub(super) fn new(
        operation: impl Into<String>,
        shape: impl Into<String>,
        bound: Bound,
        compute: impl Fn(Kernel) -> Result<Results> + 'static,
    ) -> Self {
        Self { operation: operation.into(), shape: shape.into(), bound, compute: Box::new(compute) }
    }

    /// Runs it with `kernel` as ours. An error counts as a failure with its reason.
    pub(super) fn run(&self, kernel: Kernel) -> Outcome {
        match (self.compute)(kernel).and_then(|results| self.judge(&results)) {
            Ok(outcome) => outcome,
            Err(error) => Outcome { error: f64::INFINITY, bound: 0.0, problem: Some(format!("{error:#}")) },
        }
    }

    fn judge(&self, results: &Results) -> Result<Outcome> {
        let Results { reference, plain, ours, condition, unit } = results;
        ensure!(ours.len() == reference.len(), "{} values, and {} are right", ours.len(), reference.len());
        let error = relative_error(ours, reference);
        let plain_error = || {
            ensure!(plain.len() == reference.len(), "the plain version has {} values", plain.len());
            // Where the plain loop happens to round well, a rounding of each term is still allowed.
            Ok(relative_error(plain, reference).max(condition * unit))
        };
        let bound = match self.bound {
            Bound::TwicePlain => 2.0 * plain_error()?,
            Bound::ThricePlain => 3.0 * plain_error()?,
            Bound::Fixed(bound) => bound,
            Bound::Exact => 0.0,
        };
        Ok(Outcome { error, bound, problem: None })
    }
}

/// What came of a case.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// Relative error of ours.
    pub(super) error: f64,
    /// What it may be.
    pub(super) bound: f64,
    /// Why ours gave no result.
    pub(super) problem: Option<String>,
}

impl Outcome {
    pub(super) fn passes(&self) -> bool {
        self.problem.is_none() && self.error <= self.bound
    }

    pub(super) fn verdict(&self) -> &'static str {
        if self.passes() { "holds" } else { "FAILED" }
    }

    /// The error as a share of the bound; 0 when both are 0.
    pub(super) fn of_bound(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.bound }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.problem {
            Some(problem) => f.write_str(problem),
            None => write!(f, "relative error {:.3e}, and {:.3e} is the most", self.error, self.bound),
        }
    }
}

/// `‖x − reference‖ / ‖reference‖`; infinite when a value is not finite where the reference is.
fn relative_error(values: &[f32], reference: &[f64]) -> f64 {
    let (mut difference, mut norm) = (0.0f64, 0.0f64);
    for (&value, &right) in values.iter().zip(reference) {
        let value = f64::from(value);
        if value == right || (value.is_nan() && right.is_nan()) {
            norm += if right.is_finite() { right * right } else { 0.0 };
            continue;
        }
        if !value.is_finite() || !right.is_finite() {
            return f64::INFINITY;
        }
        difference += (value - right).powi(2);
        norm += right * right;
    }
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum_case(bound: Bound) -> Case {
        Case::new("sum", "[8]", bound, |kernel| {
            let values = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.1];
            let ours = kernel.inputs(&values).iter().sum();
            let reference = values.iter().map(|&value| f64::from(value)).sum();
            Ok(Results::new(vec![reference], vec![values.iter().sum()], vec![ours]))
        })
    }

    #[test]
    fn a_right_kernel_passes_and_a_wrong_one_fails() {
        let case = sum_case(Bound::TwicePlain);
        assert!(case.run(Kernel::Ours).passes());
        assert!(!case.run(Kernel::OneInFourDropped).passes());
    }

    #[test]
    fn an_error_and_a_wrong_length_are_failures() {
        let broken = Case::new("broken", "", Bound::Exact, |_| anyhow::bail!("no kernel"));
        assert_eq!(broken.run(Kernel::Ours).to_string(), "no kernel");
        let short =
            Case::new("short", "", Bound::Fixed(1.0), |_| Ok(Results::new(vec![1.0; 2], Vec::new(), vec![1.0])));
        assert!(!short.run(Kernel::Ours).passes());
    }

    #[test]
    fn not_a_number_is_infinitely_wrong() {
        assert_eq!(relative_error(&[f32::NAN, 1.0], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[f32::NAN], &[f64::NAN]), 0.0);
        assert_eq!(relative_error(&[0.0], &[0.0]), 0.0);
        assert_eq!(relative_error(&[1.0], &[0.0]), f64::INFINITY);
    }
}
