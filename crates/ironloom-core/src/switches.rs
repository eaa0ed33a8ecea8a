//! Switches that turn single optimizations off, so that one binary can be measured against itself.
//!
//! `IRONLOOM_OFF=avx512,flash` names the paths to leave out. The variable is read once per process.

use std::sync::OnceLock;

/// Whether the optimization called `name` is switched off by `IRONLOOM_OFF`.
pub fn is_off(name: &str) -> bool {
    static OFF: OnceLock<Vec<String>> = OnceLock::new();
    OFF.get_or_init(|| {
        let value = std::env::var("IRONLOOM_OFF").unwrap_or_default();
        value.split(',').map(|name| name.trim().to_ascii_lowercase()).filter(|name| !name.is_empty()).collect()
    })
    .iter()
    .any(|off| off == name)
}
