//! Byte-pair merging: neighbouring tokens are joined, best merge first, until no merge applies.
//!
//! In: the tokens of single bytes or characters. Out: the tokens after merging, in place. Of all applicable merges the one of
//! lowest rank is taken, then the leftmost. A short word scans its pairs for each merge; a long one keeps them in a heap with
//! a doubly linked list of the tokens left, so 50,000 characters without a space cost n log n (Sennrich, Haddow and Birch,
//! arXiv:1508.07909, give the algorithm; the heap is the usual speed-up).

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{
    Result, TextError,
    vocabulary::{TokenKind, Vocabulary},
};

/// What two neighbouring tokens become, and how soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Merge {
    /// Lower is sooner.
    pub(super) rank: u32,
    /// The token they become.
    pub(super) id: u32,
}

/// Which neighbours may be joined.
pub(super) trait Merges {
    /// What two neighbours become, if anything.
    fn merge(&self, left: u32, right: u32) -> Option<Merge>;
}

/// Words up to this many tokens scan all pairs for each merge: below it that beats the heap's bookkeeping.
const SCAN_LIMIT: usize = 48;

/// Buffers of the merging, kept from word to word.
#[derive(Debug, Default)]
pub(super) struct Merger {
    pairs: Vec<Option<Merge>>,
    heap: BinaryHeap<Reverse<Candidate>>,
    next: Vec<u32>,
    previous: Vec<u32>,
}

impl Merger {
    /// Merges `tokens` in place until nothing applies.
    pub(super) fn run(&mut self, tokens: &mut Vec<u32>, merges: &impl Merges) {
        if tokens.len() <= SCAN_LIMIT { self.scan(tokens, merges) } else { self.sift(tokens, merges) }
    }

    fn scan(&mut self, tokens: &mut Vec<u32>, merges: &impl Merges) {
        let pairs = &mut self.pairs;
        pairs.clear();
        pairs.extend(tokens.windows(2).map(|pair| merges.merge(pair[0], pair[1])));
        loop {
            // Pairs of one rank differ only where two splits give the same piece; their ids decide before their places.
            let best = pairs
                .iter()
                .enumerate()
                .filter_map(|(place, merge)| {
                    merge.map(|merge| (merge.rank, tokens[place], tokens[place + 1], place, merge.id))
                })
                .min();
            let Some((_, _, _, place, id)) = best else { return };
            tokens[place] = id;
            tokens.remove(place + 1);
            pairs.remove(place);
            if place > 0 {
                pairs[place - 1] = merges.merge(tokens[place - 1], id);
            }
            if place + 1 < tokens.len() {
                pairs[place] = merges.merge(id, tokens[place + 1]);
            }
        }
    }

    fn sift(&mut self, tokens: &mut Vec<u32>, merges: &impl Merges) {
        let Self { heap, next, previous, .. } = self;
        let count = tokens.len() as u32;
        heap.clear();
        next.clear();
        next.extend(1..=count);
        previous.clear();
        previous.extend((0..count).map(|place| place.wrapping_sub(1)));
        heap.extend(tokens.windows(2).enumerate().filter_map(|(place, pair)| {
            let merge = merges.merge(pair[0], pair[1])?;
            Some(Reverse(Candidate::new(merge, pair[0], pair[1], place as u32)))
        }));
        while let Some(Reverse(candidate)) = heap.pop() {
            let place = candidate.place() as usize;
            let right = next[place];
            // A stale candidate: one of its tokens was joined to something else meanwhile.
            if right == count || pair_key(tokens[place], tokens[right as usize]) != candidate.pair() {
                continue;
            }
            let after = next[right as usize];
            tokens[place] = candidate.id;
            tokens[right as usize] = JOINED;
            next[place] = after;
            if let Some(merge) = (after != count).then(|| merges.merge(candidate.id, tokens[after as usize])).flatten()
            {
                heap.push(Reverse(Candidate::new(merge, candidate.id, tokens[after as usize], candidate.place())));
            }
            if after != count {
                previous[after as usize] = candidate.place();
            }
            let before = previous[place];
            if before != NOWHERE
                && let Some(merge) = merges.merge(tokens[before as usize], candidate.id)
            {
                heap.push(Reverse(Candidate::new(merge, tokens[before as usize], candidate.id, before)));
            }
        }
        tokens.retain(|&token| token != JOINED);
    }
}

/// A place whose token was joined to the one before it. No vocabulary has so many tokens.
const JOINED: u32 = u32::MAX;
const NOWHERE: u32 = u32::MAX;

/// A merge that may be applied at a place, ordered by rank, left token, right token, place. One number holds all four: it
/// compares in two instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    key: u128,
    id: u32,
}

impl Candidate {
    fn new(merge: Merge, left: u32, right: u32, place: u32) -> Self {
        let key = u128::from(merge.rank) << 96 | u128::from(left) << 64 | u128::from(right) << 32 | u128::from(place);
        Self { key, id: merge.id }
    }

    fn place(self) -> u32 {
        self.key as u32
    }

    fn pair(self) -> u64 {
        (self.key >> 32) as u64
    }
}

/// Merges listed pair by pair, as byte-level tokenizers and `tokenizer.json` give them.
#[derive(Clone, Debug)]
pub(super) struct PairTable {
    /// Open addressing with linear probing; at most half full.
    slots: Vec<(u64, Merge)>,
}

const NO_PAIR: u64 = u64::MAX;

impl PairTable {
    /// A table for `pairs` merges.
    fn with_capacity(pairs: usize) -> Self {
        let vacant = (NO_PAIR, Merge { rank: 0, id: 0 });
        Self { slots: vec![vacant; (pairs.max(1) * 2).next_power_of_two()] }
    }

    /// Adds a merge; of two merges of one pair the later stays, as in the `tokenizers` crate.
    fn insert(&mut self, left: u32, right: u32, merge: Merge) {
        let key = pair_key(left, right);
        let mut slot = self.slot(key);
        while self.slots[slot].0 != NO_PAIR && self.slots[slot].0 != key {
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        self.slots[slot] = (key, merge);
    }

    fn slot(&self, key: u64) -> usize {
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - self.slots.len().trailing_zeros())) as usize
    }
}

/// Puts the bytes that a token's text in a file stands for into a buffer.
pub(super) type TokenBytes = fn(&str, &mut Vec<u8>);

/// The table of merges listed as texts, the first being the soonest.
///
/// # Errors
/// A half, or what the halves make, is not in the vocabulary.
pub(super) fn listed_merges<'a>(
    listed: impl ExactSizeIterator<Item = Option<(&'a str, &'a str)>>,
    vocabulary: &Vocabulary,
    token_bytes: TokenBytes,
) -> Result<PairTable> {
    let mut table = PairTable::with_capacity(listed.len());
    let (mut left_bytes, mut right_bytes) = (Vec::new(), Vec::new());
    for (rank, halves) in listed.enumerate() {
        let (left, right) = halves.unwrap_or_default();
        token_bytes(left, &mut left_bytes);
        token_bytes(right, &mut right_bytes);
        let ids = vocabulary.find(&left_bytes).zip(vocabulary.find(&right_bytes));
        let Some(((left, right), id)) = ids.zip(vocabulary.find_joined(&left_bytes, &right_bytes)) else {
            return Err(TextError::Merge { rank, merge: format!("{left} {right}") });
        };
        table.insert(left, right, Merge { rank: rank as u32, id });
    }
    Ok(table)
}

fn pair_key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Merges for PairTable {
    fn merge(&self, left: u32, right: u32) -> Option<Merge> {
        let key = pair_key(left, right);
        let mut slot = self.slot(key);
        loop {
            let (found, merge) = self.slots[slot];
            if found == key {
                return Some(merge);
            }
            if found == NO_PAIR {
                return None;
            }
            slot = (slot + 1) & (self.slots.len() - 1);
        }
    }
}

/// Merges that follow from the vocabulary: two neighbours join when what they spell is a token, the best score first. This
/// is SentencePiece's rule, and GGUF files give such tokenizers no list of merges.
#[derive(Debug)]
pub(super) struct ScoreMerges<'a> {
    /// The tokens.
    pub(super) vocabulary: &'a Vocabulary,
    /// The place of each token when sorted by falling score, then by id.
    pub(super) ranks: &'a [u32],
}

impl Merges for ScoreMerges<'_> {
    fn merge(&self, left: u32, right: u32) -> Option<Merge> {
        let normal = |&id: &u32| self.vocabulary.kind(id) == TokenKind::Normal;
        if !normal(&left) || !normal(&right) {
            return None;
        }
        let id =
            self.vocabulary.find_joined(self.vocabulary.bytes(left), self.vocabulary.bytes(right)).filter(normal)?;
        Some(Merge { rank: self.ranks[id as usize], id })
    }
}

/// The place of each token when sorted by falling score, then by id: see [`ScoreMerges`].
pub(super) fn score_ranks(scores: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b)));
    let mut ranks = vec![0; scores.len()];
    for (rank, &id) in order.iter().enumerate() {
        ranks[id as usize] = rank as u32;
    }
    ranks
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The scan is the plain statement of the rule; the heap must agree with it on any merges and any word.
        #[test]
        fn the_heap_merges_as_the_scan_does(
            word in proptest::collection::vec(0u32..4, 0..300),
            merges in proptest::collection::vec((0u32..12, 0u32..12), 0..40),
        ) {
            let mut table = PairTable::with_capacity(merges.len());
            for (rank, &(left, right)) in merges.iter().enumerate() {
                table.insert(left, right, Merge { rank: rank as u32, id: 4 + rank as u32 % 12 });
            }
            let (mut scanned, mut sifted) = (word.clone(), word);
            Merger::default().scan(&mut scanned, &table);
            Merger::default().sift(&mut sifted, &table);
            prop_assert_eq!(scanned, sifted);
        }
    }

    #[test]
    fn the_lowest_rank_goes_first_and_then_the_leftmost() {
        let mut table = PairTable::with_capacity(2);
        table.insert(1, 2, Merge { rank: 1, id: 10 });
        table.insert(2, 3, Merge { rank: 0, id: 11 });
        let mut word = vec![1, 2, 3, 1, 2];
        Merger::default().run(&mut word, &table);
        assert_eq!(word, [1, 11, 10]);
    }
}
