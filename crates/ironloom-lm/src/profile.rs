//! Which kernels a pass spends its time in.

use ironloom_kernels::KernelTime;
use ironloom_nn::Span;
use ironloom_tensor::{
    Context, Path,
    ops::{Choose, KvTable, NextIds, TableRow},
};

use crate::{Error, LogitRows, Model, Result, passes::FEW_ROWS};

impl Model {
    /// The time of each kernel of a pass on a graphics card, the longest first; of few rows the choice of the next ids is
    /// among them, as in a step of decoding. The kernels run one by one, so that their sum is more than the pass takes when
    /// it is replayed. The caches keep their lengths.
    ///
    /// # Errors
    /// Those of [`Model::forward`]; the model is on the processor.
    pub fn profile(&self, ids: &[u32], spans: &mut [Span<'_>]) -> Result<Vec<KernelTime>> {
        let gpu = self.device.card("a profile")?.gpu();
        let cx = Context::inference(&self.device);
        let rows: usize = spans.iter().map(|span| span.rows).sum();
        if rows != ids.len() {
            return Err(Error::Count { what: "the number of the spans' rows", expected: ids.len(), found: rows });
        }
        let Some(first) = spans.first() else { return Ok(Vec::new()) };
        if rows > FEW_ROWS {
            let lengths: Vec<usize> = spans.iter().map(|span| span.cache.len()).collect();
            return gpu.profile(|| {
                let passed = self.forward(&cx, ids, spans, LogitRows::Last).map(drop);
                spans.iter_mut().zip(&lengths).for_each(|(span, &length)| span.cache.truncate(length));
                passed
            });
        }
        let capacity = rows.next_power_of_two();
        let table =
            KvTable::new(&self.device, capacity, self.config.heads, first.cache.layers(), self.config.context_length)?;
        let next = NextIds::new(&self.device, capacity, self.config.vocab_size)?;
        for span in spans.iter_mut() {
            span.cache.reserve(span.rows)?;
        }
        let mut entries = Vec::with_capacity(rows);
        for span in spans.iter() {
            for row in 0..span.rows {
                let id = ids[entries.len()];
                entries.push(TableRow { id, position: span.cache.len() + row, cache: span.cache.layers() });
            }
        }
        let cx = cx.with_path(Path::Few);
        gpu.profile(|| {
            // The choice moves the rows of the table one position on.
            table.set(&entries)?;
            Ok(next.choose(&self.table_pass(&cx, &table)?, &table, Choose::Largest)?)
        })
    }
}
