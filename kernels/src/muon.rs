//! Muon, orthogonalized momentum for matrices: the launchers of `cuda/muon.cu` and the products between them.

use crate::{
    Error, Form, Gpu, Multiply, Operand, Output, ParameterRange, Result, Slice,
    checks::{aligned, int},
    gradient_norm::{sum_of_squares, sum_of_squares_pieces},
    launch::Arguments,
    optimizer::element_launch,
};

/// What [`muon`] works on: one matrix, `rows` by `cols`, both multiples of 8.
#[derive(Clone, Copy, Debug)]
pub struct Muon<'a> {
    /// The matrix: `[rows, cols]` elements.
    pub range: ParameterRange<'a>,
    /// `[rows, cols]` in F32, zeros before the first step.
    pub momentum: Slice<'a>,
    /// [`muon_workspace`] bytes. Matrices after each other may share it.
    pub workspace: Slice<'a>,
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// Decay of the momentum.
    pub mu: f64,
    /// Whether the step looks ahead along the momentum.
    pub nesterov: bool,
    /// Weight decay per unit of learning rate.
    pub weight_decay: f64,
}

const NAME: &str = "Muon";
const STEPS: usize = 5;
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// Where the parts of the workspace end, each at a multiple of 256 bytes: the direction (F32) and its sums of squares (F64),
/// the operand (bfloat16), and of the smaller side the matrix `x xᵀ` (bfloat16), its square (F32) and their polynomial
/// (bfloat16).
fn workspace_ends(rows: usize, cols: usize) -> Result<[usize; 6]> {
    let (small, elements) = (rows.min(cols), rows.checked_mul(cols).ok_or(Error::SizeOverflow)?);
    let parts = [
        Form::F32.bytes(rows, cols)?,
        sum_of_squares_pieces(elements) * 8,
        Form::Bf16.bytes(rows, cols)?,
        Form::Bf16.bytes(small, small)?,
        Form::F32.bytes(small, small)?,
        Form::Bf16.bytes(small, small)?,
    ];
    let mut end = 0usize;
    let mut ends = [0; 6];
    for (place, bytes) in ends.iter_mut().zip(parts) {
        let next = end.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(256));
        end = next.ok_or(Error::SizeOverflow)?;
        *place = end;
    }
    Ok(ends)
}

/// Bytes of the workspace for a matrix. It starts at a multiple of 16 bytes.
///
/// # Errors
/// The size overflows.
pub fn muon_workspace(rows: usize, cols: usize) -> Result<usize> {
    Ok(workspace_ends(rows, cols)?[5])
}

/// Moves a matrix along its orthogonalized momentum: with `g` the gradient times the step's factor,
///
/// ```text
/// b ← b + (1 - μ)(g - b),   u = g + μ (b - g), or without `nesterov` u = b
/// x ← u / (‖u‖ + 1e-7),   five times  x ← 3.4445 x + (-4.7750 a + 2.0315 a²) x  with  a = x xᵀ
/// w ← w - η ( 0.2 √max(rows, cols) x + λ w )
/// ```
///
/// Of a tall matrix `a = xᵀ x` is the smaller one, and comes from the right. `multiply` makes the products, with operands in
/// bfloat16: [`CublasLt::multiply`](crate::CublasLt::multiply). All else is single precision, so that the result is within
/// about 2% of the processor's.
///
/// # Errors
/// A side is not a multiple of 8, a slice is too small or not aligned, a product fails, or a launch does.
pub fn muon(gpu: &Gpu, call: &Muon<'_>, mut multiply: impl FnMut(&Multiply<'_>) -> Result<()>) -> Result<()> {
    let Muon { range, rows, cols, .. } = *call;
    let count = rows.checked_mul(cols).ok_or(Error::SizeOverflow)?;
    if range.count != count {
        return Err(Error::Shape {
            operation: NAME,
            what: "the range's elements",
            expected: count,
            found: range.count,
        });
    }
    if !rows.is_multiple_of(8) || !cols.is_multiple_of(8) {
        let what = format!("a matrix of {rows} by {cols}: both have to be multiples of 8");
        return Err(Error::Unsupported { operation: NAME, what });
    }
    if count == 0 {
        return Ok(());
    }
    let at = range.addresses(NAME)?;
    let momentum = range.state(NAME, "the momentum in bytes", call.momentum)?;
    let ends = workspace_ends(rows, cols)?;
    aligned(NAME, "the workspace in bytes", call.workspace, ends[5])?;
    let part = |index: usize| {
        let start = if index == 0 { 0 } else { ends[index - 1] };
        call.workspace.part(start, ends[index] - start)
    };
    let (x, partial, operand) = (part(0)?, part(1)?, part(2)?);
    let (gram, square, polynomial) = (part(3)?, part(4)?, part(5)?);
    let launch = element_launch(gpu, count);

    let arguments = Arguments::new()
        .u64(at.gradient)
        .u64(momentum)
        .u64(x.address())
        .u64(at.step)
        .f32(call.mu as f32)
        .i32(i32::from(call.nesterov))
        .u64(count as u64);
    gpu.launch(&gpu.function("muon", "muon_momentum")?, launch, arguments)?;
    sum_of_squares(gpu, x, partial, count)?;

    let [first, third, fifth] = COEFFICIENTS;
    let (small, wide) = (rows.min(cols), rows <= cols);
    let (as_rows, as_columns) = (Operand::rows(operand, cols), Operand::columns(operand, cols));
    for step in 0..STEPS {
        let sums = if step == 0 { partial.address() } else { 0 };
        let arguments = Arguments::new()
            .u64(x.address())
            .u64(operand.address())
            .u64(sums)
            .i32(int(NAME, sum_of_squares_pieces(count))?)
            .f32(first)
            .u64(count as u64);
        gpu.launch(&gpu.function("muon", "muon_operand")?, launch, arguments)?;
        let sides = if wide { [as_rows, as_columns] } else { [as_columns, as_rows] };
        multiply(&product(sides, gram, small, Output::Bf16, [small, small, rows.max(cols)]))?;
        multiply(&product([Operand::rows(gram, small); 2], square, small, Output::F32, [small; 3]))?;
        let arguments = Arguments::new()
            .u64(gram.address())
            .u64(square.address())
            .u64(polynomial.address())
            .f32(third)
            .f32(fifth)
            .u64((small * small) as u64);
        gpu.launch(&gpu.function("muon", "muon_polynomial")?, element_launch(gpu, small * small), arguments)?;
        let polynomial = Operand::rows(polynomial, small);
        let sides = if wide { [polynomial, as_rows] } else { [as_rows, polynomial] };
        multiply(&product(sides, x, cols, Output::AddF32, [rows, cols, small]))?;
    }

    let arguments = Arguments::new()
        .u64(at.weights)
        .u64(x.address())
        .u64(at.rounded)
        .u64(at.step)
        .value((rows.max(cols) as f64).sqrt())
        .value(call.weight_decay)
        .u64(count as u64);
    gpu.launch(&gpu.function("muon", "muon_update")?, launch, arguments)
}

fn product<'a>(
    [a, b]: [Operand<'a>; 2],
    out: Slice<'a>,
    out_stride: usize,
    output: Output,
    size: [usize; 3],
) -> Multiply<'a> {
    Multiply { a, b, out, out_stride, output, start: None, size }
}
