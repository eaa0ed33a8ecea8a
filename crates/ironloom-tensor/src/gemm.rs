//! Products of plain single-precision matrices on the processor, for training: `out (+)= a b`, any of them transposed.
//!
//! The inner loops are those of the crate `gemm-f32`; here is how the work is shared. The longer side of `out` is cut into
//! pieces whose number depends on the shape alone, so the bits of a product are the same on any number of threads.

use gemm_common::Parallelism;

use crate::{CpuDevice, ops::Disjoint};

/// A view of a matrix: element `(i, j)` is at `i * row_stride + j * column_stride`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of `columns` elements, `stride` apart.
    pub(crate) fn new(values: &'a [f32], [rows, columns]: [usize; 2], stride: usize) -> Self {
        assert!(rows == 0 || columns == 0 || (rows - 1) * stride + columns <= values.len(), "a view within its values");
        Self { values, rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// Rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    fn offset(&self, row: usize, column: usize) -> usize {
        row * self.row_stride + column * self.column_stride
    }
}

/// What a product does with what its output holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// Overwrites it.
    Set,
    /// Adds to it.
    Add,
}

impl Write {
    /// A gradient's first writer sets it, later ones add.
    pub(crate) fn first(first: bool) -> Self {
        if first { Self::Set } else { Self::Add }
    }
}

/// Pieces that the longer side of an output is cut into at most.
const PIECES: usize = 16;
/// Rows or columns of a piece at least.
const PIECE: usize = 32;
/// Multiplications below which a product is not worth sharing.
const SERIAL: usize = 1 << 18;

/// `out [a's rows, b's columns] (+)= a b`, shared by the threads. The rows of `out` are `stride` apart.
pub(crate) fn gemm(cpu: &CpuDevice, out: &mut [f32], stride: usize, a: Matrix<'_>, b: Matrix<'_>, write: Write) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    let by_rows = m >= n;
    let side = if by_rows { m } else { n };
    let step = side.div_ceil(PIECES).next_multiple_of(PIECE);
    if m * n * k <= SERIAL || step >= side {
        return gemm_serial(out, stride, a, b, write);
    }
    let shared = Disjoint::new(out);
    cpu.threads.run(side.div_ceil(step), |piece| {
        let range = piece * step..((piece + 1) * step).min(side);
        let (rows, columns) = if by_rows { (range, 0..n) } else { (0..m, range) };
        // SAFETY: a piece writes its own rows and columns, which no other has.
        let place = unsafe { shared.pointer(rows.start * stride + columns.start, rows.len(), columns.len(), stride) };
        let a = Matrix { values: &a.values[a.offset(rows.start, 0)..], rows: rows.len(), ..a };
        let b = Matrix { values: &b.values[b.offset(0, columns.start)..], columns: columns.len(), ..b };
        // SAFETY: the place has these rows and columns.
        unsafe { product(place, stride, a, b, write) };
    });
}

/// As [`gemm`], on the calling thread.
pub(crate) fn gemm_serial(out: &mut [f32], stride: usize, a: Matrix<'_>, b: Matrix<'_>, write: Write) {
    let (m, n) = (a.rows, b.columns);
    assert!(m == 0 || n == 0 || (m - 1) * stride + n <= out.len(), "an output within its memory");
    // SAFETY: the output has these rows and columns.
    unsafe { product(out.as_mut_ptr(), stride, a, b, write) }
}

/// # Safety
/// `out` has `a`'s rows, `stride` apart, of `b`'s columns, and nothing else reads or writes them meanwhile.
unsafe fn product(out: *mut f32, stride: usize, a: Matrix<'_>, b: Matrix<'_>, write: Write) {
    assert_eq!(a.columns, b.rows, "the inner sides of a product");
    let (m, n, k) = (a.rows, b.columns, a.columns);
    if m == 0 || n == 0 {
        return;
    }
    let signed = |stride: usize| stride as isize;
    // The library wants columns that lie together: it is given the transposed product.
    // SAFETY: the views lie within their slices, as their makers have checked, and the output by the caller's promise.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            n,
            m,
            k,
            out,
            signed(stride),
            1,
            write == Write::Add,
            b.values.as_ptr(),
            signed(b.row_stride),
            signed(b.column_stride),
            a.values.as_ptr(),
            signed(a.row_stride),
            signed(a.column_stride),
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use ironloom_core::{Philox, SimdLevel, Threads};

    use super::*;

    fn normals(count: usize, seed: u64) -> Vec<f32> {
        let mut draws = Philox::new(seed, 0);
        (0..count).map(|_| draws.next_normal()).collect()
    }

    #[test]
    fn products_of_any_orientation_equal_double_precision_on_any_threads() {
        for [m, n, k] in [[1, 1, 1], [3, 5, 7], [200, 33, 65], [33, 300, 64], [600, 600, 9], [5, 0, 3], [70, 90, 0]] {
            for (turn_a, turn_b) in [(false, false), (false, true), (true, false), (true, true)] {
                let (a, b) = (normals(m * k, 1), normals(k * n, 2));
                let view_a = if turn_a { Matrix::new(&a, [k, m], m).transposed() } else { Matrix::new(&a, [m, k], k) };
                let view_b = if turn_b { Matrix::new(&b, [n, k], k).transposed() } else { Matrix::new(&b, [k, n], n) };
                let stride = n + 3;
                let before = normals(m * stride, 3);
                for write in [Write::Set, Write::Add] {
                    let of_threads = [1, 2, 3].map(|threads| {
                        let cpu = CpuDevice { threads: Threads::new(threads), level: SimdLevel::detect() };
                        let mut out = before.clone();
                        gemm(&cpu, &mut out, stride, view_a, view_b, write);
                        out
                    });
                    assert!(of_threads.iter().all(|out| *out == of_threads[0]));
                    for i in 0..m {
                        for j in 0..stride {
                            let was = f64::from(before[i * stride + j]);
                            let exact = if j < n {
                                let terms = (0..k)
                                    .map(|p| f64::from(a[view_a.offset(i, p)]) * f64::from(b[view_b.offset(p, j)]));
                                terms.sum::<f64>() + if write == Write::Add { was } else { 0.0 }
                            } else {
                                was
                            };
                            let found = f64::from(of_threads[0][i * stride + j]);
                            assert!((found - exact).abs() < 1e-5 * (1.0 + k as f64).sqrt(), "{found} {exact}");
                        }
                    }
                }
            }
        }
    }
}
