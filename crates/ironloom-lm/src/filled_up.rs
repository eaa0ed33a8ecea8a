//! Matrices with zeros past their stored rows and columns.
//!
//! Products on a graphics card read 16 bytes of their input at a time, so they take columns in eights. The inner width of a
//! feed-forward block may be any: there gate and up get rows of zeros and down columns of zeros, up to a multiple of eight.
//! The block's output stays what it was: `act(0) * 0 = 0`, times zero.

use ironloom_tensor::Device;

/// What a file holds of a matrix, and what a device does: `[rows, cols]` each.
#[derive(Clone, Copy)]
pub(crate) struct MatrixShape {
    pub(crate) stored: [usize; 2],
    pub(crate) held: [usize; 2],
}

impl From<[usize; 2]> for MatrixShape {
    fn from(shape: [usize; 2]) -> Self {
        Self { stored: shape, held: shape }
    }
}

impl MatrixShape {
    /// Whether the device holds zeros that the file does not.
    pub(crate) fn is_filled_up(&self) -> bool {
        self.stored != self.held
    }
}

/// The shapes of a feed-forward block's gate (and up) and of its down.
pub(crate) fn feed_forward_shapes(device: &Device, width: usize, inner: usize) -> [MatrixShape; 2] {
    let held = match device {
        Device::Cuda(_) => inner_on_card(inner),
        _ => inner,
    };
    let shape = |inner, held| MatrixShape { stored: inner, held };
    [shape([inner, width], [held, width]), shape([width, inner], [width, held])]
}

/// What a graphics card holds of an inner width.
pub(crate) fn inner_on_card(inner: usize) -> usize {
    inner.next_multiple_of(8)
}

/// `[rows, width]` elements that start with those of `stored`, the rest zeros.
pub(crate) fn filled_up<'a, T: Copy + Default + 'a>(
    stored: impl Iterator<Item = &'a [T]>,
    [rows, width]: [usize; 2],
) -> Vec<T> {
    let mut filled = vec![T::default(); rows * width];
    for (to, from) in filled.chunks_exact_mut(width.max(1)).zip(stored) {
        to[..from.len()].copy_from_slice(from);
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_stand_behind_and_below() {
        let stored = [1, 2, 3, 4, 5, 6];
        assert_eq!(filled_up(stored.chunks(3), [3, 4]), [1, 2, 3, 0, 4, 5, 6, 0, 0, 0, 0, 0]);
        assert_eq!(filled_up(stored.chunks(3), [2, 3]), stored);
    }

    #[test]
    fn the_processor_holds_what_is_stored() {
        let shapes = feed_forward_shapes(&Device::cpu(1), 64, 22);
        assert!(shapes.iter().all(|shape| !shape.is_filled_up()));
        assert_eq!(shapes.map(|shape| shape.held), [[22, 64], [64, 22]]);
    }
}
