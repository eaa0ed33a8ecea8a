//! [`Gpu`]: one device with one stream, its memory and its kernels.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use cudarc::driver::sys;

use crate::{
    Buffer, Error, Result, Slice,
    buffer::{Pool, pool_of_thread},
    driver::{call, once_more},
    images,
    launch::Function,
    profile::Recorder,
    turn::Turn,
};

/// What is known of a card.
#[derive(Clone, Debug, PartialEq)]
pub struct Properties {
    /// The name, such as `NVIDIA H200`.
    pub name: String,
    /// Major and minor number.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// The most shared memory of a block, in bytes.
    pub shared_per_block: u32,
    /// The second-level cache, in bytes.
    pub l2_bytes: u32,
    /// All of its memory, in bytes.
    pub memory_bytes: usize,
    /// The newest CUDA that the driver serves, major and minor number.
    pub driver: (u32, u32),
}

/// The first CUDA whose driver has every function that is called without a look at its version (tensor maps came last). One
/// that is missing would panic where it is loaded, so older drivers are refused before any but [`Gpu::open`]'s first calls,
/// which all drivers have.
const DRIVER_FROM: (u32, u32) = (12, 0);

/// The first compute capability with clusters of blocks.
pub(crate) const CLUSTERS_FROM: (u32, u32) = (9, 0);

/// A device with one stream. Cloning shares it.
#[derive(Clone)]
pub struct Gpu {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    properties: Properties,
    /// Whether consecutive kernels may overlap.
    pub(crate) overlap: bool,
    /// Where the memory of passes comes from, unless a thread is within another pool.
    pool: Arc<Pool>,
    pub(crate) functions: Mutex<Loaded>,
    /// Times kernels while a profile is taken.
    pub(crate) recorder: Recorder,
}

/// Modules by image and functions by image and name.
#[derive(Default)]
pub(crate) struct Loaded {
    pub(crate) modules: HashMap<&'static str, Module>,
    pub(crate) functions: HashMap<(&'static str, &'static str), Function>,
}

/// A loaded image; it stays until the context goes.
pub(crate) struct Module(pub(crate) sys::CUmodule);

// SAFETY: a module is a handle that any thread may use with its context bound.
unsafe impl Send for Module {}

/// The context and the stream: what memory needs to be given back.
pub(crate) struct Shared {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub(crate) stream: sys::CUstream,
    /// Bytes taken from the driver.
    pub(crate) held: AtomicUsize,
    /// The most that was held.
    pub(crate) peak: AtomicUsize,
    /// The most bytes to take.
    pub(crate) budget: AtomicUsize,
}

// SAFETY: the handles may be used by any thread that binds the context, as every method does.
unsafe impl Send for Shared {}
// SAFETY: as above; the driver's calls are thread-safe.
unsafe impl Sync for Shared {}

impl Shared {
    /// Makes the context this thread's, for a turn at the driver.
    pub(crate) fn bind(&self) -> Result<Turn> {
        let turn = Turn::shared();
        call!(cuCtxSetCurrent(self.context))?;
        Ok(turn)
    }

    pub(crate) fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// Bytes free and bytes in all.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        let _turn = self.bind()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free, total))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nothing can be done about a failure at the end.
        let _turn = self.bind();
        let _ = call!(cuStreamSynchronize(self.stream));
        let _ = call!(cuStreamDestroy_v2(self.stream));
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.device));
    }
}

impl Gpu {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// The driver, the device or the kernels are missing, or the driver or the card is too old: each has its own error.
    pub fn open(ordinal: usize) -> Result<Self> {
        // SAFETY: it only asks the loader for the library. Calling into a library that isn't there would panic.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoDriver);
        }
        let _turn = Turn::shared();
        // SAFETY: the library is there.
        match unsafe { sys::cuInit(0) } {
            sys::CUresult::CUDA_SUCCESS => {}
            sys::CUresult::CUDA_ERROR_NO_DEVICE => return Err(Error::NoDevice { ordinal, count: 0 }),
            // A stub of the library, as build machines have it.
            sys::CUresult::CUDA_ERROR_STUB_LIBRARY => return Err(Error::NoDriver),
            other => return Err(crate::driver::failure("cuInit", other)),
        }
        let mut version = 0;
        call!(cuDriverGetVersion(&mut version))?;
        let driver = served(version)?;
        let mut count = 0;
        call!(cuDeviceGetCount(&mut count))?;
        let count = count as usize;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let mut device = 0;
        call!(cuDeviceGet(&mut device, ordinal as i32))?;
        let properties = properties(device, driver)?;
        let (major, minor) = properties.compute_capability;
        if major < 8 {
            return Err(Error::UnsupportedCard { name: properties.name, major, minor });
        }
        if images().is_empty() {
            return Err(Error::NoKernels);
        }
        let mut shared = Shared {
            device,
            context: context(device)?,
            stream: std::ptr::null_mut(),
            held: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            budget: AtomicUsize::new(usize::MAX),
        };
        let _turn = shared.bind()?;
        call!(cuStreamCreate(&mut shared.stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        let shared = Arc::new(shared);
        // Captured overlap became edges of graphs with CUDA 12.3.
        let overlap = major >= 9 && properties.driver >= (12, 3) && !ironloom_core::is_off("overlap");
        let pool = Arc::new(Pool::new(shared.clone()));
        let (functions, recorder) = (Mutex::default(), Recorder::default());
        Ok(Self { inner: Arc::new(Inner { shared, properties, overlap, pool, functions, recorder }) })
    }

    /// Whether both are one opened device, and so one stream.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// What is known of the card.
    pub fn properties(&self) -> &Properties {
        &self.inner.properties
    }

    /// Bytes free on the card and bytes of the card.
    ///
    /// # Errors
    /// The driver fails.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.inner.shared.memory()
    }

    /// Bytes that may still be taken: what is free on the card, and what the budget leaves.
    ///
    /// # Errors
    /// The driver fails.
    pub fn available_bytes(&self) -> Result<usize> {
        let left = self.inner.shared.budget.load(Relaxed).saturating_sub(self.held_bytes());
        Ok(self.memory()?.0.min(left))
    }

    /// Bytes taken from the driver by this program and not given back.
    pub fn held_bytes(&self) -> usize {
        self.inner.shared.held.load(Relaxed)
    }

    /// The most of [`Gpu::held_bytes`] so far.
    pub fn peak_bytes(&self) -> usize {
        self.inner.shared.peak.load(Relaxed)
    }

    /// Sets the most bytes to take from the driver.
    pub fn set_budget(&self, bytes: usize) {
        self.inner.shared.budget.store(bytes, Relaxed);
    }

    /// Memory for the time of a pass, with undefined contents. A dropped buffer's memory serves the next of its size.
    ///
    /// # Errors
    /// There is no room: the error names `operation`.
    pub fn allocate(&self, bytes: usize, operation: &'static str) -> Result<Buffer> {
        self.pool().allocate(bytes, operation)
    }

    /// Memory that goes back to the driver when it is dropped, with undefined contents: weights, caches.
    ///
    /// # Errors
    /// There is no room: the error names `operation`.
    pub fn allocate_lasting(&self, bytes: usize, operation: &'static str) -> Result<Buffer> {
        once_more(|| Buffer::lasting(&self.inner.shared, bytes, operation), || self.trim())
    }

    /// Lasting memory that holds zeros.
    ///
    /// # Errors
    /// There is no room: the error names `operation`.
    pub fn allocate_cleared(&self, bytes: usize, operation: &'static str) -> Result<Buffer> {
        let buffer = self.allocate_lasting(bytes, operation)?;
        self.clear(buffer.slice())?;
        Ok(buffer)
    }

    /// Lasting memory that holds `bytes`.
    ///
    /// # Errors
    /// There is no room: the error names `operation`.
    pub fn upload(&self, bytes: &[u8], operation: &'static str) -> Result<Buffer> {
        let buffer = self.allocate_lasting(bytes.len(), operation)?;
        self.write(buffer.slice(), bytes)?;
        Ok(buffer)
    }

    /// Gives unused memory of passes back to the driver.
    pub fn trim(&self) {
        self.pool().trim();
    }

    /// Where the memory of this thread's passes comes from now.
    pub(crate) fn pool(&self) -> Arc<Pool> {
        pool_of_thread(&self.inner.shared).unwrap_or_else(|| self.inner.pool.clone())
    }

    /// Writes `bytes` to the start of `to`; they may change as soon as this returns.
    ///
    /// # Errors
    /// `to` is shorter, or the driver fails.
    pub fn write(&self, to: Slice<'_>, bytes: &[u8]) -> Result<()> {
        let address = to.expect("write", "the destination's size in bytes", bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let _turn = self.inner.shared.bind()?;
        call!(cuMemcpyHtoDAsync_v2(address, bytes.as_ptr().cast(), bytes.len(), self.inner.shared.stream))
    }

    /// Reads the first bytes of `from`, once everything before is done.
    ///
    /// # Errors
    /// `from` is shorter, or something before failed.
    pub fn read(&self, from: Slice<'_>, bytes: &mut [u8]) -> Result<()> {
        let address = from.expect("read", "the source's size in bytes", bytes.len())?;
        let _turn = self.inner.shared.bind()?;
        if !bytes.is_empty() {
            let stream = self.inner.shared.stream;
            call!(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), address, bytes.len(), stream))?;
        }
        self.synchronize()
    }

    /// Copies `from` to the start of `to`, which it may not overlap.
    ///
    /// # Errors
    /// `to` is shorter, or the driver fails.
    pub fn copy(&self, to: Slice<'_>, from: Slice<'_>) -> Result<()> {
        let address = to.expect("copy", "the destination's size in bytes", from.bytes())?;
        if from.bytes() == 0 {
            return Ok(());
        }
        let _turn = self.inner.shared.bind()?;
        call!(cuMemcpyDtoDAsync_v2(address, from.address(), from.bytes(), self.inner.shared.stream))
    }

    /// Sets every byte of `to` to zero.
    ///
    /// # Errors
    /// The driver fails.
    pub fn clear(&self, to: Slice<'_>) -> Result<()> {
        if to.bytes() == 0 {
            return Ok(());
        }
        let _turn = self.inner.shared.bind()?;
        call!(cuMemsetD8Async(to.address(), 0, to.bytes(), self.inner.shared.stream))
    }

    /// Waits until everything in the stream is done.
    ///
    /// # Errors
    /// Something before failed.
    pub fn synchronize(&self) -> Result<()> {
        let _turn = self.inner.shared.bind()?;
        call!(cuStreamSynchronize(self.inner.shared.stream))
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({})", self.inner.properties.name)
    }
}

/// The context that all users of a device in this process share, which is this thread's afterwards.
fn context(device: sys::CUdevice) -> Result<sys::CUcontext> {
    /// Held by the thread that may be making it.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut flags, mut is_used, mut context) = (0, 0, std::ptr::null_mut());
    call!(cuDevicePrimaryCtxGetState(device, &mut flags, &mut is_used))?;
    call!(cuDevicePrimaryCtxRetain(&mut context, device))?;
    if is_used == 0 && call!(cuCtxSetCurrent(context)).is_ok() {
        // The driver keeps room for the stack of every thread that the card can hold, by default 1 KiB each, 264 MiB on an
        // H200. It makes more when a kernel needs more. Where it keeps the room, nothing is lost. Kernels that run while the
        // limit is set fail (error 719), so a context that others use already stays as it is.
        let _ = call!(cuCtxSetLimit(sys::CUlimit::CU_LIMIT_STACK_SIZE, 0));
    }
    Ok(context)
}

/// The newest CUDA that a driver serves, major and minor number, from the driver's number for it.
///
/// # Errors
/// It is too old.
fn served(version: i32) -> Result<(u32, u32)> {
    let found = (version as u32 / 1000, version as u32 % 1000 / 10);
    if found < DRIVER_FROM { Err(Error::OldDriver { found, needed: DRIVER_FROM }) } else { Ok(found) }
}

fn properties(device: sys::CUdevice, driver: (u32, u32)) -> Result<Properties> {
    let attribute = |which| -> Result<u32> {
        let mut value = 0;
        call!(cuDeviceGetAttribute(&mut value, which, device))?;
        Ok(value as u32)
    };
    use sys::CUdevice_attribute as Attribute;
    let mut name = [0; 128];
    call!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device))?;
    let name = name.iter().take_while(|&&letter| letter != 0).map(|&letter| letter as u8 as char).collect();
    let mut memory_bytes = 0;
    call!(cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
    Ok(Properties {
        name,
        compute_capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        memory_bytes,
        driver,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_too_old_is_named_with_what_is_needed() {
        let error = served(11_080).unwrap_err();
        assert!(matches!(error, Error::OldDriver { found: (11, 8), needed: (12, 0) }));
        assert!(error.to_string().contains("serves CUDA 11.8, and 12.0 or later is needed"), "{error}");
        assert_eq!(
            [served(12_000), served(12_030), served(13_000)].map(Result::ok),
            [Some((12, 0)), Some((12, 3)), Some((13, 0))]
        );
    }
}
