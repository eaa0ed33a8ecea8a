//! What can go wrong on a device.

use cudarc::{cublaslt::sys::cublasStatus_t, driver::sys::CUresult};

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library is not installed.
    #[error("no CUDA driver found (libcuda.so.1 or nvcuda.dll): install NVIDIA's driver, or run on the CPU")]
    NoDriver,
    /// There is no such device.
    #[error(
        "there is no CUDA device {ordinal}: {count} found; check nvidia-smi and CUDA_VISIBLE_DEVICES, or run on the CPU"
    )]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The driver is older than the calls that are made.
    #[error(
        "the driver serves CUDA {}.{}, and {}.{} or later is needed: update NVIDIA's driver, or run on the CPU",
        found.0, found.1, needed.0, needed.1
    )]
    OldDriver {
        /// The newest CUDA that it serves, major and minor number.
        found: (u32, u32),
        /// The oldest that suffices.
        needed: (u32, u32),
    },
    /// The card is older than the kernels.
    #[error(
        "{name} has compute capability {major}.{minor}, and the kernels need 8.0 (Ampere) or later: run on the CPU"
    )]
    UnsupportedCard {
        /// The card.
        name: String,
        /// Its compute capability before the dot.
        major: u32,
        /// And after it.
        minor: u32,
    },
    /// The build had no `nvcc`.
    #[error(
        "this program was built without CUDA kernels: put nvcc on the path or set CUDA_HOME (in a checkout, `cargo xtask \
         cuda-toolchain` gets one) and build it again"
    )]
    NoKernels,
    /// A kernel is not in the embedded images: a launcher and its source differ.
    #[error("the kernel {kernel} is not in the image {image}: rebuild with all of kernels/cuda")]
    NoKernel {
        /// The source's name.
        image: &'static str,
        /// The kernel's name.
        kernel: &'static str,
    },
    /// The embedded kernels were compiled for other architectures.
    #[error(
        "the embedded kernels have no code for {name} (compute capability {major}.{minor}): build without IRONLOOM_CUDA_ARCHS"
    )]
    NoCode {
        /// The card.
        name: String,
        /// Its compute capability before the dot.
        major: u32,
        /// And after it.
        minor: u32,
    },
    /// The device has no room.
    #[error(
        "out of device memory: {operation} asked for {}, {free} of {total} are free, {held} are held by this \
         program; use a smaller context or batch, or a more strongly quantized model",
        if *asked == 0 { "memory".into() } else { format!("{asked} bytes") }
    )]
    OutOfMemory {
        /// What asked.
        operation: &'static str,
        /// How many bytes; 0 where only the driver knows.
        asked: usize,
        /// Bytes free on the device.
        free: usize,
        /// Bytes of the device.
        total: usize,
        /// Bytes this program holds.
        held: usize,
    },
    /// The host has no room for memory that the device can write to.
    #[error("the host has no {asked} bytes of pinned memory: end other programs that hold some")]
    OutOfHostMemory {
        /// How many bytes.
        asked: usize,
    },
    /// The budget the caller set is used up.
    #[error(
        "{operation} asked for {asked} bytes, and {held} of the budget of {budget} are held: raise the memory budget"
    )]
    OverBudget {
        /// What asked.
        operation: &'static str,
        /// How many bytes.
        asked: usize,
        /// Bytes held.
        held: usize,
        /// The budget.
        budget: usize,
    },
    /// A call of the driver failed.
    #[error("CUDA: {call} failed: {message} ({code})")]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's number.
        code: u32,
        /// The driver's words.
        message: String,
    },
    /// cuBLASLt is not installed.
    #[error(
        "cuBLASLt was not found (libcublasLt.so.13 or .12): install it, or let products run on the built-in kernels"
    )]
    CublasLtMissing,
    /// A call of cuBLASLt failed.
    #[error(
        "cuBLASLt: {call} failed with status {status}; IRONLOOM_OFF=cublaslt lets products run on the built-in kernels"
    )]
    CublasLt {
        /// The call.
        call: &'static str,
        /// The library's number.
        status: u32,
    },
    /// A size is not what a kernel needs.
    #[error("{operation}: {what} is {found}, and {expected} is needed")]
    Shape {
        /// The operation.
        operation: &'static str,
        /// Which size.
        what: &'static str,
        /// What it has to be, or at least to be.
        expected: usize,
        /// What it is.
        found: usize,
    },
    /// There is no kernel for this.
    #[error("{operation}: there is no CUDA kernel for {what}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// For what.
        what: String,
    },
    /// A size does not fit into an address.
    #[error("a size overflows")]
    SizeOverflow,
}

impl Error {
    /// Whether there was no room, whoever says so: with less to hold the same call may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } | Self::OutOfHostMemory { .. } | Self::OverBudget { .. } => true,
            Self::Driver { code, .. } => *code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32,
            Self::CublasLt { status, .. } => *status == cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED as u32,
            _ => false,
        }
    }
}
