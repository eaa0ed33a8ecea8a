//! Inputs of cases: seeded, so that a case is the same on every machine and at every run.

use ironloom_core::Philox;

/// A stream of inputs for one case.
pub(super) struct Inputs(Philox);

impl Inputs {
    /// The stream of the case with this operation and shape.
    pub(super) fn of(operation: &str, shape: &str) -> Self {
        // FNV-1a: any fixed mixing of the name serves.
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let name = operation.bytes().chain([0]).chain(shape.bytes());
        Self(Philox::new(name.fold(0xcbf2_9ce4_8422_2325, mix), 0))
    }

    /// Standard-normal values.
    pub(super) fn normal(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.0.next_normal()).collect()
    }

    /// Whole numbers below `end`.
    pub(super) fn below(&mut self, end: u32, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.0.next_u32() % end).collect()
    }

    /// Random bytes.
    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.0.next_u32() as u8).collect()
    }
}
