//! The keys and values of one layer of one sequence, kept between steps.
//!
//! On the processor keys lie in panels of 16 positions, `[panel][kv head][head width][16]`, so that the scores of 16
//! positions are one vector; values lie by position, `[position][kv head][head width]`. Both are single precision. On a
//! graphics card both lie by position in bfloat16. The buffer starts empty and doubles up to what a sequence may have, so a
//! short conversation never pays for a long context.

use ironloom_kernels::{Buffer, Gpu, Slice, lasting_bytes};

use crate::{Context, Device, Error, Result, Tensor, error::expect_shape};

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
    /// The most positions that a sequence has.
    limit: usize,
    storage: Storage,
}

#[derive(Clone, Debug)]
enum Storage {
    Cpu {
        keys: Vec<f32>,
        values: Vec<f32>,
    },
    /// Clones share the memory until one of them grows or is appended to.
    Cuda {
        gpu: Gpu,
        /// Keys and values; none while nothing was kept.
        kept: Option<[Buffer; 2]>,
    },
}

impl KvBuffer {
    /// An empty buffer for `kv_heads` heads of `head_width` on `device`.
    pub fn new(device: &Device, kv_heads: usize, head_width: usize) -> Self {
        let storage = match device {
            Device::Cpu(_) => Storage::Cpu { keys: Vec::new(), values: Vec::new() },
            Device::Cuda(cuda) => Storage::Cuda { gpu: cuda.gpu().clone(), kept: None },
        };
        Self { kv_heads, head_width, length: 0, limit: usize::MAX, storage }
    }

    /// The same for a sequence of up to `positions` positions: it grows no further before they are more.
    #[must_use]
    pub fn with_limit(mut self, positions: usize) -> Self {
        self.limit = positions;
        self
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
        match &self.storage {
            Storage::Cpu { keys, values } => (keys.capacity() + values.capacity()) * size_of::<f32>(),
            Storage::Cuda { kept, .. } => kept.iter().flatten().map(Buffer::bytes).sum(),
        }
    }

    /// Bytes that it takes of its device once it has `positions` positions.
    pub fn bytes_for(&self, positions: usize) -> u64 {
        if positions == 0 {
            return 0;
        }
        let elements = self.capacity_for(positions).saturating_mul(self.kv_heads * self.head_width);
        let bytes = match &self.storage {
            Storage::Cpu { .. } => elements.saturating_mul(size_of::<f32>()),
            Storage::Cuda { .. } => lasting_bytes(elements.saturating_mul(CUDA_ELEMENT)),
        };
        2 * bytes as u64
    }

    /// Positions that it has room for once it has grown to `positions`: a power of two, or all that there may be, which on the
    /// processor are whole panels.
    fn capacity_for(&self, positions: usize) -> usize {
        let most = self.limit.max(positions).checked_next_multiple_of(PANEL).unwrap_or(usize::MAX);
        positions.max(FIRST_CAPACITY).next_power_of_two().min(most)
    }

    /// Forgets every position from `length` on.
    pub fn truncate(&mut self, length: usize) {
        if length < self.length {
            self.length = length;
            let row = self.kv_heads * self.head_width;
            if let Storage::Cpu { keys, values } = &mut self.storage {
                keys.truncate(length.next_multiple_of(PANEL) * row);
                values.truncate(length * row);
            }
        }
    }

    /// Adds the rows of `keys` and `values`, both `[n, kv_heads * head_width]`, as the next positions, on the processor.
    ///
    /// # Errors
    /// A shape does not fit, the buffer is on another device, or a tape records.
    pub fn append(&mut self, cx: &Context, keys: &Tensor, values: &Tensor) -> Result<()> {
        const NAME: &str = "append keys and values";
        cx.without_gradient(NAME)?;
        cx.cpu(NAME)?;
        let (n, row) = (keys.rows(), self.kv_heads * self.head_width);
        expect_shape(NAME, "the keys", [n, row], keys.shape())?;
        expect_shape(NAME, "the values", [n, row], values.shape())?;
        self.reserve(n)?;
        let Storage::Cpu { keys: kept_keys, values: kept_values } = &mut self.storage else {
            return Err(self.misplaced(NAME));
        };
        kept_values.extend_from_slice(values.as_f32()?);
        kept_keys.resize((self.length + n).next_multiple_of(PANEL) * row, 0.0);
        for (i, key) in keys.as_f32()?.chunks_exact(row.max(1)).enumerate() {
            let position = self.length + i;
            let panel = &mut kept_keys[position / PANEL * PANEL * row..][..PANEL * row];
            for (element, &value) in key.iter().enumerate() {
                panel[element * PANEL + position % PANEL] = value;
            }
        }
        self.length += n;
        Ok(())
    }

    /// The keys and the values of every position, each `[position][kv head][head width]`: for tests.
    ///
    /// # Errors
    /// The device fails.
    pub fn read(&self) -> Result<[Vec<f32>; 2]> {
        let row = self.kv_heads * self.head_width;
        let count = self.length * row;
        match &self.storage {
            Storage::Cpu { keys, values } => {
                let key = |i: usize| {
                    let (position, element) = (i / row, i % row);
                    keys[position / PANEL * PANEL * row + element * PANEL + position % PANEL]
                };
                Ok([(0..count).map(key).collect(), values[..count].to_vec()])
            }
            Storage::Cuda { gpu, kept: Some([keys, values]) } if count > 0 => {
                let read = |buffer: &Buffer| -> Result<Vec<f32>> {
                    let mut bits = vec![0u16; count];
                    gpu.read(buffer.part(0, CUDA_ELEMENT * count)?, bytemuck::cast_slice_mut(&mut bits))?;
                    // A bfloat16 is the upper half of a number in single precision.
                    Ok(bits.into_iter().map(|bits| f32::from_bits(u32::from(bits) << 16)).collect())
                };
                Ok([read(keys)?, read(values)?])
            }
            Storage::Cuda { .. } => Ok([Vec::new(), Vec::new()]),
        }
    }

    /// Whether `more` positions fit in memory that no clone shares.
    pub fn has_room(&self, more: usize) -> bool {
        let elements = (self.length + more) * self.kv_heads * self.head_width;
        match &self.storage {
            Storage::Cpu { keys, values } => elements <= keys.capacity().min(values.capacity()),
            Storage::Cuda { kept, .. } => kept.as_ref().is_some_and(|kept| {
                kept.iter().all(|buffer| buffer.is_unique() && elements * CUDA_ELEMENT <= buffer.bytes())
            }),
        }
    }

    /// Makes room for `more` positions: grows to a power of two of positions that holds them, or to its limit, and on a
    /// graphics card takes memory of its own where a clone shares it.
    ///
    /// # Errors
    /// The device has no room; the buffer is as it was.
    pub fn reserve(&mut self, more: usize) -> Result<()> {
        let row = self.kv_heads * self.head_width;
        let positions = self.length + more;
        let capacity = self.capacity_for(positions);
        let fits = self.has_room(more);
        match &mut self.storage {
            Storage::Cpu { keys, values } => {
                if positions * row > values.capacity() || positions.next_multiple_of(PANEL) * row > keys.capacity() {
                    keys.reserve_exact(capacity * row - keys.len());
                    values.reserve_exact(capacity * row - values.len());
                }
            }
            Storage::Cuda { .. } if fits => {}
            Storage::Cuda { gpu, kept } => {
                let held = kept.as_ref().map_or(0, |[keys, _]| keys.bytes());
                let bytes = (capacity * row * CUDA_ELEMENT).max(held);
                let grown = |old: Option<&Buffer>| -> Result<Buffer> {
                    let new = gpu.allocate_lasting(bytes, "the cache of keys and values")?;
                    if let Some(old) = old {
                        gpu.copy(new.slice(), old.part(0, self.length * row * CUDA_ELEMENT)?)?;
                    }
                    Ok(new)
                };
                let old = kept.as_ref();
                *kept = Some([grown(old.map(|[keys, _]| keys))?, grown(old.map(|[_, values]| values))?]);
            }
        }
        Ok(())
    }

    /// Counts `more` positions that a kernel has written.
    ///
    /// # Errors
    /// There is no room for them.
    pub fn advance(&mut self, more: usize) -> Result<()> {
        let length = self.length + more;
        let needed = length * self.kv_heads * self.head_width * CUDA_ELEMENT;
        let held = match &self.storage {
            Storage::Cpu { .. } => return Err(self.misplaced("counting positions")),
            Storage::Cuda { kept, .. } => kept.as_ref().map_or(0, |[keys, _]| keys.bytes()),
        };
        if needed > held {
            let operation = "counting positions";
            return Err(Error::Count { operation, what: "the bytes reserved", expected: needed, found: held });
        }
        self.length = length;
        Ok(())
    }

    /// Keys and values on a graphics card, `[position][kv head][head width]` in bfloat16.
    pub(crate) fn cuda(&self, operation: &'static str) -> Result<[Slice<'_>; 2]> {
        match &self.storage {
            Storage::Cuda { kept: Some([keys, values]), .. } => Ok([keys.slice(), values.slice()]),
            Storage::Cuda { kept: None, .. } => {
                Err(Error::Count { operation, what: "the history's length", expected: 1, found: 0 })
            }
            Storage::Cpu { .. } => Err(self.misplaced(operation)),
        }
    }

    /// The panel of keys `panel` of head `head`: `[head width][16]`.
    pub(crate) fn key_panel(&self, panel: usize, head: usize) -> &[f32] {
        let Storage::Cpu { keys, .. } = &self.storage else { return &[] };
        &keys[(panel * self.kv_heads + head) * self.head_width * PANEL..][..self.head_width * PANEL]
    }

    /// The values of head `head` from position 0 on, a row every `kv_heads * head_width`.
    pub(crate) fn values_of(&self, head: usize) -> &[f32] {
        let Storage::Cpu { values, .. } = &self.storage else { return &[] };
        &values[(head * self.head_width).min(values.len())..]
    }

    /// Fails where it is not on the processor.
    pub(crate) fn expect_cpu(&self, operation: &'static str) -> Result<()> {
        if matches!(self.storage, Storage::Cpu { .. }) { Ok(()) } else { Err(self.misplaced(operation)) }
    }

    fn misplaced(&self, operation: &'static str) -> Error {
        match &self.storage {
            Storage::Cpu { .. } => {
                Error::Device { operation, expected: "a graphics card", found: "a cache on the processor" }
            }
            Storage::Cuda { .. } => {
                Error::Device { operation, expected: "the processor", found: "a cache on a graphics card" }
            }
        }
    }
}

/// Bytes of a number kept on a graphics card.
const CUDA_ELEMENT: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn rows_are_found_again_after_growth_truncation_and_copy() {
        let device = Device::cpu(1);
        let cx = Context::inference(&device);
        let (heads, width) = (2, 3);
        let mut buffer = KvBuffer::new(&device, heads, width);
        let row = |position: usize, sign: f32| (0..6).map(move |i| sign * (position * 10 + i) as f32);
        let feed = |buffer: &mut KvBuffer, range: std::ops::Range<usize>| {
            let n = range.len();
            let keys = Tensor::from_f32(range.clone().flat_map(|p| row(p, 1.0)).collect(), [n, 6]).unwrap();
            let values = Tensor::from_f32(range.flat_map(|p| row(p, -1.0)).collect(), [n, 6]).unwrap();
            buffer.append(&cx, &keys, &values).unwrap();
        };
        feed(&mut buffer, 0..5);
        assert_eq!(buffer.bytes() as u64, buffer.bytes_for(5));
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
        let all = |sign: f32| (0..70).flat_map(|position| row(position, sign)).collect::<Vec<_>>();
        assert_eq!(buffer.read().unwrap(), [all(1.0), all(-1.0)]);
        assert_eq!(buffer.bytes() as u64, buffer.bytes_for(100));
        assert_eq!(buffer.bytes_for(100), 2 * 128 * 6 * 4);
    }

    #[test]
    fn a_buffer_grows_no_further_than_its_limit() {
        let device = Device::cpu(1);
        let cx = Context::inference(&device);
        // 150 positions are 10 panels less 10.
        let mut buffer = KvBuffer::new(&device, 1, 4).with_limit(150);
        let rows = |n: usize| Tensor::from_f32(vec![1.0; 4 * n], [n, 4]).unwrap();
        for (more, capacity) in [(1, 64), (64, 128), (64, 160), (21, 160), (1, 160), (10, 176)] {
            buffer.append(&cx, &rows(more), &rows(more)).unwrap();
            assert_eq!(buffer.bytes(), 2 * capacity * 4 * 4, "{} positions", buffer.len());
            assert_eq!(buffer.bytes() as u64, buffer.bytes_for(buffer.len()));
        }
        assert_eq!(KvBuffer::new(&device, 1, 4).with_limit(40_960).bytes_for(40_960), 2 * 40_960 * 4 * 4);
    }
}
