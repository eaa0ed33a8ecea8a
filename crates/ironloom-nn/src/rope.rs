//! Frequencies of rotary position embedding, plain and scaled for longer contexts.
//!
//! Plain: `f_i = base^(-2i / width)` for `i < width / 2` (arXiv 2104.09864). Scaled forms change `f_i`, and YaRN also scales
//! the sines and cosines. All follow the definitions in Hugging Face's `modeling_rope_utils`, which the checkpoints mean.

use std::f64::consts::TAU;

use crate::{Error, Result};

/// How frequencies are scaled for contexts longer than the model was first trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`: positions are squeezed together.
    Linear {
        /// How much longer the context is.
        factor: f64,
    },
    /// Frequency `i` divided by `factors[i]`: how GGUF files store Llama 3's scaling.
    Factors(Vec<f32>),
    /// Llama 3.1's: low frequencies divided by `factor`, high ones kept, those between blended.
    Llama3 {
        /// How much longer the context is.
        factor: f64,
        /// Wavelengths above `original_context / low_frequency_factor` are divided.
        low_frequency_factor: f64,
        /// Wavelengths below `original_context / high_frequency_factor` are kept.
        high_frequency_factor: f64,
        /// The context the model was first trained on.
        original_context: f64,
    },
    /// YaRN (Peng et al., arXiv 2309.00071).
    Yarn {
        /// How much longer the context is.
        factor: f64,
        /// The context the model was first trained on.
        original_context: f64,
        /// Rotations over the original context above which a frequency is kept; usually 32.
        beta_fast: f64,
        /// Rotations below which it is divided; usually 1.
        beta_slow: f64,
        /// Whether the bounds are rounded to whole frequencies.
        truncate: bool,
        /// The factor on sines and cosines; see [`RopeScaling::yarn_attention_factor`].
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// YaRN's factor on sines and cosines: `explicit` where given; else the ratio of the two `mscale` forms where both are
    /// given and not 0; else `0.1 ln(factor) + 1`.
    pub fn yarn_attention_factor(
        factor: f64,
        explicit: Option<f64>,
        mscale: Option<f64>,
        mscale_all_dim: Option<f64>,
    ) -> f64 {
        let form = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let given = |value: Option<f64>| value.filter(|value| *value != 0.0);
        match (explicit, given(mscale), given(mscale_all_dim)) {
            (Some(explicit), _, _) => explicit,
            (None, Some(mscale), Some(all)) => form(mscale) / form(all),
            _ => form(1.0),
        }
    }
}

/// A rotary embedding: which part of a head turns, and how fast.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeOptions {
    /// The base of the frequencies (`rope_theta`).
    pub base: f64,
    /// Elements of a head that turn; even.
    pub width: usize,
    /// Scaling for longer contexts.
    pub scaling: RopeScaling,
}

impl RopeOptions {
    /// The frequencies, `[width / 2]`, in radians a position, and the factor on sines and cosines.
    ///
    /// # Errors
    /// A number is not finite and positive, the width is odd, or factors are not one for each frequency.
    pub fn inverse_frequencies(&self) -> Result<(Vec<f32>, f32)> {
        let positive = |option, value: f64| {
            if value.is_finite() && value > 0.0 {
                Ok(value)
            } else {
                Err(Error::Option { option, value, limit: "a positive number" })
            }
        };
        if self.width == 0 || !self.width.is_multiple_of(2) {
            return Err(Error::Option {
                option: "rope width",
                value: self.width as f64,
                limit: "a positive even number",
            });
        }
        let base = positive("rope base", self.base)?;
        let half = self.width / 2;
        // The exponent is rounded to single precision, as the reference does.
        let power = |i: usize| base.powf(f64::from((2 * i) as f32 / self.width as f32));
        let plain = (0..half).map(|i| 1.0 / f64::from(power(i) as f32));
        let frequencies: Vec<f64> = match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => {
                let factor = positive("rope scaling factor", *factor)?;
                plain.map(|f| f / factor).collect()
            }
            RopeScaling::Factors(factors) => {
                if factors.len() != half {
                    let value = factors.len() as f64;
                    return Err(Error::Option {
                        option: "the number of rope factors",
                        value,
                        limit: "half the rope width",
                    });
                }
                for factor in factors {
                    positive("a rope factor", f64::from(*factor))?;
                }
                plain.zip(factors).map(|(f, factor)| f / f64::from(*factor)).collect()
            }
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                let factor = positive("rope scaling factor", *factor)?;
                let low = positive("rope low-frequency factor", *low_frequency_factor)?;
                let high = positive("rope high-frequency factor", *high_frequency_factor)?;
                let context = positive("rope original context", *original_context)?;
                if high <= low {
                    let limit = "more than the low-frequency factor";
                    return Err(Error::Option { option: "rope high-frequency factor", value: high, limit });
                }
                plain
                    .map(|f| {
                        let rotations = context * f / TAU;
                        let kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
                        (1.0 - kept) * f / factor + kept * f
                    })
                    .collect()
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                let factor = positive("rope scaling factor", *factor)?;
                let context = positive("rope original context", *original_context)?;
                let (fast, slow) = (positive("beta_fast", *beta_fast)?, positive("beta_slow", *beta_slow)?);
                let width = self.width as f64;
                let at = |rotations: f64| width * (context / (rotations * TAU)).ln() / (2.0 * base.ln());
                let (low, high) = (at(fast), at(slow));
                let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(width - 1.0));
                let span = if low == high { 0.001 } else { high - low };
                plain
                    .enumerate()
                    .map(|(i, f)| {
                        let divided = ((i as f64 - low) / span).clamp(0.0, 1.0);
                        f / factor * divided + f * (1.0 - divided)
                    })
                    .collect()
            }
        };
        let factor = match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => positive("rope attention factor", attention_factor)?,
            _ => 1.0,
        };
        Ok((frequencies.into_iter().map(|f| f as f32).collect(), factor as f32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(scaling: RopeScaling) -> Vec<f32> {
        RopeOptions { base: 500_000.0, width: 128, scaling }.inverse_frequencies().unwrap().0
    }

    #[test]
    fn llama3_keeps_high_and_divides_low_frequencies() {
        let plain = frequencies(RopeScaling::None);
        for factor in [8.0, 32.0] {
            let scaled = frequencies(RopeScaling::Llama3 {
                factor,
                low_frequency_factor: 1.0,
                high_frequency_factor: 4.0,
                original_context: 8192.0,
            });
            assert_eq!(scaled[0], plain[0]);
            assert!((scaled[63] * factor as f32 / plain[63] - 1.0).abs() < 1e-6);
            assert!(scaled.iter().zip(&plain).any(|(s, p)| s < p && *s > p / factor as f32 * 1.01), "a blend between");
        }
    }

    #[test]
    fn yarn_attention_factor_follows_what_is_given() {
        let form = 0.1 * 4.0f64.ln() + 1.0;
        let factor = |explicit, mscale, all| RopeScaling::yarn_attention_factor(4.0, explicit, mscale, all);
        assert_eq!(factor(None, None, None), form);
        assert_eq!(factor(Some(1.0), Some(2.0), None), 1.0);
        assert_eq!(factor(None, Some(1.0), Some(1.0)), 1.0);
        assert_eq!(factor(None, Some(2.0), Some(1.0)), (0.2 * 4.0f64.ln() + 1.0) / form);
        assert_eq!(factor(None, Some(2.0), None), form);
        assert_eq!(RopeScaling::yarn_attention_factor(1.0, None, None, None), 1.0);
    }

    #[test]
    fn senseless_options_are_refused() {
        let refused = |base, width, scaling| RopeOptions { base, width, scaling }.inverse_frequencies().is_err();
        assert!(refused(0.0, 64, RopeScaling::None));
        assert!(refused(f64::NAN, 64, RopeScaling::None));
        assert!(refused(1e4, 63, RopeScaling::None));
        assert!(refused(1e4, 64, RopeScaling::Linear { factor: 0.0 }));
        assert!(refused(1e4, 64, RopeScaling::Factors(vec![1.0; 31])));
    }
}
