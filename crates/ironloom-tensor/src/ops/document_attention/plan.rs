//! How the work of attention within documents is cut: tiles of keys, blocks of queries, slices of a document's blocks, and where
//! each lies in memory. All of it depends on a document's own lengths alone.

use std::ops::Range;

use super::{DocumentAttentionOptions, DocumentSpan, Mask, NAME};
use crate::{
    CpuDevice, Error, Result, Tensor,
    error::{expect_count, expect_shape},
    gemm::Matrix,
    lanes::LANES,
    ops::Disjoint,
};

/// Queries of a block.
pub(super) const QUERIES: usize = 64;
/// Keys of a tile: with [`QUERIES`] rows, scores and their gradients stay in the second-level cache.
pub(super) const KEYS: usize = 256;
/// Tasks of a document's backward pass to aim at, however few kv heads it has.
pub(super) const SLICES: usize = 16;
/// Blocks of queries a slice has at least: what a slice adds to keys and values is summed once more.
pub(super) const SLICE_BLOCKS: usize = 4;

/// Where everything of a call lies. All of it follows from shapes.
pub(super) struct Plan {
    pub(super) options: DocumentAttentionOptions,
    /// Of a head.
    pub(super) width: usize,
    pub(super) documents: Vec<Document>,
    /// Rows of queries, and of keys.
    pub(super) rows: [usize; 2],
    /// Elements of all panels.
    pub(super) panels: usize,
    /// Elements of all slices' gradients of keys.
    pub(super) partials: usize,
}

/// Where a document lies.
pub(super) struct Document {
    pub(super) mask: Mask,
    /// Its rows of `q`.
    pub(super) queries: Range<usize>,
    /// Its rows of `k`.
    pub(super) keys: Range<usize>,
    /// The start of its panels: `[tile][kv head][head width][stride of the tile]`.
    pub(super) panels: usize,
    /// How many parts its blocks of queries are cut into in the backward pass.
    pub(super) slices: usize,
    /// The start of its slices' gradients of keys: `[kv head][slice][key][head width]`.
    pub(super) partials: usize,
}

impl Plan {
    pub(super) fn new(
        [q, k, v]: [&Tensor; 3],
        spans: &[DocumentSpan],
        options: &DocumentAttentionOptions,
    ) -> Result<Self> {
        let count = |what, expected, found| Err(Error::Count { operation: NAME, what, expected, found });
        let &DocumentAttentionOptions { heads, kv_heads, mask, .. } = options;
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return count("the number of query heads, a multiple of that of kv heads,", kv_heads.max(1), heads);
        }
        let width = q.width() / heads;
        if width == 0 {
            return count("the head width", 1, 0);
        }
        expect_shape(NAME, "the queries", [q.rows(), heads * width], q.shape())?;
        expect_shape(NAME, "the keys", [k.rows(), kv_heads * width], k.shape())?;
        expect_shape(NAME, "the values", *k.shape(), v.shape())?;
        if mask == Mask::Window(0) {
            return count("the window", 1, 0);
        }
        let mut documents = Vec::with_capacity(spans.len());
        let (mut first, mut panels, mut partials) = ([0usize; 2], 0, 0);
        for span in spans {
            if mask != Mask::Bidirectional {
                expect_count(NAME, "the number of a document's keys", span.queries, span.keys)?;
            } else if span.queries > 0 && span.keys == 0 {
                return count("the number of a document's keys", 1, 0);
            }
            let end = [first[0].saturating_add(span.queries), first[1].saturating_add(span.keys)];
            if end[0] > q.rows() || end[1] > k.rows() {
                break;
            }
            let most = span.queries.div_ceil(QUERIES).div_ceil(SLICE_BLOCKS);
            let slices = (SLICES / kv_heads).clamp(1, most.max(1));
            let document =
                Document { mask, queries: first[0]..end[0], keys: first[1]..end[1], panels, slices, partials };
            if document.has_panels() {
                let strides = (0..span.keys.div_ceil(KEYS)).map(|tile| document.stride(tile)).sum::<usize>();
                panels += strides * kv_heads * width;
            }
            partials += slices * span.keys * kv_heads * width;
            documents.push(document);
            first = end;
        }
        let total = |rows: fn(&DocumentSpan) -> usize| spans.iter().map(rows).fold(0, usize::saturating_add);
        expect_count(NAME, "the number of the documents' queries", q.rows(), total(|span| span.queries))?;
        expect_count(NAME, "the number of the documents' keys", k.rows(), total(|span| span.keys))?;
        Ok(Self { options: *options, width, documents, rows: [q.rows(), k.rows()], panels, partials })
    }

    /// Query heads of a kv head.
    pub(super) fn group(&self) -> usize {
        self.options.heads / self.options.kv_heads
    }

    /// Where a row of a query head starts in `q`, `out` and their gradients.
    pub(super) fn query(&self, row: usize, head: usize) -> usize {
        (row * self.options.heads + head) * self.width
    }

    /// Where a row of a kv head starts in `k`, `v` and their gradients.
    pub(super) fn key(&self, row: usize, kv_head: usize) -> usize {
        (row * self.options.kv_heads + kv_head) * self.width
    }

    /// Rows of a query head from `row` on.
    pub(super) fn query_rows<'a>(&self, x: &'a [f32], row: usize, rows: usize, head: usize) -> Matrix<'a> {
        Matrix::new(&x[self.query(row, head)..], [rows, self.width], self.options.heads * self.width)
    }

    /// Rows of a kv head from `row` on.
    pub(super) fn key_rows<'a>(&self, x: &'a [f32], row: usize, rows: usize, kv_head: usize) -> Matrix<'a> {
        Matrix::new(&x[self.key(row, kv_head)..], [rows, self.width], self.options.kv_heads * self.width)
    }

    /// The rows `keys` (of the document, all of one tile) of `x`, of which `panels` were made, turned: `[head width, keys]`.
    pub(super) fn turned<'a>(
        &self,
        [x, panels]: [&'a [f32]; 2],
        document: &Document,
        kv_head: usize,
        keys: &Range<usize>,
    ) -> Matrix<'a> {
        if !document.has_panels() {
            return self.key_rows(x, document.keys.start + keys.start, keys.len(), kv_head).transposed();
        }
        let tile = keys.start / KEYS;
        let stride = document.stride(tile);
        let start = self.panel_start(document, tile, kv_head) + keys.start % KEYS;
        Matrix::new(&panels[start..], [self.width, keys.len()], stride)
    }

    pub(super) fn panel_start(&self, document: &Document, tile: usize, kv_head: usize) -> usize {
        let before = tile * self.options.kv_heads * padded(KEYS) + kv_head * document.stride(tile);
        document.panels + before * self.width
    }

    /// Where a slice's gradients of keys start.
    pub(super) fn partial(&self, document: &Document, kv_head: usize, slice: usize) -> usize {
        document.partials + (kv_head * document.slices + slice) * document.keys.len() * self.width
    }

    /// Every tile of every document, by number.
    pub(super) fn tiles(&self) -> Vec<(&Document, usize)> {
        let tiles = |document: &Document| 0..document.keys.len().div_ceil(KEYS);
        self.documents.iter().flat_map(|document| tiles(document).map(move |tile| (document, tile))).collect()
    }

    /// `x [m, kv_heads * w]` as panels.
    pub(super) fn transposed(&self, cpu: &CpuDevice, x: &[f32]) -> Vec<f32> {
        let mut panels = vec![0.0; self.panels];
        let (shared, tiles) = (Disjoint::new(&mut panels), self.tiles());
        cpu.threads.run(tiles.len(), |i| {
            let (document, tile) = tiles[i];
            if !document.has_panels() {
                return;
            }
            let (stride, rows) = (document.stride(tile), document.tile(tile));
            for kv_head in 0..self.options.kv_heads {
                let start = self.panel_start(document, tile, kv_head);
                // SAFETY: each panel belongs to one task.
                let panel = unsafe { shared.slice(start..start + self.width * stride) };
                for first in rows.clone().step_by(LANES) {
                    let rows = first..(first + LANES).min(rows.end);
                    for d in 0..self.width {
                        let row = &mut panel[d * stride + first % KEYS..][..rows.len()];
                        for (to, key) in row.iter_mut().zip(rows.clone()) {
                            *to = x[self.key(document.keys.start + key, kv_head) + d];
                        }
                    }
                }
            }
        });
        panels
    }
}

impl Document {
    /// Whether its keys and values are transposed into panels: where more than one block reads them.
    pub(super) fn has_panels(&self) -> bool {
        self.queries.len() > QUERIES
    }

    /// Blocks of queries, counted from the document's first.
    pub(super) fn blocks(&self) -> impl DoubleEndedIterator<Item = Range<usize>> {
        let queries = self.queries.len();
        (0..queries.div_ceil(QUERIES)).map(move |block| block * QUERIES..((block + 1) * QUERIES).min(queries))
    }

    /// The blocks of a slice.
    pub(super) fn blocks_of(&self, slice: usize) -> impl Iterator<Item = Range<usize>> {
        let blocks = self.queries.len().div_ceil(QUERIES);
        let bound = |slice: usize| blocks * slice / self.slices;
        self.blocks().skip(bound(slice)).take(bound(slice + 1) - bound(slice))
    }

    /// The keys of a tile, counted from the document's first.
    pub(super) fn tile(&self, tile: usize) -> Range<usize> {
        tile * KEYS..((tile + 1) * KEYS).min(self.keys.len())
    }

    /// Elements from one row of a tile's panel to the next.
    pub(super) fn stride(&self, tile: usize) -> usize {
        padded(self.tile(tile).len())
    }

    /// The stride of scores.
    pub(super) fn widest(&self) -> usize {
        padded(self.keys.len().min(KEYS))
    }

    /// The keys that a query sees.
    pub(super) fn sees(&self, query: usize) -> Range<usize> {
        match self.mask {
            Mask::Causal => 0..query + 1,
            Mask::Window(window) => (query + 1).saturating_sub(window)..query + 1,
            Mask::Bidirectional => 0..self.keys.len(),
        }
    }

    /// The tiles of keys that any query of a block sees, each cut to those keys.
    pub(super) fn tiles_in_view(&self, block: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let view = self.sees(block.start).start..self.sees(block.end.saturating_sub(1)).end;
        let tiles = view.start / KEYS..view.end.div_ceil(KEYS);
        tiles.map(move |tile| (tile * KEYS).max(view.start)..((tile + 1) * KEYS).min(view.end))
    }

    /// What each query of a block sees of a tile, counted from the tile's first key.
    pub(super) fn seen(&self, block: &Range<usize>, tile: &Range<usize>) -> Vec<Range<usize>> {
        let inside = |key: usize| key.clamp(tile.start, tile.end) - tile.start;
        block.clone().map(|query| self.sees(query)).map(|keys| inside(keys.start)..inside(keys.end)).collect()
    }
}

/// A stride for rows of so many elements: whole lanes, and one lane's worth more, for rows a power of two apart share few sets
/// of the first-level cache.
pub(super) fn padded(elements: usize) -> usize {
    elements.next_multiple_of(LANES) + LANES
}
