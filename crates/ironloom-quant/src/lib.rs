//! Packed formats of weights, and matrix products straight from packed bytes.
#![deny(missing_docs)]

mod error;
pub mod formats;
pub mod packed;
mod stored;
pub mod tiles;

pub use error::{Error, Result};
pub use formats::{pack, unpack};
pub use packed::{PackedMatrix, Product, WeightFormat, matmul};
pub use stored::StoredMatrix;
pub use tiles::{DeviceFormat, TileFormat, TiledMatrix};
