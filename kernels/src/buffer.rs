//! Memory of the device, and parts of it.
//!
//! Lasting memory (weights, caches) is given back to the driver when its buffer is dropped. Memory of a pass comes from a
//! pool: what a dropped buffer lay in is free for the next at once, which is safe because everything runs in one stream. A
//! captured graph has a pool of its own, which lives as long as the graph replays into it and gives nothing back before.

use std::{
    cell::RefCell,
    collections::HashMap,
    marker::PhantomData,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use crate::{Error, Result, arena::Arena, driver::call, gpu::Shared, turn::Turn};

/// Memory of the device. Cloning shares it.
#[derive(Clone)]
pub struct Buffer {
    memory: Arc<Memory>,
}

struct Memory {
    address: u64,
    /// Bytes asked for.
    bytes: usize,
    /// Bytes taken.
    taken: usize,
    home: Home,
}

/// Where memory goes when it is dropped.
pub(crate) enum Home {
    Device(Arc<Shared>),
    Pool(Arc<Pool>),
}

impl Drop for Memory {
    fn drop(&mut self) {
        match &self.home {
            Home::Device(shared) => shared.free(self.address, self.taken),
            Home::Pool(pool) => pool.take_back(self.address, self.taken),
        }
    }
}

impl Buffer {
    pub(crate) fn lasting(shared: &Arc<Shared>, bytes: usize, operation: &'static str) -> Result<Self> {
        let taken = bytes.max(1).checked_next_multiple_of(ALIGNMENT).ok_or(Error::SizeOverflow)?;
        let address = shared.allocate(taken, operation)?;
        Ok(Self { memory: Arc::new(Memory { address, bytes, taken, home: Home::Device(shared.clone()) }) })
    }

    /// The whole of it.
    pub fn slice(&self) -> Slice<'_> {
        Slice { address: self.memory.address, bytes: self.memory.bytes, lifetime: PhantomData }
    }

    /// `bytes` bytes from `offset` on.
    ///
    /// # Errors
    /// The buffer ends before.
    pub fn part(&self, offset: usize, bytes: usize) -> Result<Slice<'_>> {
        self.slice().part(offset, bytes)
    }

    /// How many bytes it holds.
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// How many share it.
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.memory)
    }

    /// Whether nothing else shares it.
    pub fn is_unique(&self) -> bool {
        self.holders() == 1
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes at {:#x})", self.memory.bytes, self.memory.address)
    }
}

/// A part of a [`Buffer`]: what launchers take.
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a> {
    address: u64,
    bytes: usize,
    lifetime: PhantomData<&'a Buffer>,
}

impl<'a> Slice<'a> {
    /// How many bytes it holds.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its address on the device, for tables that kernels read.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// `bytes` bytes from `offset` on.
    ///
    /// # Errors
    /// The slice ends before.
    pub fn part(&self, offset: usize, bytes: usize) -> Result<Slice<'a>> {
        let end = offset.checked_add(bytes).ok_or(Error::SizeOverflow)?;
        if end > self.bytes {
            return Err(Error::Shape {
                operation: "part of a buffer",
                what: "the buffer's size in bytes",
                expected: end,
                found: self.bytes,
            });
        }
        Ok(Slice { address: self.address + offset as u64, bytes, lifetime: PhantomData })
    }

    /// Its address, where it holds at least `bytes` bytes.
    ///
    /// # Errors
    /// It holds fewer: the error names `operation` and `what`.
    pub fn expect(&self, operation: &'static str, what: &'static str, bytes: usize) -> Result<u64> {
        if self.bytes < bytes {
            return Err(Error::Shape { operation, what, expected: bytes, found: self.bytes });
        }
        Ok(self.address)
    }

    /// [`Slice::expect`] of what may be left out: then 0, which kernels take for nothing.
    pub(crate) fn expect_optional(
        slice: Option<Self>,
        operation: &'static str,
        what: &'static str,
        bytes: usize,
    ) -> Result<u64> {
        slice.map_or(Ok(0), |slice| slice.expect(operation, what, bytes))
    }

    /// Of no memory, for tests of what looks at places and sizes alone.
    #[cfg(test)]
    pub(crate) fn at(address: u64, bytes: usize) -> Self {
        Slice { address, bytes, lifetime: PhantomData }
    }
}

/// Addresses are multiples of this.
const ALIGNMENT: usize = 256;
/// Sizes from here on are rounded to an eighth of their power of two, so that prompts of nearby lengths share memory.
const COARSE: usize = 1 << 16;

/// What [`Gpu::allocate`](crate::Gpu::allocate) takes for `bytes` bytes: for plans.
///
/// # Errors
/// The size overflows.
pub fn pass_bytes(bytes: usize) -> Result<usize> {
    let step = match bytes {
        0..COARSE => ALIGNMENT,
        _ => bytes.checked_next_power_of_two().ok_or(Error::SizeOverflow)? / 16,
    };
    bytes.max(1).checked_next_multiple_of(step).ok_or(Error::SizeOverflow)
}

/// What [`Gpu::allocate_lasting`](crate::Gpu::allocate_lasting) takes of the card for `bytes` bytes: for plans. The driver
/// gives whole pieces of 2 MiB, and cuts one of them where half of it or less is asked for: the matrices of a model of three
/// billion weights in NF4 take 1,988 MiB instead of 1,655.
pub fn lasting_bytes(bytes: usize) -> usize {
    const PIECE: usize = 2 << 20;
    let step = if bytes > PIECE / 2 { PIECE } else { ALIGNMENT };
    bytes.max(1).checked_next_multiple_of(step).unwrap_or(usize::MAX)
}

/// Memory of passes, in use and free.
pub(crate) struct Pool {
    /// First, for its addresses go back before the context may.
    free: Mutex<Free>,
    shared: Arc<Shared>,
    /// Bytes it holds, in use or free.
    held: AtomicUsize,
    /// Of a graph's pool: the one beside it, which may have memory that nobody uses.
    beside: Option<Arc<Pool>>,
}

/// What a pool has that is not in use.
enum Free {
    /// Places of any size.
    Places(Arena),
    /// Where a driver cannot map memory: pieces by size, each for the next of its size.
    Sizes(HashMap<usize, Vec<u64>>),
}

impl Pool {
    /// The pool of a device. Whether the driver can map memory is tried once, here.
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let sizes = || Mutex::new(Free::Sizes(HashMap::new()));
        let arena = (!ironloom_core::is_off("arena")).then(|| Arena::new(&shared).ok()).flatten();
        let free = arena.map_or_else(sizes, |arena| Mutex::new(Free::Places(arena)));
        let mut pool = Self { shared, free, held: AtomicUsize::new(0), beside: None };
        match pool.take(1, "a first place") {
            Ok(address) => pool.take_back(address, 1),
            Err(error) if error.is_out_of_memory() => {}
            Err(_) => pool.free = sizes(),
        }
        pool.give_back();
        pool
    }

    /// The pool of a graph. What it has taken it keeps: the graph is recorded in the memory that its kernels ran in.
    pub(crate) fn of_graph(beside: Arc<Pool>) -> Result<Self> {
        // What a graph's pool has is in use even where no buffer lies.
        let beside = beside.beside.clone().unwrap_or(beside);
        let shared = beside.shared.clone();
        let maps = matches!(*beside.free(), Free::Places(_));
        let free = if maps { Free::Places(Arena::new(&shared)?) } else { Free::Sizes(HashMap::new()) };
        Ok(Self { shared, free: Mutex::new(free), held: AtomicUsize::new(0), beside: Some(beside) })
    }

    /// Bytes it holds, in use or free.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize, operation: &'static str) -> Result<Buffer> {
        let taken = pass_bytes(bytes)?;
        let address = self.take(taken, operation).or_else(|error| {
            // What lies unused may make the room.
            self.trim();
            self.take(taken, operation).map_err(|_| error)
        })?;
        Ok(Buffer { memory: Arc::new(Memory { address, bytes, taken, home: Home::Pool(self.clone()) }) })
    }

    fn take(&self, taken: usize, operation: &'static str) -> Result<u64> {
        // The turn before the lock: a thread that records may want the lock, and this one waits for that.
        let _turn = Turn::shared();
        let (address, grown) = match &mut *self.free() {
            Free::Places(arena) => arena.take(&self.shared, taken, operation)?,
            Free::Sizes(free) => match free.get_mut(&taken).and_then(Vec::pop) {
                Some(address) => (address, 0),
                None => (self.shared.allocate(taken, operation)?, taken),
            },
        };
        self.held.fetch_add(grown, Relaxed);
        Ok(address)
    }

    /// Gives unused memory back to the driver: of a graph's pool that of the one beside it. Nothing while a stream is
    /// recorded, for giving back waits for it, which ends a recording.
    pub(crate) fn trim(&self) {
        if !self.shared.is_capturing().unwrap_or(true) {
            self.beside.as_deref().unwrap_or(self).give_back();
        }
    }

    fn give_back(&self) {
        // A failure here has been an error of an earlier call, or comes again with the next.
        let _turn = self.shared.bind();
        let _ = call!(cuStreamSynchronize(self.shared.stream));
        let given = match &mut *self.free() {
            Free::Places(arena) => {
                let given = arena.trim();
                self.shared.held.fetch_sub(given, Relaxed);
                given
            }
            Free::Sizes(free) => {
                let pieces =
                    free.drain().flat_map(|(taken, addresses)| addresses.into_iter().map(move |at| (at, taken)));
                pieces.inspect(|&(address, taken)| self.shared.free(address, taken)).map(|(_, taken)| taken).sum()
            }
        };
        self.held.fetch_sub(given, Relaxed);
    }

    fn take_back(&self, address: u64, taken: usize) {
        match &mut *self.free() {
            Free::Places(arena) => arena.give_back(address, taken),
            Free::Sizes(free) => free.entry(taken).or_default().push(address),
        }
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.give_back();
    }
}

thread_local! {
    /// The pools that this thread is within, the innermost last.
    static WITHIN: RefCell<Vec<Arc<Pool>>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, the memory of this thread's passes comes from a pool of its own.
#[must_use]
pub(crate) struct Within(PhantomData<*const ()>);

impl Within {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        WITHIN.with_borrow_mut(|pools| pools.push(pool));
        Self(PhantomData)
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        // Outside of the borrow: it may be the pool's last.
        let _pool = WITHIN.with_borrow_mut(Vec::pop);
    }
}

/// The pool of a device that this thread is within.
pub(crate) fn pool_of_thread(shared: &Arc<Shared>) -> Option<Arc<Pool>> {
    WITHIN.with_borrow(|pools| pools.iter().rev().find(|pool| Arc::ptr_eq(&pool.shared, shared)).cloned())
}

impl Shared {
    /// Takes `bytes` from the driver.
    fn allocate(&self, bytes: usize, operation: &'static str) -> Result<u64> {
        let mut address = 0;
        self.take(bytes, operation, || call!(cuMemAlloc_v2(&mut address, bytes)))?;
        Ok(address)
    }

    /// Takes `bytes` from the driver by `take`.
    pub(crate) fn take(&self, bytes: usize, operation: &'static str, take: impl FnOnce() -> Result<()>) -> Result<()> {
        let _turn = self.bind()?;
        let held = self.held.load(Relaxed);
        let budget = self.budget.load(Relaxed);
        if held.saturating_add(bytes) > budget {
            return Err(Error::OverBudget { operation, asked: bytes, held, budget });
        }
        match take() {
            Err(error) if error.is_out_of_memory() => {
                let (free, total) = self.memory()?;
                Err(Error::OutOfMemory { operation, asked: bytes, free, total, held })
            }
            Err(error) => Err(error),
            Ok(()) => {
                let before = self.held.fetch_add(bytes, Relaxed);
                self.peak.fetch_max(before + bytes, Relaxed);
                Ok(())
            }
        }
    }

    /// Gives memory back once everything that may use it is done.
    fn free(&self, address: u64, bytes: usize) {
        // A failure here has been an error of an earlier call, or comes again with the next.
        let _ = self
            .bind()
            .and_then(|_turn| call!(cuStreamSynchronize(self.stream)).and_then(|()| call!(cuMemFree_v2(address))));
        self.held.fetch_sub(bytes, Relaxed);
    }
}
