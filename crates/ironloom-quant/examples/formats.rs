//! What each packed format costs and loses on normal weights: `cargo run --release -p ironloom-quant --example formats`.

use ironloom_core::{DType, Philox, Threads};
use ironloom_quant::{PackedMatrix, WeightFormat, pack, unpack};

const ROWS: usize = 256;
const COLS: usize = 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut draws = Philox::new(1, 0);
    let weights: Vec<f32> = (0..ROWS * COLS).map(|_| draws.next_normal()).collect();
    let error = |unpacked: &[f32]| {
        let squares = weights.iter().zip(unpacked).map(|(a, b)| f64::from(a - b).powi(2));
        (squares.sum::<f64>() / weights.len() as f64).sqrt()
    };
    println!("{:<6} {:>12} {:>10}", "format", "bits/weight", "RMS error");
    let mut unpacked = vec![0.0; weights.len()];
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0, DType::Q4_K, DType::Q6_K] {
        let bytes = pack(dtype, &weights)?;
        unpack(dtype, &bytes, &mut unpacked)?;
        let bits = bytes.len() as f64 * 8.0 / weights.len() as f64;
        println!("{:<6} {bits:>12.3} {:>10.4}", dtype.name(), error(&unpacked));
    }
    for format in [WeightFormat::Int8, WeightFormat::Int4, WeightFormat::Nf4] {
        let matrix = PackedMatrix::from_f32(&weights, ROWS, COLS, format, &Threads::all())?;
        for (row, out) in unpacked.chunks_exact_mut(COLS).enumerate() {
            matrix.row(row, out)?;
        }
        let bits = matrix.bytes() as f64 * 8.0 / weights.len() as f64;
        println!("{:<6} {bits:>12.3} {:>10.4}", matrix.name(), error(&unpacked));
    }
    Ok(())
}
