//! Starting a kernel: its function, its grid, its arguments.

use std::{
    ffi::{CString, c_void},
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use bytemuck::NoUninit;
use cudarc::driver::sys;

use crate::{
    Error, Gpu, Result,
    driver::{self, call},
    images,
};

/// A kernel of an image, ready to start.
#[derive(Clone)]
pub(crate) struct Function {
    name: &'static str,
    raw: sys::CUfunction,
    /// The dynamic shared memory it has been allowed.
    shared_bytes: Arc<AtomicU32>,
}

// SAFETY: a function is a handle that any thread may use with its context bound.
unsafe impl Send for Function {}
// SAFETY: as above; the driver's calls that take it are thread-safe.
unsafe impl Sync for Function {}

/// How a kernel is started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// Blocks in x, y and z.
    pub(crate) grid: [u32; 3],
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
}

/// A kernel's arguments, in the order of its parameters.
#[derive(Default)]
pub(crate) struct Arguments {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Arguments {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// A number of eight bytes, or an address.
    pub(crate) fn u64(self, value: u64) -> Self {
        self.value(value)
    }

    pub(crate) fn i32(self, value: i32) -> Self {
        self.value(value)
    }

    pub(crate) fn f32(self, value: f32) -> Self {
        self.value(value)
    }

    /// Any plain value: a struct that the kernel takes by value.
    pub(crate) fn value<T: NoUninit>(mut self, value: T) -> Self {
        self.starts.push(self.words.len());
        for bytes in bytemuck::bytes_of(&value).chunks(8) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.words.push(u64::from_ne_bytes(word));
        }
        self
    }
}

/// Shared memory of a block that needs no permission.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;

impl Gpu {
    /// The kernel `name` of `cuda/<image>.cu`.
    pub(crate) fn function(&self, image: &'static str, name: &'static str) -> Result<Function> {
        // Before the lock: a thread that records may want it, and this one waits for that.
        let _turn = self.inner.shared.bind()?;
        let mut loaded = self.inner.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded.functions.get(&(image, name)) {
            return Ok(function.clone());
        }
        let missing = Error::NoKernel { image, kernel: name };
        let module = match loaded.modules.get(image) {
            Some(module) => module.0,
            None => {
                let found = images().iter().find(|known| known.name == image);
                let Some(found) = found else { return Err(missing) };
                let mut module = std::ptr::null_mut();
                // SAFETY: the image is a whole fatbin, whose header tells its size.
                let load = || match unsafe { sys::cuModuleLoadData(&mut module, found.fatbin.as_ptr().cast()) } {
                    sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {
                        let (major, minor) = self.properties().compute_capability;
                        Err(Error::NoCode { name: self.properties().name.clone(), major, minor })
                    }
                    result => driver::check("cuModuleLoadData", result),
                };
                self.with_room("kernels", load)?;
                loaded.modules.insert(image, crate::gpu::Module(module));
                module
            }
        };
        let symbol = CString::new(name).unwrap_or_default();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name is a string of C.
        match unsafe { sys::cuModuleGetFunction(&mut raw, module, symbol.as_ptr()) } {
            sys::CUresult::CUDA_SUCCESS => {}
            sys::CUresult::CUDA_ERROR_NOT_FOUND => return Err(missing),
            other => return Err(driver::failure("cuModuleGetFunction", other)),
        }
        let function = Function { name, raw, shared_bytes: Arc::new(AtomicU32::new(PLAIN_SHARED_BYTES)) };
        loaded.functions.insert((image, name), function.clone());
        Ok(function)
    }

    /// Puts a kernel into the stream. A grid without blocks is no work.
    pub(crate) fn launch(&self, function: &Function, launch: Launch, arguments: Arguments) -> Result<()> {
        self.launch_sized(function, launch, arguments, None)
    }

    /// The same for a product, whose rows, columns and products in each sum a profile tells.
    pub(crate) fn launch_product(
        &self,
        function: &Function,
        launch: Launch,
        arguments: Arguments,
        size: [usize; 3],
    ) -> Result<()> {
        self.launch_sized(function, launch, arguments, Some(size))
    }

    fn launch_sized(
        &self,
        function: &Function,
        launch: Launch,
        arguments: Arguments,
        size: Option<[usize; 3]>,
    ) -> Result<()> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let _turn = self.inner.shared.bind()?;
        if launch.shared_bytes > function.shared_bytes.load(Relaxed) {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            call!(cuFuncSetAttribute(function.raw, attribute, launch.shared_bytes as i32))?;
            function.shared_bytes.store(launch.shared_bytes, Relaxed);
        }
        let mut parameters: Vec<*mut c_void> =
            arguments.starts.iter().map(|&start| (&raw const arguments.words[start]).cast_mut().cast()).collect();
        // The next kernel may start while this one ends: see `wait_for_previous_kernel` in vocabulary/device.cuh.
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.inner.shared.stream,
            attrs: &mut overlap,
            numAttrs: u32::from(self.inner.overlap && !self.is_profiling()),
        };
        self.timed(function.name, size, || {
            call!(cuLaunchKernelEx(&config, function.raw, parameters.as_mut_ptr(), std::ptr::null_mut()))
        })
    }
}
