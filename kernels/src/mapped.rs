//! Memory of the host that kernels write to, for news that the host reads without waiting for the stream.

use std::{ffi::c_void, ptr::NonNull, sync::Arc};

use cudarc::driver::sys;

use crate::{Error, Gpu, Result, driver::call, gpu::Shared};

/// Pinned memory of the host with an address on the device, set to zero.
pub struct Mapped {
    shared: Arc<Shared>,
    host: NonNull<c_void>,
    address: u64,
    bytes: usize,
}

// SAFETY: it is plain memory that its owner alone frees.
unsafe impl Send for Mapped {}
// SAFETY: it is read with volatile loads only.
unsafe impl Sync for Mapped {}

impl Gpu {
    /// `bytes` bytes of such memory.
    ///
    /// # Errors
    /// The host has no room.
    pub fn mapped(&self, bytes: usize) -> Result<Mapped> {
        let shared = self.inner.shared.clone();
        let _turn = shared.bind()?;
        let mut host = std::ptr::null_mut();
        let asked = bytes.max(8);
        call!(cuMemHostAlloc(&mut host, asked, sys::CU_MEMHOSTALLOC_DEVICEMAP))
            .map_err(|error| if error.is_out_of_memory() { Error::OutOfHostMemory { asked } } else { error })?;
        let Some(host) = NonNull::new(host) else { return Err(Error::SizeOverflow) };
        let mut mapped = Mapped { shared, host, address: 0, bytes };
        // SAFETY: the memory was allocated with this size.
        unsafe { host.cast::<u8>().write_bytes(0, asked) };
        call!(cuMemHostGetDevicePointer_v2(&mut mapped.address, host.as_ptr(), 0))?;
        Ok(mapped)
    }
}

impl Mapped {
    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes it holds.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The u32 at `index`, as it is now.
    ///
    /// # Errors
    /// The memory ends before.
    pub fn u32(&self, index: usize) -> Result<u32> {
        let at = self.place(index, 4)?;
        // SAFETY: the place is inside the memory and aligned; the device may change it at any time, hence volatile.
        Ok(unsafe { at.cast::<u32>().read_volatile() })
    }

    /// The u64 at `index`, as it is now.
    ///
    /// # Errors
    /// The memory ends before.
    pub fn u64(&self, index: usize) -> Result<u64> {
        let at = self.place(index, 8)?;
        // SAFETY: as in `u32`.
        let value = unsafe { at.cast::<u64>().read_volatile() };
        // What the device wrote before this number is seen after it.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        Ok(value)
    }

    fn place(&self, index: usize, element: usize) -> Result<*const u8> {
        let end = index.checked_add(1).and_then(|end| end.checked_mul(element)).ok_or(Error::SizeOverflow)?;
        if end > self.bytes {
            let (expected, found) = (end, self.bytes);
            return Err(Error::Shape { operation: "mapped memory", what: "the size in bytes", expected, found });
        }
        // SAFETY: the end is inside the allocation.
        Ok(unsafe { self.host.as_ptr().cast::<u8>().add(end - element) })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // The device may still write to it; nothing can be done about a failure at the end.
        let _turn = self.shared.bind();
        let _ = call!(cuStreamSynchronize(self.shared.stream));
        let _ = call!(cuMemFreeHost(self.host.as_ptr()));
    }
}

impl std::fmt::Debug for Mapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mapped({} bytes)", self.bytes)
    }
}
