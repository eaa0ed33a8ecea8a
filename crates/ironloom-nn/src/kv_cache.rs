//! The keys and values of all layers of one sequence.

use ironloom_tensor::{Device, ops::KvBuffer};

use crate::Result;

/// What one sequence keeps between steps: a buffer of keys and values for each layer, all of one length. It starts empty
/// and doubles as it grows. A clone is an independent continuation of the same beginning.
#[derive(Clone, Debug)]
pub struct KvCache {
    layers: Vec<KvBuffer>,
}

/// Consecutive positions of one sequence in a forward pass.
#[derive(Debug)]
pub struct Span<'a> {
    /// The sequence's cache; the pass appends its rows.
    pub cache: &'a mut KvCache,
    /// How many of the pass's rows belong to it.
    pub rows: usize,
}

impl KvCache {
    /// An empty cache on `device` of `layers` layers with `kv_heads` heads of `head_width`.
    pub fn new(device: &Device, layers: usize, kv_heads: usize, head_width: usize) -> Self {
        Self { layers: vec![KvBuffer::new(device, kv_heads, head_width); layers] }
    }

    /// The same for a sequence of up to `positions` positions: it grows no further before they are more.
    #[must_use]
    pub fn with_limit(self, positions: usize) -> Self {
        Self { layers: self.layers.into_iter().map(|layer| layer.with_limit(positions)).collect() }
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        // A pass that failed half-way has appended to its first layers only: those rows don't count.
        self.layers.iter().map(KvBuffer::len).min().unwrap_or(0)
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets every position from `length` on; a longer length changes nothing.
    pub fn truncate(&mut self, length: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(length));
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(KvBuffer::bytes).sum()
    }

    /// Bytes that it takes of its device once it has `positions` positions.
    pub fn bytes_for(&self, positions: usize) -> u64 {
        self.layers.iter().map(|layer| layer.bytes_for(positions)).fold(0, u64::saturating_add)
    }

    /// Whether `more` positions fit where every layer lies now.
    pub fn has_room(&self, more: usize) -> bool {
        self.layers.iter().all(|layer| layer.has_room(more))
    }

    /// Makes room for `more` positions in every layer.
    ///
    /// # Errors
    /// The device has none; the positions held stay.
    pub fn reserve(&mut self, more: usize) -> Result<()> {
        // A pass that failed half-way has appended to its first layers only.
        self.truncate(self.len());
        Ok(self.layers.iter_mut().try_for_each(|layer| layer.reserve(more))?)
    }

    /// Counts `more` positions in every layer, which kernels have written.
    ///
    /// # Errors
    /// There is no room for them.
    pub fn advance(&mut self, more: usize) -> Result<()> {
        Ok(self.layers.iter_mut().try_for_each(|layer| layer.advance(more))?)
    }

    /// The buffers of all layers.
    pub fn layers(&self) -> &[KvBuffer] {
        &self.layers
    }

    /// The buffer of one layer.
    pub fn layer(&self, layer: usize) -> &KvBuffer {
        &self.layers[layer]
    }

    /// The buffer of one layer, to append to.
    pub fn layer_mut(&mut self, layer: usize) -> &mut KvBuffer {
        &mut self.layers[layer]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_cache_holds_nothing() {
        let mut cache = KvCache::new(&Device::cpu(1), 30, 3, 64);
        assert_eq!((cache.len(), cache.bytes(), cache.layers().len()), (0, 0, 30));
        cache.truncate(10);
        assert!(cache.is_empty());
        assert_eq!(cache.bytes_for(20), 30 * 2 * 64 * 3 * 64 * 4);
        assert_eq!(cache.with_limit(100).bytes_for(80), 30 * 2 * 112 * 3 * 64 * 4);
    }
}
