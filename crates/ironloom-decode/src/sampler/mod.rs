//! From logits to one token: penalties, temperature, filters, a seeded draw.
//!
//! In: the model's logits `[vocabulary]` and the ids so far. Out: the next id. [`Sampler`] says the steps and their order;
//! each has its file. Every operation is exactly rounded IEEE arithmetic in a fixed order, so that a seed's text does not
//! depend on the machine.

mod candidates;
mod exponential;
mod options;
mod penalties;

use ironloom_core::Philox;

pub use options::SamplerOptions;

use crate::{Error, Result};
use candidates::Candidates;

/// The random stream that sampling draws from, apart from streams other parts of the house take from the same seed.
const SAMPLING_STREAM: u64 = 0x7361_6d70_6c65;

/// Picks the next token from logits. It remembers nothing between calls but its buffers.
///
/// The steps and their order are those of transformers' `generate`:
///
/// 1. penalties over the last `penalty_window` ids: repetition, then presence and frequency;
/// 2. temperature: `weight[i] = exp((logit[i] - max) / temperature)`;
/// 3. top-k: the `k` largest logits;
/// 4. top-p: the fewest heaviest tokens that together hold `top_p` of the weight left by top-k (Holtzman et al., "The
///    Curious Case of Neural Text Degeneration", 2020);
/// 5. min-p: tokens of at least `min_p` times the heaviest's weight (Nguyen et al., "Min-p Sampling", 2024);
/// 6. a draw: the first token, by id, at which the running sum of weights passes `u` times the total.
///
/// Of equal logits the lower id comes first. The uniform `u` is a function of the seed and of the index the token will have
/// in its sequence: the same seed and logits give the same text on every machine, whatever else was sampled before or
/// beside it. Two forks of a session need two seeds to differ.
///
/// ```
/// use ironloom_decode::{Sampler, SamplerOptions};
/// let mut sampler = Sampler::new(SamplerOptions { temperature: 0.8, top_k: 2, seed: 7, ..Default::default() })?;
/// let id = sampler.sample(&[0.1, 2.0, 1.5, -3.0], &[])?;
/// assert!(id == 1 || id == 2);
/// # Ok::<(), ironloom_decode::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    /// The logits with penalties, where there are any.
    penalized: Vec<f32>,
    candidates: Candidates,
}

impl Sampler {
    /// A sampler with these options.
    ///
    /// # Errors
    /// [`Error::InvalidOption`]: an option is NaN or out of its limits.
    pub fn new(options: SamplerOptions) -> Result<Self> {
        options.check()?;
        Ok(Self { options, penalized: Vec::new(), candidates: Candidates::default() })
    }

    /// A sampler that always takes the most likely token.
    pub fn greedy() -> Self {
        Self { options: SamplerOptions::greedy(), penalized: Vec::new(), candidates: Candidates::default() }
    }

    /// The options it was made with.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// The next token: `logits` are one per id of the vocabulary, `history` the ids before it, the prompt's among them.
    ///
    /// `history` sets what is penalized, and its length is the position of the random draw: the same seed, ids and logits
    /// give the same token however often it is asked. Negative infinity masks a token.
    ///
    /// # Errors
    /// [`Error::NotFinite`]: a logit is NaN or positive infinity. [`Error::NoCandidate`]: no token is left.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        let Self { options, penalized, candidates } = self;
        let logits = penalties::apply(options, logits, history, penalized);
        let max = largest(logits)?;
        if options.temperature == 0.0 {
            let first = logits.iter().position(|&logit| logit == max);
            return Ok(first.unwrap_or_default() as u32);
        }
        candidates.gather(logits, max, options);
        candidates.keep_top_p(f64::from(options.top_p));
        candidates.keep_min_p(f64::from(options.min_p));
        Ok(candidates.draw(uniform(options.seed, history.len())))
    }
}

/// Uniform in `[0, 1)` with 53 bits, for the token at `index` of its sequence. A draw takes two of the stream's numbers.
fn uniform(seed: u64, index: usize) -> f64 {
    let mut draws = Philox::new(seed, SAMPLING_STREAM);
    draws.seek(2 * index as u64);
    draws.next_f64()
}

/// The largest logit, after making sure that it and all others can be compared.
fn largest(logits: &[f32]) -> Result<f32> {
    // Lanes make this one pass at the speed of memory; the maximum does not depend on their number.
    let (mut max, mut wrong) = ([f32::NEG_INFINITY; 16], [0u32; 16]);
    let (lanes, rest) = logits.as_chunks::<16>();
    for chunk in lanes.iter().map(<[f32; 16]>::as_slice).chain(rest.chunks(16)) {
        for ((max, wrong), &logit) in max.iter_mut().zip(&mut wrong).zip(chunk) {
            *wrong |= u32::from(logit.is_nan() || logit == f32::INFINITY);
            *max = if logit > *max { logit } else { *max };
        }
    }
    if wrong.contains(&1) {
        let found = logits.iter().enumerate().find(|(_, logit)| logit.is_nan() || **logit == f32::INFINITY);
        let (id, value) = found.map_or((0, f32::NAN), |(id, &value)| (id, value));
        return Err(Error::NotFinite { id, value });
    }
    let max = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY { Err(Error::NoCandidate { vocabulary: logits.len() }) } else { Ok(max) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(options: SamplerOptions) -> Sampler {
        Sampler::new(options).unwrap()
    }

    #[test]
    fn greedy_takes_the_lowest_of_equal_ids() {
        let logits = [f32::NEG_INFINITY, 1.0, 3.0, 3.0, -2.0];
        assert_eq!(Sampler::greedy().sample(&logits, &[]).unwrap(), 2);
        let cold = SamplerOptions { temperature: f32::MIN_POSITIVE, ..Default::default() };
        assert!(matches!(sampler(cold).sample(&logits, &[]).unwrap(), 2 | 3));
    }

    #[test]
    fn top_k_of_one_is_greedy_at_any_temperature() {
        let mut one = sampler(SamplerOptions { temperature: 50.0, top_k: 1, ..Default::default() });
        for position in 0..50 {
            assert_eq!(one.sample(&[1.0, 5.0, 5.0, 4.0], &vec![0; position]).unwrap(), 1);
        }
    }

    #[test]
    fn logits_without_a_distribution_are_errors() {
        let inf = f32::INFINITY;
        for options in [SamplerOptions::greedy(), SamplerOptions { top_p: 0.5, top_k: 2, ..Default::default() }] {
            let mut sampler = sampler(options);
            assert!(matches!(sampler.sample(&[f32::NAN; 4], &[]), Err(Error::NotFinite { id: 0, .. })));
            assert!(matches!(sampler.sample(&[0.0, 1.0, f32::NAN], &[]), Err(Error::NotFinite { id: 2, .. })));
            assert!(matches!(sampler.sample(&[0.0, inf], &[]), Err(Error::NotFinite { id: 1, .. })));
            assert!(matches!(sampler.sample(&[-inf; 4], &[]), Err(Error::NoCandidate { vocabulary: 4 })));
            assert!(matches!(sampler.sample(&[], &[]), Err(Error::NoCandidate { vocabulary: 0 })));
            assert_eq!(sampler.sample(&[-inf, -1e30, -inf], &[]).unwrap(), 1);
        }
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_only() {
        let logits: Vec<f32> = (0..100).map(|i| (i % 7) as f32 * 0.3).collect();
        let mut one = sampler(SamplerOptions { seed: 9, ..Default::default() });
        let straight: Vec<u32> = (0..40).map(|n| one.sample(&logits, &vec![0; n]).unwrap()).collect();
        let backwards: Vec<u32> = (0..40).rev().map(|n| one.sample(&logits, &vec![0; n]).unwrap()).collect();
        assert!(straight.iter().eq(backwards.iter().rev()));
        let mut other = sampler(SamplerOptions { seed: 10, ..Default::default() });
        assert_ne!(straight, (0..40).map(|n| other.sample(&logits, &vec![0; n]).unwrap()).collect::<Vec<_>>());
    }
}
