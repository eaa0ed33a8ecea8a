//! What a sampler may be told, and within which limits.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How the next token is chosen. The default leaves the model's distribution as it is: temperature 1, no filter, no penalty.
///
/// As JSON, each field may be left out; a misspelt one is an error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplerOptions {
    /// Divides the logits: below 1 the likely get likelier. 0 takes the most likely token, the lowest id among equals.
    pub temperature: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest likeliest tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this many times as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits, and multiplies negative ones, of tokens in the window; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the window.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time it is in the window.
    pub frequency_penalty: f32,
    /// How many of the last ids, the prompt's among them, the penalties look at. Without a number: all of them.
    pub penalty_window: Option<usize>,
    /// Which of the many possible texts to write: the same seed writes the same one again.
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: Some(64),
            seed: 0,
        }
    }
}

impl SamplerOptions {
    /// The most likely token, always.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Whether ids before have a say in what is chosen.
    pub(crate) fn has_penalties(&self) -> bool {
        let none = self.repetition_penalty == 1.0 && self.presence_penalty == 0.0 && self.frequency_penalty == 0.0;
        !none && self.penalty_window != Some(0)
    }

    /// Whether the largest logit is what is chosen.
    pub(crate) fn is_argmax(&self) -> bool {
        self.temperature == 0.0 && !self.has_penalties()
    }

    /// Refuses values that mean nothing.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] with the option's name, its value and its limits.
    pub fn check(&self) -> Result<()> {
        let rules: [(&'static str, f32, bool, &'static str); 6] = [
            (
                "temperature",
                self.temperature,
                self.temperature >= 0.0 && self.temperature.is_finite(),
                "a number from 0 up (0 takes the most likely token)",
            ),
            ("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "above 0 and at most 1 (1 keeps all tokens)"),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "from 0 (which keeps all tokens) to 1"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
                "a number above 0 (1 changes nothing)",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                (-2.0..=2.0).contains(&self.presence_penalty),
                "from -2 to 2 (0 changes nothing)",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                (-2.0..=2.0).contains(&self.frequency_penalty),
                "from -2 to 2 (0 changes nothing)",
            ),
        ];
        match rules.into_iter().find(|(_, _, holds, _)| !holds) {
            Some((option, value, _, limits)) => Err(Error::InvalidOption { option, value: f64::from(value), limits }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_option_value_and_limits() {
        let base = SamplerOptions::default;
        let nan = f32::NAN;
        let cases = [
            (SamplerOptions { temperature: -0.5, ..base() }, "temperature is -0.5, and it must be a number from 0 up"),
            (SamplerOptions { temperature: nan, ..base() }, "temperature is NaN"),
            (SamplerOptions { temperature: f32::INFINITY, ..base() }, "temperature is inf"),
            (SamplerOptions { top_p: 0.0, ..base() }, "top_p is 0, and it must be above 0 and at most 1"),
            (SamplerOptions { top_p: 1.5, ..base() }, "top_p is 1.5"),
            (SamplerOptions { top_p: nan, ..base() }, "top_p is NaN"),
            (SamplerOptions { min_p: -0.25, ..base() }, "min_p is -0.25"),
            (SamplerOptions { min_p: nan, ..base() }, "min_p is NaN"),
            (SamplerOptions { repetition_penalty: 0.0, ..base() }, "repetition_penalty is 0"),
            (SamplerOptions { repetition_penalty: nan, ..base() }, "repetition_penalty is NaN"),
            (SamplerOptions { presence_penalty: 3.0, ..base() }, "presence_penalty is 3"),
            (SamplerOptions { frequency_penalty: nan, ..base() }, "frequency_penalty is NaN"),
        ];
        for (options, message) in cases {
            let text = options.check().unwrap_err().to_string();
            assert!(text.starts_with(message), "{text}");
        }
        base().check().unwrap();
        SamplerOptions::greedy().check().unwrap();
    }

    #[test]
    fn json_takes_part_of_the_options_and_refuses_misspelt_ones() {
        let options: SamplerOptions = serde_json::from_str(r#"{"top_k": 40, "seed": 3}"#).unwrap();
        assert_eq!(options, SamplerOptions { top_k: 40, seed: 3, ..Default::default() });
        let text = serde_json::to_string(&options).unwrap();
        assert_eq!(serde_json::from_str::<SamplerOptions>(&text).unwrap(), options);
        assert!(serde_json::from_str::<SamplerOptions>(r#"{"topk": 40}"#).is_err());
    }
}
