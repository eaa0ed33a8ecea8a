//! Penalties on tokens that were used lately.
//!
//! For a token that is `count >= 1` times among the last `penalty_window` ids:
//! `logit = logit > 0 ? logit / repetition : logit * repetition`, then `logit -= presence + count * frequency`. The first
//! is of Keskar et al., "CTRL", 2019, in the form that looks at the sign; the others are those of the OpenAI API.

use super::SamplerOptions;

/// The logits with the penalties: `logits` itself where there is nothing to change, else a copy in `buffer`. Ids of the
/// history that have no logit change nothing.
pub(super) fn apply<'a>(
    options: &SamplerOptions,
    logits: &'a [f32],
    history: &[u32],
    buffer: &'a mut Vec<f32>,
) -> &'a [f32] {
    let window = options.penalty_window.unwrap_or(usize::MAX).min(history.len());
    let neutral =
        options.repetition_penalty == 1.0 && options.presence_penalty == 0.0 && options.frequency_penalty == 0.0;
    if window == 0 || neutral {
        return logits;
    }
    buffer.clear();
    buffer.extend_from_slice(logits);
    let mut recent = history[history.len() - window..].to_vec();
    recent.sort_unstable();
    for run in recent.chunk_by(|a, b| a == b) {
        if let Some(logit) = buffer.get_mut(run[0] as usize) {
            let repeated =
                if *logit > 0.0 { *logit / options.repetition_penalty } else { *logit * options.repetition_penalty };
            *logit = repeated - (options.presence_penalty + run.len() as f32 * options.frequency_penalty);
        }
    }
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalized(options: SamplerOptions, logits: &[f32], history: &[u32]) -> Vec<f32> {
        apply(&options, logits, history, &mut Vec::new()).to_vec()
    }

    #[test]
    fn repetition_looks_at_the_sign() {
        let options = SamplerOptions { repetition_penalty: 2.0, ..Default::default() };
        assert_eq!(penalized(options, &[4.0, -4.0, 0.0, 4.0], &[0, 1, 1, 2]), [2.0, -8.0, 0.0, 4.0]);
    }

    #[test]
    fn presence_counts_once_and_frequency_each_time() {
        let options = SamplerOptions { presence_penalty: 0.5, frequency_penalty: 0.25, ..Default::default() };
        assert_eq!(penalized(options, &[1.0, 1.0, 1.0], &[1, 2, 1, 1]), [1.0, -0.25, 0.25]);
    }

    #[test]
    fn only_the_window_is_looked_at() {
        let options = SamplerOptions { presence_penalty: 1.0, penalty_window: Some(2), ..Default::default() };
        assert_eq!(penalized(options.clone(), &[0.0; 4], &[0, 1, 2, 3]), [0.0, 0.0, -1.0, -1.0]);
        let all = SamplerOptions { penalty_window: None, ..options.clone() };
        assert_eq!(penalized(all, &[0.0; 4], &[0, 1, 2, 3]), [-1.0; 4]);
        let none = SamplerOptions { penalty_window: Some(0), ..options };
        assert_eq!(penalized(none, &[0.0; 4], &[0, 1, 2, 3]), [0.0; 4]);
    }

    #[test]
    fn masked_tokens_stay_masked_and_foreign_ids_are_passed_over() {
        let options = SamplerOptions { repetition_penalty: 1.5, presence_penalty: -2.0, ..Default::default() };
        assert_eq!(penalized(options, &[f32::NEG_INFINITY, 1.0], &[0, 77]), [f32::NEG_INFINITY, 1.0]);
    }
}
