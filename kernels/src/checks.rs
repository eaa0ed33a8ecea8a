//! What launchers check before a kernel starts: sizes as kernels count them, rows that lie apart, addresses.
//!
//! A refusal names the operation and what is wrong. An address that comes out of a check is that of memory which holds all
//! that the kernel touches.

use crate::{Error, Form, Result, Slice};

/// A size as kernels take it.
pub(crate) fn int(operation: &'static str, size: usize) -> Result<i32> {
    at_most(operation, "a size of a kernel, at most", i32::MAX as usize, size)?;
    Ok(size as i32)
}

/// A size as kernels take it that round it up to their tiles and blocks.
pub(crate) fn padded_int(operation: &'static str, what: &'static str, size: usize) -> Result<i32> {
    at_most(operation, what, (1 << 31) - 1024, size)?;
    Ok(size as i32)
}

pub(crate) fn at_most(operation: &'static str, what: &'static str, most: usize, found: usize) -> Result<()> {
    if found > most { Err(Error::Shape { operation, what, expected: most, found }) } else { Ok(()) }
}

pub(crate) fn multiple(operation: &'static str, what: &'static str, found: usize, of: usize) -> Result<()> {
    if found.is_multiple_of(of) { Ok(()) } else { Err(Error::Shape { operation, what, expected: of, found }) }
}

/// How many query heads share a head of keys and values.
pub(crate) fn grouped_heads(operation: &'static str, heads: usize, kv_heads: usize) -> Result<usize> {
    if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
        let what = "the number of query heads (needed: a multiple of)";
        return Err(Error::Shape { operation, what, expected: kv_heads.max(1), found: heads });
    }
    Ok(heads / kv_heads)
}

/// The address of `rows` rows of `width` numbers whose starts are `stride` apart, where the slice holds them all.
pub(crate) fn strided(
    operation: &'static str,
    what: &'static str,
    slice: Slice<'_>,
    form: Form,
    [rows, stride, width]: [usize; 3],
) -> Result<u64> {
    if form == Form::Split {
        return Err(Error::Unsupported { operation, what: format!("{what} in two parts") });
    }
    if stride < width {
        return Err(Error::Shape { operation, what: "the stride of rows", expected: width, found: stride });
    }
    let elements = match rows.checked_sub(1) {
        Some(before) => before.checked_mul(stride).and_then(|n| n.checked_add(width)).ok_or(Error::SizeOverflow)?,
        None => 0,
    };
    slice.expect(operation, what, form.bytes(1, elements)?)
}

/// The same of rows of bfloat16 that are read or written by 16 bytes.
pub(crate) fn strided_by_eight(
    operation: &'static str,
    what: &'static str,
    slice: Slice<'_>,
    [rows, stride, width]: [usize; 3],
) -> Result<u64> {
    multiple(operation, "the stride of rows (needed: a multiple of)", stride, 8)?;
    aligned_to(16, operation, what, strided(operation, what, slice, Form::Bf16, [rows, stride, width])?)
}

/// The address of something that is read or written by 16 bytes.
pub(crate) fn aligned(operation: &'static str, what: &'static str, slice: Slice<'_>, bytes: usize) -> Result<u64> {
    aligned_to(16, operation, what, slice.expect(operation, what, bytes)?)
}

/// The address, where it is a multiple of `of`.
pub(crate) fn aligned_to(of: u64, operation: &'static str, what: &'static str, address: u64) -> Result<u64> {
    if !address.is_multiple_of(of) {
        return Err(Error::Unsupported { operation, what: format!("{what}: its address is no multiple of {of}") });
    }
    Ok(address)
}

/// Whether a row's elements of this form can be read and written `count` at a time: its address and stride allow it.
pub(crate) fn by(count: usize, form: Form, address: u64, stride: usize) -> bool {
    let bytes = count * if form == Form::Bf16 { 2 } else { 4 };
    stride.is_multiple_of(count) && address.is_multiple_of(bytes as u64)
}

/// Whether rows of this width at these addresses can be read and written by 16 bytes of F32.
pub(crate) fn by_vectors(width: usize, addresses: &[u64]) -> bool {
    addresses.iter().all(|&address| by(4, Form::F32, address, width))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "a test";

    #[test]
    fn sizes_end_where_kernels_stop_counting() {
        let most = i32::MAX as usize;
        assert_eq!(int(NAME, most).unwrap(), i32::MAX);
        let error = int(NAME, most + 1).unwrap_err().to_string();
        assert!(error.starts_with(NAME) && error.contains("2147483648") && error.contains("2147483647"), "{error}");
        assert_eq!(padded_int(NAME, "rows", most - 1023).unwrap(), i32::MAX - 1023);
        assert!(padded_int(NAME, "rows", most - 1022).unwrap_err().to_string().contains("rows"));
    }

    #[test]
    fn query_heads_come_in_equal_groups() {
        assert_eq!(grouped_heads(NAME, 9, 3).unwrap(), 3);
        for (heads, kv_heads) in [(3, 2), (2, 3), (0, 1), (1, 0), (0, 0)] {
            assert!(grouped_heads(NAME, heads, kv_heads).is_err(), "{heads} and {kv_heads}");
        }
    }

    #[test]
    fn the_last_of_strided_rows_ends_where_its_elements_do() {
        let rows = |bytes, form, shape| strided(NAME, "rows", Slice::at(256, bytes), form, shape);
        assert_eq!(rows(2 * (2 * 10 + 8), Form::Bf16, [3, 10, 8]).unwrap(), 256);
        assert!(rows(2 * (2 * 10 + 8) - 1, Form::Bf16, [3, 10, 8]).is_err());
        assert!(rows(4 * (2 * 10 + 8) - 1, Form::F32, [3, 10, 8]).is_err());
        assert_eq!(rows(0, Form::F32, [0, 10, 8]).unwrap(), 256);
        assert!(rows(1 << 20, Form::F32, [3, 7, 8]).unwrap_err().to_string().contains("stride"));
        assert!(matches!(rows(1 << 20, Form::Split, [3, 8, 8]), Err(Error::Unsupported { .. })));
        assert!(matches!(rows(1 << 20, Form::F32, [3, usize::MAX, 8]), Err(Error::SizeOverflow)));
    }

    #[test]
    fn what_is_read_by_sixteen_bytes_lies_at_multiples_of_them() {
        let rows = |address, stride| strided_by_eight(NAME, "rows", Slice::at(address, 1 << 20), [3, stride, 8]);
        assert_eq!(rows(272, 16).unwrap(), 272);
        assert!(rows(264, 16).unwrap_err().to_string().contains("multiple of 16"));
        assert!(rows(272, 12).unwrap_err().to_string().contains("stride"));
        assert_eq!(aligned(NAME, "numbers", Slice::at(32, 8), 8).unwrap(), 32);
        assert!(aligned(NAME, "numbers", Slice::at(32, 8), 9).is_err());
        assert!(matches!(aligned(NAME, "numbers", Slice::at(40, 8), 8), Err(Error::Unsupported { .. })));
        assert_eq!(aligned_to(8, NAME, "numbers", 40).unwrap(), 40);
    }

    #[test]
    fn what_is_not_there_lies_at_zero() {
        assert_eq!(Slice::expect_optional(None, NAME, "a bias", 8).unwrap(), 0);
        assert_eq!(Slice::expect_optional(Some(Slice::at(64, 8)), NAME, "a bias", 8).unwrap(), 64);
        assert!(Slice::expect_optional(Some(Slice::at(64, 7)), NAME, "a bias", 8).is_err());
    }

    #[test]
    fn elements_go_several_at_a_time_where_address_and_stride_allow_it() {
        assert!(by(8, Form::Bf16, 16, 24) && by(4, Form::Bf16, 8, 12) && by(4, Form::F32, 16, 12));
        assert!(!by(8, Form::Bf16, 8, 24) && !by(8, Form::Bf16, 16, 12) && !by(4, Form::F32, 8, 12));
        assert!(by_vectors(12, &[16, 32, 0]) && !by_vectors(13, &[16]) && !by_vectors(12, &[16, 8]));
    }
}
