//! The tokens still in play for one draw, with their weights, and the cuts that thin them out.
//!
//! A vocabulary has up to a quarter of a million tokens and a draw has well under a millisecond, so nothing here sorts
//! the vocabulary: top-k keeps a small buffer of the best so far, and top-p finds its last token by a histogram of
//! weights and sorts the one bucket in which the sum crosses. Candidates are always in the order of their ids.

use super::{SamplerOptions, exponential::extend_weights};

/// Buckets of the weight histogram per factor of two.
const BUCKETS_PER_OCTAVE: u32 = 8;
/// Weights below `2^-64` share the last bucket.
const BUCKETS: usize = 64 * BUCKETS_PER_OCTAVE as usize;
/// Weights that a draw passes over at a time.
const BLOCK: usize = 1024;
/// The fewest tokens that top-k collects before it sorts the better from the worse.
const SMALLEST_BUFFER: usize = 256;

/// Token ids in ascending order and the weight of each, relative to the heaviest of the vocabulary.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidates {
    ids: Vec<u32>,
    weights: Vec<f64>,
    best: Vec<(f32, u32)>,
}

impl Candidates {
    /// Starts over with the `top_k` largest logits (all where it is 0), weighted `exp((logit - max) / temperature)`.
    pub(super) fn gather(&mut self, logits: &[f32], max: f32, options: &SamplerOptions) {
        let (max, sharpness) = (f64::from(max), 1.0 / f64::from(options.temperature));
        self.ids.clear();
        self.weights.clear();
        if options.top_k == 0 || options.top_k >= logits.len() {
            self.ids.extend(0..logits.len() as u32);
            extend_weights(&mut self.weights, logits, max, sharpness);
        } else {
            self.find_best(logits, options.top_k);
            self.ids.extend(self.best.iter().map(|&(_, id)| id));
            let best: Vec<f32> = self.best.iter().map(|&(logit, _)| logit).collect();
            extend_weights(&mut self.weights, &best, max, sharpness);
        }
    }

    /// Fills `best` with the `count` largest logits by id; of equal ones, those of lower ids.
    fn find_best(&mut self, logits: &[f32], count: usize) {
        let best = &mut self.best;
        let capacity = count.saturating_mul(2).max(SMALLEST_BUFFER);
        // A logit at the bar loses to the buffer's: its id is higher than all of theirs.
        let mut bar = f32::NEG_INFINITY;
        best.clear();
        for (id, &logit) in logits.iter().enumerate() {
            if logit > bar {
                best.push((logit, id as u32));
                if best.len() >= capacity {
                    bar = cut_to(best, count);
                }
            }
        }
        cut_to(best, count);
        best.sort_unstable_by_key(|&(_, id)| id);
    }

    /// Keeps the fewest heaviest candidates whose weights sum to at least `top_p` of all weights here.
    pub(super) fn keep_top_p(&mut self, top_p: f64) {
        if top_p >= 1.0 {
            return;
        }
        let masses = self.histogram();
        let wanted = top_p * masses.iter().sum::<f64>();
        let mut sum = 0.0;
        let crossing = masses.iter().position(|mass| {
            let crosses = sum + mass >= wanted;
            sum += if crosses { 0.0 } else { *mass };
            crosses
        });
        let Some(crossing) = crossing else { return };
        self.keep(|weight, _| bucket(weight) <= crossing);
        let mut members: Vec<(f64, u32)> = self.pairs().filter(|&(weight, _)| bucket(weight) == crossing).collect();
        members.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let last = members.iter().find(|(weight, _)| {
            sum += weight;
            sum >= wanted
        });
        // Where sums in another order end a rounding short of the bucket's mass, all its members stay.
        if let Some(&(lightest, last_id)) = last {
            self.keep(|weight, id| weight > lightest || (weight == lightest && id <= last_id));
        }
    }

    /// The weight in each bucket.
    fn histogram(&self) -> [f64; BUCKETS] {
        // Two tables, because weights next to each other often share a bucket and would wait for each other's addition.
        let mut masses = [[0.0f64; BUCKETS]; 2];
        for pair in self.weights.chunks(2) {
            masses.iter_mut().zip(pair).for_each(|(masses, &weight)| masses[bucket(weight)] += weight);
        }
        let [mut even, odd] = masses;
        even.iter_mut().zip(odd).for_each(|(even, odd)| *even += odd);
        even
    }

    /// Keeps candidates of at least `min_p` of the heaviest's weight, which is 1.
    pub(super) fn keep_min_p(&mut self, min_p: f64) {
        if min_p > 0.0 {
            self.keep(|weight, _| weight >= min_p);
        }
    }

    /// The candidate at which the running sum of weights passes `uniform` of the total, for `uniform` in `[0, 1)`.
    pub(super) fn draw(&self, uniform: f64) -> u32 {
        // Blocks first, then inside of one: the running sum of single weights waits for each addition, and would take as
        // long as all exponentials.
        let blocks: Vec<f64> = self.weights.chunks(BLOCK).map(sum_in_lanes).collect();
        let target = uniform * blocks.iter().sum::<f64>();
        let (block, before) = passing(&blocks, 0.0, target);
        let start = block * BLOCK;
        let weights = &self.weights[start..self.weights.len().min(start + BLOCK)];
        let (place, _) = passing(weights, before, target);
        self.ids.get(start + place).copied().unwrap_or_default()
    }

    fn pairs(&self) -> impl Iterator<Item = (f64, u32)> {
        self.weights.iter().copied().zip(self.ids.iter().copied())
    }

    fn keep(&mut self, keeps: impl Fn(f64, u32) -> bool) {
        let mut kept = 0;
        for i in 0..self.ids.len() {
            let (weight, id) = (self.weights[i], self.ids[i]);
            (self.weights[kept], self.ids[kept]) = (weight, id);
            kept += usize::from(keeps(weight, id));
        }
        self.weights.truncate(kept);
        self.ids.truncate(kept);
    }
}

/// Where the running sum from `sum` on first passes `target`, and the sum before that. Where rounding keeps the sum from
/// passing it, that is the last weight which is not 0.
fn passing(weights: &[f64], mut sum: f64, target: f64) -> (usize, f64) {
    let mut last = (0, sum);
    for (place, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
        last = (place, sum);
        sum += weight;
        if sum > target {
            break;
        }
    }
    last
}

/// The sum in a fixed order: eight interleaved sums, then those.
fn sum_in_lanes(weights: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    for chunk in weights.chunks(8) {
        lanes.iter_mut().zip(chunk).for_each(|(lane, weight)| *lane += weight);
    }
    lanes.iter().sum()
}

/// Cuts the list to its `count` best and gives the logit of the last of them; the lowest possible where there are fewer.
fn cut_to(best: &mut Vec<(f32, u32)>, count: usize) -> f32 {
    if count == 0 || best.len() < count {
        return f32::NEG_INFINITY;
    }
    let (_, &mut (bar, _), _) = best.select_nth_unstable_by(count - 1, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    best.truncate(count);
    bar
}

/// The histogram's bucket of a weight in `[0, 1]`: heavier weights have lower or equal buckets.
fn bucket(weight: f64) -> usize {
    let steps = 1.0f64.to_bits().saturating_sub(weight.to_bits()) >> (52 - BUCKETS_PER_OCTAVE.ilog2());
    (steps as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gathered(logits: &[f32], top_k: usize) -> Candidates {
        let mut candidates = Candidates::default();
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        candidates.gather(logits, max, &SamplerOptions { top_k, ..Default::default() });
        candidates
    }

    /// Ids by descending logit, lower ids first among equals.
    fn ranking(logits: &[f32]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order
    }

    fn as_sorted_ids(ranked: &[usize]) -> Vec<u32> {
        let mut ids: Vec<u32> = ranked.iter().map(|&id| id as u32).collect();
        ids.sort_unstable();
        ids
    }

    proptest! {
        #[test]
        fn top_k_is_the_head_of_a_full_sort(
            // Few distinct values, so that ties fall on the cut.
            levels in prop::collection::vec(0i8..12, 1..900),
            top_k in 1usize..1000,
        ) {
            let logits: Vec<f32> = levels.iter().map(|&level| f32::from(level)).collect();
            let ranked = ranking(&logits);
            prop_assert_eq!(gathered(&logits, top_k).ids, as_sorted_ids(&ranked[..top_k.min(logits.len())]));
        }

        #[test]
        fn top_p_is_the_shortest_head_of_a_full_sort(
            logits in prop::collection::vec(-20.0f32..20.0, 1..600),
            top_p in 0.01f64..0.999,
        ) {
            let mut candidates = gathered(&logits, 0);
            let ranked = ranking(&logits);
            let max = f64::from(logits[ranked[0]]);
            let weights: Vec<f64> = ranked.iter().map(|&id| (f64::from(logits[id]) - max).exp()).collect();
            let wanted = top_p * weights.iter().sum::<f64>();
            let sums: Vec<f64> = weights.iter().scan(0.0, |sum, weight| { *sum += weight; Some(*sum) }).collect();
            // A sum within rounding of the cut may fall on either side.
            prop_assume!(sums.iter().all(|sum| (sum - wanted).abs() > 1e-12 * wanted));
            let kept = sums.iter().position(|sum| *sum >= wanted).map_or(ranked.len(), |last| last + 1);
            candidates.keep_top_p(top_p);
            prop_assert_eq!(candidates.ids, as_sorted_ids(&ranked[..kept]));
        }

        #[test]
        fn every_uniform_draws_a_candidate_with_weight(
            logits in prop::collection::vec(prop_oneof![Just(f32::NEG_INFINITY), -900.0f32..0.0], 1..50),
            uniform in prop_oneof![0.0f64..1.0, Just(0.0), Just(1.0 - f64::EPSILON / 2.0)],
        ) {
            prop_assume!(logits.iter().any(|logit| *logit > f32::NEG_INFINITY));
            let candidates = gathered(&logits, 0);
            let id = candidates.draw(uniform) as usize;
            prop_assert!(candidates.weights[id] > 0.0);
        }
    }

    #[test]
    fn a_draw_divides_the_unit_interval_by_weight() {
        let equal = gathered(&[0.0; 5000], 0);
        assert!((0..5000u32).all(|id| equal.draw((f64::from(id) + 0.5) / 5000.0) == id));
        let halves = gathered(&[0.0; 2], 0);
        assert_eq!([0.0, 0.5f64.next_down(), 0.5, 1.0f64.next_down()].map(|u| halves.draw(u)), [0, 0, 1, 1]);
    }

    #[test]
    fn ties_at_the_cut_of_top_p_go_to_lower_ids() {
        let mut candidates = gathered(&[1.0; 10], 0);
        candidates.keep_top_p(0.25);
        assert_eq!(candidates.ids, [0, 1, 2]);
    }

    #[test]
    fn top_p_keeps_at_least_the_likeliest_and_min_p_too() {
        let logits = [0.0, 9.0, 3.0];
        let mut candidates = gathered(&logits, 0);
        candidates.keep_top_p(1e-9);
        assert_eq!(candidates.ids, [1]);
        let mut candidates = gathered(&logits, 0);
        candidates.keep_min_p(1.0);
        assert_eq!(candidates.ids, [1]);
    }

    #[test]
    fn min_p_is_relative_to_the_likeliest() {
        let logits = [0.0f32, -(2.0f32.ln()) + 0.001, -(2.0f32.ln()) - 0.001, -5.0];
        let mut candidates = gathered(&logits, 0);
        candidates.keep_min_p(0.5);
        assert_eq!(candidates.ids, [0, 1]);
    }

    #[test]
    fn buckets_are_ordered_by_weight() {
        let weights = [1.0, 0.99, 0.9, 0.5, 0.4, 1e-3, 2.0f64.powi(-63), 2.0f64.powi(-90), 0.0];
        assert!(weights.windows(2).all(|pair| bucket(pair[0]) <= bucket(pair[1])));
        assert_eq!((bucket(1.0), bucket(0.0)), (0, BUCKETS - 1));
        assert_ne!(bucket(0.5), bucket(0.4));
    }
}
