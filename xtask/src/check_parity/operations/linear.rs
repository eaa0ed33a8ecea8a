//! `linear`: `out[i][r] = sum_k x[i][k] w[r][k]`, straight from packed weights, for every format a matrix can be held in.
//!
//! The reference multiplies the weights as the format holds them: how well a format holds them is another test's matter
//! (round trips and golden blocks, beside the formats). What is checked here is the arithmetic from packed bytes.

use anyhow::Result;
use half::f16;
use ironloom_core::DType;
use ironloom_quant::{PackedMatrix, WeightFormat, pack, unpack};
use ironloom_tensor::{Context, Device, Tensor, Weight, ops};

use crate::check_parity::{
    case::{Bound, Case, Results},
    inputs::Inputs,
    real::Real,
};

/// Rows of x, rows and blocks of columns of the weights: one, odd, past a panel of rows, past a block of rows of x.
const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 1], [1, 17, 1], [1, 96, 3], [2, 16, 2], [3, 33, 1], [5, 64, 4], [17, 15, 3], [130, 33, 2]];
/// Columns that are no whole blocks, for the formats that take any number.
const ODD_COLUMNS: [usize; 8] = [4, 17, 576, 63, 65, 300, 130, 129];

pub(super) fn cases(device: &Device) -> Vec<Case> {
    let mut cases = Vec::new();
    let stored = DType::ALL.iter().copied().filter(|dtype| dtype.is_packed() || is_float(*dtype));
    let converted = [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4, WeightFormat::Nf4];
    let formats = stored
        .map(|dtype| (dtype, WeightFormat::Keep))
        .chain(converted.map(|format| (DType::F32, format)))
        .chain([(DType::Q4_K, WeightFormat::Int8)]);
    for (dtype, format) in formats {
        for ([n, rows, blocks], odd) in SHAPES.into_iter().zip(ODD_COLUMNS) {
            let cols = if dtype.is_packed() { blocks * dtype.block_elements() } else { odd };
            cases.push(case(device.clone(), dtype, format, n, rows, cols));
        }
    }
    cases
}

fn is_float(dtype: DType) -> bool {
    [DType::F32, DType::F16, DType::BF16].contains(&dtype)
}

fn case(device: Device, dtype: DType, format: WeightFormat, n: usize, rows: usize, cols: usize) -> Case {
    let name = match format {
        WeightFormat::Keep => format!("linear {dtype}"),
        format => format!("linear {dtype} as {format:?}"),
    };
    let shape = format!("{n} x [{rows}, {cols}]");
    let mut inputs = Inputs::of(&name, &shape);
    let x = inputs.normal(n * cols);
    let stored = stored_weights(dtype, rows * cols, &mut inputs);
    let has_minima = [DType::Q4_1, DType::Q5_1, DType::Q2_K, DType::Q4_K, DType::Q5_K].contains(&dtype);
    let minima = if has_minima && format == WeightFormat::Keep { Minima::Apart } else { Minima::None };
    Case::new(name, shape, Bound::TwicePlain, move |kernel| {
        let stored = stored.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
        let matrix = PackedMatrix::from_stored(dtype, stored, rows, cols, None, format, device.threads())?;
        let weights = held_weights(&matrix, dtype, stored, format)?;
        let ours = product(&device, Weight::cpu(matrix), &kernel.inputs(&x), n)?;
        let results = Results::new(multiply(&x, &weights, cols), multiply(&x, &weights, cols), ours);
        Ok(Results { condition: condition(&x, &weights, cols, minima, &results.reference), ..results })
    })
}

fn product(device: &Device, weight: Weight, x: &[f32], n: usize) -> Result<Vec<f32>> {
    let x = Tensor::from_f32(x.to_vec(), [n, weight.cols()])?;
    Ok(ops::linear(&Context::inference(device), &x, &weight)?.into_f32()?)
}

/// The weights that a matrix held in `format` stands for.
fn held_weights(matrix: &PackedMatrix, dtype: DType, stored: &[u8], format: WeightFormat) -> Result<Vec<f32>> {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    let mut weights = vec![0.0; rows * cols];
    if format == WeightFormat::Keep {
        unpack(dtype, stored, &mut weights)?;
    } else {
        for (row, weights) in weights.chunks_exact_mut(cols).enumerate() {
            matrix.row(row, weights)?;
        }
    }
    Ok(weights)
}

/// Standard-normal weights in `dtype`; for a type that nothing here packs, random blocks with scales of that size.
fn stored_weights(dtype: DType, count: usize, inputs: &mut Inputs) -> Result<Vec<u8>> {
    // Where a block's half-precision factors are: the scale of scales and, if any, the scale of minima.
    let factors: &[usize] = match dtype {
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q5_K => &[0, 2],
        _ => return Ok(pack(dtype, &inputs.normal(count))?),
    };
    let mut bytes = inputs.bytes(dtype.bytes_for(count)?);
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for &at in factors {
            let factor = f16::from_f32(0.01 + 0.01 * inputs.normal(1)[0].abs());
            block[at..at + 2].copy_from_slice(&factor.to_le_bytes());
        }
    }
    Ok(bytes)
}

fn multiply<R: Real>(x: &[f32], weights: &[f32], cols: usize) -> Vec<R> {
    let (x, weights) = (R::all(x), R::all(weights));
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
