//! Numbers of two precisions, so that a reference and its plain low-precision version are one loop written once.

use std::{
    iter::Sum,
    ops::{Add, Div, Mul, Neg, Sub},
};

use super::place::Precision;

/// A floating-point type that references are written in.
pub(super) trait Real:
    Copy
    + PartialOrd
    + Sum
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// The value, rounded to this precision.
    fn of(value: f64) -> Self;
    fn exp(self) -> Self;
    fn sqrt(self) -> Self;
    fn sin_cos(self) -> (Self, Self);

    /// Values rounded as `precision` holds them; a reference's own are never rounded.
    fn rounded(values: Vec<Self>, precision: Precision) -> Vec<Self>;

    /// The values in this precision.
    fn all(values: &[f32]) -> Vec<Self> {
        values.iter().map(|&value| Self::of(f64::from(value))).collect()
    }
}

macro_rules! real {
    ($float:ident, $rounded:ident) => {
        impl Real for $float {
            fn of(value: f64) -> Self {
                value as $float
            }
            fn exp(self) -> Self {
                $float::exp(self)
            }
            fn sqrt(self) -> Self {
                $float::sqrt(self)
            }
            fn sin_cos(self) -> (Self, Self) {
                $float::sin_cos(self)
            }
            fn rounded(values: Vec<Self>, precision: Precision) -> Vec<Self> {
                $rounded(values, precision)
            }
        }
    };
}

fn round(values: Vec<f32>, precision: Precision) -> Vec<f32> {
    precision.round(&values)
}

fn keep(values: Vec<f64>, _: Precision) -> Vec<f64> {
    values
}

real!(f32, round);
real!(f64, keep);
