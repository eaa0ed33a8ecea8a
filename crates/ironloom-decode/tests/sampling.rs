//! Samplers as a whole: their distributions, the text of a seed, and their speed.

use std::time::Instant;

use ironloom_core::Philox;
use ironloom_decode::{Sampler, SamplerOptions};

/// Logits of a vocabulary that look like a model's: a few likely tokens over a wide tail. Only exactly rounded operations.
fn logits(vocabulary: usize, seed: u64) -> Vec<f32> {
    let mut draws = Philox::new(seed, 1);
    (0..vocabulary)
        .map(|_| {
            let spread: f32 = (0..4).map(|_| draws.next_f32() - 0.5).sum();
            let peak = draws.next_f32();
            spread * 6.0 + if peak > 0.999 { (peak - 0.999) * 12_000.0 } else { 0.0 }
        })
        .collect()
}

/// The probabilities that the options describe, computed plainly: a full sort, the system's exponential.
fn distribution(logits: &[f32], options: &SamplerOptions) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if options.top_k > 0 {
        order.truncate(options.top_k);
    }
    let max = f64::from(logits[order[0]]);
    let weight = |id: usize| ((f64::from(logits[id]) - max) / f64::from(options.temperature)).exp();
    let wanted = f64::from(options.top_p) * order.iter().map(|&id| weight(id)).sum::<f64>();
    let mut sum = 0.0;
    if options.top_p < 1.0
        && let Some(last) = order.iter().position(|&id| {
            sum += weight(id);
            sum >= wanted
        })
    {
        order.truncate(last + 1);
    }
    order.retain(|&id| weight(id) >= f64::from(options.min_p));
    let total = order.iter().map(|&id| weight(id)).sum::<f64>();
    let mut probabilities = vec![0.0; logits.len()];
    order.iter().for_each(|&id| probabilities[id] = weight(id) / total);
    probabilities
}

/// Draws at the positions 0, 1, 2, … and holds the counts against the distribution by a chi-square test. The seeds are
/// fixed, so this passes or fails for good; the bound is the value exceeded once in about 10,000 seeds (z = 3.72, by
/// Wilson and Hilferty's approximation).
fn check_distribution(logits: &[f32], options: SamplerOptions) {
    const DRAWS: usize = 40_000;
    let expected = distribution(logits, &options);
    let mut counts = vec![0usize; logits.len()];
    let mut sampler = Sampler::new(options.clone()).unwrap();
    let history = vec![0; DRAWS];
    (0..DRAWS).for_each(|n| counts[sampler.sample(logits, &history[..n]).unwrap() as usize] += 1);
    let (mut chi_square, mut cells) = (0.0, 0);
    let (mut rare_expected, mut rare_count) = (0.0, 0.0);
    for (probability, count) in expected.iter().zip(&counts) {
        let (wanted, found) = (probability * DRAWS as f64, *count as f64);
        assert!(*probability > 0.0 || found == 0.0, "a token that was cut came up, {options:?}");
        if wanted >= 5.0 {
            chi_square += (found - wanted).powi(2) / wanted;
            cells += 1;
        } else {
            rare_expected += wanted;
            rare_count += found;
        }
    }
    if rare_expected >= 5.0 {
        chi_square += (rare_count - rare_expected).powi(2) / rare_expected;
        cells += 1;
    }
    let freedom = f64::from(cells - 1).max(1.0);
    let bound = freedom * (1.0 - 2.0 / (9.0 * freedom) + 3.72 * (2.0 / (9.0 * freedom)).sqrt()).powi(3);
    assert!(chi_square < bound, "chi-square {chi_square:.1} over {bound:.1} with {freedom} degrees, {options:?}");
}

#[test]
fn tokens_come_up_as_often_as_the_options_say() {
    let logits: Vec<f32> = logits(60, 5);
    let base = SamplerOptions { seed: 11, ..Default::default() };
    check_distribution(&logits, base.clone());
    check_distribution(&logits, SamplerOptions { temperature: 0.5, ..base.clone() });
    check_distribution(&logits, SamplerOptions { temperature: 1.7, ..base.clone() });
    check_distribution(&logits, SamplerOptions { top_k: 7, ..base.clone() });
    check_distribution(&logits, SamplerOptions { top_p: 0.6, ..base.clone() });
    check_distribution(&logits, SamplerOptions { min_p: 0.1, ..base.clone() });
    check_distribution(&logits, SamplerOptions { temperature: 1.3, top_k: 30, top_p: 0.9, min_p: 0.05, ..base });
}

#[test]
fn penalties_come_before_the_filters() {
    // Without its penalty token 0 is the only one of top-k 1.
    let options = SamplerOptions { top_k: 1, presence_penalty: 2.0, ..Default::default() };
    assert_eq!(Sampler::new(options).unwrap().sample(&[3.0, 2.0, 1.0], &[0]).unwrap(), 1);
}

/// The text of a seed is part of what this crate promises: these ids were drawn once and must never change.
#[test]
fn a_seed_gives_the_recorded_ids() {
    let draw = |options: SamplerOptions| {
        let mut sampler = Sampler::new(options).unwrap();
        let mut ids = Vec::new();
        for step in 0..16 {
            let id = sampler.sample(&logits(1000, 100 + step), &ids).unwrap();
            ids.push(id);
        }
        ids
    };
    let plain = draw(SamplerOptions { seed: 42, ..Default::default() });
    assert_eq!(plain, PLAIN_42);
    let filtered = SamplerOptions {
        temperature: 0.9,
        top_k: 50,
        top_p: 0.95,
        min_p: 0.01,
        repetition_penalty: 1.1,
        seed: 0xDEAD_BEEF_0123_4567,
        ..Default::default()
    };
    assert_eq!(draw(filtered), FILTERED_DEADBEEF);
}

const PLAIN_42: [u32; 16] = [578, 805, 386, 131, 455, 274, 831, 204, 466, 796, 718, 501, 274, 239, 950, 888];
const FILTERED_DEADBEEF: [u32; 16] = [919, 392, 944, 846, 455, 568, 756, 127, 466, 731, 600, 590, 58, 239, 793, 786];

/// A draw must be small beside a step of a small model (some 5 ms): under a millisecond where top-k thins the tokens, a few
/// where each of 150,000 needs its exponential. Only optimized code is held to it.
#[test]
fn a_draw_over_a_large_vocabulary_takes_under_a_millisecond() {
    let typical = SamplerOptions { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..Default::default() };
    let nucleus = SamplerOptions { temperature: 0.8, top_p: 0.95, ..Default::default() };
    let penalized = SamplerOptions { repetition_penalty: 1.1, ..typical.clone() };
    for vocabulary in [49_152, 151_936] {
        let logits = logits(vocabulary, 3);
        for (name, options, limit_ms) in [
            ("greedy", SamplerOptions::greedy(), 1.0),
            ("top-k 40, top-p", typical.clone(), 1.0),
            ("penalties, top-k 40, top-p", penalized.clone(), 1.0),
            ("top-p", nucleus.clone(), 3.0),
            ("temperature", SamplerOptions::default(), 3.0),
        ] {
            let mut sampler = Sampler::new(options).unwrap();
            let history: Vec<u32> = (0..500).collect();
            let best = (0..30)
                .map(|n| {
                    let start = Instant::now();
                    sampler.sample(&logits, &history[..400 + n]).unwrap();
                    start.elapsed()
                })
                .min()
                .unwrap_or_default();
            let best_ms = best.as_secs_f64() * 1e3;
            println!("{vocabulary} tokens, {name}: {best_ms:.3} ms");
            if !cfg!(debug_assertions) {
                assert!(best_ms < limit_ms, "{vocabulary} tokens, {name}: {best_ms} ms");
            }
        }
    }
}
