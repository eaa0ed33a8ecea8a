//! What a piece of work will take in memory, said before anything is allocated.

use crate::{Error, Result, format_bytes};

/// Named parts of a memory need, in bytes, in the order they were added.
///
/// ```
/// use ironloom_core::MemoryPlan;
/// let plan = MemoryPlan::new().with("weights", 96 << 20).with("cache", 12 << 20);
/// assert_eq!(plan.total(), 108 << 20);
/// assert!(plan.check(1 << 20, "load a smaller model").is_err());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    parts: Vec<(String, u64)>,
}

impl MemoryPlan {
    /// An empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// The plan with one part more.
    #[must_use]
    pub fn with(mut self, part: impl Into<String>, bytes: u64) -> Self {
        self.parts.push((part.into(), bytes));
        self
    }

    /// The parts with their bytes.
    pub fn parts(&self) -> &[(String, u64)] {
        &self.parts
    }

    /// All parts together, in bytes.
    pub fn total(&self) -> u64 {
        self.parts.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Refuses the plan when it takes more than `available` bytes; `advice` says what to do then.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with every part of the plan.
    pub fn check(&self, available: u64, advice: &'static str) -> Result<()> {
        if self.total() <= available {
            return Ok(());
        }
        Err(Error::OutOfMemory { what: format!("the plan ({self})"), needed: self.total(), available, advice })
    }

    /// Bytes of memory this machine can still give without swapping, where the system tells.
    pub fn available_host_memory() -> Option<u64> {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    }
}

impl std::fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, (part, bytes)) in self.parts.iter().enumerate() {
            write!(f, "{}{part} {}", if i == 0 { "" } else { ", " }, format_bytes(*bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_parts_and_sizes() {
        let plan = MemoryPlan::new().with("weights", 3 << 30).with("cache", 1 << 30);
        let text = plan.check(2 << 30, "shorten the context").unwrap_err().to_string();
        for part in ["weights 3.0 GiB", "cache 1.0 GiB", "4.0 GiB", "2.0 GiB", "shorten the context"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
