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
        let folder = workspace::root().join("benches").join("records").join(slug(&card.name));
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

/// A card's name for a folder, such as `nvidia-h200`.
fn slug(name: &str) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_lowercase).collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_and_drivers_are_named() {
        assert_eq!(slug("NVIDIA H200"), "nvidia-h200");
        assert_eq!(slug("NVIDIA GeForce RTX 4090"), "nvidia-geforce-rtx-4090");
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2";
        assert_eq!(driver_version(text).as_deref(), Some("580.159.04"));
        assert_eq!(driver_version(""), None);
    }
}
