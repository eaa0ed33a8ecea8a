//! int8 rows: a signed byte per weight and one FP32 scale per row.
//!
//! `weight = scale * code` with `scale = absmax / 127` and codes -127..127, where `absmax` is the row's largest magnitude
//! (Dettmers et al., "LLM.int8()", arXiv 2208.07339, section 2: row-wise absmax quantization). A row of zeros has scale 0.
//!
//! Works a row at a time on the caller's slices, so that rows can be split over threads and written where they are read.

use super::{absmax, check_finite};
use crate::{Error, Result};

/// The code of the weight of largest magnitude.
const HIGHEST: f32 = 127.0;
/// 1.5 * 2^23: floats beside it are one apart.
const ROUNDER: f32 = 12_582_912.0;

/// Packs one row; `codes` has the row's length. Returns the row's scale.
///
/// ```
/// use ironloom_quant::formats::int8_rows;
/// let mut codes = [0; 3];
/// let scale = int8_rows::pack_row(&[0.5, -1.27, 0.0], &mut codes).unwrap();
/// assert_eq!((codes, scale), ([50, -127, 0], 0.01));
/// ```
///
/// # Errors
/// A weight is not finite, or the lengths differ.
pub fn pack_row(values: &[f32], codes: &mut [i8]) -> Result<f32> {
    if codes.len() != values.len() {
        return Err(Error::Length { what: "codes of an int8 row", expected: values.len(), found: codes.len() });
    }
    check_finite(values)?;
    let absmax = absmax(values);
    if absmax == 0.0 {
        codes.fill(0);
        return Ok(0.0);
    }
    for (code, value) in codes.iter_mut().zip(values) {
        // Divided first: 127 / absmax is infinite for the smallest rows. Adding the rounder leaves the integer, rounded to
        // even, in the low bits, without the library call that rounding takes on baseline x86-64.
        *code = (value / absmax * HIGHEST + ROUNDER).to_bits() as i8;
    }
    Ok(absmax / HIGHEST)
}

/// Unpacks one row; `out` has the row's length.
///
/// # Errors
/// The lengths differ.
pub fn unpack_row(codes: &[i8], scale: f32, out: &mut [f32]) -> Result<()> {
    if out.len() != codes.len() {
        return Err(Error::Length { what: "unpacked int8 row", expected: codes.len(), found: out.len() });
    }
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = scale * f32::from(code);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_stay_within_half_a_step() {
        let values: Vec<f32> = (0..301).map(|i| (i as f32 - 77.0) * 0.013).collect();
        let (mut codes, mut read) = (vec![0; values.len()], vec![0.0; values.len()]);
        let scale = pack_row(&values, &mut codes).unwrap();
        unpack_row(&codes, scale, &mut read).unwrap();
        for (value, read) in values.iter().zip(&read) {
            assert!((value - read).abs() <= scale * 0.500_01, "{value} became {read} with scale {scale}");
        }
        assert_eq!(codes.iter().max(), Some(&127));
    }

    #[test]
    fn empty_zero_and_tiny_rows() {
        assert_eq!(pack_row(&[], &mut []).unwrap(), 0.0);
        let mut codes = [9; 2];
        assert_eq!((pack_row(&[0.0, -0.0], &mut codes).unwrap(), codes), (0.0, [0, 0]));
        assert!(pack_row(&[1e-45, -1e-40], &mut codes).unwrap().is_finite());
        assert_eq!(codes, [0, -127]);
        assert!(pack_row(&[f32::MAX, -f32::MAX], &mut codes).unwrap().is_finite());
        assert_eq!(codes, [127, -127]);
    }

    #[test]
    fn bad_rows_are_refused() {
        let error = pack_row(&[0.0, f32::NAN], &mut [0; 2]).unwrap_err();
        assert!(matches!(error, Error::NotFinite { index: 1, .. }), "{error}");
        assert!(matches!(pack_row(&[0.0], &mut [0; 2]), Err(Error::Length { expected: 1, found: 2, .. })));
        assert!(matches!(unpack_row(&[0], 1.0, &mut []), Err(Error::Length { expected: 1, found: 0, .. })));
    }
}
