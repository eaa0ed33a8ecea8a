//! Columns of wider rows, as training keeps activations and their gradients: the check that every launcher of them makes.

use crate::{Error, Form, Result, Slice};

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
        return Err(Error::Shape { operation, what: "a stride", expected: width, found: stride });
    }
    let elements = match rows.checked_sub(1) {
        Some(before) => before.checked_mul(stride).and_then(|n| n.checked_add(width)).ok_or(Error::SizeOverflow)?,
        None => 0,
    };
    slice.expect(operation, what, form.bytes(1, elements)?)
}

/// Whether a row's elements of this form can be read and written `count` at a time: its address and stride allow it.
pub(crate) fn by(count: usize, form: Form, address: u64, stride: usize) -> bool {
    let bytes = count * if form == Form::Bf16 { 2 } else { 4 };
    stride.is_multiple_of(count) && address.is_multiple_of(bytes as u64)
}
