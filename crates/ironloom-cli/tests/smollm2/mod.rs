//! Where tests find SmolLM2: in the cache that `cargo xtask demo` fills.

use std::path::PathBuf;

/// The model's file; without it, says that the test is skipped.
pub(crate) fn model() -> Option<PathBuf> {
    let cache = std::env::var_os("IRONLOOM_CACHE").map(PathBuf::from).or_else(|| {
        let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        base.or_else(|| Some(std::env::home_dir()?.join(".cache"))).map(|base| base.join("ironloom"))
    });
    let model = cache.map(|folder| folder.join("SmolLM2-135M-Instruct.Q4_1.gguf")).filter(|path| path.exists());
    if model.is_none() {
        println!("skipped: SmolLM2 is not in the cache (`cargo xtask demo` puts it there)");
    }
    model
}
