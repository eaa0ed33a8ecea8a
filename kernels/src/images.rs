//! The compiled kernels that the build embedded.

/// One `cuda/NAME.cu`, compiled for every architecture.
#[derive(Clone, Copy)]
pub struct Image {
    /// The source's name without its ending.
    pub name: &'static str,
    /// Machine code of every architecture, and assembly for later cards.
    pub fatbin: &'static [u8],
    /// The names of the kernels in its assembly (PTX).
    pub assembly: &'static [&'static str],
}

static IMAGES: &[Image] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Every image; none where the crate was built without `nvcc`.
pub fn images() -> &'static [Image] {
    IMAGES
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({}, {} bytes)", self.name, self.fatbin.len())
    }
}
