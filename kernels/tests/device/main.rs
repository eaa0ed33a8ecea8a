//! Every kernel on a device against plain arithmetic in double precision. Without a device each test says that it was skipped.

use half::bf16;
use ironloom_core::Philox;
use ironloom_kernels::{Buffer, Error, Gpu};

/// A test for each case of a check, so that the slow ones run beside one another and one at a time under a tool.
macro_rules! test_each {
    ($module:ident, $check:ident, $($name:ident: $case:expr),+ $(,)?) => {
        mod $module {
            $(#[test]
            fn $name() {
                super::$check($case);
            })+
        }
    };
}

mod adamw_8bit;
mod add;
mod advance;
mod argmax;
mod attention;
mod attention_few;
mod attention_training;
mod column_sums;
mod cross_entropy;
mod cublaslt;
mod dequantize;
mod dropout;
mod embedding;
mod embedding_backward;
mod fingerprint;
mod gated_activation;
mod gated_activation_backward;
mod gated_rows_backward;
mod gather_rows;
mod gemm;
mod gemm_transposed;
mod gradient_norm;
mod large_caches;
mod linear;
mod linear_plain;
mod memory;
mod muon;
mod optimizer;
mod rmsnorm;
mod rmsnorm_backward;
mod rope_append;
mod rope_phases;
mod rope_training;
mod route_experts;
mod route_training;
mod routed;
mod routed_training;
mod rows;
mod threads;
mod training_speed;

/// The first device; none where there is no driver or card.
pub fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error @ (Error::NoDriver | Error::NoDevice { .. })) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Standard normal numbers.
pub fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut draws = Philox::new(seed, 0);
    (0..count).map(|_| draws.next_normal()).collect()
}

/// The nearest bfloat16.
pub fn round_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

pub fn upload_f32(gpu: &Gpu, values: &[f32]) -> Buffer {
    gpu.upload(bytemuck::cast_slice(values), "a test").unwrap()
}

pub fn upload_bf16(gpu: &Gpu, values: &[f32]) -> Buffer {
    let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    gpu.upload(bytemuck::cast_slice(&values), "a test").unwrap()
}

/// The operand of few rows: `[rows, 2, width]`, high parts, then low parts.
pub fn upload_split(gpu: &Gpu, values: &[f32], width: usize) -> Buffer {
    let mut parts = Vec::with_capacity(2 * values.len());
    for row in values.chunks_exact(width) {
        parts.extend(row.iter().map(|&x| bf16::from_f32(x)));
        parts.extend(row.iter().map(|&x| bf16::from_f32(x - round_bf16(x))));
    }
    gpu.upload(bytemuck::cast_slice(&parts), "a test").unwrap()
}

pub fn upload_u32(gpu: &Gpu, values: &[u32]) -> Buffer {
    gpu.upload(bytemuck::cast_slice(values), "a test").unwrap()
}

pub fn upload_i32(gpu: &Gpu, values: &[i32]) -> Buffer {
    gpu.upload(bytemuck::cast_slice(values), "a test").unwrap()
}

pub fn upload_u64(gpu: &Gpu, values: &[u64]) -> Buffer {
    gpu.upload(bytemuck::cast_slice(values), "a test").unwrap()
}

/// Memory full of NaN, so that what a kernel does not write shows.
pub fn buffer(gpu: &Gpu, bytes: usize) -> Buffer {
    gpu.upload(&vec![0xff; bytes], "a test").unwrap()
}

pub fn read_f32(gpu: &Gpu, buffer: &Buffer, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    gpu.read(buffer.slice(), bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

pub fn read_u32(gpu: &Gpu, buffer: &Buffer, count: usize) -> Vec<u32> {
    let mut values = vec![0; count];
    gpu.read(buffer.slice(), bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

pub fn read_i32(gpu: &Gpu, buffer: &Buffer, count: usize) -> Vec<i32> {
    let mut values = vec![0; count];
    gpu.read(buffer.slice(), bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

pub fn read_bf16(gpu: &Gpu, buffer: &Buffer, count: usize) -> Vec<f32> {
    let mut values = vec![bf16::ZERO; count];
    gpu.read(buffer.slice(), bytemuck::cast_slice_mut(&mut values)).unwrap();
    values.iter().map(|x| x.to_f32()).collect()
}

/// The numbers of an operand of few rows: high parts plus low parts.
pub fn read_split(gpu: &Gpu, buffer: &Buffer, rows: usize, width: usize) -> Vec<f32> {
    let parts = read_bf16(gpu, buffer, rows * 2 * width);
    parts.chunks_exact(2 * width.max(1)).flat_map(|row| (0..width).map(|i| row[i] + row[width + i])).collect()
}

/// `‖found − expected‖ / ‖expected‖`; infinite where something is not finite.
pub fn relative_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let difference: f64 = found.iter().zip(expected).map(|(&f, &e)| (f64::from(f) - e).powi(2)).sum();
    let size: f64 = expected.iter().map(|e| e * e).sum();
    if difference.is_finite() { (difference / size.max(f64::MIN_POSITIVE)).sqrt() } else { f64::INFINITY }
}
