//! Dimensions of a dense row-major array, outermost first.

use crate::{Error, Result};

/// Dimensions of a dense row-major array, outermost first; at most [`Shape::MAX_RANK`] of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; Shape::MAX_RANK],
    rank: usize,
}

impl Shape {
    /// The most dimensions a shape can have.
    pub const MAX_RANK: usize = 6;

    /// A shape of these dimensions.
    ///
    /// # Errors
    /// There are more than [`Shape::MAX_RANK`].
    pub fn new(dims: &[usize]) -> Result<Self> {
        if dims.len() > Self::MAX_RANK {
            return Err(Error::Rank { rank: dims.len(), limit: Self::MAX_RANK });
        }
        let mut shape = Self { dims: [1; Self::MAX_RANK], rank: dims.len() };
        shape.dims[..dims.len()].copy_from_slice(dims);
        Ok(shape)
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// How many dimensions there are.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The product of the dimensions; 1 for a scalar.
    ///
    /// # Errors
    /// The product does not fit in `usize`.
    pub fn elements(&self) -> Result<usize> {
        self.dims().iter().try_fold(1usize, |product, &dim| product.checked_mul(dim)).ok_or(Error::SizeOverflow)
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        const { assert!(N <= Shape::MAX_RANK) };
        let mut shape = Self { dims: [1; Self::MAX_RANK], rank: N };
        shape.dims[..N].copy_from_slice(&dims);
        shape
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[")?;
        for (i, dim) in self.dims().iter().enumerate() {
            write!(f, "{}{dim}", if i == 0 { "" } else { ", " })?;
        }
        write!(f, "]")
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_print_and_count() {
        let shape = Shape::from([2, 3, 4]);
        assert_eq!((shape.to_string().as_str(), shape.elements().unwrap()), ("[2, 3, 4]", 24));
        assert_eq!(Shape::new(&[]).unwrap().elements().unwrap(), 1);
        assert!(Shape::from([usize::MAX, 2]).elements().is_err());
        assert!(Shape::new(&[1; 7]).is_err());
    }
}
