//! Rows with gaps between them, in either form, as training keeps columns of wider rows.

use ironloom_kernels::{Buffer, Form, Gpu, Slice};

use crate::{buffer, normals, read_bf16, read_f32, round_bf16, upload_bf16, upload_f32};

/// `rows` rows of `width` elements, `stride` apart; the elements between are NaN.
pub(crate) struct Rows {
    pub(crate) buffer: Buffer,
    pub(crate) form: Form,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) stride: usize,
}

impl Rows {
    /// Standard normal numbers, times `factor`, and these numbers as the device has them.
    pub(crate) fn normals(gpu: &Gpu, form: Form, shape: [usize; 3], seed: u64, factor: f32) -> (Self, Vec<f32>) {
        let mut values: Vec<f32> = normals(seed, shape[0] * shape[1]).iter().map(|x| factor * x).collect();
        if form == Form::Bf16 {
            values.iter_mut().for_each(|x| *x = round_bf16(*x));
        }
        (Self::of(gpu, form, shape, &values), values)
    }

    /// These numbers.
    pub(crate) fn of(gpu: &Gpu, form: Form, [rows, width, stride]: [usize; 3], values: &[f32]) -> Self {
        let gap = vec![f32::NAN; stride - width];
        let padded: Vec<f32> = values.chunks_exact(width).flat_map(|row| row.iter().chain(&gap).copied()).collect();
        let buffer = if form == Form::F32 { upload_f32(gpu, &padded) } else { upload_bf16(gpu, &padded) };
        Self { buffer, form, rows, width, stride }
    }

    /// Memory that nothing has been written to.
    pub(crate) fn poisoned(gpu: &Gpu, form: Form, [rows, width, stride]: [usize; 3]) -> Self {
        Self { buffer: buffer(gpu, form.bytes(rows, stride).unwrap()), form, rows, width, stride }
    }

    pub(crate) fn slice(&self) -> Slice<'_> {
        self.buffer.slice()
    }

    /// What the rows hold. Nothing may have been written between them.
    pub(crate) fn read(&self, gpu: &Gpu) -> Vec<f32> {
        let count = self.rows * self.stride;
        let all = match self.form {
            Form::F32 => read_f32(gpu, &self.buffer, count),
            _ => read_bf16(gpu, &self.buffer, count),
        };
        all.chunks_exact(self.stride).for_each(|row| assert!(row[self.width..].iter().all(|x| x.is_nan())));
        all.chunks_exact(self.stride).flat_map(|row| row[..self.width].iter().copied()).collect()
    }
}

/// The largest relative error that sums in F32, rounded to this form, may show.
pub(crate) fn bound(form: Form) -> f64 {
    if form == Form::F32 { 1e-6 } else { 3e-3 }
}

/// Whether two results are the same bits, NaN or not.
pub(crate) fn same_bits(left: &[f32], right: &[f32]) -> bool {
    left.iter().map(|x| x.to_bits()).eq(right.iter().map(|x| x.to_bits()))
}
