//! `--device` and `--threads`: what to compute on.

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
    /// Device to compute on; this build has: cpu
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = parse_device)]
    device: DeviceKind,
}

/// The devices of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceKind {
    Cpu,
}

impl MachineOptions {
    /// The device.
    pub(crate) fn open(&self) -> Device {
        self.device.open(self.threads)
    }
}

impl DeviceOption {
    /// The device, with so many threads on the host; all without a number.
    pub(crate) fn open(&self, threads: Option<u16>) -> Device {
        match self.device {
            DeviceKind::Cpu => Device::cpu(threads.map_or(0, usize::from)),
        }
    }

    /// Its name in tables.
    pub(crate) fn name(&self) -> &'static str {
        match self.device {
            DeviceKind::Cpu => "CPU",
        }
    }
}

fn parse_device(name: &str) -> Result<DeviceKind, String> {
    match name {
        "cpu" => Ok(DeviceKind::Cpu),
        _ => Err("this build has one device: cpu".to_owned()),
    }
}
