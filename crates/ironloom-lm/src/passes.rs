//! How a pass is cut on a graphics card, and the captured passes of few rows.
//!
//! Sequences with up to [`FEW_ROWS`] rows in a pass go through the kernels of few rows, up to that many rows together; the
//! rest, the chunks of prompts, go one by one through those of many. The choice depends on a sequence's own rows only, so
//! its results do not depend on the sequences beside it.
//!
//! A pass of few rows is captured once for each power of two of rows and replayed from then on: its rows' ids, positions and
//! caches lie in a table on the device. Rows of the table that a pass does not use are marked, and kernels leave them out.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use ironloom_kernels::Graph;
use ironloom_nn::{PassRows, Span};
use ironloom_tensor::{
    Context, Device, Path, Tensor,
    ops::{self, KvTable, TableRow},
};

use crate::{LogitRows, Model, Result};

/// The most rows of a pass of few rows.
pub(crate) const FEW_ROWS: usize = ironloom_kernels::MOST_ROWS;

/// Captured passes by their number of rows.
#[derive(Debug, Default)]
pub(crate) struct Passes {
    captured: Mutex<HashMap<usize, CapturedPass>>,
}

impl Passes {
    /// Forgets every captured pass: to be called before anything changes that they read, for a replay would go on reading what
    /// was there.
    pub(crate) fn clear(&mut self) {
        self.captured.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// A pass of few rows from ids to logits.
#[derive(Debug)]
struct CapturedPass {
    table: KvTable,
    /// None where graphs are switched off or found no room: the pass is launched kernel by kernel, which gives the same bits.
    graph: Option<Graph>,
    /// `[rows, vocabulary]`: the last replay's.
    logits: Option<Tensor>,
}

impl Drop for Model {
    /// A card's memory that passes have used and that waits for the next goes back with the model.
    fn drop(&mut self) {
        if let Device::Cuda(cuda) = &self.device {
            cuda.gpu().trim();
        }
    }
}

/// Some spans of a pass that run together.
struct Part {
    spans: Range<usize>,
    ids: Range<usize>,
    path: Path,
}

impl Model {
    /// The pass on a graphics card. Afterwards the caches hold its rows; after a failure some of them may hold some.
    pub(crate) fn pass_in_parts(
        &self,
        cx: &Context,
        ids: &[u32],
        spans: &mut [Span<'_>],
        rows: LogitRows,
    ) -> Result<Tensor> {
        let limit = self.config.vocab_size;
        if let Some((row, &id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= limit) {
            return Err(ironloom_tensor::Error::IdOutOfRange { operation: "embedding", id, row, limit }.into());
        }
        let mut logits = Vec::new();
        for part in parts(spans) {
            let (ids, spans) = (&ids[part.ids], &mut spans[part.spans]);
            let cx = cx.with_path(part.path);
            logits.push(match part.path {
                Path::Few => self.few_rows(&cx, ids, spans, rows)?,
                Path::Many if !ops::attention_takes_many_rows(self.config.head_width) => {
                    self.in_pieces(&cx.with_path(Path::Few), ids, spans, rows)?
                }
                Path::Many => {
                    let first = spans.first().map_or(0, |span| span.cache.len());
                    let positions: Vec<u32> = (first..first + ids.len()).map(|position| position as u32).collect();
                    let last = [ids.len() as u32 - 1];
                    self.whole_pass(&cx, ids, &positions, spans, &last, rows)?
                }
            });
        }
        Ok(ops::concat_rows(cx, logits)?)
    }

    /// A prompt of many rows through the kernels of few: for heads of a width that the others have no attention for.
    fn in_pieces(&self, cx: &Context, ids: &[u32], spans: &mut [Span<'_>], rows: LogitRows) -> Result<Tensor> {
        let (mut logits, mut ids) = (Vec::new(), ids);
        for span in spans {
            let (own, rest) = ids.split_at(span.rows);
            ids = rest;
            let pieces = own.len().div_ceil(FEW_ROWS);
            for (number, piece) in own.chunks(FEW_ROWS).enumerate() {
                let mut spans = [Span { cache: &mut *span.cache, rows: piece.len() }];
                let part = self.few_rows(cx, piece, &mut spans, rows)?;
                if rows == LogitRows::All || number + 1 == pieces {
                    logits.push(part);
                }
            }
        }
        Ok(ops::concat_rows(cx, logits)?)
    }

    fn few_rows(&self, cx: &Context, ids: &[u32], spans: &mut [Span<'_>], rows: LogitRows) -> Result<Tensor> {
        for span in spans.iter_mut() {
            span.cache.reserve(span.rows)?;
        }
        let mut table_rows = Vec::with_capacity(ids.len());
        let mut last = Vec::with_capacity(spans.len());
        for span in spans.iter() {
            for row in 0..span.rows {
                let id = ids[table_rows.len()];
                table_rows.push(TableRow { id, position: span.cache.len() + row, cache: span.cache.layers() });
            }
            last.push(table_rows.len() as u32 - 1);
        }
        let wanted: Vec<u32> = match rows {
            LogitRows::Last => last,
            LogitRows::All => (0..ids.len() as u32).collect(),
        };
        let logits = self.captured_pass(cx, &table_rows, &wanted)?;
        for span in spans.iter_mut() {
            span.cache.advance(span.rows)?;
        }
        Ok(logits)
    }

    /// Puts the rows through a captured pass, and gives the logits of the `wanted` ones.
    fn captured_pass(&self, cx: &Context, rows: &[TableRow<'_>], wanted: &[u32]) -> Result<Tensor> {
        let capacity = rows.len().next_power_of_two();
        let mut captured = self.passes.captured.lock().unwrap_or_else(PoisonError::into_inner);
        let pass = match captured.entry(capacity) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(self.capture_pass(cx, capacity)?),
        };
        pass.table.set(rows)?;
        match (&pass.graph, &pass.logits) {
            (Some(graph), Some(logits)) => {
                graph.replay()?;
                Ok(ops::gather_rows(cx, logits, wanted)?)
            }
            _ => Ok(ops::gather_rows(cx, &self.table_pass(cx, &pass.table)?, wanted)?),
        }
    }

    fn capture_pass(&self, cx: &Context, rows: usize) -> Result<CapturedPass> {
        let cache = self.new_cache();
        let table = KvTable::new(cx.device, rows, self.config.heads, cache.layers(), self.config.context_length)?;
        let Device::Cuda(cuda) = cx.device else { return Ok(CapturedPass { table, graph: None, logits: None }) };
        if ironloom_core::is_off("graph") {
            return Ok(CapturedPass { table, graph: None, logits: None });
        }
        let (graph, logits) = match cuda.gpu().capture(|| self.table_pass(cx, &table)) {
            Ok((graph, logits)) => (Some(graph), Some(logits)),
            // A graph's memory serves nothing else; kernels alone work in what other passes have left.
            Err(error) if error.is_out_of_memory() => (None, None),
            Err(error) => return Err(error),
        };
        Ok(CapturedPass { table, graph, logits })
    }

    /// From the ids of a table to the logits of all its rows, `[rows, vocabulary]`: a pass of few rows on a graphics card, as
    /// it is captured. The caches named by the table get the rows' keys and values; their lengths stay the caller's matter.
    ///
    /// # Errors
    /// A kernel refuses, or the table is another model's.
    pub fn table_pass(&self, cx: &Context, table: &KvTable) -> Result<Tensor> {
        let (_, normed) = self.hidden(cx, &table.ids(), &table.positions(), &mut PassRows::Table(table))?;
        Ok(self.head.forward(cx, &normed)?)
    }
}

/// Cuts a pass: neighbours with few rows run together as far as they fit, each with many alone.
fn parts(spans: &[Span<'_>]) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut first_id = 0;
    for (number, span) in spans.iter().enumerate() {
        let ids = first_id..first_id + span.rows;
        first_id = ids.end;
        let path = if span.rows <= FEW_ROWS { Path::Few } else { Path::Many };
        match parts.last_mut() {
            Some(last) if (last.path, path) == (Path::Few, Path::Few) && ids.end - last.ids.start <= FEW_ROWS => {
                last.spans.end = number + 1;
                last.ids.end = ids.end;
            }
            _ => parts.push(Part { spans: number..number + 1, ids, path }),
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use ironloom_nn::KvCache;
    use ironloom_quant::WeightFormat;

    use super::*;
    use crate::{Config, DenseShape};

    #[test]
    fn few_rows_run_together_and_many_alone() {
        let cut = |rows: &[usize]| {
            let mut caches = vec![KvCache::new(&Device::cpu(1), 1, 1, 1); rows.len()];
            let spans: Vec<Span<'_>> = caches.iter_mut().zip(rows).map(|(cache, &rows)| Span { cache, rows }).collect();
            parts(&spans).into_iter().map(|part| (part.spans, part.ids, part.path)).collect::<Vec<_>>()
        };
        assert_eq!(cut(&[1, 1, 30]), [(0..3, 0..32, Path::Few)]);
        assert_eq!(cut(&[1, 63, 1]), [(0..2, 0..64, Path::Few), (2..3, 64..65, Path::Few)]);
        assert_eq!(
            cut(&[65, 1, 512]),
            [(0..1, 0..65, Path::Many), (1..2, 65..66, Path::Few), (2..3, 66..578, Path::Many)]
        );
    }

    #[test]
    fn what_changes_a_model_forgets_its_captured_passes() {
        let shape = DenseShape {
            vocab_size: 100,
            width: 64,
            layers: 1,
            heads: 1,
            kv_heads: 1,
            head_width: 64,
            inner_width: 128,
        };
        let Ok(device) = Device::cuda(0, 2).inspect_err(|error| println!("skipped: {error}")) else { return };
        let mut model = Model::random(&Config::dense(shape), &device, WeightFormat::Bf16, 7).unwrap();
        let changes: [fn(&mut Model) -> Result<()>; 3] = [
            |model| model.for_each_linear(|_, _| Ok(())),
            |model| model.update(|_, _| Ok(())),
            // Refused on a card, after what it may have changed.
            |model| model.make_trainable().or(Ok(())),
        ];
        for change in changes {
            let mut cache = model.new_cache();
            let mut spans = [Span { cache: &mut cache, rows: 1 }];
            model.forward(&Context::inference(&device), &[3], &mut spans, LogitRows::Last).unwrap();
            assert_eq!(model.passes.captured.lock().unwrap().len(), 1);
            change(&mut model).unwrap();
            assert!(model.passes.captured.lock().unwrap().is_empty());
        }
    }
}
