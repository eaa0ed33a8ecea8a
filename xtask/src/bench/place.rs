//! What was measured on, and where its records are.

use std::path::PathBuf;

use ironloom_kernels::Gpu;
use serde::{Deserialize, Serialize};

use crate::{machine, workspace};

/// A device, as records name it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) device: String,
    /// What stands between the program and the device: of a processor, the vector instructions in use.
    pub(super) driver: String,
    folder: PathBuf,
}

/// A graphics card's name and its driver's version, as the process that used it knows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CardName {
    name: String,
    driver: String,
}

impl Place {
    /// This machine's processor.
    pub(super) fn host() -> Self {
        let driver = format!("{:?}", ironloom_core::SimdLevel::detect());
        Self { device: machine::device_name(), driver, folder: machine::records_folder() }
    }

    /// A graphics card.
    pub(super) fn card(card: &CardName) -> Self {
        let folder = workspace::root().join("benches").join("records").join(machine::card_slug(&card.name));
        Self { device: card.name.clone(), driver: card.driver.clone(), folder }
    }

    /// The file of a record.
    pub(super) fn record(&self, bench: &str) -> PathBuf {
        self.folder.join(format!("{bench}.json"))
    }
}

impl CardName {
    pub(super) fn of(gpu: &Gpu) -> Self {
        let properties = gpu.properties();
        let (major, minor) = properties.driver;
        let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        let driver = driver_version(&module).unwrap_or_else(|| format!("CUDA {major}.{minor}"));
        Self { name: properties.name.clone(), driver }
    }
}

/// The number in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue …`.
fn driver_version(text: &str) -> Option<String> {
    let mut words = text.lines().next()?.split_whitespace();
    let number = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    words.find(number).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_are_named() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2";
        assert_eq!(driver_version(text).as_deref(), Some("580.159.04"));
        assert_eq!(driver_version(""), None);
    }
}
