//! Products alone, in graphs, warm, their weights rotated past the second-level cache: of few rows straight from packed
//! weights (`gemv`), of many rows (`gemm`), and the largest product that sets the card's peak.

use anyhow::Result;
use ironloom_kernels::{
    Activation, Linear, Matrix, Output, Product, Then, TileFormat, WeightLayout, gemm as built_in_gemm, linear,
};
use serde_json::json;

use super::card::Card;
use crate::bench::measurement::{Measurement, Work};

/// The products of a layer of Qwen2.5-3B, and its head.
struct Shape {
    name: &'static str,
    /// Rows of the matrices that share an input.
    rows: &'static [usize],
    cols: usize,
    /// How often a pass has it.
    times: usize,
}

const SHAPES: [Shape; 5] = [
    Shape { name: "q, k, v", rows: &[2048, 256, 256], cols: 2048, times: 36 },
    Shape { name: "out", rows: &[2048], cols: 2048, times: 36 },
    Shape { name: "gate, up", rows: &[11_008, 11_008], cols: 2048, times: 36 },
    Shape { name: "down", rows: &[2048], cols: 11_008, times: 36 },
    Shape { name: "head", rows: &[151_936], cols: 2048, times: 1 },
];

/// Launches in a graph, at least.
const LAUNCHES: usize = 24;
/// Rows and columns of the product that sets the peak.
const PEAK_SIDE: usize = 8192;

impl Shape {
    fn is_gated(&self) -> bool {
        self.name == "gate, up"
    }

    /// Two operations for each weight and row.
    fn operations(&self, rows: usize) -> f64 {
        2.0 * (self.rows.iter().sum::<usize>() * self.cols * rows) as f64
    }
}

/// GB/s of weights through one row's products of the Qwen2.5-3B shape, as often as a step has each.
pub(in crate::bench) fn gemv(card: &Card, format: TileFormat) -> Result<Measurement> {
    let layout = WeightLayout::Tiles(format);
    let bytes = |shape: &Shape| {
        shape.rows.iter().map(|&rows| layout.bytes(rows, shape.cols)).sum::<ironloom_kernels::Result<usize>>()
    };
    let mut total_bytes = 0.0;
    for shape in &SHAPES {
        total_bytes += (shape.times * bytes(shape)?) as f64;
    }
    let shape = json!({"format": format!("{format:?}"), "rows": 1, "bytes_a_step": total_bytes});
    let measured = card.measure(Work::Bytes(1e9), shape, || {
        let mut seconds = 0.0;
        for shape in &SHAPES {
            seconds += shape.times as f64 * few_rows(card, shape, format, 1)?;
        }
        Ok(total_bytes / seconds / 1e9)
    })?;
    let mut notes = Vec::new();
    for rows in [1, 4, 16] {
        let mut of_rows = Vec::new();
        for shape in &SHAPES {
            let seconds = few_rows(card, shape, format, rows)?;
            let rate = bytes(shape)? as f64 / seconds / 1e12;
            of_rows.push(format!("{} {:.2} us ({rate:.2} TB/s)", shape.name, 1e6 * seconds));
        }
        notes.push(format!("{rows} {}: {}", if rows == 1 { "row" } else { "rows" }, of_rows.join("; ")));
    }
    Ok(Measurement { notes: notes.join("; "), ..measured })
}

/// Seconds of one product of `n` rows.
fn few_rows(card: &Card, shape: &Shape, format: TileFormat, n: usize) -> Result<f64> {
    let layout = WeightLayout::Tiles(format);
    let sizes = shape.rows.iter().map(|&rows| Ok(layout.bytes(rows, shape.cols)?.next_multiple_of(256)));
    let sizes = sizes.collect::<Result<Vec<usize>>>()?;
    let copy_bytes: usize = sizes.iter().sum();
    let copies = card.rotation(copy_bytes);
    let weights = match format {
        TileFormat::Bf16 => card.normals(copies * copy_bytes / 2)?,
        _ => card.noise(copies * copy_bytes)?,
    };
    // Two halves of bfloat16; the output is as wide as its widest form.
    let x = card.normals(2 * n * shape.cols)?;
    let width = if shape.is_gated() { shape.rows[0] } else { shape.rows.iter().sum() };
    let out = card.gpu.allocate_lasting(4 * n * width, "a product")?;
    let adds = matches!(shape.name, "out" | "down");
    card.seconds_of(copies.max(LAUNCHES), |launch| {
        let mut offset = launch % copies * copy_bytes;
        let mut column = 0;
        let mut matrices = Vec::new();
        for (&rows, &bytes) in shape.rows.iter().zip(&sizes) {
            matrices.push(Matrix { weights: weights.part(offset, bytes)?, rows, bias: None, column });
            offset += bytes;
            column += if shape.is_gated() { 0 } else { rows };
        }
        let then = if adds {
            Then::Add
        } else if shape.is_gated() {
            Then::Gated(Activation::Silu)
        } else {
            Then::Store
        };
        let (x, out, cols) = (x.slice(), out.slice(), shape.cols);
        Ok(linear(&card.gpu, &Linear { x, n, cols, format, matrices: &matrices, then, out, width })?)
    })
}

/// TFLOP/s of the products of a prompt of 512 rows through the layers of the Qwen2.5-3B shape.
pub(in crate::bench) fn gemm(card: &Card) -> Result<Measurement> {
    const ROWS: usize = 512;
    let layers = &SHAPES[..4];
    let library = card.cublaslt(ROWS);
    let total: f64 = layers.iter().map(|shape| shape.operations(ROWS)).sum();
    let shape = json!({"rows": ROWS, "library": if library.is_some() { "cuBLASLt" } else { "built in" }});
    let time = |shape: &Shape, library: bool| many_rows(card, shape.rows.iter().sum(), shape.cols, ROWS, library);
    let measured = card.measure(Work::Operations(1e12), shape, || {
        let mut seconds = 0.0;
        for shape in layers {
            seconds += time(shape, library.is_some())?;
        }
        Ok(total / seconds / 1e12)
    })?;
    let mut notes = Vec::new();
    for shape in layers {
        let rate = |library| Ok::<_, anyhow::Error>(shape.operations(ROWS) / time(shape, library)? / 1e12);
        let of_library = if library.is_some() { format!("{:.0} by cuBLASLt, ", rate(true)?) } else { String::new() };
        notes.push(format!("{} {of_library}{:.0} built in", shape.name, rate(false)?));
    }
    Ok(Measurement { notes: format!("TFLOP/s: {}", notes.join("; ")), ..measured })
}

/// TFLOP/s of bfloat16 products: the bound of whatever computes.
pub(in crate::bench) fn peak(card: &Card) -> Result<Measurement> {
    let library = card.cublaslt(PEAK_SIDE).is_some();
    let shape = json!({"side": PEAK_SIDE, "library": if library { "cuBLASLt" } else { "built in" }});
    card.measure(Work::Unbounded, shape, || {
        let seconds = many_rows(card, PEAK_SIDE, PEAK_SIDE, PEAK_SIDE, library)?;
        Ok(2.0 * (PEAK_SIDE as f64).powi(3) / seconds / 1e12)
    })
}

/// Seconds of a product of `rows` rows of bfloat16.
fn many_rows(card: &Card, outputs: usize, inputs: usize, rows: usize, library: bool) -> Result<f64> {
    let library = if library { card.cublaslt(rows) } else { None };
    let bytes = 2 * outputs * inputs;
    let copies = card.rotation(bytes).min(8);
    let weights = card.normals(copies * outputs * inputs)?;
    let x = card.normals(rows * inputs)?;
    let out = card.gpu.allocate_lasting(2 * rows * outputs, "a product")?;
    card.seconds_of(copies.max(8), |launch| {
        let product = Product {
            x: x.slice(),
            x_stride: inputs,
            weight: weights.part(launch % copies * bytes, bytes)?,
            weight_stride: inputs,
            bias: None,
            out: out.slice(),
            out_stride: outputs,
            output: Output::Bf16,
            rows,
            outputs,
            inputs,
        };
        let launched = match &library {
            Some(library) => library.matmul(&card.gpu, &product),
            None => built_in_gemm(&card.gpu, &product),
        };
        Ok(launched?)
    })
}
