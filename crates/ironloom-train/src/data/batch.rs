//! What a step is made of: ids, what should follow each, and how they fall into documents.

use std::ops::Range;

/// The target of a position whose prediction does not count.
pub const IGNORED: i64 = -100;

/// Rows of token ids that go through the model together.
///
/// A document attends to itself only, and its positions start at 0: `documents` says where each ends. The loss of a step is
/// the sum over its batches divided by the sum of their [`counted`](Self::counted), so that any way of cutting a step
/// into batches gives the same step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The id that follows in the same document, or [`IGNORED`]; as many as `ids`.
    pub targets: Vec<i64>,
    /// How many consecutive ids each document has; their sum is the number of `ids`.
    pub documents: Vec<usize>,
}

impl Batch {
    /// How many predictions count.
    pub fn counted(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORED).count()
    }

    /// Where each document lies in `ids`.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.documents.iter().scan(0, |end, &length| {
            let start = *end;
            *end += length;
            Some(start..*end)
        })
    }

    /// Puts the rows of another batch after these.
    pub fn append(&mut self, mut other: Batch) {
        self.ids.append(&mut other.ids);
        self.targets.append(&mut other.targets);
        self.documents.append(&mut other.documents);
    }
}

/// How many predictions count in all batches of a step: what the sum of their losses is divided by.
pub fn counted(batches: &[Batch]) -> usize {
    batches.iter().map(Batch::counted).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_each_other() {
        let batch = Batch { ids: vec![1; 6], targets: vec![2, IGNORED, 0, IGNORED, 5, IGNORED], documents: vec![2, 4] };
        assert_eq!(batch.ranges().collect::<Vec<_>>(), [0..2, 2..6]);
        assert_eq!((batch.counted(), counted(&[batch.clone(), batch])), (3, 6));
    }
}
