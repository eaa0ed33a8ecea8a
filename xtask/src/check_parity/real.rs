//! Numbers of two precisions, so that a reference and its plain low-precision version are one loop written once.

use std::{
    iter::Sum,
    ops::{Add, Div, Mul, Neg, Sub},
};

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

    /// The values in this precision.
    fn all(values: &[f32]) -> Vec<Self> {
        values.iter().map(|&value| Self::of(f64::from(value))).collect()
    }
}

macro_rules! real {
    ($float:ident) => {
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
        }
    };
}

real!(f32);
real!(f64);
