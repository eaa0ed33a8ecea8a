//! `linear`: `out[i][r] = sum_k x[i][k] w[r][k]`, straight from packed weights, for every format a matrix can be held in.
//!
//! The reference multiplies the weights as the format holds them: how well a format holds them is another test's matter
//! (round trips and golden blocks, beside the formats). What is checked here is the arithmetic from packed bytes.

use ironloom_core::DType;
use ironloom_quant::WeightFormat;
use ironloom_tensor::{Device, ops};

use super::weights::{self, Matrix};
use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    place::{Place, is_cpu},
    real::Real,
};

/// Rows of x, rows and blocks of columns of the weights: one, odd, past a panel of rows, past a block of rows of x.
const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 1], [1, 17, 1], [1, 96, 3], [2, 16, 2], [3, 33, 1], [5, 64, 4], [17, 15, 3], [130, 33, 2]];
/// Columns that are no whole blocks, for the formats that take any number.
const ODD_COLUMNS: [usize; 8] = [4, 17, 576, 63, 65, 300, 130, 129];
/// Rows of x, rows and columns of the weights on a card: each number of rows that a kernel is made for and one past it,
/// parts of a tile of 16 rows, of a chunk of 64 columns and of a record of 256, long sums.
const CARD_SHAPES: [[usize; 3]; 13] = [
    [1, 1, 8],
    [1, 33, 576],
    [1, 160, 4096],
    [2, 17, 64],
    [3, 96, 328],
    [7, 40, 2048],
    [16, 64, 72],
    [33, 48, 2048],
    [64, 80, 576],
    [65, 40, 64],
    [17, 16, 8],
    [130, 33, 328],
    [200, 72, 2048],
];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for (dtype, format) in weights::formats() {
        if is_cpu(device) {
            for ([n, rows, blocks], odd) in SHAPES.into_iter().zip(ODD_COLUMNS) {
                let cols = if dtype.is_packed() { blocks * dtype.block_elements() } else { odd };
                cases.push(case(Place::single(device), (dtype, format), n, [rows, cols]));
            }
            continue;
        }
        for place in Place::each(device) {
            for [n, rows, cols] in CARD_SHAPES {
                if place.takes(n) {
                    let cols = cols.next_multiple_of(dtype.block_elements());
                    cases.push(case(place.clone(), (dtype, format), n, [rows, cols]));
                }
            }
        }
    }
    cases
}

fn case(place: Place, format: (DType, WeightFormat), n: usize, [rows, cols]: [usize; 2]) -> Case {
    let name = format!("linear {}", weights::name(format));
    let shape = format!("{n} x [{rows}, {cols}]");
    Case::new(name.clone(), place.shape(&shape), Bound::TwicePlain, move |kernel| {
        let mut inputs = Inputs::of(&name, &shape);
        let x = inputs.normal(n * cols);
        let matrix = Matrix::random(format, [rows, cols], &mut inputs)?;
        let given = place.operand(kernel.inputs(&x), [n, cols])?;
        let ours = ops::linear(&place.context(), &given, &matrix.weight(&place.device)?)?.into_f32()?;
        let held = matrix.held(&place.device)?;
        let plain = multiply(&place.operands().round(&x), &place.weights(&held), cols);
        let results = Results::new(multiply(&x, &held, cols), plain, ours).in_precision(place.operands());
        let minima = if matrix.has_minima() { Minima::Apart } else { Minima::None };
        Ok(Results { condition: condition(&x, &held, cols, minima, &results.reference), ..results })
    })
}

/// `x [n, cols]` times `weights [rows, cols]` transposed.
pub(super) fn multiply<R: Real>(x: &[f32], weights: &[f32], cols: usize) -> Vec<R> {
    product(&R::all(x), &R::all(weights), cols)
}

/// The same of numbers in their precision.
pub(super) fn product<R: Real>(x: &[R], weights: &[R], cols: usize) -> Vec<R> {
    let rows = x.chunks_exact(cols);
    rows.flat_map(|x| weights.chunks_exact(cols).map(move |w| x.iter().zip(w).map(|(&x, &w)| x * w).sum())).collect()
}

/// Whether a weight is `scale * code + min`, whose two terms are summed apart.
#[derive(Clone, Copy, PartialEq)]
enum Minima {
    None,
    Apart,
}

/// How large the terms of the sums are beside the sums, both as root mean squares: about 1, but for few sums that happen to
/// cancel. Minima summed apart make terms as large as the weight and the largest weight together.
fn condition(x: &[f32], weights: &[f32], cols: usize, minima: Minima, sums: &[f64]) -> f64 {
    let largest = weights.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs()));
    let beside = if minima == Minima::Apart { largest } else { 0.0 };
    let weights: Vec<f32> = weights.iter().map(|weight| (weight.abs() + beside).powi(2)).collect();
    let x: Vec<f32> = x.iter().map(|x| x * x).collect();
    let terms: f64 = multiply::<f64>(&x, &weights, cols).into_iter().sum();
    (terms / sums.iter().map(|sum| sum * sum).sum::<f64>()).sqrt().max(1.0)
}
