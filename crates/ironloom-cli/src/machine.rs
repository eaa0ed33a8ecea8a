//! `--device`, `--threads` and `--memory-budget`: what to compute on.

use anyhow::Result;
use ironloom_core::Threads;
use ironloom_lm::available_memory;
use ironloom_tensor::Device;

/// What to compute on.
#[derive(clap::Args)]
pub(crate) struct MachineOptions {
    #[command(flatten)]
    pub(crate) device: DeviceOption,
    /// Threads to compute with [default: all of this process]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// Which device to compute on.
#[derive(clap::Args)]
pub(crate) struct DeviceOption {
    /// Device to compute on: cpu, cuda, or cuda:N for the graphics card N
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = parse_device)]
    device: DeviceKind,
    /// The most memory of the device to take, such as 12GiB [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory_budget: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceKind {
    Cpu,
    Cuda(usize),
}

impl MachineOptions {
    /// The device.
    ///
    /// # Errors
    /// It is not there, or cannot be used.
    pub(crate) fn open(&self) -> Result<Device> {
        self.device.open(self.threads)
    }

    /// The processor's threads.
    pub(crate) fn threads(&self) -> Threads {
        self.threads.map_or_else(Threads::all, |threads| Threads::new(usize::from(threads)))
    }
}

impl DeviceOption {
    /// The device, with so many threads on the host; all without a number.
    ///
    /// # Errors
    /// It is not there, or cannot be used.
    pub(crate) fn open(&self, threads: Option<u16>) -> Result<Device> {
        let threads = threads.map_or(0, usize::from);
        let device = match self.device {
            DeviceKind::Cpu => Device::cpu(threads),
            DeviceKind::Cuda(ordinal) => Device::cuda(ordinal, threads)?,
        };
        if let (Device::Cuda(cuda), Some(budget)) = (&device, self.memory_budget) {
            cuda.gpu().set_budget(usize::try_from(budget).unwrap_or(usize::MAX));
        }
        Ok(device)
    }

    /// Bytes that a model may take on `device`, where that is known.
    ///
    /// # Errors
    /// The device fails.
    pub(crate) fn available(&self, device: &Device) -> Result<Option<u64>> {
        let free = available_memory(device)?;
        Ok(match (free, self.memory_budget) {
            (Some(free), Some(budget)) => Some(free.min(budget)),
            (free, budget) => free.or(budget),
        })
    }

    /// Whether it is a graphics card.
    pub(crate) fn is_card(&self) -> bool {
        self.device != DeviceKind::Cpu
    }

    /// Its name in tables.
    pub(crate) fn name(&self) -> &'static str {
        match self.device {
            DeviceKind::Cpu => "CPU",
            DeviceKind::Cuda(_) => "CUDA",
        }
    }
}

fn parse_device(name: &str) -> Result<DeviceKind, String> {
    let ordinal = match name {
        "cpu" => return Ok(DeviceKind::Cpu),
        "cuda" => "0",
        _ => name.strip_prefix("cuda:").unwrap_or_default(),
    };
    ordinal.parse().map(DeviceKind::Cuda).map_err(|_| "there are cpu, cuda and cuda:N".to_owned())
}

fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("GB", 1_000_000_000), ("MB", 1_000_000)];
    let (number, unit) =
        UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit))).unwrap_or((text, 1));
    let number: f64 =
        number.trim().parse().map_err(|_| "a size such as 12GiB, 800MB or a number of bytes".to_owned())?;
    if number.is_finite() && number > 0.0 {
        Ok((number * unit as f64) as u64)
    } else {
        Err("a size above 0".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_sizes_are_read() {
        assert_eq!(parse_device("cpu"), Ok(DeviceKind::Cpu));
        assert_eq!(parse_device("cuda"), Ok(DeviceKind::Cuda(0)));
        assert_eq!(parse_device("cuda:3"), Ok(DeviceKind::Cuda(3)));
        assert!(["", "gpu", "cuda:", "cuda:x", "cuda:-1"].iter().all(|name| parse_device(name).is_err()));
        assert_eq!(parse_size("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse_size("800MB"), Ok(800_000_000));
        assert_eq!(parse_size("4096"), Ok(4096));
        assert!(["", "x", "-1GiB", "0"].iter().all(|size| parse_size(size).is_err()));
    }
}
