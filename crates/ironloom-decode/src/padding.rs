//! Matrices of ids that were padded on the left, made ragged.
//!
//! A batch here has no use for padding: each row is a sequence of its own length. Callers who come with the rectangular
//! matrices of other tools get their rows out of them.

use crate::{Error, Result};

/// How padding is told from tokens.
#[derive(Clone, Copy, Debug)]
pub enum Padding<'a> {
    /// This id, up to the first other id of the row. Where a prompt may begin with it, give a mask.
    Id(u32),
    /// An attention mask of the matrix's size: 0 is padding.
    Mask(&'a [u8]),
}

/// The rows of a row-major matrix `[rows, width]` of ids, without the padding at their left.
///
/// ```
/// use ironloom_decode::{Padding, strip_left_padding};
/// let rows = strip_left_padding(&[0, 0, 5, 1, 2, 3], 3, Padding::Id(0))?;
/// assert_eq!(rows, [vec![5], vec![1, 2, 3]]);
/// # Ok::<(), ironloom_decode::Error>(())
/// ```
///
/// # Errors
/// [`Error::PaddedShape`]: the ids are not whole rows, or the mask is of another size. [`Error::PaddingInside`]: the mask has
/// a 0 after a 1. [`Error::EmptyRow`]: a row has no token.
pub fn strip_left_padding(ids: &[u32], width: usize, padding: Padding<'_>) -> Result<Vec<Vec<u32>>> {
    if width == 0 || !ids.len().is_multiple_of(width) {
        let expected = ids.len().checked_div(width).map_or(0, |rows| rows * width);
        return Err(Error::PaddedShape { what: "ids", found: ids.len(), expected, width });
    }
    if let Padding::Mask(mask) = padding
        && mask.len() != ids.len()
    {
        return Err(Error::PaddedShape { what: "mask entries", found: mask.len(), expected: ids.len(), width });
    }
    let strip = |(row, tokens): (usize, &[u32])| {
        let is_padding = |column: usize| match padding {
            Padding::Id(id) => tokens[column] == id,
            Padding::Mask(mask) => mask[row * width + column] == 0,
        };
        let first = (0..width).find(|&column| !is_padding(column)).ok_or(Error::EmptyRow { row })?;
        match (first..width).find(|&column| is_padding(column)) {
            Some(column) if matches!(padding, Padding::Mask(_)) => Err(Error::PaddingInside { row, column }),
            _ => Ok(tokens[first..].to_vec()),
        }
    };
    ids.chunks_exact(width).enumerate().map(strip).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pad_id_inside_a_row_is_a_token() {
        let rows = strip_left_padding(&[9, 9, 4, 9, 7, 9, 9, 5], 4, Padding::Id(9)).unwrap();
        assert_eq!(rows, [vec![4, 9], vec![7, 9, 9, 5]]);
    }

    #[test]
    fn a_mask_keeps_a_prompt_that_begins_with_the_pad_id() {
        let rows = strip_left_padding(&[9, 9, 4, 9, 7, 9], 3, Padding::Mask(&[0, 1, 1, 1, 1, 1])).unwrap();
        assert_eq!(rows, [vec![9, 4], vec![9, 7, 9]]);
    }

    #[test]
    fn matrices_that_are_not_padded_on_the_left_are_refused() {
        let strip = |ids: &[u32], width, padding| strip_left_padding(ids, width, padding).unwrap_err();
        assert!(matches!(strip(&[1, 2, 3], 2, Padding::Id(0)), Error::PaddedShape { found: 3, expected: 2, .. }));
        assert!(matches!(strip(&[1], 0, Padding::Id(0)), Error::PaddedShape { .. }));
        assert!(matches!(strip(&[1, 2], 2, Padding::Mask(&[1])), Error::PaddedShape { what: "mask entries", .. }));
        let inside = strip(&[1, 2, 3, 4], 2, Padding::Mask(&[1, 1, 1, 0]));
        assert!(matches!(inside, Error::PaddingInside { row: 1, column: 1 }));
        assert!(matches!(strip(&[1, 2, 0, 0], 2, Padding::Id(0)), Error::EmptyRow { row: 1 }));
        assert!(strip_left_padding(&[], 3, Padding::Id(0)).unwrap().is_empty());
    }
}
