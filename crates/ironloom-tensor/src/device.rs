//! Where operations run, and what records them.

use ironloom_core::{SimdLevel, Threads};

use crate::{Error, Result, Tape};

/// Where tensors live and operations run. Chosen at run time and passed explicitly, never global.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// The processor.
    Cpu(CpuDevice),
}

/// The processor: its threads and the vector instructions to use.
#[derive(Clone, Debug)]
pub struct CpuDevice {
    /// The threads that share an operation's work.
    pub threads: Threads,
    /// The vector instructions to use; every level gives the same bits.
    pub level: SimdLevel,
}

impl Device {
    /// The processor with `threads` threads; 0 takes all.
    pub fn cpu(threads: usize) -> Self {
        let threads = if threads == 0 { Threads::all() } else { Threads::new(threads) };
        Self::Cpu(CpuDevice { threads, level: SimdLevel::detect() })
    }

    /// The threads that host work for this device may use.
    pub fn threads(&self) -> &Threads {
        match self {
            Self::Cpu(cpu) => &cpu.threads,
        }
    }

    /// The device's name for people, such as `cpu (2 threads)`.
    pub fn describe(&self) -> String {
        match self {
            Self::Cpu(cpu) => format!("cpu ({} threads, {:?})", cpu.threads.count(), cpu.level),
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
}

impl<'a> Context<'a> {
    /// A context that records nothing.
    pub fn inference(device: &'a Device) -> Self {
        Self { device, tape: None }
    }

    /// A context that records operations on `tape`.
    pub fn training(device: &'a Device, tape: &'a Tape) -> Self {
        Self { device, tape: Some(tape) }
    }

    /// The processor to run on.
    pub(crate) fn cpu(&self) -> &'a CpuDevice {
        match self.device {
            Device::Cpu(cpu) => cpu,
        }
    }

    /// Refuses an operation without a gradient when a tape records: a silent gap would give wrong gradients.
    pub(crate) fn without_gradient(&self, operation: &'static str) -> Result<()> {
        if self.tape.is_some() { Err(Error::NoGradient { operation }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use ironloom_core::Threads;
    use ironloom_quant::{PackedMatrix, WeightFormat};

    use super::*;
    use crate::{Tensor, Weight, ops};

    #[test]
    fn an_operation_without_a_gradient_refuses_a_tape() {
        let (device, tape) = (Device::cpu(1), Tape::new());
        let matrix = PackedMatrix::from_f32(&[1.0; 8], 2, 4, WeightFormat::F32, &Threads::new(1)).unwrap();
        let (weight, x) = (Weight::cpu(matrix), Tensor::zeros([1, 4]).unwrap());
        assert!(ops::linear(&Context::inference(&device), &x, &weight).is_ok());
        let error = ops::linear(&Context::training(&device, &tape), &x, &weight).unwrap_err();
        assert!(matches!(error, Error::NoGradient { operation: "linear" }));
    }
}
