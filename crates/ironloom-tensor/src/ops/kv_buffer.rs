//! The keys and values of one layer of one sequence, kept between steps.
//!
//! On the processor keys lie in panels of 16 positions, `[panel][kv head][head width][16]`, so that the scores of 16
//! positions are one vector; values lie by position, `[position][kv head][head width]`. Both are single precision. The
//! buffer starts empty and doubles, so a short conversation never pays for a long context.

use crate::{Context, Result, Tensor, error::expect_shape};

/// Positions in a panel of keys.
pub(crate) const PANEL: usize = 16;
/// Positions a buffer holds when it first grows.
const FIRST_CAPACITY: usize = 64;

/// The keys and values of one layer of one sequence. A clone is an independent copy.
#[derive(Clone, Debug)]
pub struct KvBuffer {
    kv_heads: usize,
    head_width: usize,
    length: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl KvBuffer {
    /// An empty buffer for `kv_heads` heads of `head_width`.
    pub fn new(kv_heads: usize, head_width: usize) -> Self {
        Self { kv_heads, head_width, length: 0, keys: Vec::new(), values: Vec::new() }
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Heads of keys and of values.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Elements of a head.
    pub fn head_width(&self) -> usize {
        self.head_width
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> usize {
        (self.keys.capacity() + self.values.capacity()) * size_of::<f32>()
    }

    /// Bytes that a buffer of `positions` positions reserves.
    pub fn bytes_for(kv_heads: usize, head_width: usize, positions: usize) -> u64 {
        let capacity = if positions == 0 { 0 } else { positions.max(FIRST_CAPACITY).next_power_of_two() };
        2 * (capacity * kv_heads * head_width * size_of::<f32>()) as u64
    }

    /// Forgets every position from `length` on.
    pub fn truncate(&mut self, length: usize) {
        if length < self.length {
            self.length = length;
            let row = self.kv_heads * self.head_width;
            self.keys.truncate(length.next_multiple_of(PANEL) * row);
            self.values.truncate(length * row);
        }
    }

    /// Adds the rows of `keys` and `values`, both `[n, kv_heads * head_width]`, as the next positions.
    ///
    /// # Errors
    /// A shape does not fit, or a tape records.
    pub fn append(&mut self, cx: &Context, keys: &Tensor, values: &Tensor) -> Result<()> {
        const NAME: &str = "append keys and values";
        cx.without_gradient(NAME)?;
        let (n, row) = (keys.rows(), self.kv_heads * self.head_width);
        expect_shape(NAME, "the keys", [n, row], keys.shape())?;
        expect_shape(NAME, "the values", [n, row], values.shape())?;
        self.reserve(self.length + n);
        self.values.extend_from_slice(values.as_f32()?);
        self.keys.resize((self.length + n).next_multiple_of(PANEL) * row, 0.0);
        for (i, key) in keys.as_f32()?.chunks_exact(row.max(1)).enumerate() {
            let position = self.length + i;
            let panel = &mut self.keys[position / PANEL * PANEL * row..][..PANEL * row];
            for (element, &value) in key.iter().enumerate() {
                panel[element * PANEL + position % PANEL] = value;
            }
        }
        self.length += n;
        Ok(())
    }

    /// Grows to a power of two of positions that holds `positions`.
    fn reserve(&mut self, positions: usize) {
        let row = self.kv_heads * self.head_width;
        if positions * row > self.values.capacity() || positions.next_multiple_of(PANEL) * row > self.keys.capacity() {
            let capacity = positions.max(FIRST_CAPACITY).next_power_of_two() * row;
            self.keys.reserve_exact(capacity - self.keys.len());
            self.values.reserve_exact(capacity - self.values.len());
        }
    }

    /// The panel of keys `panel` of head `head`: `[head width][16]`.
    pub(crate) fn key_panel(&self, panel: usize, head: usize) -> &[f32] {
        &self.keys[(panel * self.kv_heads + head) * self.head_width * PANEL..][..self.head_width * PANEL]
    }

    /// The values of head `head` from position 0 on, a row every `kv_heads * head_width`.
    pub(crate) fn values_of(&self, head: usize) -> &[f32] {
        &self.values[(head * self.head_width).min(self.values.len())..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn rows_are_found_again_after_growth_truncation_and_copy() {
        let device = Device::cpu(1);
        let cx = Context::inference(&device);
        let (heads, width) = (2, 3);
        let mut buffer = KvBuffer::new(heads, width);
        let row = |position: usize, sign: f32| (0..6).map(move |i| sign * (position * 10 + i) as f32);
        let feed = |buffer: &mut KvBuffer, range: std::ops::Range<usize>| {
            let n = range.len();
            let keys = Tensor::from_f32(range.clone().flat_map(|p| row(p, 1.0)).collect(), [n, 6]).unwrap();
            let values = Tensor::from_f32(range.flat_map(|p| row(p, -1.0)).collect(), [n, 6]).unwrap();
            buffer.append(&cx, &keys, &values).unwrap();
        };
        feed(&mut buffer, 0..5);
        assert_eq!(buffer.bytes() as u64, KvBuffer::bytes_for(heads, width, 5));
        let copy = buffer.clone();
        feed(&mut buffer, 5..100);
        buffer.truncate(17);
        feed(&mut buffer, 17..70);
        assert_eq!((buffer.len(), copy.len()), (70, 5));
        for position in 0..70 {
            for head in 0..heads {
                for i in 0..width {
                    let expected = (position * 10 + head * width + i) as f32;
                    let panel = buffer.key_panel(position / PANEL, head);
                    assert_eq!(panel[i * PANEL + position % PANEL], expected);
                    assert_eq!(buffer.values_of(head)[position * heads * width + i], -expected);
                }
            }
        }
        assert_eq!(buffer.bytes() as u64, KvBuffer::bytes_for(heads, width, 100));
    }
}
