//! A CUDA driver that keeps books: a library with the driver's functions as far as `ironloom-kernels` calls them, which takes
//! memory, copies and clears, and launches nothing. So the host's side of a card (memory, plans, recordings, threads) is tested
//! on machines without one: `cargo xtask test` puts it in place of `libcuda` for tests that look at no kernel's result.
//!
//! While a stream is recorded, a call of any other thread fails with error 901, as some calls do on a card: all but
//! `cuTensorMapEncodeTiled`, which asks no context for anything.
//!
//! The signatures are those of `cuda.h`; pointers are taken as the caller's promise that they hold what they name.
#![allow(non_snake_case, reason = "the driver's names")]
#![allow(
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    reason = "every function is the driver's, with its contract"
)]

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    sync::{Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
};

use memmap2::{MmapMut, MmapOptions};

type Status = c_int;
const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const CAPTURE_INVALIDATED: Status = 901;

/// Pieces of memory that can be mapped.
const GRANULE: usize = 2 << 20;
/// Of the card that it plays: an H200 with less memory.
const MEMORY: usize = 64 << 30;
const ATTRIBUTES: [(c_int, c_int); 5] = [(75, 9), (76, 0), (16, 132), (97, 232_448), (38, 50 << 20)];

struct Books {
    /// Host memory that plays the device's, by address.
    memory: BTreeMap<u64, MmapMut>,
    /// Bytes taken.
    used: usize,
    contexts: usize,
    recorder: Option<ThreadId>,
}

static BOOKS: Mutex<Books> = Mutex::new(Books { memory: BTreeMap::new(), used: 0, contexts: 0, recorder: None });

impl Books {
    /// Addresses of `bytes` bytes that read as zero.
    fn map(&mut self, bytes: usize) -> Option<u64> {
        let memory = MmapOptions::new().len(bytes + GRANULE).no_reserve_swap().map_anon().ok()?;
        let address = (memory.as_ptr() as u64).next_multiple_of(GRANULE as u64);
        self.memory.insert(address, memory);
        Some(address)
    }

    fn take(&mut self, bytes: usize) -> Status {
        if bytes > MEMORY - self.used {
            return OUT_OF_MEMORY;
        }
        self.used += bytes;
        SUCCESS
    }
}

/// The books, for a call that no recording of another thread forbids.
fn call(work: impl FnOnce(&mut MutexGuard<'_, Books>) -> Status) -> Status {
    let mut books = BOOKS.lock().unwrap_or_else(PoisonError::into_inner);
    match books.recorder {
        Some(recorder) if recorder != thread::current().id() => CAPTURE_INVALIDATED,
        _ => work(&mut books),
    }
}

/// A call that only writes `value`.
unsafe fn give<T>(to: *mut T, value: T) -> Status {
    call(|_| {
        unsafe { to.write(value) };
        SUCCESS
    })
}

/// Functions that do nothing but ask whether they may.
macro_rules! nothing {
    ($($name:ident($($argument:ty),*);)*) => {
        $(#[unsafe(no_mangle)]
        extern "C" fn $name($(_: $argument),*) -> Status {
            call(|_| SUCCESS)
        })*
    };
}

nothing! {
    cuInit(c_uint);
    cuCtxSetCurrent(*mut c_void);
    cuCtxSetLimit(c_int, usize);
    cuStreamSynchronize(*mut c_void);
    cuStreamDestroy_v2(*mut c_void);
    cuGraphDestroy(*mut c_void);
    cuGraphExecDestroy(*mut c_void);
    cuGraphLaunch(*mut c_void, *mut c_void);
    cuFuncSetAttribute(*mut c_void, c_int, c_int);
    cuLaunchKernelEx(*const c_void, *mut c_void, *mut *mut c_void, *mut *mut c_void);
    cuEventRecord(*mut c_void, *mut c_void);
    cuEventSynchronize(*mut c_void);
    cuEventDestroy_v2(*mut c_void);
    cuMemRelease(u64);
    cuMemSetAccess(u64, usize, *const c_void, usize);
}

/// Functions that give a value of one kind whatever they are asked.
macro_rules! giving {
    ($($name:ident($to:ty $(, $argument:ty)*) = $value:expr;)*) => {
        $(#[unsafe(no_mangle)]
        unsafe extern "C" fn $name(to: *mut $to $(, _: $argument)*) -> Status {
            unsafe { give(to, $value) }
        })*
    };
}

const HANDLE: *mut c_void = std::ptr::without_provenance_mut(1);

giving! {
    cuDriverGetVersion(c_int) = 13_000;
    cuDeviceGetCount(c_int) = 1;
    cuDeviceGet(c_int, c_int) = 0;
    cuDeviceTotalMem_v2(usize, c_int) = MEMORY;
    cuStreamCreate(*mut c_void, c_uint) = HANDLE;
    cuModuleLoadData(*mut c_void, *const c_void) = HANDLE;
    cuModuleGetFunction(*mut c_void, *mut c_void, *const c_char) = HANDLE;
    cuGraphInstantiateWithFlags(*mut c_void, *mut c_void, c_ulonglong) = HANDLE;
    cuEventCreate(*mut c_void, c_uint) = HANDLE;
    cuEventElapsedTime_v2(f32, *mut c_void, *mut c_void) = 1.0;
    cuMemGetAllocationGranularity(usize, *const c_void, c_int) = GRANULE;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _: c_int) -> Status {
    const NAME: &CStr = c"driver of books";
    call(|_| {
        if (length as usize) < NAME.count_bytes() + 1 {
            return INVALID_VALUE;
        }
        unsafe { NAME.as_ptr().copy_to_nonoverlapping(name, NAME.count_bytes() + 1) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _: c_int) -> Status {
    let known = ATTRIBUTES.iter().find(|(number, _)| *number == attribute);
    unsafe { give(value, known.map_or(1, |(_, value)| *value)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxGetState(_: c_int, flags: *mut c_uint, active: *mut c_int) -> Status {
    call(|books| {
        unsafe { (flags.write(0), active.write(c_int::from(books.contexts > 0))) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _: c_int) -> Status {
    call(|books| {
        books.contexts += 1;
        unsafe { context.write(HANDLE) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_: c_int) -> Status {
    call(|books| {
        books.contexts -= 1;
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(_: *mut c_void, _: c_int) -> Status {
    call(|books| {
        books.recorder = Some(thread::current().id());
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(_: *mut c_void, graph: *mut *mut c_void) -> Status {
    call(|books| {
        books.recorder = None;
        unsafe { graph.write(HANDLE) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(_: *mut c_void, status: *mut c_int) -> Status {
    call(|books| {
        unsafe { status.write(c_int::from(books.recorder.is_some())) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphGetNodes(_: *mut c_void, _: *mut *mut c_void, count: *mut usize) -> Status {
    unsafe { give(count, 2) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    call(|books| {
        unsafe { (free.write(MEMORY - books.used), total.write(MEMORY)) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Status {
    call(|books| match books.take(bytes) {
        SUCCESS => match books.map(bytes) {
            Some(found) => {
                unsafe { address.write(found) };
                SUCCESS
            }
            None => OUT_OF_MEMORY,
        },
        other => other,
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> Status {
    call(|books| match books.memory.remove(&address) {
        Some(memory) => {
            books.used -= memory.len() - GRANULE;
            SUCCESS
        }
        None => INVALID_VALUE,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(address: *mut u64, bytes: usize, _: usize, _: u64, _: c_ulonglong) -> Status {
    call(|books| match books.map(bytes) {
        Some(found) => {
            unsafe { address.write(found) };
            SUCCESS
        }
        None => OUT_OF_MEMORY,
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, _: usize) -> Status {
    call(|books| if books.memory.remove(&address).is_some() { SUCCESS } else { INVALID_VALUE })
}

/// Its handle is its size.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(handle: *mut u64, bytes: usize, _: *const c_void, _: c_ulonglong) -> Status {
    if !bytes.is_multiple_of(GRANULE) { INVALID_VALUE } else { unsafe { give(handle, bytes as u64) } }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, bytes: usize, _: usize, handle: u64, _: c_ulonglong) -> Status {
    call(|books| {
        let fits = address.is_multiple_of(GRANULE as u64) && handle == bytes as u64;
        if fits { books.take(bytes) } else { INVALID_VALUE }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(_: u64, bytes: usize) -> Status {
    call(|books| {
        books.used -= bytes;
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, _: c_uint) -> Status {
    call(|books| match books.map(bytes) {
        Some(found) => {
            unsafe { host.write(found as *mut c_void) };
            SUCCESS
        }
        None => OUT_OF_MEMORY,
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(host: *mut c_void) -> Status {
    call(|books| if books.memory.remove(&(host as u64)).is_some() { SUCCESS } else { INVALID_VALUE })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(address: *mut u64, host: *mut c_void, _: c_uint) -> Status {
    unsafe { give(address, host as u64) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, _: *mut c_void) -> Status {
    call(|_| {
        unsafe { from.cast::<u8>().copy_to(to as *mut u8, bytes) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, _: *mut c_void) -> Status {
    call(|_| {
        unsafe { (from as *const u8).copy_to(to.cast(), bytes) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _: *mut c_void) -> Status {
    call(|_| {
        unsafe { (from as *const u8).copy_to(to as *mut u8, bytes) };
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(to: u64, byte: u8, bytes: usize, _: *mut c_void) -> Status {
    call(|_| {
        unsafe { (to as *mut u8).write_bytes(byte, bytes) };
        SUCCESS
    })
}

/// Allowed at any time: it puts numbers together and asks the device for nothing.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuTensorMapEncodeTiled(
    _: *mut c_void,
    _: c_int,
    _: c_uint,
    _: *mut c_void,
    _: *const u64,
    _: *const u64,
    _: *const c_uint,
    _: *const c_uint,
    _: c_int,
    _: c_int,
    _: c_int,
    _: c_int,
) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(_: Status, text: *mut *const c_char) -> Status {
    unsafe { text.write(c"an error of the driver of books".as_ptr()) };
    SUCCESS
}
