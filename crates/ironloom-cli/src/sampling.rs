//! How the next token is chosen, as arguments.

use std::hash::{BuildHasher, RandomState};

use anyhow::Result;
use ironloom_decode::{Sampler, SamplerOptions};

use crate::failure::Usage;

/// How the next token is chosen.
#[derive(clap::Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingOptions {
    /// Divides the logits; 0 always takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.7, allow_negative_numbers = true)]
    temperature: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 40)]
    top_k: usize,
    /// Keep the fewest likeliest tokens that together have this probability; 1 keeps all
    #[arg(long, value_name = "P", default_value_t = 0.95, allow_negative_numbers = true)]
    top_p: f32,
    /// Keep tokens at least this many times as likely as the likeliest; 0 keeps all
    #[arg(long, value_name = "P", default_value_t = 0.05, allow_negative_numbers = true)]
    min_p: f32,
    /// Divides the logits of recent tokens; 1 changes nothing
    #[arg(long, value_name = "F", default_value_t = 1.0, allow_negative_numbers = true)]
    repetition_penalty: f32,
    /// Taken off the logit of each recent token
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Taken off the logit of a recent token for each time it occurs
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// How many of the last tokens are recent
    #[arg(long, value_name = "N", default_value_t = 64)]
    penalty_window: usize,
    /// Which of the possible texts to write: the same seed writes the same one again [default: another each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingOptions {
    /// The options of a sampler, checked.
    pub(crate) fn sampler_options(&self) -> Result<SamplerOptions> {
        let options = SamplerOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_window: Some(self.penalty_window),
            seed: self.seed.unwrap_or_else(any_seed),
        };
        match Sampler::new(options.clone()) {
            Ok(_) => Ok(options),
            Err(error) => Err(Usage(error.to_string()).into()),
        }
    }
}

/// A seed that nobody chose. 32 bits, so that every JSON reader takes it as it is.
fn any_seed() -> u64 {
    RandomState::new().hash_one("seed") & u64::from(u32::MAX)
}
