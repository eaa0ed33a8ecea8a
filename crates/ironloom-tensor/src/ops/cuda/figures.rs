//! What changes from step to step on a graphics card: numbers that kernels of a captured pass read, sums that they add to, and
//! where documents begin and end.

use bytemuck::{Pod, Zeroable};
use ironloom_kernels::{AttentionBounds, Buffer, Gpu, LossTotals, Slice};

use super::super::Mask;
use crate::{Device, Error, Indices, Result, error::expect_count};

const NAME: &str = "the figures of a step";

/// The numbers of one pass of a step, and the sums of all of its passes. Cloning shares them.
#[derive(Clone, Debug)]
pub struct Figures {
    gpu: Gpu,
    totals: Buffer,
    numbers: Buffer,
    /// Negative for rows that are padding.
    positions: Option<Indices>,
}

/// What the passes of a step have added up.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTotals {
    /// Of the output's loss.
    pub loss: LossTotals,
    /// Of routers' own losses, weighted and scaled.
    pub side_loss: f64,
}

/// What a pass is told.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassNumbers {
    /// What random operations draw from.
    pub seed: u64,
    /// The factor of the loss.
    pub scale: f32,
    /// The factor of routers' losses.
    pub share: f32,
}

// SAFETY: all its fields are numbers for which zeros are a value.
unsafe impl Zeroable for StepTotals {}
// SAFETY: five numbers of 8 bytes in C's layout, so there is no padding.
unsafe impl Pod for StepTotals {}
// SAFETY: all its fields are numbers for which zeros are a value.
unsafe impl Zeroable for PassNumbers {}
// SAFETY: one number of 8 bytes before two of 4 in C's layout, so there is no padding.
unsafe impl Pod for PassNumbers {}

impl Figures {
    /// Sums of zero.
    ///
    /// # Errors
    /// The device is the processor, or has no room.
    pub fn new(device: &Device) -> Result<Self> {
        let gpu = device.card(NAME)?.gpu().clone();
        let totals = gpu.allocate_cleared(size_of::<StepTotals>(), NAME)?;
        let numbers = gpu.allocate_lasting(size_of::<PassNumbers>(), NAME)?;
        Ok(Self { gpu, totals, numbers, positions: None })
    }

    /// Those of another pass of the same step: numbers of its own, and the same sums.
    ///
    /// # Errors
    /// The device has no room.
    pub fn another_pass(&self) -> Result<Self> {
        let numbers = self.gpu.allocate_lasting(size_of::<PassNumbers>(), NAME)?;
        Ok(Self { numbers, ..self.clone() })
    }

    /// The same numbers with sums that nobody reads.
    pub(crate) fn uncounted(&self) -> Result<Self> {
        let totals = self.gpu.allocate(size_of::<StepTotals>(), NAME)?;
        self.gpu.clear(totals.slice())?;
        Ok(Self { totals, ..self.clone() })
    }

    /// Those of a pass whose rows have these positions, i32 that are negative for padding.
    pub fn of_rows(self, positions: Indices) -> Self {
        Self { positions: Some(positions), ..self }
    }

    pub(crate) fn positions(&self) -> Option<&Indices> {
        self.positions.as_ref()
    }

    /// Sets all sums to zero.
    ///
    /// # Errors
    /// The device fails.
    pub fn clear(&self) -> Result<()> {
        Ok(self.gpu.clear(self.totals.slice())?)
    }

    /// Sets the numbers of the pass.
    ///
    /// # Errors
    /// The device fails.
    pub fn set(&self, numbers: PassNumbers) -> Result<()> {
        Ok(self.gpu.write(self.numbers.slice(), bytemuck::bytes_of(&numbers))?)
    }

    /// The sums, once all passes are done.
    ///
    /// # Errors
    /// The device fails.
    pub fn read(&self) -> Result<StepTotals> {
        let mut totals = StepTotals::default();
        self.gpu.read(self.totals.slice(), bytemuck::bytes_of_mut(&mut totals))?;
        Ok(totals)
    }

    /// Where [`StepTotals::loss`] lies.
    pub fn loss(&self) -> Result<Slice<'_>> {
        Ok(self.totals.part(0, size_of::<LossTotals>())?)
    }

    /// Where [`StepTotals::side_loss`] lies.
    pub fn side_loss(&self) -> Result<Slice<'_>> {
        Ok(self.totals.part(size_of::<LossTotals>(), 8)?)
    }

    pub(crate) fn seed(&self) -> Result<Slice<'_>> {
        Ok(self.numbers.part(0, 8)?)
    }

    pub(crate) fn scale(&self) -> Result<Slice<'_>> {
        Ok(self.numbers.part(8, 4)?)
    }

    pub(crate) fn share(&self) -> Result<Slice<'_>> {
        Ok(self.numbers.part(12, 4)?)
    }
}

/// Which rows of a pass see each other, on a graphics card: documents one after the other, then padding that sees nothing.
/// Cloning shares the memory.
#[derive(Clone, Debug)]
pub struct DocumentBounds {
    gpu: Gpu,
    rows: usize,
    /// For each mask, i32 `[4][rows]`: each query's first key and the key after its last, each key's first query and the query
    /// after its last.
    masks: Vec<(Mask, Buffer)>,
}

impl DocumentBounds {
    /// Room for passes of `rows` rows under these masks.
    ///
    /// # Errors
    /// The device is the processor, or has no room.
    pub fn new(device: &Device, rows: usize, masks: &[Mask]) -> Result<Self> {
        let gpu = device.card(NAME)?.gpu().clone();
        let mut held: Vec<(Mask, Buffer)> = Vec::new();
        for &mask in masks {
            if !held.iter().any(|(known, _)| *known == mask) {
                held.push((mask, gpu.allocate_lasting(16 * rows, NAME)?));
            }
        }
        Ok(Self { gpu, rows, masks: held })
    }

    /// Sets the documents' lengths; rows past their sum are padding.
    ///
    /// # Errors
    /// The sum is more than the rows, or the device fails.
    pub fn set(&self, lengths: &[usize]) -> Result<()> {
        let total = lengths.iter().fold(0usize, |sum, length| sum.saturating_add(*length));
        if total > self.rows {
            expect_count(NAME, "the sum of the documents' lengths", self.rows, total)?;
        }
        for (mask, buffer) in &self.masks {
            self.gpu.write(buffer.slice(), bytemuck::cast_slice(&bounds(*mask, lengths, self.rows)))?;
        }
        Ok(())
    }

    /// How many rows there are, with padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn of(&self, mask: Mask) -> Result<MaskBounds> {
        let Some((_, buffer)) = self.masks.iter().find(|(known, _)| *known == mask) else {
            return Err(Error::NoKernel { operation: "a mask without bounds", device: "a graphics card" });
        };
        Ok(MaskBounds { buffer: buffer.clone(), rows: self.rows })
    }
}

/// The bounds of one mask.
pub(crate) struct MaskBounds {
    buffer: Buffer,
    rows: usize,
}

impl MaskBounds {
    pub(crate) fn slices(&self) -> Result<AttentionBounds<'_>> {
        let part = |number: usize| self.buffer.part(4 * self.rows * number, 4 * self.rows);
        Ok(AttentionBounds { first_key: part(0)?, end_key: part(1)?, first_query: part(2)?, end_query: part(3)? })
    }
}

/// `[4][rows]`, in the order of [`DocumentBounds::masks`].
fn bounds(mask: Mask, lengths: &[usize], rows: usize) -> Vec<i32> {
    let mut all = vec![0i32; 4 * rows];
    let mut start = 0;
    for &length in lengths {
        let end = start + length;
        for row in start..end {
            let seen = match mask {
                Mask::Causal => [start, row + 1, row, end],
                Mask::Window(window) => {
                    [start.max((row + 1).saturating_sub(window)), row + 1, row, end.min(row.saturating_add(window))]
                }
                Mask::Bidirectional => [start, end, start, end],
            };
            for (part, value) in seen.into_iter().enumerate() {
                all[part * rows + row] = value as i32;
            }
        }
        start = end;
    }
    // Padding sees nothing, at places that keep each list in ascending order.
    for part in 0..4 {
        all[part * rows + start..(part + 1) * rows].fill(start as i32);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_the_masks() {
        assert_eq!(
            bounds(Mask::Causal, &[2, 3], 6),
            [[0, 0, 2, 2, 2, 5], [1, 2, 3, 4, 5, 5], [0, 1, 2, 3, 4, 5], [2, 2, 5, 5, 5, 5]].concat()
        );
        assert_eq!(
            bounds(Mask::Window(2), &[3, 1], 4),
            [[0, 0, 1, 3], [1, 2, 3, 4], [0, 1, 2, 3], [2, 3, 3, 4]].concat()
        );
        assert_eq!(bounds(Mask::Bidirectional, &[1, 2], 3), [[0, 1, 1], [1, 3, 3], [0, 1, 1], [1, 3, 3]].concat());
    }
}
