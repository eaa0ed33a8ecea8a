//! Where the rows of a pass find their caches, on a graphics card.
//!
//! A pass of few rows runs the same kernels on the same addresses whether it is launched or replayed from a graph. What
//! differs from pass to pass lies in one table on the device: of each row its id, its position, and for each layer the
//! addresses of its keys and values. So a cache may grow, and rows may come and go, without a new capture.

use ironloom_kernels::{Buffer, FewShape, Gpu, Slice};

use super::KvBuffer;
use crate::{Device, Error, Indices, Result};

/// The ids, positions and caches of up to a fixed number of rows.
#[derive(Debug)]
pub struct KvTable {
    gpu: Gpu,
    rows: usize,
    layers: usize,
    kv_heads: usize,
    head_width: usize,
    /// u32 `[rows]`.
    ids: Buffer,
    /// i32 `[rows]`, -1 for a row that is not in use.
    positions: Buffer,
    /// u64 `[layers][rows][2]`: the addresses of keys and of values.
    addresses: Buffer,
    /// Counters of the attention's blocks, zero between launches.
    tickets: Buffer,
    /// Positions that the attention's grid reaches.
    reach: usize,
}

const NAME: &str = "the table of a pass";

/// A row of a pass.
#[derive(Clone, Copy, Debug)]
pub struct TableRow<'a> {
    /// Its id.
    pub id: u32,
    /// Its position: how many ids of its sequence come before it.
    pub position: usize,
    /// Its sequence's cache, a buffer for each layer.
    pub cache: &'a [KvBuffer],
}

impl KvTable {
    /// A table of `rows` rows, none of them in use, for caches like `cache`, whose sequences have up to `reach` positions, and
    /// `heads` query heads.
    ///
    /// # Errors
    /// The device has no room, or is the processor, which needs no table; or the query heads do not share the cache's heads.
    pub fn new(device: &Device, rows: usize, heads: usize, cache: &[KvBuffer], reach: usize) -> Result<Self> {
        let gpu = device.card(NAME)?.gpu().clone();
        let (kv_heads, head_width) = cache.first().map_or((1, 1), |layer| (layer.kv_heads(), layer.head_width()));
        // A window sees no more, and needs no more counters.
        let shape = FewShape { rows, max_positions: reach, heads, kv_heads, head_width, window: None };
        let (ids, positions) = (gpu.allocate_lasting(4 * rows, NAME)?, gpu.allocate_lasting(4 * rows, NAME)?);
        let addresses = gpu.allocate_lasting(16 * rows * cache.len(), NAME)?;
        let tickets = gpu.allocate_cleared(shape.workspace()?.tickets, NAME)?;
        let layers = cache.len();
        let table = Self { gpu, rows, layers, kv_heads, head_width, ids, positions, addresses, tickets, reach };
        table.set(&[])?;
        Ok(table)
    }

    /// How many rows it has.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Positions that sequences in it may have.
    pub fn reach(&self) -> usize {
        self.reach
    }

    /// Puts these rows first in the table, and the rest out of use.
    ///
    /// # Errors
    /// They are more than the table holds, their caches are of another model, or one has no room for its row.
    pub fn set(&self, rows: &[TableRow<'_>]) -> Result<()> {
        let count = |what, expected, found| {
            if expected == found { Ok(()) } else { Err(Error::Count { operation: NAME, what, expected, found }) }
        };
        if rows.len() > self.rows {
            count("the number of rows", self.rows, rows.len())?;
        }
        let mut ids = vec![0u32; self.rows];
        let mut positions = vec![-1i32; self.rows];
        let mut addresses = vec![0u64; 2 * self.rows * self.layers];
        for (row, entry) in rows.iter().enumerate() {
            if entry.position >= self.reach {
                count("the number of positions", self.reach, entry.position + 1)?;
            }
            ids[row] = entry.id;
            positions[row] = entry.position as i32;
            self.put_addresses(&mut addresses, row, entry.cache, entry.position + 1)?;
        }
        self.gpu.write(self.ids.slice(), bytemuck::cast_slice(&ids))?;
        self.gpu.write(self.positions.slice(), bytemuck::cast_slice(&positions))?;
        Ok(self.gpu.write(self.addresses.slice(), bytemuck::cast_slice(&addresses))?)
    }

    /// Sets where the rows' caches lie, and leaves ids and positions as they are: for caches that grow between steps whose
    /// positions only the device knows.
    ///
    /// # Errors
    /// They are more than the table holds, or their caches are of another model.
    pub fn set_caches(&self, caches: &[&[KvBuffer]]) -> Result<()> {
        let mut addresses = vec![0u64; 2 * self.rows * self.layers];
        for (row, cache) in caches.iter().enumerate() {
            self.put_addresses(&mut addresses, row, cache, 0)?;
        }
        Ok(self.gpu.write(self.addresses.slice(), bytemuck::cast_slice(&addresses))?)
    }

    fn put_addresses(&self, addresses: &mut [u64], row: usize, cache: &[KvBuffer], positions: usize) -> Result<()> {
        let count = |what, expected, found| {
            if expected == found { Ok(()) } else { Err(Error::Count { operation: NAME, what, expected, found }) }
        };
        count("the number of the cache's layers", self.layers, cache.len())?;
        for (layer, buffer) in cache.iter().enumerate() {
            count("the number of kv heads", self.kv_heads, buffer.kv_heads())?;
            count("the head width", self.head_width, buffer.head_width())?;
            let needed = positions * self.kv_heads * self.head_width * 2;
            for (part, slice) in buffer.cuda(NAME)?.into_iter().enumerate() {
                let place = addresses.get_mut((layer * self.rows + row) * 2 + part);
                let Some(place) = place else { return count("the number of rows", self.rows, row + 1) };
                *place = slice.expect(NAME, "the bytes of a layer's cache", needed)?;
            }
        }
        Ok(())
    }

    /// The rows' ids.
    pub fn ids(&self) -> Indices {
        Indices::on_cuda(self.ids.clone(), self.rows)
    }

    /// The rows' positions.
    pub fn positions(&self) -> Indices {
        Indices::on_cuda(self.positions.clone(), self.rows)
    }

    /// Heads of keys and of values.
    pub(crate) fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Elements of a head.
    pub(crate) fn head_width(&self) -> usize {
        self.head_width
    }

    pub(crate) fn positions_slice(&self) -> Slice<'_> {
        self.positions.slice()
    }

    pub(crate) fn ids_slice(&self) -> Slice<'_> {
        self.ids.slice()
    }

    pub(crate) fn tickets(&self, bytes: usize) -> Result<Slice<'_>> {
        Ok(self.tickets.part(0, bytes)?)
    }

    /// The addresses of layer `layer`: u64 `[rows][2]`.
    pub(crate) fn layer(&self, layer: usize) -> Result<Slice<'_>> {
        Ok(self.addresses.part(16 * self.rows * layer, 16 * self.rows)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_enough_for_every_window_and_any_group_of_heads() {
        for (heads, kv_heads) in [(1, 1), (64, 1), (72, 1), (128, 1), (40, 8), (96, 2)] {
            for rows in [1, 64] {
                let shape = FewShape { rows, max_positions: 1 << 17, heads, kv_heads, head_width: 128, window: None };
                let tickets = shape.workspace().unwrap().tickets;
                for window in [1, 512, 4096, 1 << 18] {
                    let windowed = FewShape { window: Some(window), ..shape };
                    assert!(windowed.workspace().unwrap().tickets <= tickets, "{windowed:?}");
                }
            }
        }
        // More than 64 query heads on one kv head take more than 64 counters.
        let shape = FewShape { rows: 1, max_positions: 8192, heads: 72, kv_heads: 1, head_width: 64, window: None };
        assert!(shape.workspace().unwrap().tickets > 64 * 4);
    }
}
