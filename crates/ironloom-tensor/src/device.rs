//! Where operations run, and what records them.

use std::sync::{Arc, OnceLock};

use ironloom_core::{SimdLevel, Threads};
use ironloom_kernels::{CublasLt, Form, Gpu, Multiply, Product, gemm, gemm_transposed};

use crate::{Error, Result, Tape};

/// Where tensors live and operations run. Chosen at run time and passed explicitly, never global.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// The processor.
    Cpu(CpuDevice),
    /// A graphics card of NVIDIA.
    Cuda(CudaDevice),
}

/// The processor: its threads and the vector instructions to use.
#[derive(Clone, Debug)]
pub struct CpuDevice {
    /// The threads that share an operation's work.
    pub threads: Threads,
    /// The vector instructions to use; every level gives the same bits.
    pub level: SimdLevel,
}

/// A graphics card, and the processor's threads that ready its weights.
#[derive(Clone)]
pub struct CudaDevice {
    gpu: Gpu,
    threads: Threads,
    /// cuBLASLt, once asked for; none where it is not installed.
    cublaslt: Arc<OnceLock<Option<CublasLt>>>,
}

impl CudaDevice {
    /// The card.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// A product of many rows.
    pub(crate) fn product(&self, call: &Product<'_>) -> Result<()> {
        match self.cublaslt()? {
            Some(library) => Ok(library.matmul(&self.gpu, call)?),
            None => Ok(gemm(&self.gpu, call)?),
        }
    }

    /// A product of training, of operands in bfloat16: by cuBLASLt, or by our own kernel where it is not installed.
    ///
    /// # Errors
    /// A slice is too small, a size or an address is not as the product takes it, or the device fails.
    pub fn multiply(&self, call: &Multiply<'_>) -> ironloom_kernels::Result<()> {
        match self.cublaslt()? {
            Some(library) => library.multiply(&self.gpu, call),
            None => gemm_transposed(&self.gpu, call),
        }
    }

    /// Whether products of many rows go to our own kernel because cuBLASLt is not installed: slower, and to be told.
    ///
    /// # Errors
    /// It is installed, and cannot serve the card now.
    pub fn lacks_cublaslt(&self) -> Result<bool> {
        Ok(wants_cublaslt() && self.cublaslt()?.is_none())
    }

    fn cublaslt(&self) -> ironloom_kernels::Result<Option<&CublasLt>> {
        if let Some(known) = self.cublaslt.get() {
            return Ok(known.as_ref());
        }
        let opened = match wants_cublaslt() {
            true => unless_missing(CublasLt::open(&self.gpu, CublasLt::CHOICE_ROWS))?,
            false => None,
        };
        Ok(self.cublaslt.get_or_init(|| opened).as_ref())
    }
}

fn wants_cublaslt() -> bool {
    !ironloom_core::is_off("cublaslt")
}

/// A library, or none where it is not installed. What fails otherwise (it has no room just now) may go later, and must not
/// decide for good which kernel rounds the products.
fn unless_missing<T>(opened: ironloom_kernels::Result<T>) -> ironloom_kernels::Result<Option<T>> {
    match opened {
        Ok(library) => Ok(Some(library)),
        Err(ironloom_kernels::Error::CublasLtMissing) => Ok(None),
        Err(error) => Err(error),
    }
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDevice").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

/// Which kernels the products of a pass on a graphics card use. Each gives a row the same bits whatever rows lie beside it,
/// but the two round differently; a model chooses by a sequence's own rows, never by those beside it. The processor has one
/// kind only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// Up to 64 rows: operands in two halves (16 bits of mantissa), weights read packed.
    Few,
    /// More: operands in bfloat16, weights as bfloat16.
    Many,
}

impl Device {
    /// The processor with `threads` threads; 0 takes all.
    pub fn cpu(threads: usize) -> Self {
        let threads = if threads == 0 { Threads::all() } else { Threads::new(threads) };
        Self::Cpu(CpuDevice { threads, level: SimdLevel::detect() })
    }

    /// Graphics card `ordinal`, whose weights `threads` threads ready; 0 takes all.
    ///
    /// # Errors
    /// There is no driver, no such card, or no kernel for it: the error says which, and what to do.
    pub fn cuda(ordinal: usize, threads: usize) -> Result<Self> {
        let threads = if threads == 0 { Threads::all() } else { Threads::new(threads) };
        Ok(Self::Cuda(CudaDevice { gpu: Gpu::open(ordinal)?, threads, cublaslt: Arc::default() }))
    }

    /// The graphics card, for what exists on none but such.
    ///
    /// # Errors
    /// The device is the processor: the error names `operation`.
    pub fn card(&self, operation: &'static str) -> Result<&CudaDevice> {
        match self {
            Self::Cpu(_) => Err(Error::NeedsCard { operation }),
            Self::Cuda(cuda) => Ok(cuda),
        }
    }

    /// Whether work given to both runs in one order on the same memory. The processor is one device, with whatever threads; a
    /// graphics card is another each time it is opened, for each has its own stream.
    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cpu(_), Self::Cpu(_)) => true,
            (Self::Cuda(this), Self::Cuda(other)) => this.gpu.is(&other.gpu),
            _ => false,
        }
    }

    /// The threads that host work for this device may use.
    pub fn threads(&self) -> &Threads {
        match self {
            Self::Cpu(cpu) => &cpu.threads,
            Self::Cuda(cuda) => &cuda.threads,
        }
    }

    /// The processor with the same threads: where what a card trains is read and made.
    pub fn processor(&self) -> Self {
        Self::Cpu(CpuDevice { threads: self.threads().clone(), level: SimdLevel::detect() })
    }

    /// Waits until everything it was given is done.
    ///
    /// # Errors
    /// Something it was given failed.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Cuda(cuda) => Ok(cuda.gpu.synchronize()?),
        }
    }

    /// The device's name for people, such as `cpu (2 threads)`.
    pub fn describe(&self) -> String {
        match self {
            Self::Cpu(cpu) => format!("cpu ({} threads, {:?})", cpu.threads.count(), cpu.level),
            Self::Cuda(cuda) => format!("cuda ({})", cuda.gpu.properties().name),
        }
    }
}

/// What an operation needs besides its operands.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Where it runs.
    pub device: &'a Device,
    /// What records it for a backward pass; `None` keeps nothing.
    pub tape: Option<&'a Tape>,
    /// Which kernels products use where there are two kinds.
    pub path: Path,
    /// Whether nobody reads the values that the operation gives.
    unread: bool,
}

impl<'a> Context<'a> {
    /// A context that records nothing.
    pub fn inference(device: &'a Device) -> Self {
        Self { device, tape: None, path: Path::Many, unread: false }
    }

    /// A context that records operations on `tape`.
    pub fn training(device: &'a Device, tape: &'a Tape) -> Self {
        Self { device, tape: Some(tape), path: Path::Many, unread: false }
    }

    /// The same with products of `path`.
    pub fn with_path(self, path: Path) -> Self {
        Self { path, ..self }
    }

    /// The context of the operation whose output is that of the part that the tape records. Where the part runs again for its
    /// gradients ([`Tape::checkpoint`]) nobody reads that output, and the operation may leave it undefined.
    pub fn last(self) -> Self {
        Self { unread: self.tape.is_some_and(Tape::runs_again), ..self }
    }

    /// The context of an operation whose output others read.
    pub fn inside(self) -> Self {
        Self { unread: false, ..self }
    }

    /// Whether nobody reads the values that the operation gives: all but its gradients may be left out.
    pub(crate) fn is_unread(&self) -> bool {
        self.unread
    }

    /// The processor to run on.
    ///
    /// # Errors
    /// The device is another, and `operation` has no kernel for it.
    pub(crate) fn cpu(&self, operation: &'static str) -> Result<&'a CpuDevice> {
        match self.device {
            Device::Cpu(cpu) => Ok(cpu),
            Device::Cuda(_) => Err(Error::NoKernel { operation, device: "a graphics card" }),
        }
    }

    /// The graphics card to run on, if it is one.
    pub(crate) fn gpu(&self) -> Option<&'a Gpu> {
        match self.device {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(&cuda.gpu),
        }
    }

    /// What products of this context's path read.
    pub(crate) fn operand_form(&self) -> Form {
        match self.path {
            Path::Few => Form::Split,
            Path::Many => Form::Bf16,
        }
    }

    /// Refuses an operation without a gradient when a tape records: a silent gap would give wrong gradients.
    pub(crate) fn without_gradient(&self, operation: &'static str) -> Result<()> {
        if self.tape.is_some() { Err(Error::NoGradient { operation }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Indices, Tensor, ops};

    #[test]
    fn the_processor_is_one_device_and_a_card_one_each_time_it_is_opened() {
        let processor = Device::cpu(1);
        assert!(processor.is(&Device::cpu(2)) && processor.is(&processor.clone()));
        let open = || Device::cuda(0, 1).inspect_err(|error| println!("skipped: {error}"));
        let (Ok(card), Ok(again)) = (open(), open()) else { return };
        assert!(card.is(&card.clone()) && !card.is(&again));
        assert!(!card.is(&processor) && !processor.is(&card));
    }

    #[test]
    fn a_library_that_is_missing_is_done_without_and_one_that_fails_is_not() {
        let failure = ironloom_kernels::Error::CublasLt { call: "cublasLtCreate", status: 3 };
        assert_eq!(unless_missing(Ok(7)).unwrap(), Some(7));
        assert_eq!(unless_missing::<u32>(Err(ironloom_kernels::Error::CublasLtMissing)).unwrap(), None);
        assert!(unless_missing::<u32>(Err(failure)).is_err());
    }

    #[test]
    fn an_operation_without_a_gradient_refuses_a_tape() {
        let (device, tape) = (Device::cpu(1), Tape::new());
        let x = Tensor::zeros([1, 4]).unwrap();
        let parts = || vec![x.clone(), x.clone()];
        assert!(ops::concat_rows(&Context::inference(&device), parts()).is_ok());
        let error = ops::concat_rows(&Context::training(&device, &tape), parts()).unwrap_err();
        assert!(matches!(error, Error::NoGradient { operation: "concatenate rows" }));
    }

    #[test]
    fn what_is_on_cards_only_says_how_to_get_one() {
        let device = Device::cpu(1);
        let errors = [
            device.card("a profile").unwrap_err(),
            Indices::lasting(&device, 3).unwrap_err(),
            ops::KvTable::new(&device, 1, 1, &[], 8).unwrap_err(),
            ops::NextIds::new(&device, 1, 8).unwrap_err(),
        ];
        for (error, operation) in errors.into_iter().zip(["a profile", "whole numbers", "the table", "next ids"]) {
            assert!(matches!(error, Error::NeedsCard { .. }));
            let message = error.to_string();
            assert!(message.starts_with(operation), "{message}");
            assert!(message.ends_with("and the device is the processor: open a card with Device::cuda"), "{message}");
        }
    }
}
