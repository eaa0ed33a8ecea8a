//! The keys and values of all layers of one sequence.

use ironloom_tensor::ops::KvBuffer;

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
    /// An empty cache of `layers` layers with `kv_heads` heads of `head_width`.
    pub fn new(layers: usize, kv_heads: usize, head_width: usize) -> Self {
        Self { layers: vec![KvBuffer::new(kv_heads, head_width); layers] }
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

    /// Bytes that `positions` positions of such a cache reserve.
    pub fn bytes_for(layers: usize, kv_heads: usize, head_width: usize, positions: usize) -> u64 {
        KvBuffer::bytes_for(kv_heads, head_width, positions).saturating_mul(layers as u64)
    }

    /// How many layers there are.
    pub fn layers(&self) -> usize {
        self.layers.len()
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
        let mut cache = KvCache::new(30, 3, 64);
        assert_eq!((cache.len(), cache.bytes(), cache.layers()), (0, 0, 30));
        cache.truncate(10);
        assert!(cache.is_empty());
        assert_eq!(KvCache::bytes_for(30, 3, 64, 20), 30 * 2 * 64 * 3 * 64 * 4);
    }
}
